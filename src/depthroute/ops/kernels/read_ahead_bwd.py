"""Backward pass of `read_ahead`: each source is read once, its gradient read and written once.

`b_` names a block, `o_` offsets, `m_` a mask, `p_` a pointer.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from depthroute.ops.block import BlockRead
from depthroute.ops.kernels.block_layout import (
    BlockLayout,
    ReadAheadGradients,
    contiguous_rows,
)
from depthroute.ops.kernels.layout import power_of_two
from depthroute.ops.kernels.select import pointer_to
from depthroute.ops.kernels.sources import num_programs


def read_ahead_bwd(
    given: BlockRead,
    first: Tensor | None,
    lse: Tensor,
    logits: Tensor,
    rstds: Tensor,
    norm_rstds: Tensor | None,
    grad_outs: Sequence[Tensor],
    grad_lses: Sequence[Tensor],
    later_values: Sequence[Tensor] | None,
    later_keys: Sequence[Tensor] | None,
    slots: Sequence[Tensor],
) -> ReadAheadGradients:
    """Launch the backward pass.

    Args:
        given: Arguments of the forward pass, its last source complete.
        first, lse, logits, rstds, norm_rstds: Results of the forward pass.
        grad_outs: Q gradients of the reads, `[*b, D]`.
        grad_lses: Q of what sites return for `lse`, `[*b]`.
        later_values, later_keys: What later blocks have added to the sources' gradients.
        slots: What sites return for their queries, Q or fewer `[rows, R]`, the last ones.
    """
    at = BlockLayout.of(given)
    grads = ReadAheadGradients.empty(given)
    if not at.T:
        return grads._replace(query=torch.zeros_like(given.query))
    step = at.queries_at_once
    programs = num_programs(at.T, at.programs, given.query.device)
    grad_query = lse.new_empty((programs, at.Q, at.R))
    values, query = contiguous_rows(given.values), given.query.contiguous()
    keys = None if given.keys is None else contiguous_rows(given.keys)
    later_values = None if later_values is None else contiguous_rows(later_values)
    later_keys = None if later_keys is None else contiguous_rows(later_keys)
    for start in range(0, at.Q, step):
        group = slice(start, start + step)
        count = len(grad_outs[group])
        read_ahead_bwd_kernel[(programs,)](
            contiguous_rows(grad_outs[group]),
            tuple(grad_lses[group]),
            first,
            values,
            keys,
            later_values,
            later_keys,
            query,
            lse,
            logits,
            rstds,
            norm_rstds,
            grads.values,
            grads.keys,
            grad_query,
            at.T,
            start,
            given.rule.scale,
            given.share if given.pending is not None else 1.0,
            given.norm_eps or 0.0,
            NORM_FIRST=given.norm_eps is not None and start == 0,
            Q=at.Q,
            COUNT=count,
            QP=power_of_two(count),
            LAST=start + step >= at.Q,
            **at.constants,
            **at.backward_launch,
        )
        later_values = grads.values.unbind(0)
        later_keys = None if grads.keys is None else grads.keys.unbind(0)
    columns = 32
    sum_rows_kernel[(at.Q, -(-at.R // columns))](
        grad_query,
        tuple(slots) or None,
        grads.query,
        programs,
        len(slots[0]) if slots else 0,
        at.Q - len(slots),
        Q=at.Q,
        SLOTS=len(slots),
        R=at.R,
        BR=columns,
        BLOCK=32,
    )
    return grads


@triton.jit
def upstream(p_g, o_row, o_c, m_g, b_x, b_along, b_norm, is_first, NORM_FIRST: tl.constexpr,
             D: tl.constexpr):  # fmt: skip
    """Load the gradients `[Q, columns]` of the reads; the first is taken back through its norm."""
    b_g = tl.load(p_g[:, None] + (o_row * D + o_c)[None, :], mask=m_g, other=0.0).to(tl.float32)
    if NORM_FIRST:
        b_g = tl.where(is_first, b_norm * (b_g - b_x[None, :] * b_along), b_g)
    return b_g


@triton.jit
def read_ahead_bwd_kernel(
    grad_outs, grad_lses, first, values, keys, later_values, later_keys, query,
    lse, logits, rstds, norm_rstds, grad_values, grad_keys, grad_query,
    num_tokens, start, scale, share, norm_eps,
    NORM_FIRST: tl.constexpr, Q: tl.constexpr, COUNT: tl.constexpr, QP: tl.constexpr,
    LAST: tl.constexpr, STAGES: tl.constexpr,
    S: tl.constexpr, SP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, R: tl.constexpr,
    BR: tl.constexpr, NORM: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Loop over tokens: hold the gradients of the reads as a tile `[Q, D]`, loop over sources.

    `grad_lse` brings `-<grad_out, out>` of each read, so that one pass over the sources is enough.
    The gradient of the queries stays in registers, one row for each program.
    """
    pid = tl.program_id(0)
    o_q, o_d, o_r = tl.arange(0, QP), tl.arange(0, BD), tl.arange(0, BR)
    m_q, m_d, m_r = o_q < COUNT, o_d < D, o_r < R
    m_g, m_k = m_q[:, None] & m_d[None, :], m_q[:, None] & m_r[None, :]
    is_first = (o_q == 0)[:, None]
    o_tail = o_r + (D - R)
    p_g = pointer_to(grad_outs, o_q, COUNT)
    p_c = grad_lses[0] + o_q * 0
    for k in tl.static_range(1, COUNT):
        p_c = tl.where(o_q == k, grad_lses[k], p_c)
    p_q = query + (start + o_q)[:, None] * R + o_r[None, :]
    b_dq = tl.zeros([QP, BR], tl.float32)
    for t in range(pid, num_tokens, tl.num_programs(0)):
        o_row = tl.cast(t, tl.int64)
        b_c = tl.load(p_c + o_row, mask=m_q, other=0.0)
        b_lse = tl.load(lse + (start + o_q).to(tl.int64) * num_tokens + o_row, mask=m_q, other=0.0)
        b_x, b_xk, b_along, b_norm = 0.0, 0.0, 0.0, 0.0
        if NORM_FIRST:
            b_norm = tl.load(norm_rstds + o_row)
            b_x = tl.load(first + o_row * D + o_d, mask=m_d, other=0.0).to(tl.float32)
            b_y = tl.load(grad_outs[0] + o_row * D + o_d, mask=m_d, other=0.0).to(tl.float32)
            b_along = tl.sum(b_x * b_y, axis=0) / D
            # of the read, `<grad, out>`: what the norm leaves of it, because of its eps
            b_c = tl.where(o_q == 0, -b_along * D * norm_eps * b_norm * b_norm, b_c)
        b_g = upstream(p_g, o_row, o_d, m_g, b_x, b_along, b_norm, is_first, NORM_FIRST, D)
        if KEYS == "tail":
            if NORM_FIRST:
                b_xk = tl.load(first + o_row * D + o_tail, mask=m_r, other=0.0).to(tl.float32)
            b_gk = upstream(p_g, o_row, o_tail, m_k, b_xk, b_along, b_norm, is_first, NORM_FIRST, D)
        for i in tl.range(0, S, num_stages=STAGES):
            o_i = tl.zeros([], tl.int32) + i
            p_v = pointer_to(values, o_i, S) + o_row * D
            b_v = tl.load(p_v + o_d, mask=m_d, other=0.0).to(tl.float32)
            if later_values is not None:
                p_l = pointer_to(later_values, o_i, S) + o_row * D
                b_later = tl.load(p_l + o_d, mask=m_d, other=0.0).to(tl.float32)
            b_z = tl.load(logits + (o_row * S + i) * Q + start + o_q, mask=m_q, other=0.0)
            b_r = tl.load(rstds + o_row * S + i)
            b_w = tl.where(m_q, tl.exp(b_z - b_lse), 0.0)
            b_gz = b_w * (tl.sum(b_g * b_v[None, :], axis=1) + b_c)
            b_gd = b_gz * (b_r * scale)
            b_pull = tl.sum(b_gz * b_z, axis=0) * b_r * b_r
            b_share = tl.where(o_i == S - 1, share, 1.0) if LAST else 1.0
            b_q = tl.load(p_q, mask=m_k, other=0.0, eviction_policy="evict_last").to(tl.float32)
            if KEYS == "value":
                b_k = b_v
                b_dv = tl.sum(b_w[:, None] * b_g + b_gd[:, None] * b_q, axis=0)
            else:
                b_dv = tl.sum(b_w[:, None] * b_g, axis=0)
            if NORM == "full" or (NORM == "tail" and KEYS == "value"):
                b_dv -= b_v * (b_pull / D)
            if later_values is not None:
                b_dv += b_later
            p_dv = grad_values + (tl.cast(i, tl.int64) * num_tokens + o_row) * D
            m_dv = m_d & (o_d < D - R) if KEYS == "tail" else m_d
            tl.store(p_dv + o_d, (b_dv * b_share).to(grad_values.dtype.element_ty), mask=m_dv)
            if KEYS == "tail":  # the columns of the key once more, with what comes by the score
                b_k = tl.load(p_v + o_tail, mask=m_r, other=0.0).to(tl.float32)
                b_dk = tl.sum(b_w[:, None] * b_gk + b_gd[:, None] * b_q, axis=0)
                if NORM != "none":
                    b_dk -= b_k * (b_pull / (D if NORM == "full" else R))
                if later_values is not None:
                    b_dk += tl.load(p_l + o_tail, mask=m_r, other=0.0).to(tl.float32)
                b_dk *= b_share
                tl.store(p_dv + o_tail, b_dk.to(grad_values.dtype.element_ty), mask=m_r)
            if KEYS == "separate":
                p_k = pointer_to(keys, o_i, S) + o_row * R
                b_k = tl.load(p_k + o_r, mask=m_r, other=0.0).to(tl.float32)
                b_dk = tl.sum(b_gd[:, None] * b_q, axis=0)
                if NORM != "none":
                    b_dk -= b_k * (b_pull / R)
                if later_keys is not None:
                    p_lk = pointer_to(later_keys, o_i, S) + o_row * R
                    b_dk += tl.load(p_lk + o_r, mask=m_r, other=0.0).to(tl.float32)
                p_dk = grad_keys + (tl.cast(i, tl.int64) * num_tokens + o_row) * R
                tl.store(p_dk + o_r, b_dk.to(grad_keys.dtype.element_ty), mask=m_r)
            b_dq += b_gd[:, None] * b_k[None, :]
    p_dq = grad_query + (pid * Q + start + o_q)[:, None] * R + o_r[None, :]
    tl.store(p_dq, b_dq, mask=m_k)


