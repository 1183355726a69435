"""Scores of separate keys, and their gradient: keys are narrow, so apart from the values' passes.

`b_` names a block, `o_` offsets, `m_` a mask, `p_` a pointer.
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from depthroute.ops.block import BlockRead
from depthroute.ops.kernels.block_layout import BlockLayout, contiguous_rows
from depthroute.ops.kernels.layout import power_of_two
from depthroute.ops.kernels.sources import num_programs

TOKENS = 16  # of a program at a time


def scores_fwd(given: BlockRead, logits: Tensor, rstds: Tensor) -> None:
    """Write the logits `[T, S, Q]` and the factors of the key norm `[T, S]`."""
    at = BlockLayout.of(given)
    assert given.keys is not None
    scores_fwd_kernel[(triton.cdiv(at.T, TOKENS),)](
        contiguous_rows(given.keys),
        given.query.contiguous(),
        logits,
        rstds,
        at.T,
        at.Q,
        given.rule.eps,
        given.rule.scale,
        **_constants(at),
    )


def scores_bwd(
    given: BlockRead,
    grad_logits: Tensor,
    logits: Tensor,
    rstds: Tensor,
    later_keys: Sequence[Tensor] | None,
    grad_keys: Tensor,
) -> Tensor:
    """Write the gradients of the keys `[S, *b, R]`; return rows that sum to that of the queries."""
    at = BlockLayout.of(given)
    assert given.keys is not None
    programs = num_programs(triton.cdiv(at.T, TOKENS), 2, rstds.device)
    grad_query = rstds.new_empty((programs, at.Q, at.R))
    scores_bwd_kernel[(programs,)](
        contiguous_rows(given.keys),
        None if later_keys is None else contiguous_rows(later_keys),
        given.query.contiguous(),
        grad_logits,
        logits,
        rstds,
        grad_keys,
        grad_query,
        at.T,
        given.rule.scale,
        Q=at.Q,
        QP=power_of_two(at.Q),
        **_constants(at),
    )
    return grad_query


def _constants(at: BlockLayout) -> dict[str, int | str]:
    return {"S": at.S, "R": at.R, "BR": power_of_two(at.R), "NORM": at.norm, "TOKENS": TOKENS}


@triton.jit
def scores_fwd_kernel(
    keys, query, logits, rstds, num_tokens, num_queries, eps, scale,
    S: tl.constexpr, R: tl.constexpr, BR: tl.constexpr, NORM: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Score the sources of some tokens, one source after another."""
    o_row = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    o_r = tl.arange(0, BR)
    m_row, m_r = o_row < num_tokens, o_r < R
    for i in tl.static_range(S):
        p_k = keys[i] + o_row[:, None] * R + o_r[None, :]
        b_k = tl.load(p_k, mask=m_row[:, None] & m_r[None, :], other=0.0).to(tl.float32)
        b_r = tl.full([TOKENS], 1.0, tl.float32)
        if NORM != "none":
            b_r = tl.rsqrt(tl.sum(b_k * b_k, axis=1) / R + eps)
        tl.store(rstds + o_row * S + i, b_r, mask=m_row)
        for j in range(num_queries):
            b_q = tl.load(query + j * R + o_r, mask=m_r, other=0.0)
            b_z = tl.sum(b_k * b_q[None, :], axis=1) * (b_r * scale)
            tl.store(logits + (o_row * S + i) * num_queries + j, b_z, mask=m_row)


@triton.jit
def scores_bwd_kernel(
    keys, later_keys, query, grad_logits, logits, rstds, grad_keys, grad_query, num_tokens, scale,
    Q: tl.constexpr, QP: tl.constexpr, S: tl.constexpr, R: tl.constexpr, BR: tl.constexpr,
    NORM: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Loop over groups of tokens, with one row of each query's gradient for each program."""
    pid = tl.program_id(0)
    o_r, o_q = tl.arange(0, BR), tl.arange(0, QP)
    m_r = o_r < R
    b_dq = tl.zeros([QP, BR], tl.float32)
    for start in range(pid * TOKENS, num_tokens, tl.num_programs(0) * TOKENS):
        o_row = tl.cast(start, tl.int64) + tl.arange(0, TOKENS)
        m_row = o_row < num_tokens
        o_k, m_k = o_row[:, None] * R + o_r[None, :], m_row[:, None] & m_r[None, :]
        for i in tl.static_range(S):
            b_k = tl.load(keys[i] + o_k, mask=m_k, other=0.0).to(tl.float32)
            b_r = tl.load(rstds + o_row * S + i, mask=m_row, other=0.0)
            if later_keys is not None:
                b_dk = tl.load(later_keys[i] + o_k, mask=m_k, other=0.0).to(tl.float32)
            else:
                b_dk = tl.zeros([TOKENS, BR], tl.float32)
            b_pull = tl.zeros([TOKENS], tl.float32)
            for j in tl.static_range(Q):
                o_z = (o_row * S + i) * Q + j
                b_gz = tl.load(grad_logits + o_z, mask=m_row, other=0.0)
                b_pull += b_gz * tl.load(logits + o_z, mask=m_row, other=0.0)
                b_gd = b_gz * (b_r * scale)
                b_q = tl.load(query + j * R + o_r, mask=m_r, other=0.0)
                b_dk += b_gd[:, None] * b_q[None, :]
                b_dqj = tl.sum(b_gd[:, None] * b_k, axis=0)
                b_dq += tl.where((o_q == j)[:, None], b_dqj[None, :], 0.0)
            if NORM != "none":
                b_dk -= b_k * (b_pull * b_r * b_r / R)[:, None]
            p_dk = grad_keys + i * tl.cast(num_tokens, tl.int64) * R + o_k
            tl.store(p_dk, b_dk.to(grad_keys.dtype.element_ty), mask=m_k)
    p_dq = grad_query + (pid * Q + o_q)[:, None] * R + o_r[None, :]
    tl.store(p_dq, b_dq, mask=(o_q < Q)[:, None] & m_r[None, :])
