"""Backward pass of `depth_attend`: each source is read, and its gradient written, once.

`b_` names a block, `o_` offsets, `m_` a mask, `p_` a pointer.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from depthroute.ops.kernels import tuning
from depthroute.ops.kernels.gradient import norm_backward, source_backward
from depthroute.ops.kernels.layout import Layout, as_bias, as_query_rows, of_queries
from depthroute.ops.kernels.results import Attended, AttendGradients, empty_stack
from depthroute.ops.kernels.sources import (
    key_tile_of,
    load_sources,
    num_programs,
    pack,
    tile_of,
)
from depthroute.ops.kernels.sums import inner_products
from depthroute.ops.scores import ScoreRule

# sources that a program can hold beside the query; beside more, it is loaded for each token
BESIDE_QUERY = tl.constexpr(8)


def depth_attend_bwd(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    values: Sequence[Tensor],
    keys: Sequence[Tensor] | None,
    query: Tensor,
    bias: Tensor | None,
    null: Tensor | None,
    read: Attended,
    rule: ScoreRule,
) -> AttendGradients:
    """Launch the backward pass on validated arguments and the results of the forward pass."""
    at = Layout.of(values, keys, query, rule)
    grad_values, grad_keys = empty_stack(values), None if keys is None else empty_stack(keys)
    if not at.T:
        zeros = (None if x is None else x.new_zeros(x.shape) for x in (bias, null))
        return AttendGradients(grad_values, grad_keys, query.new_zeros(query.shape), *zeros)
    launch = tuning.backward(at)
    programs = num_programs(at.T, launch.programs, query.device)
    packed = pack(values, keys, launch)
    upstream, query_rows = as_query_rows(grad_out), query.float().contiguous()
    null_rows = None if null is None else null.contiguous()
    grad_lse = None if grad_lse is None else grad_lse.contiguous()
    flat_bias = as_bias(bias, at, values[0].shape[:-1])
    # one row for each program, summed below: no atomics, so that two runs agree
    grad_query = read.lse.new_empty((programs, at.Q, at.R))
    grad_null = None if null is None else read.lse.new_empty((programs, at.Q, at.H))
    grad_logits = torch.empty_like(read.dots) if bias is not None or at.key_heads_apart else None
    for first in range(0, at.Q, launch.queries):
        group = first, min(launch.queries, at.Q - first)
        depth_attend_bwd_kernel[(programs,)](
            of_queries(upstream, 0, *group),
            of_queries(grad_lse, 0, *group),
            packed.values,
            packed.keys,
            of_queries(query_rows, 0, *group),
            flat_bias and flat_bias._replace(data=of_queries(flat_bias.data, 0, *group)),
            of_queries(null_rows, 0, *group),
            of_queries(read.out, 0, *group),
            of_queries(read.lse, 0, *group),
            of_queries(read.dots, 2, *group),
            read.rstds,
            of_queries(read.out_rstds, 0, *group),
            grad_values,
            grad_keys,
            of_queries(grad_query, 1, *group),
            of_queries(grad_logits, 2, *group),
            of_queries(grad_null, 1, *group),
            *upstream.stride()[:2],
            at.T,
            at.S,
            rule.scale,
            Q=at.Q,
            COUNT=group[1],
            QP=launch.queries,
            ACCUMULATE=first > 0,
            **at.constants,
            KEY_HEADS_APART=at.key_heads_apart,
            CHUNK=launch.chunk,
            RESIDENT=launch.resident,
            STAGES=launch.stages_of(values[0].itemsize),
            ALIGNED=packed.aligned,
            num_warps=launch.num_warps,
            maxnreg=launch.max_registers,
        )
    return AttendGradients(
        grad_values,
        grad_keys,
        grad_query.sum(0).to(query.dtype),
        None if bias is None else _sum_to_bias(grad_logits, bias),
        None if null is None else grad_null.sum(0).to(null.dtype),
    )


def _sum_to_bias(grad_logits: Tensor, bias: Tensor) -> Tensor:
    """Sum logit gradients `[T, S, Q, H]` to a bias `[Q or 1, S, *(b or ones)]`."""
    summed = grad_logits.sum(-1).permute(2, 1, 0)
    if bias.shape[0] == 1:
        summed = summed.sum(0, keepdim=True)
    if bias.shape[2:].numel() != summed.shape[2]:
        summed = summed.sum(2, keepdim=True)
    return summed.reshape(bias.shape).contiguous()


@triton.jit
def weight_of(
    dots, rstds, bias, b_lse, o_row, i, o_q, o_qh, m_qh, num_sources, scale,
    Q: tl.constexpr, COUNT: tl.constexpr, H: tl.constexpr,
):  # fmt: skip
    """Return the weights and raw scores `[Q, H]` of source i, and the factor of its norm."""
    o_number = o_row * num_sources + i
    b_dot = tl.load(dots + o_number * (Q * H) + o_qh, mask=m_qh, other=0.0)
    b_r = tl.load(rstds + o_number, mask=i < num_sources, other=0.0)
    b_z = b_dot * (b_r * scale)
    if bias is not None:
        o_bias = tl.cast(i, tl.int64) * bias.source + o_row * bias.token
        p_bias = bias.data + o_bias + o_q.to(tl.int64)[:, None] * bias.query
        b_z += tl.load(p_bias, mask=(o_q < COUNT)[:, None] & (i < num_sources), other=0.0)
    return tl.where(m_qh, tl.exp(b_z - b_lse), 0.0), b_dot, b_r


@triton.jit
def depth_attend_bwd_kernel(
    grad_out, grad_lse, values, keys, query, bias, null, out, lse, dots, rstds, out_rstds,
    grad_values, grad_keys, grad_query, grad_logits, grad_null,
    stride_g_query, stride_g_token, num_tokens, num_sources, scale,
    Q: tl.constexpr, COUNT: tl.constexpr, QP: tl.constexpr, ACCUMULATE: tl.constexpr,
    D: tl.constexpr, R: tl.constexpr, H: tl.constexpr, NORM: tl.constexpr, KEYS: tl.constexpr,
    HP: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr,
    KEY_HEADS_APART: tl.constexpr,
    CHUNK: tl.constexpr, RESIDENT: tl.constexpr, STAGES: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Loop over tokens; what every logit's gradient needs of all sources comes before the rest.

    That is `<grad, out>`. Resident sources give it exactly, by the inner products that each needs
    anyway; their weights are computed twice, and not held between. Others would have to be read
    twice: there it is taken of the output, rounded as it is.
    The query's gradient stays in registers, one row for each program: summed in a fixed order, no
    two runs differ.
    """
    if RESIDENT:
        num_sources = CHUNK  # known to the compiler
    pid = tl.program_id(0)
    o_q, o_h = tl.arange(0, QP), tl.arange(0, HP)
    o_v, m_v = tile_of(D, H, HP, BC)
    o_k, m_k = key_tile_of(o_v, m_v, D, R, H, KEYS, HP, BK)
    o_j, m_j = o_q[:, None, None], (o_q < COUNT)[:, None, None]
    # numbers [QP, HP] of one token and source, and of one query
    o_qh, m_qh = o_q[:, None] * H + o_h[None, :], (o_q < COUNT)[:, None] & (o_h < H)[None, :]
    m_g = m_j & m_v[None, :, :]
    o_g = o_j.to(tl.int64) * stride_g_query + o_v[None, :, :]
    if KEYS == "separate":
        p_q, m_query = query + o_j * R + o_k[None, :, :], m_j & m_k[None, :, :]
    else:
        p_q = query + o_j * R + (o_v - (D - R))[None, :, :]
        m_query = m_g & (o_v >= D - R)[None, :, :]
    if QP == 1 and CHUNK <= BESIDE_QUERY:
        b_q = tl.load(p_q, mask=m_query, other=0.0)
    b_dq = tl.zeros([QP, HP, BK], tl.float32)
    b_dnull = tl.zeros([QP, HP], tl.float32)

    for t in tl.range(pid, num_tokens, tl.num_programs(0), num_stages=STAGES):
        o_row = tl.cast(t, tl.int64)
        b_g = tl.load(grad_out + o_row * stride_g_token + o_g, mask=m_g, other=0.0).to(tl.float32)
        if out_rstds is not None or not RESIDENT:
            o_out = o_j.to(tl.int64) * num_tokens + o_row
            p_out = out + o_out * D + o_v[None, :, :]
            b_out = tl.load(p_out, mask=m_g, other=0.0).to(tl.float32)
        if out_rstds is not None:
            b_factor = tl.load(out_rstds + o_out, mask=m_j, other=1.0)
            b_g = norm_backward(b_g, b_out, b_factor, D)
            if not RESIDENT:
                b_out /= b_factor
        o_lse = (o_q.to(tl.int64)[:, None] * num_tokens + o_row) * H + o_h[None, :]
        b_lse = tl.load(lse + o_lse, mask=m_qh, other=0.0)
        if grad_lse is None:
            b_rest = tl.zeros([QP, HP], tl.float32)
        else:
            b_rest = tl.load(grad_lse + o_lse, mask=m_qh, other=0.0)
        if RESIDENT:
            b_vs, b_ks = load_sources(
                values, keys, 0, o_row, num_sources, o_v, m_v, o_k, m_k, D, R, KEYS, CHUNK, True,
                ALIGNED,
            )  # fmt: skip
            b_as = inner_products(b_vs, b_g, CHUNK, 2)
            for c in tl.static_range(CHUNK):
                b_w, b_dot, b_r = weight_of(
                    dots, rstds, bias, b_lse, o_row, c, o_q, o_qh, m_qh, num_sources, scale,
                    Q, COUNT, H,
                )  # fmt: skip
                b_rest -= b_w * b_as[c]
        else:
            b_rest -= tl.sum(b_g * b_out, axis=2)
        if null is not None:
            b_null = tl.load(null + o_qh, mask=m_qh, other=0.0)
            b_dnull += tl.where(m_qh, tl.exp(b_null - b_lse) * b_rest, 0.0)
        if QP > 1 or CHUNK > BESIDE_QUERY:
            b_q = tl.load(p_q, mask=m_query, other=0.0, eviction_policy="evict_last")

        for start in range(0, num_sources, CHUNK):
            if not RESIDENT:
                b_vs, b_ks = load_sources(
                    values, keys, start, o_row, num_sources, o_v, m_v, o_k, m_k, D, R, KEYS, CHUNK,
                    False, ALIGNED,
                )  # fmt: skip
                b_as = inner_products(b_vs, b_g, CHUNK, 2)
            for c in tl.static_range(CHUNK):
                i, m_i = start + c, start + c < num_sources
                b_w, b_dot, b_r = weight_of(
                    dots, rstds, bias, b_lse, o_row, i, o_q, o_qh, m_qh & m_i, num_sources,
                    scale, Q, COUNT, H,
                )  # fmt: skip
                b_gz = b_w * (b_as[c] + b_rest)
                p_gz = grad_logits
                if grad_logits is not None:
                    p_gz = grad_logits + (o_row * num_sources + i) * (Q * H)
                    tl.store(p_gz + o_qh, b_gz, mask=m_qh & m_i)
                b_dq += source_backward(
                    b_vs[c], b_ks[c], b_g, b_q, b_w, b_gz, b_dot, b_r, scale, p_gz, i, m_i, o_row,
                    num_tokens, grad_values, grad_keys, o_q, o_v, m_v, o_k, m_k, m_query,
                    D, R, H, NORM, KEYS, KEY_HEADS_APART, ACCUMULATE,
                )  # fmt: skip

    p_dq = grad_query + (pid * Q + o_j) * R + o_k[None, :, :]
    tl.store(p_dq, b_dq, mask=m_j & m_k[None, :, :])
    if null is not None:
        tl.store(grad_null + pid * (Q * H) + o_qh, b_dnull, mask=m_qh)