@triton.jit
def sum_rows_kernel(
    rows, slots, out, num_rows, num_slot_rows, first_slot,
    Q: tl.constexpr, SLOTS: tl.constexpr, R: tl.constexpr, BR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum the rows `[num_rows, Q, R]` of one query's gradient, and its slot `[num_slot_rows, R]`."""
    j = tl.program_id(0)
    o_r, o_p = tl.program_id(1) * BR + tl.arange(0, BR), tl.arange(0, BLOCK)
    b_sum = tl.zeros([BLOCK, BR], tl.float32)
    for i in range(0, num_rows, BLOCK):
        o_row = i + o_p[:, None]
        m_row = (o_row < num_rows) & (o_r < R)[None, :]
        b_sum += tl.load(rows + (o_row * Q + j) * R + o_r[None, :], mask=m_row, other=0.0)
    if slots is not None:
        if j >= first_slot:
            p_slot = pointer_to(slots, j - first_slot, SLOTS)
            for i in range(0, num_slot_rows, BLOCK):
                o_row = i + o_p[:, None]
                m_row = (o_row < num_slot_rows) & (o_r < R)[None, :]
                b_sum += tl.load(p_slot + o_row * R + o_r[None, :], mask=m_row, other=0.0)
    tl.store(out + j * R + o_r, tl.sum(b_sum, axis=0), mask=o_r < R)
