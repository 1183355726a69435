"""Forward pass of `read_ahead` for more sources than a program holds: each is read twice.

Both parts go by columns. First the scores that a block of columns adds, in products of the sources
with the queries; then the weights, of the sums over the blocks, and the reads.

`b_` names a block, `o_` offsets, `m_` a mask, `p_` a pointer.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from depthroute.ops.block import BlockRead
from depthroute.ops.kernels import block_layout
from depthroute.ops.kernels.block_layout import BlockLayout, ReadAhead, contiguous_rows
from depthroute.ops.kernels.layout import power_of_two
from depthroute.ops.kernels.select import pointer_to
from depthroute.ops.kernels.split import split, splits


def read_ahead_stream(given: BlockRead, at: BlockLayout, result: ReadAhead) -> None:
    """Launch the forward pass; `result.logits` and `rstds` are there already for separate keys."""
    values, has_first = _closed(given, result.closed), given.norm_eps is not None
    launch = block_layout.ahead_columns(at)
    columns, programs = block_layout.column_grid(launch, at, values[0].device)
    # blocks of columns that hold a part of the keys
    skipped = 0 if at.norm == "full" else (at.D - at.R) // launch.columns
    for start in range(0, at.Q, at.queries_at_once):
        count = min(at.queries_at_once, at.Q - start)
        shared = {
            "COUNT": count,
            "SP": power_of_two(at.S),
            "BD": launch.columns,
            "STAGES": launch.stages,
            "SPLIT": splits(values[0]),
            "num_warps": launch.num_warps,
            **at.constants,
        }
        parts = None
        if not at.separate:
            size = (columns - skipped, at.T, at.S, count + 1)
            parts = values[0].new_empty(size, dtype=torch.float32)
            partial_scores_kernel[(columns - skipped, programs)](
                values, given.query.contiguous(), parts, at.T, start, skipped,
                CP=2 * max(8, power_of_two(count)), **shared,
            )  # fmt: skip
        mix_kernel[(columns, programs)](
            values,
            parts,
            *(result.first, result.out, result.lse, result.weights, result.logits, result.rstds),
            at.T,
            start,
            given.rule.eps,
            given.rule.scale,
            HAS_FIRST=has_first,
            Q=at.Q,
            PARTS=columns - skipped,
            QP=max(16, power_of_two(count)),
            **shared,
        )
    if has_first:
        norm_kernel[(at.T,)](
            result.first,
            result.norm_rstds,
            given.norm_eps,
            D=at.D,
            BD=power_of_two(at.D),
            num_warps=block_layout.site_forward(at.D).num_warps,
        )


def _closed(given: BlockRead, closed: Tensor | None) -> tuple[Tensor, ...]:
    """Return the sources, the last one complete."""
    values = given.values
    if closed is not None:
        total = values[-1].float() + given.pending.float()  # type: ignore[union-attr]
        values = (*values[:-1], closed.copy_(total * given.share))
    return contiguous_rows(values)


@triton.jit
def partial_scores_kernel(
    values, query, parts, num_tokens, start, skipped,
    COUNT: tl.constexpr, S: tl.constexpr, SP: tl.constexpr, D: tl.constexpr, R: tl.constexpr,
    NORM: tl.constexpr, SEPARATE: tl.constexpr, CP: tl.constexpr, BD: tl.constexpr,
    STAGES: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Write what a block of columns adds to the scores, and to the square that the norm divides by.

    The queries stay in registers. They are float32: with SPLIT, two numbers of bfloat16 each, in
    the two halves of CP columns.
    """
    o_s, o_c = tl.arange(0, SP), tl.arange(0, CP)
    o_d = (tl.program_id(0) + skipped) * BD + tl.arange(0, BD)
    m_d, m_k = o_d < D, (o_d < D) & (o_d >= D - R)
    is_high, o_q = o_c < CP // 2, o_c % (CP // 2)
    p_q = query + (start + o_q)[None, :] * R + (o_d - (D - R))[:, None]
    b_q = tl.load(p_q, mask=(o_q < COUNT)[None, :] & m_k[:, None], other=0.0).to(tl.float32)
    b_high, b_low = split(b_q, SPLIT)
    b_q = tl.where(is_high[None, :], b_high, b_low if SPLIT else 0.0)
    p_v = pointer_to(values, o_s, S)[:, None] + o_d[None, :]
    m_v = (o_s < S)[:, None] & m_d[None, :]
    o_j = tl.arange(0, CP // 2)
    p_z = parts + (tl.program_id(0).to(tl.int64) * num_tokens * S + o_s) * (COUNT + 1)
    for t in tl.range(tl.program_id(1), num_tokens, tl.num_programs(1), num_stages=STAGES):
        o_row = tl.cast(t, tl.int64)
        b_v = tl.load(p_v + o_row * D, mask=m_v, other=0.0)
        b_z = tl.dot(b_v if SPLIT else b_v.to(tl.float32), b_q, input_precision="ieee")
        b_z = tl.sum(tl.reshape(b_z, [SP, 2, CP // 2]), axis=1)
        p_zt = p_z + o_row * (S * (COUNT + 1))
        m_z = (o_s < S)[:, None] & (o_j < COUNT)[None, :]
        tl.store(p_zt[:, None] + o_j[None, :], b_z, mask=m_z)
        if NORM != "none":
            b_k = b_v.to(tl.float32)
            if NORM == "tail":
                b_k = tl.where(m_k[None, :], b_k, 0.0)
            tl.store(p_zt + COUNT, tl.sum(b_k * b_k, axis=1), mask=o_s < S)


@triton.jit
def mix_kernel(
    values, parts, first, out, lse, weights, logits, rstds, num_tokens, start, eps, scale,
    HAS_FIRST: tl.constexpr, Q: tl.constexpr, COUNT: tl.constexpr, S: tl.constexpr,
    SP: tl.constexpr, D: tl.constexpr, R: tl.constexpr, NORM: tl.constexpr, SEPARATE: tl.constexpr,
    PARTS: tl.constexpr, QP: tl.constexpr, BD: tl.constexpr, STAGES: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """Mix the sources in a block of columns, token by token; the first read is not normed yet.

    The programs of the first block of columns write what the others find out as well.
    """
    is_writer = tl.program_id(0) == 0
    o_s, o_q = tl.arange(0, SP), tl.arange(0, QP)
    o_d = tl.program_id(0) * BD + tl.arange(0, BD)
    m_s, m_q, m_d = o_s < S, o_q < COUNT, o_d < D
    p_v = pointer_to(values, o_s, S)[:, None] + o_d[None, :]
    m_v, m_z = m_s[:, None] & m_d[None, :], m_s[:, None] & m_q[None, :]
    o_z = (o_s * Q + start)[:, None] + o_q[None, :]
    for t in tl.range(tl.program_id(1), num_tokens, tl.num_programs(1), num_stages=STAGES):
        o_row = tl.cast(t, tl.int64)
        b_v = tl.load(p_v + o_row * D, mask=m_v, other=0.0)
        p_z = logits + o_row * (S * Q) + o_z
        if SEPARATE:
            b_z = tl.load(p_z, mask=m_z, other=0.0)
        else:
            b_z, b_square = tl.zeros([SP, QP], tl.float32), tl.zeros([SP], tl.float32)
            for c in tl.static_range(PARTS):
                o_part = ((tl.cast(c, tl.int64) * num_tokens + o_row) * S + o_s) * (COUNT + 1)
                b_z += tl.load(parts + o_part[:, None] + o_q[None, :], mask=m_z, other=0.0)
                if NORM != "none":
                    b_square += tl.load(parts + o_part + COUNT, mask=m_s, other=0.0)
            b_r = tl.full([SP], 1.0, tl.float32)
            if NORM != "none":
                b_r = tl.rsqrt(b_square / (D if NORM == "full" else R) + eps)
            b_z *= (b_r * scale)[:, None]
            tl.store(rstds + o_row * S + o_s, b_r, mask=m_s & is_writer)
            tl.store(p_z, b_z, mask=m_z & is_writer)
        b_z = tl.where(m_s[:, None], b_z, float("-inf"))
        b_top = tl.max(b_z, axis=0)
        b_e = tl.exp(b_z - b_top[None, :])
        b_sum = tl.sum(b_e, axis=0)
        b_w = b_e / b_sum[None, :]
        tl.store(weights + o_row * (S * Q) + o_z, b_w, mask=m_z & is_writer)
        o_j = (start + o_q).to(tl.int64)
        p_lse = lse + o_j * num_tokens + o_row
        tl.store(p_lse, b_top + tl.log(b_sum), mask=m_q & is_writer)
        b_high, b_low = split(tl.trans(b_w), SPLIT)
        if SPLIT:
            b_out = tl.dot(b_low, b_v, tl.dot(b_high, b_v))
        else:
            b_out = tl.dot(b_high, b_v.to(tl.float32), input_precision="ieee")
        p_out = out + ((o_j - HAS_FIRST) * num_tokens + o_row) * D
        if HAS_FIRST:
            p_out = tl.where(o_j == 0, first + o_row * D, p_out)
        m_out = m_q[:, None] & m_d[None, :]
        tl.store(p_out[:, None] + o_d[None, :], b_out.to(out.dtype.element_ty), mask=m_out)


@triton.jit
def norm_kernel(rows, rstds, eps, D: tl.constexpr, BD: tl.constexpr):
    """Norm the rows in place."""
    o_row, o_d = tl.program_id(0).to(tl.int64), tl.arange(0, BD)
    p_row, m_d = rows + o_row * D + o_d, o_d < D
    b_x = tl.load(p_row, mask=m_d, other=0.0).to(tl.float32)
    b_rstd = tl.rsqrt(tl.sum(b_x * b_x, axis=0) / D + eps)
    tl.store(rstds + o_row, b_rstd)
    tl.store(p_row, (b_x * b_rstd).to(rows.dtype.element_ty), mask=m_d)
