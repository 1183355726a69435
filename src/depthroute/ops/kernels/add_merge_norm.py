"""Forward and backward pass of `add_norm` and `add_merge_norm`: all that a site does, at once.

`b_` names a block, `o_` offsets, `m_` a mask, `p_` a pointer.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from depthroute.ops.block import Site
from depthroute.ops.kernels import block_layout
from depthroute.ops.kernels.block_layout import site_programs
from depthroute.ops.kernels.block_results import SiteGradients, SiteResult
from depthroute.ops.kernels.layout import as_rows, power_of_two


def site_fwd(given: Site) -> SiteResult:
    """Launch the forward pass on validated arguments."""
    result = SiteResult.empty(given)
    tokens, width = len(result.numbers), result.out.shape[-1]
    if not tokens:
        return result
    pending = as_rows(given.pending)
    total = None if given.total is None else as_rows(given.total)
    site_fwd_kernel[(tokens,)](
        given.old,
        given.lse,
        given.query,
        total,
        pending,
        given.key,
        *result,
        0 if total is None else total.stride(0),
        pending.stride(0),
        given.rule.eps,
        given.rule.scale,
        given.share,
        given.norm_eps or 0.0,
        0.0 if given.key_sum is None else given.key_sum.norm_eps or 0.0,
        NORMED=given.norm_eps is not None,
        **_constants(given, width),
        num_warps=block_layout.site_forward(width).num_warps,
    )
    return result


def site_bwd(
    given: Site,
    new_key: Tensor | None,
    out: Tensor,
    numbers: Tensor,
    grad_out: Tensor,
    grad_total: Tensor | None,
    grad_new_key: Tensor | None,
) -> SiteGradients:
    """Launch the backward pass.

    Args:
        given: Arguments of the forward pass, with the open block after the write as `pending`.
        new_key, out, numbers: Results of the forward pass.
        grad_out: Gradient of the normed read, `[*b, D]`.
        grad_total, grad_new_key: Gradients of the open block and of its key by their later uses.
    """
    grads = SiteGradients.empty(given)
    tokens = len(numbers)
    if not tokens:
        return grads._replace(query=None if grads.query is None else torch.zeros_like(grads.query))
    value = as_rows(given.pending)
    # the next site wrote it as columns of a wider one, with those of an emitted key
    later = None if grad_total is None else as_rows(grad_total)
    merges, launch = given.query is not None, block_layout.site_backward(value.shape[-1])
    programs = len(given.query) if merges else site_programs(tokens, value.shape[-1], value.device)
    site_bwd_kernel[(programs,)](
        grad_out.contiguous(),
        later,
        None if grad_new_key is None else grad_new_key.contiguous(),
        out,
        value,
        given.key,
        new_key,
        given.query,
        numbers,
        *grads,
        0 if later is None else later.stride(0),
        value.stride(0),
        tokens,
        given.rule.scale,
        given.share,
        given.norm_eps or 0.0,
        NORMED=given.norm_eps is not None,
        MERGES=merges,
        **_constants(given, value.shape[-1]),
        num_warps=launch.num_warps,
        maxnreg=launch.max_registers,
    )
    return grads


def _constants(given: Site, width: int) -> dict[str, int | str | bool]:
    rank = width if given.query is None else given.query.shape[-1]
    if given.key_sum is not None:
        keys = "emitted"
    elif given.key is not None:
        keys = "separate"
    else:
        keys = "value" if rank == width else "tail"
    sizes = {"D": width, "BD": power_of_two(width), "R": rank, "BR": power_of_two(rank)}
    norms_emitted = given.key_sum is not None and given.key_sum.norm_eps is not None
    return {**sizes, "NORM": given.rule.key_norm, "KEYS": keys, "NORMS_EMITTED": norms_emitted}


@triton.jit
def site_fwd_kernel(
    old, old_lse, query, total, pending, key, new_total, new_key, out, numbers,
    stride_total, stride_pending, eps, scale, share, norm_eps, emitted_eps,
    NORMED: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, R: tl.constexpr, BR: tl.constexpr,
    NORM: tl.constexpr, KEYS: tl.constexpr, NORMS_EMITTED: tl.constexpr,
):  # fmt: skip
    """Add one token's write to its block, merge the block into the read, norm the result."""
    o_row = tl.program_id(0).to(tl.int64)
    o_d, o_r = tl.arange(0, BD), tl.arange(0, BR)
    m_d, m_r = o_d < D, o_r < R
    dtype: tl.constexpr = out.dtype.element_ty
    p_y = pending + o_row * stride_pending
    b_v = tl.load(p_y + o_d, mask=m_d, other=0.0).to(tl.float32)
    if total is not None:  # the logit sees the sum as it is stored
        b_v += tl.load(total + o_row * stride_total + o_d, mask=m_d, other=0.0).to(tl.float32)
        b_v = b_v.to(dtype)
        tl.store(new_total + o_row * D + o_d, b_v, mask=m_d)
        b_v = b_v.to(tl.float32)
    b_v *= share
    b_out = b_v
    p_n = numbers + o_row * (5 if NORMS_EMITTED else 4)
    if old is not None:
        b_old = tl.load(old + o_row * D + o_d, mask=m_d, other=0.0).to(tl.float32)
        if KEYS == "value":
            b_k = b_v
        elif KEYS == "tail":
            o_tail = o_r + (D - R)
            b_k = tl.load(p_y + o_tail, mask=m_r, other=0.0).to(tl.float32)
            if total is not None:
                b_k += tl.load(total + o_row * stride_total + o_tail, mask=m_r, other=0.0).to(
                    tl.float32
                )
                b_k = b_k.to(dtype).to(tl.float32)
            b_k *= share
        elif KEYS == "separate":
            b_k = tl.load(key + o_row * R + o_r, mask=m_r, other=0.0).to(tl.float32)
        else:
            b_k = tl.load(p_y + D + o_r, mask=m_r, other=0.0).to(tl.float32)
            if NORMS_EMITTED:
                b_emitted = tl.rsqrt(tl.sum(b_k * b_k, axis=0) / R + emitted_eps)
                tl.store(p_n + 4, b_emitted)
                b_k *= b_emitted
            if key is not None:
                b_k += tl.load(key + o_row * R + o_r, mask=m_r, other=0.0)
            tl.store(new_key + o_row * R + o_r, b_k, mask=m_r)
        b_q = tl.load(query + o_r, mask=m_r, other=0.0, eviction_policy="evict_last")
        if NORM == "none":
            b_r = 1.0
        elif NORM == "full":
            b_r = tl.rsqrt(tl.sum(b_v * b_v, axis=0) / D + eps)
        else:
            b_r = tl.rsqrt(tl.sum(b_k * b_k, axis=0) / R + eps)
        b_z = tl.sum(b_k * b_q.to(tl.float32), axis=0) * (b_r * scale)
        b_take = tl.sigmoid(b_z - tl.load(old_lse + o_row))
        b_out = b_old + b_take * (b_v - b_old)
        tl.store(p_n, b_z)
        tl.store(p_n + 1, b_r)
        tl.store(p_n + 2, b_take)
    if NORMED:
        b_norm = tl.rsqrt(tl.sum(b_out * b_out, axis=0) / D + norm_eps)
        tl.store(p_n + 3, b_norm)
        b_out *= b_norm
    tl.store(out + o_row * D + o_d, b_out.to(dtype), mask=m_d)


