"""Forward pass of `read_ahead`: one pass over the closed sources serves all queries of a block.

`b_` names a block, `o_` offsets, `m_` a mask, `p_` a pointer.
"""

import triton
import triton.language as tl

from depthroute.ops.block import BlockRead
from depthroute.ops.kernels import block_layout
from depthroute.ops.kernels.block_layout import BlockLayout, contiguous_rows
from depthroute.ops.kernels.block_results import ReadAhead
from depthroute.ops.kernels.layout import as_rows, power_of_two
from depthroute.ops.kernels.read_ahead_stream import read_ahead_stream
from depthroute.ops.kernels.read_ahead_tiles import read_ahead_tiles
from depthroute.ops.kernels.select import pointer_to
from depthroute.ops.kernels.separate_keys import scores_fwd


def read_ahead_fwd(given: BlockRead) -> ReadAhead:
    """Launch the forward pass on validated arguments."""
    at = BlockLayout.of(given)
    result = ReadAhead.empty(at, given)
    if not at.T:
        return result
    if given.keys is not None:
        scores_fwd(given, result.logits, result.rstds)
    form = block_layout.ahead_form(at, given.values[0].dtype)
    if form != "held":
        launch_other = read_ahead_tiles if form == "tiled" else read_ahead_stream
        launch_other(given, at, result)
        return result
    pending = None if given.pending is None else as_rows(given.pending)
    launch = block_layout.ahead_forward(at)
    read_ahead_fwd_kernel[(at.T, launch.programs)](
        contiguous_rows(given.values),
        pending,
        given.query.contiguous(),
        given.lse,
        *result,
        0 if pending is None else pending.stride(0),
        at.T,
        at.Q,
        given.rule.eps,
        given.rule.scale,
        given.share,
        given.norm_eps or 0.0,
        NORM_FIRST=given.norm_eps is not None,
        SP=power_of_two(at.S),
        BD=power_of_two(at.D),
        **at.constants,
        num_warps=launch.num_warps,
        maxnreg=launch.max_registers,
    )
    return result


@triton.jit
def read_ahead_fwd_kernel(
    values, pending, query, old_lse, first, out, lse, closed, weights, logits, rstds, norm_rstds,
    stride_pending, num_tokens, num_queries, eps, scale, share, norm_eps, NORM_FIRST: tl.constexpr,
    S: tl.constexpr, SP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    R: tl.constexpr, NORM: tl.constexpr, SEPARATE: tl.constexpr,
):  # fmt: skip
    """Hold one token's sources as a tile `[S, D]`, and loop over the queries.

    All sources in one tile, so that the scores of a query are one reduction over the width: the
    warps of a program wait for each other once a query, not once a score. Where tokens are few,
    programs share the queries of one.
    """
    t = tl.program_id(0)
    o_row = t.to(tl.int64)
    o_s, o_d = tl.arange(0, SP), tl.arange(0, BD)
    m_s, m_d = o_s < S, o_d < D
    dtype: tl.constexpr = values[0].dtype.element_ty
    p_v = pointer_to(values, o_s, S)
    m_v = m_s[:, None] & m_d[None, :]
    b_v = tl.load(p_v[:, None] + (o_row * D + o_d)[None, :], mask=m_v, other=0.0).to(tl.float32)
    is_open = (o_s == S - 1)[:, None]
    if pending is not None:  # the last source closes here
        p_y = pending + o_row * stride_pending
        b_y = tl.load(p_y + o_d, mask=m_d, other=0.0).to(tl.float32)
        b_closed = ((b_v + b_y[None, :]) * share).to(dtype).to(tl.float32)
        b_v = tl.where(is_open, b_closed, b_v)
        b_last = tl.sum(tl.where(is_open, b_v, 0.0), axis=0)
        tl.store(closed + o_row * D + o_d, b_last.to(dtype), mask=m_d & (tl.program_id(1) == 0))
    m_k = m_d & (o_d >= D - R)
    if not SEPARATE:
        if NORM == "none":
            b_r = tl.full([SP], 1.0, tl.float32)
        elif NORM == "full":
            b_r = tl.rsqrt(tl.sum(b_v * b_v, axis=1) / D + eps)
        else:
            b_k = tl.where(m_k[None, :], b_v, 0.0)
            b_r = tl.rsqrt(tl.sum(b_k * b_k, axis=1) / R + eps)
        if old_lse is not None:  # a read, which has no key
            b_r = tl.where(o_s == 0, 0.0, b_r)
            b_old = tl.load(old_lse + o_row)
        tl.store(rstds + o_row * S + o_s, b_r, mask=m_s)

    for j in range(tl.program_id(1), num_queries, tl.num_programs(1)):
        o_z = (o_row * S + o_s) * num_queries + j
        if SEPARATE:
            b_z = tl.load(logits + o_z, mask=m_s, other=float("-inf"))
        else:
            p_q = query + j * R + o_d - (D - R)
            b_q = tl.load(p_q, mask=m_k, other=0.0, eviction_policy="evict_last")
            b_z = tl.sum(b_v * b_q[None, :], axis=1) * (b_r * scale)
            if old_lse is not None:
                b_z = tl.where(o_s == 0, b_old, b_z)
            tl.store(logits + o_z, b_z, mask=m_s)
            b_z = tl.where(m_s, b_z, float("-inf"))
        b_top = tl.max(b_z, axis=0)
        b_e = tl.exp(b_z - b_top)
        b_sum = tl.sum(b_e, axis=0)
        b_w = b_e / b_sum
        tl.store(weights + o_z, b_w, mask=m_s)
        o_j = tl.cast(j, tl.int64)
        tl.store(lse + o_j * num_tokens + o_row, b_top + tl.log(b_sum))
        if S > 1 or NORM_FIRST:
            b_out = tl.sum(b_w[:, None] * b_v, axis=0)
            p_out = out + ((o_j - NORM_FIRST) * num_tokens + o_row) * D
            if NORM_FIRST:  # noqa: SIM102 - known to the compiler
                if j == 0:
                    b_norm = tl.rsqrt(tl.sum(b_out * b_out, axis=0) / D + norm_eps)
                    tl.store(norm_rstds + o_row, b_norm)
                    b_out *= b_norm
                    p_out = first + o_row * D
            tl.store(p_out + o_d, b_out.to(dtype), mask=m_d)
