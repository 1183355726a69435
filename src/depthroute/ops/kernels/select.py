"""One of several tensors, chosen by a number that is known at run time only."""

import triton
import triton.language as tl


@triton.jit
def pointer_to(tensors, i, COUNT: tl.constexpr):
    """Return where tensor i of a tuple starts; for a block of numbers, a block of pointers.

    A chain of selects: a tuple takes only indices known to the compiler, and a table in memory
    would have to be written by a kernel of its own.
    """
    p = tensors[0] + i * 0
    for k in tl.static_range(1, COUNT):
        p = tl.where(i == k, tensors[k], p)
    return tl.multiple_of(p, 16)
