"""Forward pass of `read_ahead` that streams the sources, each of them twice, through small tiles.

First the scores, in products with the queries, which stay in registers: so the columns go to
several programs, each of which writes its part of the scores. Then the weights, of the sums of the
parts. Then the reads, by columns again, in products of the weights with the sources.

`b_` names a block, `o_` offsets, `m_` a mask, `p_` a pointer.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from depthroute.ops.block import BlockRead
from depthroute.ops.kernels import block_layout
from depthroute.ops.kernels.block_layout import BlockLayout, contiguous_rows
from depthroute.ops.kernels.block_results import ReadAhead
from depthroute.ops.kernels.layout import as_rows, power_of_two
from depthroute.ops.kernels.select import pointer_to
from depthroute.ops.kernels.split import split, splits

# numbers that a program turns into weights
WEIGHTS = 512


def read_ahead_stream(given: BlockRead, at: BlockLayout, result: ReadAhead) -> None:
    """Launch the forward pass; `result.logits` and `rstds` are there already for separate keys."""
    assert given.lse is None  # a merge has one query, and few sources: they are held
    values, has_first = _closed(given, at, result.closed), given.norm_eps is not None
    launch, sources = block_layout.ahead_reads(at, values[0].dtype), power_of_two(at.S)
    at_once = block_layout.group_size(at.Q, block_layout.READS_AT_ONCE)
    for start in range(0, at.Q, at_once):
        count = min(at_once, at.Q - start)
        parts = None if at.separate else _partial_scores(given, at, values, start, count)
        shared = {"Q": at.Q, "COUNT": count, "S": at.S}
        queries = power_of_two(count)
        tokens = max(1, WEIGHTS // (sources * queries))
        weights_kernel[(triton.cdiv(at.T, tokens),)](
            parts, result.lse, result.weights, result.logits, result.rstds,
            at.T, start, given.rule.eps, given.rule.scale,
            WIDTH=at.score_columns, NORM=at.norm, PARTS=0 if parts is None else len(parts),
            BT=tokens, SP=sources, QP=queries, num_warps=1, **shared,
        )  # fmt: skip
        tokens = 2 if at.S <= 8 else 1  # of a tile of 16 rows
        mix_kernel[block_layout.column_grid(launch, at, values[0].device)](
            values, result.weights, result.first, result.out, at.T, start,
            HAS_FIRST=has_first, D=at.D, BT=tokens, QP=16 // tokens, SP=16 // tokens,
            BD=launch.columns, STAGES=launch.stages, SPLIT=splits(values[0]),
            num_warps=launch.num_warps, maxnreg=launch.max_registers, **shared,
        )  # fmt: skip
    if has_first:
        norms = (result.first, result.norm_rstds, given.norm_eps)
        norm_kernel[(at.T,)](*norms, **_whole_rows(at.D))


def _closed(given: BlockRead, at: BlockLayout, closed: Tensor | None) -> tuple[Tensor, ...]:
    """Return the sources, the last one complete."""
    values = contiguous_rows(given.values)
    if given.pending is None:
        return values
    rows = as_rows(given.pending)
    arguments = (values[-1], rows, closed, rows.stride(0), given.share)
    close_kernel[(at.T,)](*arguments, **_whole_rows(at.D))
    return (*values[:-1], closed)  # type: ignore[arg-type]


def _whole_rows(width: int) -> dict[str, Any]:
    num_warps = block_layout.site_forward(width).num_warps
    return {"D": width, "BD": power_of_two(width), "num_warps": num_warps}


def _partial_scores(
    given: BlockRead, at: BlockLayout, values: tuple[Tensor, ...], start: int, count: int
) -> Tensor:
    """Return what blocks of columns add, `[blocks, T, S, count + 1]`: scores, then a square."""
    launch = block_layout.ahead_scores(at, values[0].dtype)
    columns, programs = block_layout.column_grid(launch, at, values[0].device, at.score_columns)
    parts = values[0].new_empty((columns, at.T, at.S, count + 1), dtype=torch.float32)
    sources = max(8, power_of_two(at.S))
    partial_scores_kernel[(columns, programs)](
        values, given.query.contiguous(), parts, at.T, start,
        COUNT=count, S=at.S, D=at.D, R=at.R, WIDTH=at.score_columns, NORM=at.norm,
        BT=64 // sources, SP=sources, CP=2 * max(8, power_of_two(count)), BD=launch.columns,
        STAGES=launch.stages, SPLIT=splits(values[0]), num_warps=launch.num_warps,
    )  # fmt: skip
    return parts


@triton.jit
def close_kernel(value, pending, closed, stride_pending, share, D: tl.constexpr, BD: tl.constexpr):
    """Write the last source, complete."""
    o_row, o_d = tl.program_id(0).to(tl.int64), tl.arange(0, BD)
    m_d = o_d < D
    b_v = tl.load(value + o_row * D + o_d, mask=m_d, other=0.0).to(tl.float32)
    b_y = tl.load(pending + o_row * stride_pending + o_d, mask=m_d, other=0.0).to(tl.float32)
    b_closed = ((b_v + b_y) * share).to(closed.dtype.element_ty)
    tl.store(closed + o_row * D + o_d, b_closed, mask=m_d)


@triton.jit
def partial_scores_kernel(
    values, query, parts, num_tokens, start,
    COUNT: tl.constexpr, S: tl.constexpr, D: tl.constexpr, R: tl.constexpr, WIDTH: tl.constexpr,
    NORM: tl.constexpr, BT: tl.constexpr, SP: tl.constexpr, CP: tl.constexpr, BD: tl.constexpr,
    STAGES: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Write what a block of columns adds to the scores, and to the square that the norm divides by.

    The queries are float32: with SPLIT, two numbers of bfloat16 each, in the two halves of CP
    columns. The sources of BT tokens are one tile of 64 rows.
    """
    o_m, o_c, o_j = tl.arange(0, BT * SP), tl.arange(0, CP), tl.arange(0, CP // 2)
    o_s, t_m = o_m % SP, o_m // SP
    o_d = D - WIDTH + tl.program_id(0) * BD + tl.arange(0, BD)
    m_d, m_k = o_d < D, (o_d < D) & (o_d >= D - R)
    is_high, o_q = o_c < CP // 2, o_c % (CP // 2)
    p_q = query + (start + o_q)[None, :] * R + (o_d - (D - R))[:, None]
    b_q = tl.load(p_q, mask=(o_q < COUNT)[None, :] & m_k[:, None], other=0.0).to(tl.float32)
    b_high, b_low = split(b_q, SPLIT)
    b_q = tl.where(is_high[None, :], b_high, b_low if SPLIT else 0.0)
    p_v = pointer_to(values, o_s, S)[:, None] + ((t_m * D)[:, None] + o_d[None, :])
    o_part = tl.program_id(0).to(tl.int64) * num_tokens * S + (t_m * S + o_s)
    p_z = parts + o_part * (COUNT + 1)
    steps = tl.cdiv(num_tokens, BT)
    for step in tl.range(tl.program_id(1), steps, tl.num_programs(1), num_stages=STAGES):
        t = tl.cast(step, tl.int64) * BT
        m_m = (o_s < S) & (t + t_m < num_tokens)
        b_v = tl.load(p_v + t * D, mask=m_m[:, None] & m_d[None, :], other=0.0)
        b_z = tl.dot(b_v if SPLIT else b_v.to(tl.float32), b_q, input_precision="ieee")
        b_z = tl.sum(tl.reshape(b_z, [BT * SP, 2, CP // 2]), axis=1)
        p_zt = p_z + t * (S * (COUNT + 1))
        tl.store(p_zt[:, None] + o_j[None, :], b_z, mask=m_m[:, None] & (o_j < COUNT)[None, :])
        if NORM != "none":
            b_v = b_v.to(tl.float32)
            tl.store(p_zt + COUNT, tl.sum(b_v * b_v, axis=1), mask=m_m)


@triton.jit
def weights_kernel(
    parts, lse, weights, logits, rstds, num_tokens, start, eps, scale,
    Q: tl.constexpr, COUNT: tl.constexpr, S: tl.constexpr, WIDTH: tl.constexpr, NORM: tl.constexpr,
    PARTS: tl.constexpr, BT: tl.constexpr, SP: tl.constexpr, QP: tl.constexpr,
):  # fmt: skip
    """Weigh the sources of BT tokens by their scores; without PARTS, by logits that are there."""
    o_s, o_q = tl.arange(0, SP), tl.arange(0, QP)
    o_t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    m_t, m_s, m_q = o_t < num_tokens, o_s < S, o_q < COUNT
    o_i, m_i = o_t[:, None] * S + o_s[None, :], m_t[:, None] & m_s[None, :]
    o_z, m_z = o_i[:, :, None] * Q + start + o_q, m_i[:, :, None] & m_q
    if PARTS == 0:
        b_z = tl.load(logits + o_z, mask=m_z, other=0.0)
    else:
        b_z, b_square = tl.zeros([BT, SP, QP], tl.float32), tl.zeros([BT, SP], tl.float32)
        for c in tl.static_range(PARTS):
            p_z = parts + (tl.cast(c, tl.int64) * num_tokens * S + o_i) * (COUNT + 1)
            b_z += tl.load(p_z[:, :, None] + o_q, mask=m_z, other=0.0)
            if NORM != "none":
                b_square += tl.load(p_z + COUNT, mask=m_i, other=0.0)
        b_r = tl.full([BT, SP], 1.0, tl.float32)
        if NORM != "none":
            b_r = tl.rsqrt(b_square / WIDTH + eps)
        b_z *= (b_r * scale)[:, :, None]
        tl.store(rstds + o_i, b_r, mask=m_i)
        tl.store(logits + o_z, b_z, mask=m_z)
    b_z = tl.where(m_s[:, None], b_z, float("-inf"))
    b_top = tl.max(b_z, axis=1)
    b_e = tl.exp(b_z - b_top[:, None, :])
    b_sum = tl.sum(b_e, axis=1)
    tl.store(weights + o_z, b_e / b_sum[:, None, :], mask=m_z)
    p_lse = lse + (start + o_q).to(tl.int64) * num_tokens + o_t[:, None]
    tl.store(p_lse, b_top + tl.log(b_sum), mask=m_t[:, None] & m_q)


@triton.jit
def mix_kernel(
    values, weights, first, out, num_tokens, start,
    HAS_FIRST: tl.constexpr, Q: tl.constexpr, COUNT: tl.constexpr, S: tl.constexpr,
    D: tl.constexpr, BT: tl.constexpr, QP: tl.constexpr, SP: tl.constexpr, BD: tl.constexpr,
    STAGES: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Mix the sources in a block of columns, BT tokens at a time, SP sources after another.

    The weights are a matrix with a block for each token. The first read is not normed yet.
    """
    o_m, o_n = tl.arange(0, BT * QP), tl.arange(0, BT * SP)
    o_q, o_s, t_m, t_n = o_m % QP, o_n % SP, o_m // QP, o_n // SP
    o_d = tl.program_id(0) * BD + tl.arange(0, BD)
    m_d = o_d < D
    m_w = (t_m[:, None] == t_n[None, :]) & (o_q < COUNT)[:, None]
    o_j = (start + o_q).to(tl.int64)
    p_out = out + ((o_j - HAS_FIRST) * num_tokens + t_m) * D
    if HAS_FIRST:
        p_out = tl.where(o_j == 0, first + t_m * D, p_out)
    steps = tl.cdiv(num_tokens, BT)
    for step in tl.range(tl.program_id(1), steps, tl.num_programs(1), num_stages=STAGES):
        t = tl.cast(step, tl.int64) * BT
        b_out = tl.zeros([BT * QP, BD], tl.float32)
        for first_source in tl.static_range(0, S, SP):
            o_i = first_source + o_s
            m_i = (o_i < S) & (t + t_n < num_tokens)
            p_v = pointer_to(values, o_i, S)[:, None] + ((t_n * D)[:, None] + o_d[None, :])
            b_v = tl.load(p_v + t * D, mask=m_i[:, None] & m_d[None, :], other=0.0)
            o_w = (t_n * S + o_i)[None, :] * Q + start + o_q[:, None]
            b_w = tl.load(weights + t * (S * Q) + o_w, mask=m_w & m_i[None, :], other=0.0)
            b_high, b_low = split(b_w, SPLIT)
            if SPLIT:
                b_out = tl.dot(b_low, b_v, tl.dot(b_high, b_v, b_out))
            else:
                b_out = tl.dot(b_high, b_v.to(tl.float32), b_out, input_precision="ieee")
        m_out = ((o_q < COUNT) & (t + t_m < num_tokens))[:, None] & m_d[None, :]
        p_o = (p_out + t * D)[:, None] + o_d[None, :]
        tl.store(p_o, b_out.to(out.dtype.element_ty), mask=m_out)


@triton.jit
def norm_kernel(rows, rstds, eps, D: tl.constexpr, BD: tl.constexpr):
    """Norm the rows in place."""
    o_row, o_d = tl.program_id(0).to(tl.int64), tl.arange(0, BD)
    p_row, m_d = rows + o_row * D + o_d, o_d < D
    b_x = tl.load(p_row, mask=m_d, other=0.0).to(tl.float32)
    b_rstd = tl.rsqrt(tl.sum(b_x * b_x, axis=0) / D + eps)
    tl.store(rstds + o_row, b_rstd)
    tl.store(p_row, (b_x * b_rstd).to(rows.dtype.element_ty), mask=m_d)
