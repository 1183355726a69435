"""Gradients of a source and of an output's norm, shared by the backward passes of all reads."""

import triton
import triton.language as tl


@triton.jit
def source_backward(
    b_v, b_k, b_g, b_q, b_w, b_gz, b_dot, b_r, scale, p_gz, i, m_i, o_row,
    num_tokens, grad_values, grad_keys, o_q, o_v, m_v, o_k, m_k, m_query,
    D: tl.constexpr, R: tl.constexpr, H: tl.constexpr, NORM: tl.constexpr, KEYS: tl.constexpr,
    KEY_HEADS_APART: tl.constexpr, ACCUMULATE: tl.constexpr,
):  # fmt: skip
    """Write the gradient of source i at one token; return its share `[Q, H, R / H]` of the query's.

    Args:
        b_v, b_k: Its tiles.
        b_g: Gradient of the output, `[Q, H, D / H]`.
        b_q: Query in the columns `o_v`, or `o_k` for separate keys.
        b_w, b_gz, b_dot: Weight, gradient of the logit and raw score, `[Q, H]`.
        b_r: Factor of the key norm.
        p_gz: Where `b_gz` has been stored; used if KEY_HEADS_APART.
        ACCUMULATE: Whether to add to what an earlier group of queries has written.
    """
    b_wide, b_narrow = b_v.to(tl.float32), b_k.to(tl.float32)
    b_gd = b_gz * (b_r * scale)
    b_pull = tl.sum(tl.sum(b_gd * b_dot, axis=1), axis=0) * b_r * b_r
    b_dv = tl.sum(b_w[:, :, None] * b_g, axis=0)
    if KEYS != "separate":
        b_gd_v = b_gd[:, :, None]
        if KEY_HEADS_APART:  # each column needs the gradient of the head that it is a key of
            tl.debug_barrier()
            o_kh = tl.maximum(o_v - (D - R), 0) // (R // H)
            p_column = p_gz + o_q[:, None, None] * H + o_kh[None, :, :]
            b_gd_v = tl.load(p_column, mask=m_query & m_i, other=0.0) * (b_r * scale)
        b_dv += tl.sum(b_gd_v * b_q, axis=0)
        if NORM == "tail":
            b_dv -= tl.where(o_v >= D - R, b_wide, 0.0) * (b_pull / R)
    if NORM == "full":
        b_dv -= b_wide * (b_pull / D)
    o_source = tl.cast(i, tl.int64) * num_tokens + o_row
    p_dv = grad_values + o_source * D + o_v
    if ACCUMULATE:
        b_dv += tl.load(p_dv, mask=m_v & m_i, other=0.0).to(tl.float32)
    tl.store(p_dv, b_dv.to(grad_values.dtype.element_ty), mask=m_v & m_i)
    if KEYS == "separate":
        b_dk = tl.sum(b_gd[:, :, None] * b_q, axis=0)
        if NORM == "tail":
            b_dk -= b_narrow * (b_pull / R)
        p_dk = grad_keys + o_source * R + o_k
        if ACCUMULATE:
            b_dk += tl.load(p_dk, mask=m_k & m_i, other=0.0).to(tl.float32)
        tl.store(p_dk, b_dk.to(grad_keys.dtype.element_ty), mask=m_k & m_i)
    return b_gd[:, :, None] * b_narrow[None, :, :]


@triton.jit
def norm_backward(b_g, b_normed, b_factor, D: tl.constexpr):
    """Take the gradient `[Q, H, D / H]` of normed outputs at one token back through their norm.

    Args:
        b_g: Gradient of the normed outputs.
        b_normed: The normed outputs.
        b_factor: What the norm multiplied them by, `[Q, 1, 1]`.
    """
    b_along = tl.sum(tl.sum(b_g * b_normed, axis=2), axis=1)[:, None, None] / D
    return b_factor * (b_g - b_normed * b_along)
