"""Float32 numbers for tensor cores that multiply bfloat16 ones."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from depthroute.ops.kernels.layout import INTERPRETED


def on_tensor_cores(dtype: torch.dtype) -> bool:
    """Decide whether tensor cores multiply sources with float32 numbers: where a split is exact."""
    return dtype == torch.bfloat16


def splits(source: Tensor) -> bool:
    """Decide whether what is multiplied with a source is split."""
    return on_tensor_cores(source.dtype) and not INTERPRETED


@triton.jit
def split(x, SPLIT: tl.constexpr):
    """Return numbers as the sum of two of bfloat16, or as they are and once more.

    What is left out is 2^-17 of a number; products with a number of bfloat16 are exact.
    """
    high, low = x, x
    if SPLIT:
        # rounded as bits: converted there and back, each number would be a slow instruction
        bits = (x.to(tl.int32, bitcast=True) + 0x8000) & -0x10000
        rounded = bits.to(tl.float32, bitcast=True)
        high, low = rounded.to(tl.bfloat16), (x - rounded).to(tl.bfloat16)
    return high, low
