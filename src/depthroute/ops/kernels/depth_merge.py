"""Forward and backward pass of `depth_merge`: one source joins a finished read.

`b_` names a block, `o_` offsets, `m_` a mask, `p_` a pointer.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from depthroute.ops.kernels import tuning
from depthroute.ops.kernels.gradient import norm_backward, source_backward
from depthroute.ops.kernels.layout import (
    Layout,
    as_bias,
    as_query_rows,
    as_rows,
    power_of_two,
)
from depthroute.ops.kernels.results import Merged, MergeGradients
from depthroute.ops.kernels.sources import (
    inverse_rms,
    key_tile_of,
    key_within,
    num_programs,
    tile_of,
)
from depthroute.ops.scores import ScoreRule


def depth_merge_fwd(
    out: Tensor,
    lse: Tensor,
    value: Tensor,
    query: Tensor,
    key: Tensor | None,
    bias: Tensor | None,
    rule: ScoreRule,
    out_norm_eps: float | None = None,
) -> Merged:
    """Launch the forward pass on validated arguments (`checks.Merge`)."""
    at = _layout(value, query, key, rule)
    result = Merged.empty(at, value, out_norm_eps is not None)
    if not at.T:
        return result
    old, row = as_query_rows(out), as_rows(value)
    key_row = row if key is None else as_rows(key)
    launch = tuning.merge_forward(at)
    depth_merge_fwd_kernel[(at.T,)](
        old,
        lse.contiguous(),
        row,
        key_row,
        query.float().contiguous(),
        as_bias(bias, at, value.shape[:-1]),
        *result,
        *old.stride()[:2],
        row.stride(0),
        key_row.stride(0),
        at.T,
        rule.eps,
        rule.scale,
        out_norm_eps,
        Q=at.Q,
        QP=power_of_two(at.Q),
        **at.constants,
        num_warps=launch.num_warps,
        maxnreg=launch.max_registers,
    )
    return result


def depth_merge_bwd(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    value: Tensor,
    query: Tensor,
    key: Tensor | None,
    bias: Tensor | None,
    dots: Tensor,
    rstds: Tensor,
    keep: Tensor,
    take: Tensor,
    out_rstds: Tensor | None,
    normed: Tensor | None,
    rule: ScoreRule,
) -> MergeGradients:
    """Launch the backward pass on the arguments of the forward pass and its results."""
    at = _layout(value, query, key, rule)
    grads = MergeGradients.empty(out, lse, value, query, key, bias)
    if not at.T:
        return grads._replace(
            query=query.new_zeros(query.shape),
            bias=None if bias is None else bias.new_zeros(bias.shape),
        )
    old, row, upstream = as_query_rows(out), as_rows(value), as_query_rows(grad_out)
    key_row = row if key is None else as_rows(key)
    launch = tuning.merge_backward(at)
    programs = num_programs(at.T, launch.programs, query.device)
    keep_logits = bias is not None or at.key_heads_apart
    grad_logits = torch.empty_like(dots) if keep_logits else None
    grad_query = keep.new_empty((programs, at.Q, at.R))
    depth_merge_bwd_kernel[(programs,)](
        upstream,
        None if grad_lse is None else grad_lse.contiguous(),
        old,
        row,
        key_row,
        query.float().contiguous(),
        dots,
        rstds,
        keep,
        take,
        out_rstds,
        normed,
        grads.out,
        grads.lse,
        grads.value,
        grads.key,
        grad_query,
        grad_logits,
        *upstream.stride()[:2],
        *old.stride()[:2],
        row.stride(0),
        key_row.stride(0),
        at.T,
        rule.scale,
        Q=at.Q,
        QP=power_of_two(at.Q),
        **at.constants,
        KEY_HEADS_APART=at.key_heads_apart,
        num_warps=launch.num_warps,
        maxnreg=launch.max_registers,
    )
    grads = grads._replace(query=grad_query.sum(0).to(query.dtype))
    if bias is not None:
        grads = grads._replace(bias=grad_logits.sum(-1).T.reshape(bias.shape).contiguous())
    return grads


def _layout(value: Tensor, query: Tensor, key: Tensor | None, rule: ScoreRule) -> Layout:
    return Layout.of([value], None if key is None else [key], query, rule)


@triton.jit
def depth_merge_fwd_kernel(
    old, old_lse, value, key, query, bias, out, lse, dots, rstds, keep, take, out_rstds,
    stride_o_query, stride_o_token, stride_v, stride_k, num_tokens, eps, scale, out_norm_eps,
    Q: tl.constexpr, QP: tl.constexpr,
    D: tl.constexpr, R: tl.constexpr, H: tl.constexpr, NORM: tl.constexpr, KEYS: tl.constexpr,
    HP: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Merge the source of one token into every query's read."""
    t = tl.program_id(0)
    o_row = t.to(tl.int64)
    o_q, o_h = tl.arange(0, QP), tl.arange(0, HP)
    o_v, m_v = tile_of(D, H, HP, BC)
    o_k, m_k = key_tile_of(o_v, m_v, D, R, H, KEYS, HP, BK)
    o_qh, m_qh = o_q[:, None] * H + o_h[None, :], (o_q < Q)[:, None] & (o_h < H)[None, :]
    o_j, m_j = o_q[:, None, None], (o_q < Q)[:, None, None]
    m_out = m_j & m_v[None, :, :]

    p_old = old + o_j.to(tl.int64) * stride_o_query + o_row * stride_o_token
    b_old = tl.load(p_old + o_v[None, :, :], mask=m_out, other=0.0).to(tl.float32)
    b_v = tl.load(value + o_row * stride_v + o_v, mask=m_v, other=0.0).to(tl.float32)
    if KEYS == "value":
        b_k = key_within(b_v, m_k, D, R)
    else:
        o_tail = D - R if KEYS == "tail" else 0
        b_k = tl.load(key + o_row * stride_k + o_tail + o_k, mask=m_k, other=0.0).to(tl.float32)
    p_q = query + o_j * R + o_k[None, :, :]
    b_q = tl.load(p_q, mask=m_j & m_k[None, :, :], other=0.0, eviction_policy="evict_last")
    o_lse = (o_q.to(tl.int64)[:, None] * num_tokens + o_row) * H + o_h[None, :]
    b_lse = tl.load(old_lse + o_lse, mask=m_qh, other=0.0)

    b_r = inverse_rms(b_v, b_k, eps, NORM, D, R)
    b_dot = tl.sum(b_q * b_k[None, :, :], axis=2)
    b_z = b_dot * (b_r * scale)
    if bias is not None:
        p_bias = bias.data + o_row * bias.token + o_q.to(tl.int64)[:, None] * bias.query
        b_z += tl.load(p_bias, mask=(o_q < Q)[:, None], other=0.0)
    b_top = tl.maximum(b_lse, b_z)
    b_total = b_top + tl.log(tl.exp(b_lse - b_top) + tl.exp(b_z - b_top))
    b_keep, b_take = tl.exp(b_lse - b_total), tl.exp(b_z - b_total)
    b_out = b_keep[:, :, None] * b_old + b_take[:, :, None] * b_v[None, :, :]

    o_out = o_j.to(tl.int64) * num_tokens + o_row
    if out_rstds is not None:
        b_square = tl.sum(tl.sum(b_out * b_out, axis=2), axis=1)[:, None, None]
        b_norm = tl.rsqrt(b_square / D + out_norm_eps)
        tl.store(out_rstds + o_out, b_norm, mask=m_j)
        b_out *= b_norm
    p_out = out + o_out * D + o_v[None, :, :]
    tl.store(p_out, b_out.to(out.dtype.element_ty), mask=m_out)
    tl.store(lse + o_lse, b_total, mask=m_qh)
    o_number = o_row * (Q * H) + o_qh
    tl.store(rstds + o_row, b_r)
    tl.store(dots + o_number, b_dot, mask=m_qh)
    tl.store(keep + o_number, b_keep, mask=m_qh)
    tl.store(take + o_number, b_take, mask=m_qh)


