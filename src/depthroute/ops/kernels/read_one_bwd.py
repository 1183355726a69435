"""Backward pass of `read_ahead` for one query: a program holds all sources of a token.

Each source is read, and its gradient written, once. `b_` names a block, `o_` offsets, `m_` a mask,
`p_` a pointer.
"""

import triton
import triton.language as tl

from depthroute.ops.kernels.block_results import GradientCall
from depthroute.ops.kernels.depth_attend_bwd import BESIDE_QUERY
from depthroute.ops.kernels.layout import power_of_two
from depthroute.ops.kernels.sums import sums
from depthroute.ops.kernels.tuning import Launch


def read_one_bwd(call: GradientCall, launch: Launch, programs: int) -> None:
    """Launch so many programs."""
    given, at = call.given, call.at
    read_one_bwd_kernel[(programs,)](
        call.upstream[0],
        call.grad_lses[0],
        call.first,
        given.values,
        call.later,
        given.query,
        *(call.weights, call.logits, call.rstds, call.norm_rstds),
        *(call.grads.values, call.grad_logits, call.grad_query, call.grads.lse),
        at.T,
        call.num_rows,
        given.rule.scale,
        given.norm_eps or 0.0,
        call.share,
        NORM_FIRST=given.norm_eps is not None,
        OLD=call.num_old,
        BD=power_of_two(at.D),
        STAGES=launch.stages_of(given.values[0].itemsize),
        **at.constants,
        num_warps=launch.num_warps,
        maxnreg=launch.max_registers,
    )


@triton.jit
def read_one_bwd_kernel(
    grad_out, grad_lse, first, values, later_values, query, weights, logits, rstds, norm_rstds,
    grad_values, grad_logits, grad_query, grad_old_lse,
    num_tokens, num_rows, scale, norm_eps, share,
    NORM_FIRST: tl.constexpr, OLD: tl.constexpr, S: tl.constexpr, D: tl.constexpr, R: tl.constexpr,
    NORM: tl.constexpr, SEPARATE: tl.constexpr, BD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Loop over tokens; the gradient of the query stays in registers, one row for each program."""
    pid, o_d = tl.program_id(0), tl.arange(0, BD)
    m_d, m_k = o_d < D, (o_d < D) & (o_d >= D - R)
    if not SEPARATE:
        p_q = query + o_d - (D - R)
        if S <= BESIDE_QUERY:
            b_q = tl.load(p_q, mask=m_k, other=0.0)
        b_dq = tl.zeros([BD], tl.float32)
    for t in tl.range(pid, num_tokens, tl.num_programs(0), num_stages=STAGES):
        o_row = tl.cast(t, tl.int64)
        o_v = o_row * D + o_d
        b_g = tl.load(grad_out + o_v, mask=m_d, other=0.0).to(tl.float32)
        if NORM_FIRST:  # its gradient goes back through the norm
            b_x = tl.load(first + o_v, mask=m_d, other=0.0).to(tl.float32)
            b_norm = tl.load(norm_rstds + o_row)
            b_along = tl.sum(b_g * b_x, axis=0)
            b_g = b_norm * (b_g - b_x * (b_along / D))
            # <grad, out>: what the norm leaves of it, because of its eps
            b_c = -b_along * norm_eps * b_norm * b_norm
        else:
            b_c = tl.load(grad_lse + o_row)
        # loads that no sum has to wait for come before the first one
        numbers = ()
        for i in tl.static_range(S):
            o_z = o_row * S + i
            b_w, b_r, b_pull = tl.load(weights + o_z), 0.0, 0.0
            if not SEPARATE:
                b_r = tl.load(rstds + o_z)
                if NORM != "none":
                    b_pull = tl.load(logits + o_z) * b_r * b_r / (D if NORM == "full" else R)
            numbers = numbers + ((b_w, b_r * scale, b_pull),)
        b_vs, products = (), ()
        for i in tl.static_range(S):
            b_v = tl.load(values[i] + o_v, mask=m_d, other=0.0)
            b_vs, products = b_vs + (b_v,), products + (b_v.to(tl.float32) * b_g,)
        b_as = sums(products, S, 0)
        if not SEPARATE and S > BESIDE_QUERY:
            b_q = tl.load(p_q, mask=m_k, other=0.0, eviction_policy="evict_last")
        for i in tl.static_range(S):
            b_w, b_r, b_pull = numbers[i]
            b_gz = b_w * (b_as[i] + b_c)
            b_dv = b_w * b_g
            if OLD and i == 0:
                tl.store(grad_old_lse + o_row, b_w * b_c)
            if SEPARATE:
                tl.store(grad_logits + o_row * S + i, b_gz)
            else:
                b_v, b_gd = b_vs[i].to(tl.float32), b_gz * b_r
                b_dv += b_gd * b_q
                b_dq += b_gd * b_v
                if NORM != "none":
                    b_key = b_v if NORM == "full" else tl.where(m_k, b_v, 0.0)
                    b_dv -= b_key * (b_gz * b_pull)
            if later_values is not None and i >= OLD:  # a merged read is used nowhere else
                b_dv += tl.load(later_values[i - OLD] + o_v, mask=m_d, other=0.0).to(tl.float32)
            if i == S - 1:
                b_dv *= share
            p_dv = grad_values + (i * tl.cast(num_tokens, tl.int64) + o_row) * D + o_d
            tl.store(p_dv, b_dv.to(grad_values.dtype.element_ty), mask=m_d)
    if not SEPARATE:
        p_dq = grad_query + o_d - (D - R)
        tl.store(p_dq + pid * R, b_dq, mask=m_k)
        for row in range(pid + tl.num_programs(0), num_rows, tl.num_programs(0)):
            tl.store(p_dq + row * R, tl.zeros_like(b_dq), mask=m_k)
