"""Forward pass of `read_ahead` by tensor cores: the sources of a few tokens are the rows of a tile.

A program goes over the columns twice: for the scores, then for the reads; the second time they come
from a cache. All that is summed across the width is summed by the products. Programs of one warp
have nobody to wait for.

`b_` names a block, `o_` offsets, `m_` a mask, `p_` a pointer.
"""

import triton
import triton.language as tl

from depthroute.ops.block import BlockRead
from depthroute.ops.kernels import block_layout
from depthroute.ops.kernels.block_layout import BlockLayout, contiguous_rows
from depthroute.ops.kernels.block_results import ReadAhead
from depthroute.ops.kernels.layout import as_rows, power_of_two
from depthroute.ops.kernels.select import pointer_to
from depthroute.ops.kernels.split import split, splits

# rows of a tile, queries that a program takes at once, and numbers of a closing source that it
# loads at once
ROWS, QUERIES_AT_ONCE, CLOSED_AT_ONCE = 16, 16, 2048


def read_ahead_tiles(given: BlockRead, at: BlockLayout, result: ReadAhead) -> None:
    """Launch the forward pass; `result.logits` and `rstds` are there already for separate keys."""
    assert given.lse is None  # a merge has one query: its sources are held
    launch, has_first = block_layout.ahead_tiles(at), given.norm_eps is not None
    values = contiguous_rows(given.values)
    pending = None if given.pending is None else as_rows(given.pending)
    sources = power_of_two(at.S)
    tokens = ROWS // sources
    at_once = block_layout.group_size(at.Q, QUERIES_AT_ONCE)
    for start in range(0, at.Q, at_once):
        count = min(at_once, at.Q - start)
        read_ahead_tiles_kernel[(triton.cdiv(at.T, tokens),)](
            values, pending, given.query.contiguous(), *result,
            0 if pending is None else pending.stride(0), at.T, start,
            given.rule.eps, given.rule.scale, given.share, given.norm_eps or 0.0,
            HAS_FIRST=has_first, NORM_FIRST=has_first and not start, Q=at.Q, COUNT=count,
            BT=tokens, SP=sources, QP=max(8, power_of_two(count), ROWS // tokens),
            BD=launch.columns, BC=min(power_of_two(at.D), CLOSED_AT_ONCE // tokens),
            STAGES=launch.stages, SPLIT=splits(values[0]), **at.constants,
            num_warps=launch.num_warps,
        )  # fmt: skip
        if pending is not None:  # for further queries it is closed
            assert result.closed is not None
            values, pending = (*values[:-1], result.closed), None


@triton.jit
def read_ahead_tiles_kernel(
    values, pending, query, first, out, lse, closed, weights, logits, rstds, norm_rstds,
    stride_pending, num_tokens, start, eps, scale, share, norm_eps,
    HAS_FIRST: tl.constexpr, NORM_FIRST: tl.constexpr, Q: tl.constexpr, COUNT: tl.constexpr,
    BT: tl.constexpr, SP: tl.constexpr, QP: tl.constexpr, BD: tl.constexpr, BC: tl.constexpr,
    STAGES: tl.constexpr, SPLIT: tl.constexpr, S: tl.constexpr, D: tl.constexpr,
    R: tl.constexpr, NORM: tl.constexpr, SEPARATE: tl.constexpr,
):  # fmt: skip
    """Rows are the SP sources of each of BT tokens; rows of results their QP queries."""
    o_t, o_m, o_q = tl.arange(0, BT), tl.arange(0, BT * SP), tl.arange(0, QP)
    o_s, t_m, o_d = o_m % SP, o_m // SP, tl.arange(0, BD)
    t = tl.program_id(0).to(tl.int64) * BT
    left = num_tokens - t
    m_m, m_q, m_t = (o_s < S) & (t_m < left), o_q < COUNT, o_t < left
    p_v = pointer_to(values, o_s, S)
    if pending is not None:  # the last source closes here
        for c in tl.static_range(0, D, BC):
            o_c = c + tl.arange(0, BC)
            m_c = m_t[:, None] & (o_c < D)[None, :]
            o_tc = (t + o_t)[:, None] * D + o_c[None, :]
            p_y = pending + (t + o_t)[:, None] * stride_pending + o_c[None, :]
            b_c = tl.load(values[S - 1] + o_tc, mask=m_c, other=0.0).to(tl.float32)
            b_c += tl.load(p_y, mask=m_c, other=0.0).to(tl.float32)
            tl.store(closed + o_tc, (b_c * share).to(closed.dtype.element_ty), mask=m_c)
        tl.debug_barrier()  # it is loaded again below
        p_v = tl.where(o_s == S - 1, closed, p_v)
    p_v = tl.multiple_of(p_v, 16) + (t + t_m) * D

    # products of sources with queries, for the scores, and with each other, for all norms
    LEFT_OF_KEY: tl.constexpr = D if SEPARATE else D - R
    b_gram = tl.zeros([BT * SP, BT * SP], tl.float32)
    if LEFT_OF_KEY > 0 and (NORM_FIRST or (NORM == "full" and not SEPARATE)):
        for c in tl.range(0, LEFT_OF_KEY, BD, num_stages=STAGES):
            m_v = m_m[:, None] & (c + o_d < LEFT_OF_KEY)[None, :]
            b_v = tl.load(p_v[:, None] + (c + o_d)[None, :], mask=m_v, other=0.0)
            if not SPLIT:
                b_v = b_v.to(tl.float32)
            b_gram = tl.dot(b_v, tl.trans(b_v), b_gram, input_precision="ieee")
    o_z = ((t + t_m) * S + o_s)[:, None] * Q + (start + o_q)[None, :]
    m_z = m_m[:, None] & m_q[None, :]
    if SEPARATE:
        b_z = tl.load(logits + o_z, mask=m_z, other=0.0)
    else:
        b_z, b_rest = tl.zeros([BT * SP, QP], tl.float32), tl.zeros([BT * SP, QP], tl.float32)
        b_tail = tl.zeros([BT * SP, BT * SP], tl.float32)
        for c in tl.range(0, R, BD, num_stages=STAGES):
            m_k = c + o_d < R
            p_q = query + (start + o_q)[None, :] * R + (c + o_d)[:, None]
            b_q = tl.load(p_q, mask=m_q[None, :] & m_k[:, None], other=0.0)
            b_high, b_low = split(b_q, SPLIT)
            p_k = p_v[:, None] + (D - R + c + o_d)[None, :]
            b_k = tl.load(p_k, mask=m_m[:, None] & m_k[None, :], other=0.0)
            if SPLIT:
                b_rest = tl.dot(b_k, b_low, b_rest)
            else:
                b_k = b_k.to(tl.float32)
            b_z = tl.dot(b_k, b_high, b_z, input_precision="ieee")
            if NORM != "none" or NORM_FIRST:
                b_tail = tl.dot(b_k, tl.trans(b_k), b_tail, input_precision="ieee")
        b_gram += b_tail
        b_r = tl.full([BT * SP], 1.0, tl.float32)
        if NORM != "none":
            b_square = tl.where(o_m[:, None] == o_m, b_gram if NORM == "full" else b_tail, 0.0)
            b_r = tl.rsqrt(tl.sum(b_square, axis=1) / (D if NORM == "full" else R) + eps)
        tl.store(rstds + (t + t_m) * S + o_s, b_r, mask=m_m)
        b_z = (b_z + b_rest) * (b_r * scale)[:, None]
        tl.store(logits + o_z, b_z, mask=m_z)

    b_z = tl.reshape(tl.where((o_s < S)[:, None], b_z, float("-inf")), [BT, SP, QP])
    b_top = tl.max(b_z, axis=1)
    b_e = tl.exp(b_z - b_top[:, None, :])
    b_sum = tl.sum(b_e, axis=1)
    p_lse = lse + (start + o_q).to(tl.int64)[None, :] * num_tokens + (t + o_t)[:, None]
    tl.store(p_lse, b_top + tl.log(b_sum), mask=m_t[:, None] & m_q[None, :])
    b_w = b_e / b_sum[:, None, :]
    tl.store(weights + o_z, tl.reshape(b_w, [BT * SP, QP]), mask=m_z)
    if NORM_FIRST:  # the square of a mix is its weights' form of the products: no sum to wait for
        b_first = tl.reshape(tl.sum(tl.where(o_q == 0, b_w, 0.0), axis=2), [BT * SP])
        b_along = tl.where(t_m[:, None] == t_m, b_gram * b_first, 0.0)
        b_square = tl.reshape(tl.sum(b_along, axis=1) * b_first, [BT, SP])
        b_norm = tl.rsqrt(tl.sum(b_square, axis=1) / D + norm_eps)
        tl.store(norm_rstds + t + o_t, b_norm, mask=m_t)
        b_w = tl.where(o_q == 0, b_w * b_norm[:, None, None], b_w)

    # the weights as a matrix with a block for each token
    is_own = t_m == o_t[:, None]
    b_w = tl.trans(tl.reshape(b_w, [BT * SP, QP]))
    b_w = tl.reshape(tl.where(is_own[:, None, :], b_w[None, :, :], 0.0), [BT * QP, BT * SP])
    b_high, b_low = split(b_w, SPLIT)
    o_n = tl.arange(0, BT * QP)
    q_n, t_n = o_n % QP, o_n // QP
    p_out = out + ((start + q_n - HAS_FIRST).to(tl.int64) * num_tokens + t + t_n) * D
    if NORM_FIRST:
        p_out = tl.where(q_n == 0, first + (t + t_n) * D, p_out)
    p_out, m_n = tl.multiple_of(p_out, 16), (q_n < COUNT) & (t_n < left)
    for c in tl.range(0, D, BD, num_stages=STAGES):
        m_d = (c + o_d < D)[None, :]
        b_v = tl.load(p_v[:, None] + (c + o_d)[None, :], mask=m_m[:, None] & m_d, other=0.0)
        if SPLIT:
            b_out = tl.dot(b_low, b_v, tl.dot(b_high, b_v))
        else:
            b_out = tl.dot(b_high, b_v.to(tl.float32), input_precision="ieee")
        p_o = p_out[:, None] + (c + o_d)[None, :]
        tl.store(p_o, b_out.to(out.dtype.element_ty), mask=m_n[:, None] & m_d)