@triton.jit
def depth_merge_bwd_kernel(
    grad_out, grad_lse, old, value, key, query, dots, rstds, keep, take, out_rstds, normed,
    grad_old, grad_old_lse, grad_value, grad_key, grad_query, grad_logits,
    stride_g_query, stride_g_token, stride_o_query, stride_o_token, stride_v, stride_k,
    num_tokens, scale,
    Q: tl.constexpr, QP: tl.constexpr,
    D: tl.constexpr, R: tl.constexpr, H: tl.constexpr, NORM: tl.constexpr, KEYS: tl.constexpr,
    HP: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr, KEY_HEADS_APART: tl.constexpr,
):  # fmt: skip
    """Loop over tokens, with one row of the query's gradient for each program."""
    pid = tl.program_id(0)
    o_q, o_h = tl.arange(0, QP), tl.arange(0, HP)
    o_v, m_v = tile_of(D, H, HP, BC)
    o_k, m_k = key_tile_of(o_v, m_v, D, R, H, KEYS, HP, BK)
    o_qh, m_qh = o_q[:, None] * H + o_h[None, :], (o_q < Q)[:, None] & (o_h < H)[None, :]
    o_j, m_j = o_q[:, None, None], (o_q < Q)[:, None, None]
    m_out = m_j & m_v[None, :, :]
    if KEYS == "separate":
        o_query, m_query = o_k[None, :, :], m_j & m_k[None, :, :]
    else:
        o_query, m_query = (o_v - (D - R))[None, :, :], m_out & (o_v >= D - R)[None, :, :]
    b_q = tl.load(query + o_j * R + o_query, mask=m_query, other=0.0)
    b_dq = tl.zeros([QP, HP, BK], tl.float32)

    for t in range(pid, num_tokens, tl.num_programs(0)):
        o_row = tl.cast(t, tl.int64)
        p_g = grad_out + o_j.to(tl.int64) * stride_g_query + o_row * stride_g_token
        b_g = tl.load(p_g + o_v[None, :, :], mask=m_out, other=0.0).to(tl.float32)
        if out_rstds is not None:
            o_out = o_j.to(tl.int64) * num_tokens + o_row
            p_normed = normed + o_out * D + o_v[None, :, :]
            b_normed = tl.load(p_normed, mask=m_out, other=0.0).to(tl.float32)
            b_g = norm_backward(b_g, b_normed, tl.load(out_rstds + o_out, mask=m_j, other=1.0), D)
        p_old = old + o_j.to(tl.int64) * stride_o_query + o_row * stride_o_token
        b_old = tl.load(p_old + o_v[None, :, :], mask=m_out, other=0.0).to(tl.float32)
        b_v = tl.load(value + o_row * stride_v + o_v, mask=m_v, other=0.0).to(tl.float32)
        if KEYS == "value":
            b_k = key_within(b_v, m_k, D, R)
        else:
            o_tail = D - R if KEYS == "tail" else 0
            p_k = key + o_row * stride_k + o_tail
            b_k = tl.load(p_k + o_k, mask=m_k, other=0.0).to(tl.float32)
        o_number = o_row * (Q * H) + o_qh
        b_dot = tl.load(dots + o_number, mask=m_qh, other=0.0)
        b_keep = tl.load(keep + o_number, mask=m_qh, other=0.0)
        b_take = tl.load(take + o_number, mask=m_qh, other=0.0)
        b_r = tl.load(rstds + o_row)
        o_lse = (o_q.to(tl.int64)[:, None] * num_tokens + o_row) * H + o_h[None, :]
        if grad_lse is None:
            b_glse = tl.zeros([QP, HP], tl.float32)
        else:
            b_glse = tl.load(grad_lse + o_lse, mask=m_qh, other=0.0)

        # moving mass from the old read to the new source changes the output along their difference
        b_moved = b_keep * b_take * tl.sum(b_g * (b_v[None, :, :] - b_old), axis=2)
        b_gz = b_take * b_glse + b_moved
        tl.store(grad_old_lse + o_lse, b_keep * b_glse - b_moved, mask=m_qh)
        p_dold = grad_old + (o_j.to(tl.int64) * num_tokens + o_row) * D + o_v[None, :, :]
        b_dold = b_keep[:, :, None] * b_g
        tl.store(p_dold, b_dold.to(grad_old.dtype.element_ty), mask=m_out)
        p_gz = grad_logits
        if grad_logits is not None:
            p_gz = grad_logits + o_row * (Q * H)
            tl.store(p_gz + o_qh, b_gz, mask=m_qh)
        b_dq += source_backward(
            b_v, b_k, b_g, b_q, b_take, b_gz, b_dot, b_r, scale, p_gz, 0, True, o_row,
            num_tokens, grad_value, grad_key, o_q, o_v, m_v, o_k, m_k, m_query,
            D, R, H, NORM, KEYS, KEY_HEADS_APART, False,
        )  # fmt: skip

    p_dq = grad_query + (pid * Q + o_j) * R + o_k[None, :, :]
    tl.store(p_dq, b_dq, mask=m_j & m_k[None, :, :])
