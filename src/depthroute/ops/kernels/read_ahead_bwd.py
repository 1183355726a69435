"""Backward pass of `read_ahead`: each source is read once, its gradient read and written once.

`b_` names a block, `o_` offsets, `m_` a mask, `p_` a pointer.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from depthroute.ops.block import BlockRead
from depthroute.ops.kernels import block_layout
from depthroute.ops.kernels.block_layout import (
    BlockLayout,
    ReadAheadGradients,
    contiguous_rows,
)
from depthroute.ops.kernels.scores import scores_bwd
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
    launch = block_layout.ahead_backward(at)
    programs = num_programs(at.T, launch.programs, given.query.device)
    grad_query = lse.new_empty((programs, at.Q, at.R))
    grad_logits = None if given.keys is None else torch.empty_like(logits)
    values, query = contiguous_rows(given.values), given.query.contiguous()
    later_values = None if later_values is None else contiguous_rows(later_values)
    for start in range(0, at.Q, step):
        group = slice(start, start + step)
        count = len(grad_outs[group])
        read_ahead_bwd_kernel[(programs,)](
            contiguous_rows(grad_outs[group]),
            tuple(grad_lses[group]),
            first,
            values,
            later_values,
            query,
            lse,
            logits,
            rstds,
            norm_rstds,
            grads.values,
            grad_logits,
            grad_query,
            at.T,
            start,
            given.rule.scale,
            given.share if given.pending is not None else 1.0,
            given.norm_eps or 0.0,
            NORM_FIRST=given.norm_eps is not None and start == 0,
            Q=at.Q,
            COUNT=count,
            CHUNK=launch.chunk,
            LAST=start + step >= at.Q,
            **at.constants,
            num_warps=launch.num_warps,
            maxnreg=launch.max_registers,
        )
        later_values = grads.values.unbind(0)
    if given.keys is not None:
        scores_bwd(given, grad_logits, logits, rstds, later_keys, grads.keys, grad_query)
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
        BLOCK=128,
    )
    return grads


@triton.jit
def read_ahead_bwd_kernel(
    grad_outs, grad_lses, first, values, later_values, query, lse, logits, rstds, norm_rstds,
    grad_values, grad_logits, grad_query, num_tokens, start, scale, share, norm_eps,
    NORM_FIRST: tl.constexpr, Q: tl.constexpr, COUNT: tl.constexpr, CHUNK: tl.constexpr,
    LAST: tl.constexpr, S: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, R: tl.constexpr, NORM: tl.constexpr, SEPARATE: tl.constexpr,
):  # fmt: skip
    """Loop over tokens: hold its sources and their gradients as tiles `[S, D]`, go by the queries.

    `grad_lses` bring `-<grad_out, out>` of each read, so that one pass over the sources is enough.
    The gradient of the queries stays in registers, one row for each program.
    """
    pid = tl.program_id(0)
    o_c, o_d = tl.arange(0, CHUNK), tl.arange(0, BD)
    m_d, m_k = o_d < D, (o_d < D) & (o_d >= D - R)
    b_dqs = ()
    for j in tl.static_range(COUNT):
        b_dqs = b_dqs + (tl.zeros([BD], tl.float32),)
    for t in range(pid, num_tokens, tl.num_programs(0)):
        o_row = tl.cast(t, tl.int64)
        if NORM_FIRST:
            b_norm = tl.load(norm_rstds + o_row)
            b_x = tl.load(first + o_row * D + o_d, mask=m_d, other=0.0).to(tl.float32)
            b_g = tl.load(grad_outs[0] + o_row * D + o_d, mask=m_d, other=0.0).to(tl.float32)
            b_along = tl.sum(b_x * b_g, axis=0) / D
        for c in range(0, S, CHUNK):
            o_s = c + o_c
            m_s = o_s < S
            m_v = m_s[:, None] & m_d[None, :]
            o_v = (o_row * D + o_d)[None, :]
            b_v = tl.load(pointer_to(values, o_s, S)[:, None] + o_v, mask=m_v, other=0.0)
            if later_values is not None:
                p_later = pointer_to(later_values, o_s, S)[:, None]
                b_dv = tl.load(p_later + o_v, mask=m_v, other=0.0).to(tl.float32)
            else:
                b_dv = tl.zeros([CHUNK, BD], tl.float32)
            b_r = tl.load(rstds + o_row * S + o_s, mask=m_s, other=0.0)
            b_pull = tl.zeros([CHUNK], tl.float32)
            b_next = tl.load(grad_outs[0] + o_row * D + o_d, mask=m_d, other=0.0)
            b_new = ()
            for j in tl.static_range(COUNT):
                b_g = b_next.to(tl.float32)
                if j + 1 < COUNT:  # in flight while this one is used
                    b_next = tl.load(grad_outs[j + 1] + o_row * D + o_d, mask=m_d, other=0.0)
                if NORM_FIRST and j == 0:
                    b_x = tl.load(first + o_row * D + o_d, mask=m_d, other=0.0).to(tl.float32)
                    b_g = b_norm * (b_g - b_x * b_along)
                    # of the read, `<grad, out>`: what the norm leaves of it, because of its eps
                    b_c = -b_along * D * norm_eps * b_norm * b_norm
                else:
                    b_c = tl.load(grad_lses[j] + o_row)
                b_lse = tl.load(lse + (start + j) * tl.cast(num_tokens, tl.int64) + o_row)
                p_z = (o_row * S + o_s) * Q + start + j
                b_z = tl.load(logits + p_z, mask=m_s, other=float("-inf"))
                b_w = tl.exp(b_z - b_lse)
                b_gz = b_w * (tl.sum(b_v.to(tl.float32) * b_g[None, :], axis=1) + b_c)
                b_dv += b_w[:, None] * b_g[None, :]
                if SEPARATE:
                    tl.store(grad_logits + p_z, b_gz, mask=m_s)
                else:
                    b_gd = b_gz * (b_r * scale)
                    b_pull += tl.where(m_s, b_gz * b_z, 0.0)
                    p_q = query + (start + j) * R + o_d - (D - R)
                    b_q = tl.load(p_q, mask=m_k, other=0.0, eviction_policy="evict_last")
                    b_dv += b_gd[:, None] * b_q[None, :]
                    b_dq = tl.sum(b_gd[:, None] * b_v.to(tl.float32), axis=0)
                    b_new = b_new + (b_dqs[j] + b_dq,)
            if not SEPARATE:
                b_dqs = b_new
                if NORM == "tail":
                    b_k = tl.where(m_k[None, :], b_v.to(tl.float32), 0.0)
                    b_dv -= b_k * (b_pull * b_r * b_r / R)[:, None]
                elif NORM == "full":
                    b_dv -= b_v.to(tl.float32) * (b_pull * b_r * b_r / D)[:, None]
            if LAST:
                b_dv *= tl.where(o_s == S - 1, share, 1.0)[:, None]
            p_dv = grad_values + (o_s.to(tl.int64) * num_tokens + o_row)[:, None] * D + o_d[None, :]
            tl.store(p_dv, b_dv.to(grad_values.dtype.element_ty), mask=m_v)
    if not SEPARATE:
        for j in tl.static_range(COUNT):
            p_dq = grad_query + (pid * Q + start + j) * R + o_d - (D - R)
            tl.store(p_dq, b_dqs[j], mask=m_k)


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