@triton.jit
def site_bwd_kernel(
    grad_out, grad_total, grad_new_key, out, value, key, new_key, query, numbers,
    grad_write, grad_old, grad_lse, grad_query, grad_key,
    stride_later, stride_value, num_tokens, scale, share, norm_eps,
    NORMED: tl.constexpr, MERGES: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    R: tl.constexpr, BR: tl.constexpr, NORM: tl.constexpr, KEYS: tl.constexpr,
    NORMS_EMITTED: tl.constexpr,
):  # fmt: skip
    """Loop over tokens, with one row of the query's gradient for each program.

    The read itself is not kept: it is the normed output over the factor of the norm.
    """
    pid = tl.program_id(0)
    o_d, o_r = tl.arange(0, BD), tl.arange(0, BR)
    m_d, m_r = o_d < D, o_r < R
    o_tail = o_r + (D - R)
    if MERGES:
        b_q = tl.load(query + o_r, mask=m_r, other=0.0).to(tl.float32)
        b_dq = tl.zeros([BR], tl.float32)
    for t in range(pid, num_tokens, tl.num_programs(0)):
        o_row = tl.cast(t, tl.int64)
        p_n = numbers + o_row * (5 if NORMS_EMITTED else 4)
        p_g = grad_out + o_row * D
        b_g = tl.load(p_g + o_d, mask=m_d, other=0.0).to(tl.float32)
        if MERGES or NORMED:
            b_x = tl.load(out + o_row * D + o_d, mask=m_d, other=0.0).to(tl.float32)
        if MERGES:
            b_v = tl.load(value + o_row * stride_value + o_d, mask=m_d, other=0.0)
            b_v = b_v.to(tl.float32) * share
        if grad_total is not None:
            p_later = grad_total + o_row * stride_later
            b_later = tl.load(p_later + o_d, mask=m_d, other=0.0).to(tl.float32)
        b_along, b_norm = 0.0, 1.0
        if NORMED:
            b_norm = tl.load(p_n + 3)
            b_along = tl.sum(b_g * b_x, axis=0) / D
            b_g = b_norm * (b_g - b_x * b_along)
            # <grad, read>: what the norm leaves of it, because of its eps
            b_mean = b_along * D * norm_eps * b_norm * b_norm
        if MERGES:
            if not NORMED:
                b_mean = tl.sum(b_g * b_x, axis=0)
            b_z, b_r, b_take = tl.load(p_n), tl.load(p_n + 1), tl.load(p_n + 2)
            b_gz = b_take * (tl.sum(b_g * b_v, axis=0) - b_mean)
            b_gd = b_gz * (b_r * scale)
            b_pull = b_gz * b_z * b_r * b_r
            b_dold = (1.0 - b_take) * b_g
            tl.store(grad_old + o_row * D + o_d, b_dold.to(grad_old.dtype.element_ty), mask=m_d)
            tl.store(grad_lse + o_row, (b_take - 1.0) * b_mean)
            b_dv = b_take * b_g
            if NORM == "full" or (NORM == "tail" and KEYS == "value"):
                b_dv -= b_v * (b_pull / D)
            if KEYS == "value":
                b_dv += b_gd * b_q
                b_dq += b_gd * b_v
        else:
            b_dv = b_g
        b_dv *= share
        if grad_total is not None:
            b_dv += b_later
        p_dv = grad_write + o_row * (D + R if KEYS == "emitted" else D)
        m_dv = m_d & (o_d < D - R) if KEYS == "tail" else m_d
        tl.store(p_dv + o_d, b_dv.to(grad_write.dtype.element_ty), mask=m_dv)
        if KEYS == "tail":  # the columns of the key once more, with what comes by the score
            b_k = tl.load(value + o_row * stride_value + o_tail, mask=m_r, other=0.0)
            b_k = b_k.to(tl.float32) * share
            b_gk = tl.load(p_g + o_tail, mask=m_r, other=0.0).to(tl.float32)
            if NORMED:
                b_xk = tl.load(out + o_row * D + o_tail, mask=m_r, other=0.0).to(tl.float32)
                b_gk = b_norm * (b_gk - b_xk * b_along)
            b_dk = b_take * b_gk + b_gd * b_q
            if NORM != "none":
                b_dk -= b_k * (b_pull / (D if NORM == "full" else R))
            b_dk *= share
            if grad_total is not None:
                b_dk += tl.load(p_later + o_tail, mask=m_r, other=0.0).to(tl.float32)
            tl.store(p_dv + o_tail, b_dk.to(grad_write.dtype.element_ty), mask=m_r)
            b_dq += b_gd * b_k
        if KEYS == "separate" or KEYS == "emitted":
            o_k = o_row * R + o_r
            p_k = new_key if KEYS == "emitted" else key
            b_k = tl.load(p_k + o_k, mask=m_r, other=0.0).to(tl.float32)
            b_dk = b_gd * b_q
            if NORM != "none":
                b_dk -= b_k * (b_pull / R)
            if grad_new_key is not None:
                b_dk += tl.load(grad_new_key + o_k, mask=m_r, other=0.0)
            if key is not None:
                tl.store(grad_key + o_k, b_dk.to(grad_key.dtype.element_ty), mask=m_r)
            b_dq += b_gd * b_k
        if KEYS == "emitted":
            # the write is not kept: what its key was normed to is what the block's has grown by, up
            # to a rounding of that, which is small beside the first term of the gradient
            if NORMS_EMITTED:
                if key is not None:
                    b_k -= tl.load(key + o_k, mask=m_r, other=0.0)
                b_along_k = tl.sum(b_dk * b_k, axis=0) / R
                b_dk = tl.load(p_n + 4) * (b_dk - b_k * b_along_k)
            tl.store(p_dv + D + o_r, b_dk.to(grad_write.dtype.element_ty), mask=m_r)
    if MERGES:
        tl.store(grad_query + pid * R + o_r, b_dq, mask=m_r)
