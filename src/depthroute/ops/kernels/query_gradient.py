"""The sum of what programs wrote of the gradient of a block's queries.

`b_` names a block, `o_` offsets, `m_` a mask, `p_` a pointer.
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

TOKENS, COLUMNS = 64, 128  # of a tile


def sum_query_rows(rows: Tensor, slots: Sequence[Tensor], total: Tensor) -> None:
    """Sum rows `[programs, Q, R]`, and the slots `[rows, R]` of the last queries, to `[Q, R]`."""
    num_queries, rank = total.shape
    columns = 32
    sum_query_rows_kernel[(num_queries, triton.cdiv(rank, columns))](
        rows,
        tuple(slots) or None,
        total,
        len(rows),
        len(slots[0]) if slots else 0,
        Q=num_queries,
        SLOTS=len(slots),
        R=rank,
        BR=columns,
        BLOCK=256,
        num_warps=8,
    )


@triton.jit
def sum_query_rows_kernel(
    rows, slots, total, num_rows, num_slot_rows,
    Q: tl.constexpr, SLOTS: tl.constexpr, R: tl.constexpr, BR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum the rows of one query, in a fixed order."""
    j = tl.program_id(0)
    o_r, o_p = tl.program_id(1) * BR + tl.arange(0, BR), tl.arange(0, BLOCK)
    m_r = (o_r < R)[None, :]
    b_sum = tl.zeros([BLOCK, BR], tl.float32)
    for i in range(0, num_rows, BLOCK):
        o_row = i + o_p[:, None]
        p_row = rows + (o_row * Q + j) * R + o_r[None, :]
        b_sum += tl.load(p_row, mask=(o_row < num_rows) & m_r, other=0.0)
    if slots is not None:  # noqa: SIM102 - known to the compiler
        if j >= Q - SLOTS:
            p_slot = slots[0]
            for k in tl.static_range(1, SLOTS):
                p_slot = tl.where(j - (Q - SLOTS) == k, slots[k], p_slot)
            for i in range(0, num_slot_rows, BLOCK):
                o_row = i + o_p[:, None]
                p_row = p_slot + o_row * R + o_r[None, :]
                b_sum += tl.load(p_row, mask=(o_row < num_slot_rows) & m_r, other=0.0)
    tl.store(total + j * R + o_r, tl.sum(b_sum, axis=0), mask=o_r < R)
