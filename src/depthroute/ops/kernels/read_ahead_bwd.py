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
from depthroute.ops.kernels.query_gradient import query_gradient, sum_query_rows
from depthroute.ops.kernels.scores import scores_bwd
from depthroute.ops.kernels.select import pointer_to
from depthroute.ops.kernels.sources import num_programs


def read_ahead_bwd(
    given: BlockRead,
    first: Tensor | None,
    weights: Tensor,
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
        first, weights, logits, rstds, norm_rstds: Results of the forward pass.
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
    grad_logits = torch.empty_like(logits)
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
            weights,
            logits,
            rstds,
            norm_rstds,
            grads.values,
            grad_logits,
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
        grad_query = scores_bwd(given, grad_logits, logits, rstds, later_keys, grads.keys)
    else:
        grad_query = query_gradient(given, grad_logits, rstds)
    sum_query_rows(grad_query, slots, grads.query)
    return grads


@triton.jit
def dot_rows(b_x, b_y):
    """Return the inner products of rows `[N, D]` with one vector `[D]`.

    Columns are folded twice before the sum, so that each costs one multiply-add and no register.
    """
    SIZE: tl.constexpr = b_x.shape[1]
    if SIZE < 4:
        b_dot = tl.sum(b_x * b_y[None, :], axis=1)
    else:
        b_x0, b_x1 = tl.split(tl.reshape(b_x, [b_x.shape[0], SIZE // 2, 2]))
        b_y0, b_y1 = tl.split(tl.reshape(b_y, [SIZE // 2, 2]))
        b_x00, b_x01 = tl.split(tl.reshape(b_x0, [b_x.shape[0], SIZE // 4, 2]))
        b_y00, b_y01 = tl.split(tl.reshape(b_y0, [SIZE // 4, 2]))
        b_x10, b_x11 = tl.split(tl.reshape(b_x1, [b_x.shape[0], SIZE // 4, 2]))
        b_y10, b_y11 = tl.split(tl.reshape(b_y1, [SIZE // 4, 2]))
        b_sum = b_x00 * b_y00[None, :]
        b_sum += b_x01 * b_y01[None, :]
        b_sum += b_x10 * b_y10[None, :]
        b_sum += b_x11 * b_y11[None, :]
        b_dot = tl.sum(b_sum, axis=1)
    return b_dot


@triton.jit
def read_ahead_bwd_kernel(
    grad_outs, grad_lses, first, values, later_values, query, weights, logits, rstds, norm_rstds,
    grad_values, grad_logits, num_tokens, start, scale, share, norm_eps,
    NORM_FIRST: tl.constexpr, Q: tl.constexpr, COUNT: tl.constexpr, CHUNK: tl.constexpr,
    LAST: tl.constexpr, S: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, R: tl.constexpr, NORM: tl.constexpr, SEPARATE: tl.constexpr,
):  # fmt: skip
    """Loop over tokens: hold its sources and their gradients as tiles `[S, D]`, go by the queries.

    `grad_lses` bring `-<grad_out, out>` of each read, so that one pass over the sources is enough.
    """
    pid = tl.program_id(0)
    o_c, o_d = tl.arange(0, CHUNK), tl.arange(0, BD)
    m_d, m_k = o_d < D, (o_d < D) & (o_d >= D - R)
    for t in range(pid, num_tokens, tl.num_programs(0)):
        o_row = tl.cast(t, tl.int64)
        if NORM_FIRST:
            b_norm = tl.load(norm_rstds + o_row)
            b_x = tl.load(first + o_row * D + o_d, mask=m_d, other=0.0).to(tl.float32)
            b_g = tl.load(grad_outs[0] + o_row * D + o_d, mask=m_d, other=0.0).to(tl.float32)
            b_along = tl.sum(b_x * b_g, axis=0) / D
        for c in range(0, S, CHUNK):
            o_s = c + o_c
            m_s = (o_s < S) | (S % CHUNK == 0)
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
                o_z = (o_row * S + o_s) * Q + start + j
                b_w = tl.load(weights + o_z, mask=m_s, other=0.0)
                b_gz = b_w * (dot_rows(b_v.to(tl.float32), b_g) + b_c)
                b_dv += b_w[:, None] * b_g[None, :]
                tl.store(grad_logits + o_z, b_gz, mask=m_s)
                if not SEPARATE:
                    b_gd = b_gz * (b_r * scale)
                    b_pull += b_gz * tl.load(logits + o_z, mask=m_s, other=0.0)
                    p_q = query + (start + j) * R + o_d - (D - R)
                    b_q = tl.load(p_q, mask=m_k, other=0.0, eviction_policy="evict_last").to(tl.float32)
                    b_dv += b_gd[:, None] * b_q[None, :]
            if not SEPARATE:
                if NORM == "tail":
                    b_k = tl.where(m_k[None, :], b_v.to(tl.float32), 0.0)
                    b_dv -= b_k * (b_pull * b_r * b_r / R)[:, None]
                elif NORM == "full":
                    b_dv -= b_v.to(tl.float32) * (b_pull * b_r * b_r / D)[:, None]
            if LAST:
                b_dv *= tl.where(o_s == S - 1, share, 1.0)[:, None]
            p_dv = grad_values + (o_s.to(tl.int64) * num_tokens + o_row)[:, None] * D + o_d[None, :]
            tl.store(p_dv, b_dv.to(grad_values.dtype.element_ty), mask=m_v)
