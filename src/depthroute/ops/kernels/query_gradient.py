"""The gradient of a block's queries: a product over all tokens and sources, then a sum of its parts.

`b_` names a block, `o_` offsets, `m_` a mask, `p_` a pointer.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from depthroute.ops.block import BlockRead
from depthroute.ops.kernels.block_layout import BlockLayout, contiguous_rows
from depthroute.ops.kernels.layout import power_of_two
from depthroute.ops.kernels.select import pointer_to
from depthroute.ops.kernels.sources import num_programs

TOKENS, COLUMNS = 64, 128  # of a tile


def query_gradient(given: BlockRead, grad_logits: Tensor, rstds: Tensor) -> Tensor:
    """Return rows `[programs, Q, R]` that sum to the gradient of the queries.

    `dq_j = sum_t sum_i scale r_ti dz_tij k_ti`: keys by tensor cores, in bfloat16 as they are; the
    float32 factors of bfloat16 keys are split into two bfloat16 numbers each.
    """
    at = BlockLayout.of(given)
    columns = triton.cdiv(at.R, COLUMNS)
    programs = num_programs(triton.cdiv(at.T, TOKENS), max(1, 4 // columns), rstds.device)
    rows = rstds.new_empty((programs, at.Q, at.R))
    query_gradient_kernel[(programs, columns)](
        contiguous_rows(given.values),
        grad_logits,
        rstds,
        rows,
        at.T,
        given.rule.scale,
        S=at.S,
        Q=at.Q,
        QP=max(8, power_of_two(at.Q)),
        D=at.D,
        R=at.R,
        SPLIT=given.values[0].dtype == torch.bfloat16 and rstds.is_cuda,
        BT=TOKENS,
        BR=COLUMNS,
        num_warps=4,
        num_stages=3,
    )
    return rows


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
        BLOCK=128,
    )


@triton.jit
def query_gradient_kernel(
    values, grad_logits, rstds, rows, num_tokens, scale,
    S: tl.constexpr, Q: tl.constexpr, QP: tl.constexpr, D: tl.constexpr, R: tl.constexpr,
    SPLIT: tl.constexpr, BT: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Loop over tiles of tokens, and their sources; one block of columns for each program."""
    pid = tl.program_id(0)
    o_q, o_r = tl.arange(0, 2 * QP), tl.program_id(1) * BR + tl.arange(0, BR)
    o_j = o_q % QP  # each query twice: for the high and the low part of its factors
    m_r = o_r < R
    b_acc = tl.zeros([2 * QP, BR], tl.float32)
    for start in range(pid * BT, num_tokens, tl.num_programs(0) * BT):
        o_t = tl.cast(start, tl.int64) + tl.arange(0, BT)
        m_t = o_t < num_tokens
        for i in range(S):
            o_i = tl.zeros([], tl.int32) + i
            p_k = pointer_to(values, o_i, S) + o_t[:, None] * D + (D - R) + o_r[None, :]
            b_k = tl.load(p_k, mask=m_t[:, None] & m_r[None, :], other=0.0)
            b_r = tl.load(rstds + o_t * S + i, mask=m_t, other=0.0) * scale
            p_z = grad_logits + ((o_t * S + i) * Q)[None, :] + o_j[:, None]
            b_z = tl.load(p_z, mask=m_t[None, :] & (o_j < Q)[:, None], other=0.0) * b_r[None, :]
            b_high = b_z.to(tl.bfloat16).to(tl.float32)
            if SPLIT:
                b_part = tl.where((o_q < QP)[:, None], b_high, b_z - b_high)
                b_acc = tl.dot(b_part.to(tl.bfloat16), b_k, b_acc)
            else:
                b_part = tl.where((o_q < QP)[:, None], b_z, 0.0)
                b_acc = tl.dot(b_part, b_k.to(tl.float32), b_acc, input_precision="ieee")
    b_sum = tl.sum(tl.reshape(b_acc, [2, QP, BR]), axis=0)
    o_row = tl.arange(0, QP)
    p_row = rows + (pid * Q + o_row)[:, None] * R + o_r[None, :]
    tl.store(p_row, b_sum, mask=(o_row < Q)[:, None] & m_r[None, :])


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
    if slots is not None:
        if j >= Q - SLOTS:
            p_slot = slots[0]
            for k in tl.static_range(1, SLOTS):
                p_slot = tl.where(j - (Q - SLOTS) == k, slots[k], p_slot)
            for i in range(0, num_slot_rows, BLOCK):
                o_row = i + o_p[:, None]
                p_row = p_slot + o_row * R + o_r[None, :]
                b_sum += tl.load(p_row, mask=(o_row < num_slot_rows) & m_r, other=0.0)
    tl.store(total + j * R + o_r, tl.sum(b_sum, axis=0), mask=o_r < R)
