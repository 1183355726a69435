"""Backward pass of `read_ahead`: each source is read twice, its gradient read and written once.

That is for up to twelve queries; more are taken in groups.

First the inner products of all gradients with all sources of a token, by tensor cores; with them
the gradients of the logits. Then every column by itself: no sum crosses columns any more, so what
all tokens share, the queries and their gradient, stays in registers.

`b_` names a block, `o_` offsets, `m_` a mask, `p_` a pointer.
"""

import torch
import triton
import triton.language as tl

from depthroute.ops.kernels import block_layout
from depthroute.ops.kernels.block_results import GradientCall
from depthroute.ops.kernels.layout import INTERPRETED, power_of_two
from depthroute.ops.kernels.select import pointer_to
from depthroute.ops.kernels.split import split, splits


def read_many_bwd(call: GradientCall, programs: int) -> None:
    """Launch both parts; the second with so many programs for each block of columns."""
    given, at, later = call.given, call.at, call.later
    dot, update = block_layout.ahead_dots(at), block_layout.ahead_updates(at)
    columns = -(-at.D // update.columns)
    pulls = torch.empty_like(call.rstds)
    alongs = None if call.norm_rstds is None else torch.empty_like(call.norm_rstds)
    at_once = block_layout.group_size(at.Q, block_layout.GRADIENTS_AT_ONCE)
    for start in range(0, at.Q, at_once):
        group = slice(start, start + at_once)
        count, has_first = len(call.upstream[group]), given.norm_eps is not None and start == 0
        shared = {"NORM_FIRST": has_first, "Q": at.Q, "COUNT": count, **at.constants}
        queries = max(8, power_of_two(count + has_first))
        sources = max(8, power_of_two(at.S))
        tokens = max(1, 16 // sources, 16 // queries)
        grad_logits_kernel[(triton.cdiv(at.T, tokens),)](
            call.upstream[group],
            call.grad_lses[group],
            call.first,
            given.values,
            call.weights,
            call.logits,
            call.rstds,
            call.norm_rstds,
            call.grad_logits,
            pulls,
            alongs,
            call.grads.lse,
            at.T,
            start,
            given.rule.scale,
            given.norm_eps or 0.0,
            BT=tokens,
            QP=queries,
            SP=sources,
            BK=min(dot.columns, power_of_two(at.D)),
            EXACT=given.values[0].dtype != torch.float32 and not INTERPRETED,
            num_warps=dot.num_warps,
            num_stages=dot.stages,
            **shared,
        )
        for part, some in enumerate(block_layout.source_groups(at.S)):
            sources = max(4, power_of_two(len(given.values[some])))
            tokens = 16 // sources
            update_kernel[(columns, programs)](
                call.upstream[group],
                call.first,
                given.values[some],
                None if later is None else later[some],
                given.query,
                call.weights,
                call.grad_logits,
                pulls,
                alongs,
                call.norm_rstds,
                call.grads.values[some],
                None if call.grad_query is None else call.grad_query[part],
                at.T,
                call.num_rows,
                start,
                some.start,
                call.share,
                LAST=start + at_once >= at.Q and some.stop == at.S,
                COUNT_S=len(given.values[some]),
                OLD=call.num_old,
                BT=tokens,
                QP=max(queries, 16 // tokens),
                SP=sources,
                CP=2 * max(8, power_of_two(count)),
                BD=update.columns,
                STAGES=update.stages,
                SPLIT=splits(given.values[0]),
                num_warps=update.num_warps,
                **shared,
            )
        later = call.grads.values.unbind(0)


@triton.jit
def grad_logits_kernel(
    grad_outs, grad_lses, first, values, weights, logits, rstds, norm_rstds, grad_logits, pulls,
    alongs, grad_old_lse, num_tokens, start, scale, norm_eps,
    NORM_FIRST: tl.constexpr, Q: tl.constexpr, COUNT: tl.constexpr, S: tl.constexpr,
    D: tl.constexpr, R: tl.constexpr, NORM: tl.constexpr, SEPARATE: tl.constexpr,
    BT: tl.constexpr, QP: tl.constexpr, SP: tl.constexpr, BK: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Write the gradients of the logits of BT tokens, and what the key norm pulls sources by.

    The products `<grad_j, value_i>` are one matrix product of all the tokens' rows, whose blocks
    of one token are kept. `grad_lses` bring `-<grad_out, out>`, so one pass over them is enough.
    Factors are stored times that of the key norm, unless the keys are separate. A first read that
    was normed is one row more, and its gradient is taken back through the norm here.
    """
    o_m, o_n = tl.arange(0, BT * QP), tl.arange(0, BT * SP)
    o_q, o_s = o_m % QP, o_n % SP
    t_m = tl.program_id(0).to(tl.int64) * BT + o_m // QP
    t_n = tl.program_id(0).to(tl.int64) * BT + o_n // SP
    m_m, m_n = (t_m < num_tokens) & (o_q < COUNT), (t_n < num_tokens) & (o_s < S)
    p_g = pointer_to(grad_outs, o_q, COUNT)
    if NORM_FIRST:
        p_g = tl.where(o_q == COUNT, first, p_g)
        m_g = (t_m < num_tokens) & (o_q <= COUNT)
    else:
        m_g = m_m
    p_g = tl.multiple_of(p_g, 16) + t_m * D
    p_v = pointer_to(values, o_s, S) + t_n * D
    b_a = tl.zeros([BT * QP, BT * SP], tl.float32)
    b_gg = tl.zeros([BT * QP, BT * QP], tl.float32)
    for k in range(0, D, BK):
        o_k = k + tl.arange(0, BK)
        b_g = tl.load(
            p_g[:, None] + o_k[None, :], mask=m_g[:, None] & (o_k < D)[None, :], other=0.0
        )
        b_v = tl.load(
            p_v[:, None] + o_k[None, :], mask=m_n[:, None] & (o_k < D)[None, :], other=0.0
        )
        if not EXACT:
            b_g, b_v = b_g.to(tl.float32), b_v.to(tl.float32)
        b_a = tl.dot(b_g, tl.trans(b_v), b_a, input_precision="ieee")
        if NORM_FIRST:
            b_gg = tl.dot(b_g, tl.trans(b_g), b_gg, input_precision="ieee")

    is_pair = (t_m[:, None] == t_n[None, :]) & m_m[:, None] & m_n[None, :]
    b_c = grad_lses[0] + o_q * 0
    for j in tl.static_range(1, COUNT):
        b_c = tl.where(o_q == j, grad_lses[j], b_c)
    b_c = tl.load(b_c + t_m, mask=m_m, other=0.0)
    if NORM_FIRST:
        # <first, grad_out_0> / D of each row's token, then of each column's
        is_x = (o_q == COUNT)[None, :] & (t_m[:, None] == t_m[None, :])
        b_along = tl.sum(tl.where(is_x, b_gg, 0.0), axis=1) / D
        b_norm = tl.load(norm_rstds + t_m, mask=t_m < num_tokens, other=0.0)
        tl.store(alongs + t_m, b_along, mask=m_m & (o_q == 0))
        # <grad, out> of the first read: what the norm leaves of it, because of its eps
        b_c = tl.where(o_q == 0, -b_along * D * norm_eps * b_norm * b_norm, b_c)
        is_same = t_m[:, None] == t_n[None, :]
        b_xv = tl.sum(tl.where(is_same & (o_q == COUNT)[:, None], b_a, 0.0), axis=0)
        b_first = b_norm[:, None] * (b_a - b_along[:, None] * b_xv[None, :])
        b_a = tl.where((o_q == 0)[:, None], b_first, b_a)
    o_z = (t_n * S + o_s)[None, :] * Q + start + o_q[:, None]
    b_w = tl.load(weights + o_z, mask=is_pair, other=0.0)
    if grad_old_lse is not None:
        p_old = grad_old_lse + t_m[:, None] + o_n[None, :] * 0
        tl.store(p_old, b_w * b_c[:, None], mask=is_pair & (o_s == 0)[None, :])
    b_gz = b_w * (b_a + b_c[:, None])
    if not SEPARATE:
        b_r = tl.load(rstds + t_n * S + o_s, mask=m_n, other=0.0)
        if NORM != "none":
            b_z = tl.load(logits + o_z, mask=is_pair, other=0.0)
            b_pull = tl.sum(b_gz * b_z, axis=0) * b_r * b_r / (D if NORM == "full" else R)
            tl.store(pulls + t_n * S + o_s, b_pull, mask=m_n)
        b_gz *= b_r[None, :] * scale
    tl.store(grad_logits + o_z, b_gz, mask=is_pair)


@triton.jit
def update_kernel(
    grad_outs, first, values, later_values, query, weights, grad_logits, pulls, alongs, norm_rstds,
    grad_values, grad_query, num_tokens, num_rows, start, first_source, share,
    NORM_FIRST: tl.constexpr, Q: tl.constexpr, COUNT: tl.constexpr, S: tl.constexpr,
    D: tl.constexpr, R: tl.constexpr, NORM: tl.constexpr, SEPARATE: tl.constexpr,
    LAST: tl.constexpr, COUNT_S: tl.constexpr, OLD: tl.constexpr, BT: tl.constexpr,
    QP: tl.constexpr, SP: tl.constexpr, CP: tl.constexpr, BD: tl.constexpr,
    STAGES: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Write the gradients of the sources in a block of columns, BT tokens at a time.

    A source's gradient is the weights times the gradients of the reads, and what its logits got
    times the queries: products of small matrices, the first one with a block for each token. The
    gradient of the queries stays in registers, one row for each program. Float32 factors go through
    tensor cores in two parts: those of the logits side by side in CP columns.
    """
    pid = tl.program_id(1)
    o_d = tl.program_id(0) * BD + tl.arange(0, BD)
    m_d, m_k = o_d < D, (o_d < D) & (o_d >= D - R)
    o_m, o_n = tl.arange(0, BT * SP), tl.arange(0, BT * QP)
    o_s, o_q, t_m, t_n = o_m % SP, o_n % QP, o_m // SP, o_n // QP
    p_v = pointer_to(values, o_s, COUNT_S)
    p_g = pointer_to(grad_outs, o_q, COUNT)
    if NORM_FIRST:  # its gradient goes back through the norm: one row more
        p_g = tl.multiple_of(tl.where(o_q == COUNT, first, p_g), 16)
    if later_values is not None:  # a read that is merged is used nowhere else
        p_l = pointer_to(later_values, o_s - OLD, COUNT_S - OLD)
    o_j = tl.where(o_q == COUNT, 0, o_q)
    o_i = t_m * S + first_source + o_s
    o_w = o_i[:, None] * Q + start + o_j[None, :]
    m_w = (t_m[:, None] == t_n[None, :]) & (o_s < COUNT_S)[:, None]
    m_w = m_w & (o_q < COUNT + NORM_FIRST)[None, :]
    if not SEPARATE:
        o_c = tl.arange(0, CP)
        is_high, o_cq = o_c < CP // 2, o_c % (CP // 2)
        p_q = query + (start + o_cq)[:, None] * R + (o_d - (D - R))[None, :]
        b_q = tl.load(p_q, mask=(o_cq < COUNT)[:, None] & m_k[None, :], other=0.0).to(tl.float32)
        b_high, b_low = split(b_q, SPLIT)
        b_low = tl.where(is_high[:, None], b_low, 0.0)
        b_dq = tl.zeros([CP, BD], tl.float32)
        o_gd = o_i[:, None] * Q + start + o_cq[None, :]
        m_gd = (o_s < COUNT_S)[:, None] & (o_cq < COUNT)[None, :]
    steps = tl.cdiv(num_tokens, BT)
    for step in tl.range(pid, steps, tl.num_programs(1), num_stages=STAGES):
        t = tl.cast(step, tl.int64) * BT
        m_t = t + t_m < num_tokens
        m_v = (m_t & (o_s < COUNT_S))[:, None] & m_d[None, :]
        m_g = ((t + t_n < num_tokens) & (o_q < COUNT + NORM_FIRST))[:, None] & m_d[None, :]
        o_v = (t * D + (t_m * D)[:, None]) + o_d[None, :]
        b_g = tl.load(
            p_g[:, None] + (t * D + (t_n * D)[:, None] + o_d[None, :]), mask=m_g, other=0.0
        )
        b_w = tl.load(weights + t * (S * Q) + o_w, mask=m_w & m_t[:, None], other=0.0)
        if NORM_FIRST:
            m_a = t + t_n < num_tokens
            b_norm = tl.load(norm_rstds + t + t_n, mask=m_a, other=0.0)
            b_along = tl.load(alongs + t + t_n, mask=m_a, other=0.0)
            b_f = tl.where(o_q == 0, b_norm, tl.where(o_q == COUNT, -b_norm * b_along, 1.0))
            b_w *= b_f[None, :]
        if not SPLIT:
            b_g = b_g.to(tl.float32)
        b_w_high, b_w_low = split(b_w, SPLIT)
        b_dv = tl.dot(b_w_high, b_g, input_precision="ieee")
        if SPLIT:
            b_dv = tl.dot(b_w_low, b_g, b_dv)
        if not SEPARATE:
            b_v = tl.load(p_v[:, None] + o_v, mask=m_v, other=0.0)
            p_gd = grad_logits + t * (S * Q) + o_gd
            b_gd = tl.load(p_gd, mask=m_gd & m_t[:, None], other=0.0)
            b_gd_high, b_gd_low = split(b_gd, SPLIT)
            if SPLIT:
                b_c = tl.where(is_high[None, :], b_gd_high, b_gd_low)
                b_dv = tl.dot(b_c, b_high, b_dv)
                b_dv = tl.dot(b_c, b_low, b_dv)
                b_dq = tl.dot(tl.trans(b_c), b_v, b_dq)
            else:
                b_c = tl.where(is_high[None, :], b_gd, 0.0)
                b_dv = tl.dot(b_c, b_high, b_dv, input_precision="ieee")
                b_dq = tl.dot(tl.trans(b_c), b_v.to(tl.float32), b_dq, input_precision="ieee")
            if NORM != "none":
                b_pull = tl.load(pulls + t * S + o_i, mask=m_t & (o_s < COUNT_S), other=0.0)
                b_pulled = b_v.to(tl.float32) * b_pull[:, None]
                if NORM == "tail":
                    b_pulled = tl.where(m_k[None, :], b_pulled, 0.0)
                b_dv -= b_pulled
        if later_values is not None:
            b_dv += tl.load(p_l[:, None] + o_v, mask=m_v & (o_s >= OLD)[:, None], other=0.0)
        if LAST:
            b_dv *= tl.where(o_s == COUNT_S - 1, share, 1.0)[:, None]
        o_dv = tl.cast(o_s, tl.int64) * num_tokens + t + t_m
        p_dv = grad_values + (o_dv * D)[:, None] + o_d[None, :]
        tl.store(p_dv, b_dv.to(grad_values.dtype.element_ty), mask=m_v)
    if not SEPARATE:
        b_dq = tl.sum(tl.reshape(b_dq, [2, CP // 2, BD]), axis=0)
        o_cq = tl.arange(0, CP // 2)
        p_dq = grad_query + (start + o_cq)[:, None] * R + (o_d - (D - R))[None, :]
        m_dq = (o_cq < COUNT)[:, None] & m_k[None, :]
        tl.store(p_dq + pid * (Q * R), b_dq, mask=m_dq)
        for row in range(pid + tl.num_programs(1), num_rows, tl.num_programs(1)):
            tl.store(p_dq + row * (Q * R), tl.zeros_like(b_dq), mask=m_dq)
