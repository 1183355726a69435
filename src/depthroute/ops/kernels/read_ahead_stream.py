"""Forward pass of `read_ahead` for more sources than a program holds: each is read twice.

First the scores of all sources of a token, by tensor cores; then every column by itself, as in the
backward pass: no sum crosses columns any more.

`b_` names a block, `o_` offsets, `m_` a mask, `p_` a pointer.
"""

import torch
import triton
import triton.language as tl

from depthroute.ops.block import BlockRead
from depthroute.ops.kernels import block_layout
from depthroute.ops.kernels.block_layout import BlockLayout, ReadAhead, contiguous_rows
from depthroute.ops.kernels.layout import INTERPRETED, as_rows, power_of_two
from depthroute.ops.kernels.select import pointer_to


def read_ahead_stream(given: BlockRead, at: BlockLayout, result: ReadAhead) -> None:
    """Launch the forward pass; `result.logits` and `rstds` are there already for separate keys."""
    values = contiguous_rows(given.values)
    pending = None if given.pending is None else as_rows(given.pending)
    stride = 0 if pending is None else pending.stride(0)
    query, has_first = given.query.contiguous(), given.norm_eps is not None
    dot, mix = block_layout.ahead_dots(at), block_layout.ahead_mix(at)
    grid = block_layout.column_grid(mix, at, values[0].device)
    sources = power_of_two(at.S)
    for start in range(0, at.Q, at.queries_at_once):
        count = min(at.queries_at_once, at.Q - start)
        shared = {"Q": at.Q, "COUNT": count, **at.constants}
        tokens = max(1, 16 // sources)
        weights_kernel[(triton.cdiv(at.T, tokens),)](
            values,
            pending,
            query,
            result.lse,
            result.weights,
            result.logits,
            result.rstds,
            stride,
            at.T,
            start,
            given.rule.eps,
            given.rule.scale,
            given.share,
            BT=tokens,
            QP=max(8, power_of_two(count)),
            SP=sources,
            BK=min(dot.columns, power_of_two(at.D)),
            SPLIT=values[0].dtype == torch.bfloat16 and not INTERPRETED,
            num_warps=dot.num_warps,
            num_stages=dot.stages,
            **shared,
        )
        mix_kernel[grid](
            values,
            pending,
            result.first,
            result.out,
            result.closed,
            result.weights,
            stride,
            at.T,
            start,
            given.share,
            HAS_FIRST=has_first,
            BD=mix.columns,
            AHEAD=mix.stages,
            num_warps=mix.num_warps,
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


@triton.jit
def weights_kernel(
    values, pending, query, lse, weights, logits, rstds,
    stride_pending, num_tokens, start, eps, scale, share,
    Q: tl.constexpr, COUNT: tl.constexpr, S: tl.constexpr, D: tl.constexpr, R: tl.constexpr,
    NORM: tl.constexpr, SEPARATE: tl.constexpr,
    BT: tl.constexpr, QP: tl.constexpr, SP: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Write logits, weights and their log-sum-exp for all sources of BT tokens.

    Scores are one matrix product of the tokens' sources with the queries. Those are float32, and
    for bfloat16 sources each is the sum of two bfloat16 columns, a high and a low part.
    """
    o_m, o_n = tl.arange(0, BT * SP), tl.arange(0, 2 * QP)
    o_s, o_q = o_m % SP, o_n % QP
    t_m = tl.program_id(0).to(tl.int64) * BT + o_m // SP
    m_m = (t_m < num_tokens) & (o_s < S)
    o_z = (t_m * S + o_s) * Q + start
    o_j = tl.arange(0, QP)
    o_zj, m_z = o_z[:, None] + o_j[None, :], m_m[:, None] & (o_j < COUNT)[None, :]
    if SEPARATE:
        b_z = tl.load(logits + o_zj, mask=m_z, other=0.0)
    else:
        p_v = pointer_to(values, o_s, S) + t_m * D
        b_acc = tl.zeros([BT * SP, 2 * QP], tl.float32)
        b_square = tl.zeros([BT * SP, BK], tl.float32)
        first: tl.constexpr = 0 if NORM == "full" else (D - R) // BK * BK
        for k in range(first, D, BK):
            o_k = k + tl.arange(0, BK)
            m_v = m_m[:, None] & (o_k < D)[None, :]
            b_v = tl.load(p_v[:, None] + o_k[None, :], mask=m_v, other=0.0)
            if pending is not None:  # the last source closes here
                m_y = m_v & (o_s == S - 1)[:, None]
                p_y = pending + (t_m * stride_pending)[:, None] + o_k[None, :]
                b_y = tl.load(p_y, mask=m_y, other=0.0).to(tl.float32)
                b_closed = ((b_v.to(tl.float32) + b_y) * share).to(b_v.dtype)
                b_v = tl.where((o_s == S - 1)[:, None], b_closed, b_v)
            m_k = (o_k >= D - R) & (o_k < D)
            p_q = query + (start + o_q)[None, :] * R + (o_k - (D - R))[:, None]
            b_q = tl.load(p_q, mask=m_k[:, None] & (o_q < COUNT)[None, :], other=0.0).to(tl.float32)
            b_wide = b_v.to(tl.float32)
            if SPLIT:
                b_high = b_q.to(tl.bfloat16)
                b_low = (b_q - b_high.to(tl.float32)).to(tl.bfloat16)
                b_acc = tl.dot(b_v, tl.where((o_n < QP)[None, :], b_high, b_low), b_acc)
            else:
                b_part = tl.where((o_n < QP)[None, :], b_q, 0.0)
                b_acc = tl.dot(b_wide, b_part, b_acc, input_precision="ieee")
            if NORM == "full":
                b_square += b_wide * b_wide
            elif NORM == "tail":
                b_square += tl.where(m_k[None, :], b_wide * b_wide, 0.0)
        b_r = tl.full([BT * SP], 1.0, tl.float32)
        if NORM != "none":
            b_r = tl.rsqrt(tl.sum(b_square, axis=1) / (D if NORM == "full" else R) + eps)
        tl.store(rstds + t_m * S + o_s, b_r, mask=m_m)
        b_z = tl.sum(tl.reshape(b_acc, [BT * SP, 2, QP]), axis=1) * (b_r * scale)[:, None]
        tl.store(logits + o_zj, b_z, mask=m_z)

    # over the sources of each token
    b_z = tl.where((o_s < S)[:, None], b_z, float("-inf"))
    b_z = tl.reshape(b_z, [BT, SP, QP])
    b_top = tl.max(b_z, axis=1)
    b_e = tl.exp(b_z - b_top[:, None, :])
    b_sum = tl.sum(b_e, axis=1)
    b_w = tl.reshape(b_e / b_sum[:, None, :], [BT * SP, QP])
    tl.store(weights + o_zj, b_w, mask=m_z)
    o_t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    p_lse = lse + (start + o_j)[None, :] * tl.cast(num_tokens, tl.int64) + o_t[:, None]
    m_lse = (o_t < num_tokens)[:, None] & (o_j < COUNT)[None, :]
    tl.store(p_lse, b_top + tl.log(b_sum), mask=m_lse)


@triton.jit
def mix_kernel(
    values, pending, first, out, closed, weights, stride_pending, num_tokens, start, share,
    HAS_FIRST: tl.constexpr, Q: tl.constexpr, COUNT: tl.constexpr, S: tl.constexpr,
    D: tl.constexpr, R: tl.constexpr, NORM: tl.constexpr, SEPARATE: tl.constexpr,
    BD: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Mix the sources in a block of columns, token by token; the first read is not normed yet."""
    o_d = tl.program_id(0) * BD + tl.arange(0, BD)
    m_d = o_d < D
    for t in range(tl.program_id(1), num_tokens, tl.num_programs(1)):
        o_row = tl.cast(t, tl.int64)
        b_accs = ()
        for _ in tl.static_range(COUNT):
            b_accs = b_accs + (tl.zeros([BD], tl.float32),)
        b_vs = ()
        for i in tl.static_range(min(S, AHEAD)):
            b_vs = b_vs + (tl.load(values[i] + o_row * D + o_d, mask=m_d, other=0.0),)
        for i in tl.static_range(S):
            if i + AHEAD < S:  # in flight while this one is used
                b_vs = b_vs + (tl.load(values[i + AHEAD] + o_row * D + o_d, mask=m_d, other=0.0),)
            b_v = b_vs[i].to(tl.float32)
            if pending is not None and i == S - 1:
                b_y = tl.load(pending + o_row * stride_pending + o_d, mask=m_d, other=0.0)
                b_closed = ((b_v + b_y.to(tl.float32)) * share).to(closed.dtype.element_ty)
                tl.store(closed + o_row * D + o_d, b_closed, mask=m_d)
                b_v = b_closed.to(tl.float32)
            b_new = ()
            for j in tl.static_range(COUNT):
                b_w = tl.load(weights + (o_row * S + i) * Q + start + j)
                b_new = b_new + (b_accs[j] + b_w * b_v,)
            b_accs = b_new
        for j in tl.static_range(COUNT):
            o_out = ((start + j - HAS_FIRST) * tl.cast(num_tokens, tl.int64) + o_row) * D
            p_out = out + o_out
            if HAS_FIRST and j == 0:
                p_out = tl.where(start == 0, first + o_row * D, p_out)
            tl.store(p_out + o_d, b_accs[j].to(out.dtype.element_ty), mask=m_d)


@triton.jit
def norm_kernel(rows, rstds, eps, D: tl.constexpr, BD: tl.constexpr):
    """Norm the rows in place."""
    o_row, o_d = tl.program_id(0).to(tl.int64), tl.arange(0, BD)
    p_row, m_d = rows + o_row * D + o_d, o_d < D
    b_x = tl.load(p_row, mask=m_d, other=0.0).to(tl.float32)
    b_rstd = tl.rsqrt(tl.sum(b_x * b_x, axis=0) / D + eps)
    tl.store(rstds + o_row, b_rstd)
    tl.store(p_row, (b_x * b_rstd).to(rows.dtype.element_ty), mask=m_d)
