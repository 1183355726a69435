"""Forward pass of `depth_attend`: a program reads the sources of one token once.

`b_` names a block, `o_` offsets, `m_` a mask, `p_` a pointer.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from depthroute.ops.kernels import tuning
from depthroute.ops.kernels.layout import Layout, as_bias
from depthroute.ops.kernels.results import Attended
from depthroute.ops.kernels.sources import key_tile_of, load_sources, pack, tile_of
from depthroute.ops.kernels.sums import inner_products, inverse_rms_of
from depthroute.ops.scores import ScoreRule


def depth_attend_fwd(
    values: Sequence[Tensor],
    keys: Sequence[Tensor] | None,
    query: Tensor,
    bias: Tensor | None,
    null: Tensor | None,
    rule: ScoreRule,
    out_dtype: torch.dtype,
    out_norm_eps: float | None = None,
) -> Attended:
    """Launch the forward pass on validated arguments (`checks.Read`)."""
    at = Layout.of(values, keys, query, rule)
    result = Attended.empty(at, values[0], out_dtype, out_norm_eps is not None)
    if not at.T:
        return result
    launch = tuning.forward(at)
    packed = pack(values, keys, launch)
    depth_attend_fwd_kernel[(at.T if launch.resident else at.T * at.Q,)](
        packed.values,
        packed.keys,
        query.float().contiguous(),
        as_bias(bias, at, values[0].shape[:-1]),
        None if null is None else null.contiguous(),
        *result,
        at.T,
        at.S,
        at.Q,
        rule.eps,
        rule.scale,
        out_norm_eps,
        **at.constants,
        CHUNK=launch.chunk,
        RESIDENT=launch.resident,
        ALIGNED=packed.aligned,
        num_warps=launch.num_warps,
    )
    return result


@triton.jit
def depth_attend_fwd_kernel(
    values, keys, query, bias, null, out, lse, dots, rstds, out_rstds,
    num_tokens, num_sources, num_queries, eps, scale, out_norm_eps,
    D: tl.constexpr, R: tl.constexpr, H: tl.constexpr, NORM: tl.constexpr, KEYS: tl.constexpr,
    HP: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr,
    CHUNK: tl.constexpr, RESIDENT: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Mix one token's sources by an online softmax.

    With all sources resident a program serves every query; else one query, and the programs of a
    token run side by side, so that all but the first find its sources in the L2 cache.
    """
    pid = tl.program_id(0)
    if RESIDENT:
        num_sources = CHUNK  # known to the compiler
        t, first, last = pid, 0, num_queries
    else:
        t, first = pid // num_queries, pid % num_queries
        last = first + 1
    o_row = t.to(tl.int64)
    o_h = tl.arange(0, HP)
    m_h = o_h < H
    o_v, m_v = tile_of(D, H, HP, BC)
    o_k, m_k = key_tile_of(o_v, m_v, D, R, H, KEYS, HP, BK)
    if RESIDENT:
        b_vs, b_ks = load_sources(
            values, keys, 0, o_row, num_sources, o_v, m_v, o_k, m_k, D, R, KEYS, CHUNK, True,
            ALIGNED,
        )  # fmt: skip
        b_rs = inverse_rms_of(b_vs, b_ks, eps, NORM, D, R, CHUNK)
        for c in tl.static_range(CHUNK):
            tl.store(rstds + o_row * num_sources + c, b_rs[c])

    for j in range(first, last):
        o_j = tl.cast(j, tl.int64)
        b_q = tl.load(query + j * R + o_k, mask=m_k, other=0.0, eviction_policy="evict_last")
        if null is None:
            b_top = tl.full([HP], float("-inf"), tl.float32)
            b_sum = tl.zeros([HP], tl.float32)
        else:
            b_top = tl.load(null + j * H + o_h, mask=m_h, other=0.0)
            b_sum = tl.full([HP], 1.0, tl.float32)
        b_acc = tl.zeros([HP, BC], tl.float32)
        for start in range(0, num_sources, CHUNK):
            if not RESIDENT:
                b_vs, b_ks = load_sources(
                    values, keys, start, o_row, num_sources, o_v, m_v, o_k, m_k, D, R, KEYS, CHUNK,
                    False, ALIGNED,
                )  # fmt: skip
                b_rs = inverse_rms_of(b_vs, b_ks, eps, NORM, D, R, CHUNK)
            b_dots = inner_products(b_ks, b_q, CHUNK, 1)
            b_zs = ()
            b_new = b_top
            for c in tl.static_range(CHUNK):
                i = start + c
                m_i = i < num_sources
                b_dot, b_r = b_dots[c], b_rs[c]
                if not RESIDENT:
                    tl.store(rstds + o_row * num_sources + i, b_r, mask=m_i & (j == 0))
                p_dot = dots + ((o_row * num_sources + i) * num_queries + j) * H
                tl.store(p_dot + o_h, b_dot, mask=m_h & m_i)
                b_z = b_dot * (b_r * scale)
                if bias is not None:
                    o_i = tl.cast(i, tl.int64)
                    p_b = bias.data + o_j * bias.query + o_i * bias.source + o_row * bias.token
                    b_z += tl.load(p_b, mask=m_i, other=0.0)
                b_z = tl.where(m_i, b_z, float("-inf"))
                b_new = tl.maximum(b_new, b_z)
                b_zs = b_zs + (b_z,)
            # logits of -inf alone must not make -inf - -inf
            b_ref = tl.where(b_new == float("-inf"), 0.0, b_new)
            b_keep = tl.exp(b_top - b_ref)
            b_sum *= b_keep
            b_acc *= b_keep[:, None]
            for c in tl.static_range(CHUNK):
                b_w = tl.exp(b_zs[c] - b_ref)
                b_sum += b_w
                b_acc += b_w[:, None] * b_vs[c].to(tl.float32)
            b_top = b_new
        b_out = b_acc / b_sum[:, None]
        o_out = o_j * num_tokens + o_row
        if out_rstds is not None:
            b_square = tl.sum(tl.sum(b_out * b_out, axis=1), axis=0)
            b_norm = tl.rsqrt(b_square / D + out_norm_eps)
            tl.store(out_rstds + o_out, b_norm)
            b_out *= b_norm
        tl.store(out + o_out * D + o_v, b_out.to(out.dtype.element_ty), mask=m_v)
        tl.store(lse + o_out * H + o_h, b_top + tl.log(b_sum), mask=m_h)
