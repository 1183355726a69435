"""Sums of several tiles at once: the warps of a program wait for each other once, not per tile."""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from depthroute.ops.kernels.layout import power_of_two
from depthroute.ops.kernels.select import pointer_to


def sum_programs(rows: Tensor, total: Tensor, slots: Sequence[Tensor]) -> None:
    """Sum what each program of a kernel has written, in an order of its own: two runs agree.

    Args:
        rows: `[programs, Q, *shape]`.
        total: Where the sum goes, `[Q, *shape]`.
        slots: Rows that other kernels wrote for the last of the Q, `[programs, *shape]` each; or
            none.
    """
    num_queries = len(total)
    columns = total.numel() // num_queries
    # few columns of many rows: with a few hundred programs, what takes time is the steps of a loop
    at_once = min(1024, max(256, power_of_two(max(len(x) for x in (rows, *slots)))))
    narrow = 8192 // at_once
    sum_programs_kernel[(num_queries, triton.cdiv(columns, narrow))](
        rows,
        tuple(slots) or None,
        total,
        len(rows),
        len(slots[0]) if slots else 0,
        columns,
        Q=num_queries,
        SLOTS=len(slots),
        BP=at_once,
        BC=narrow,
        num_warps=8,
    )


@triton.jit
def sum_programs_kernel(
    rows, slots, total, num_rows, num_slot_rows, num_columns, Q: tl.constexpr, SLOTS: tl.constexpr,
    BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Sum BC columns of one of the Q."""
    j = tl.program_id(0)
    o_c, o_p = tl.program_id(1) * BC + tl.arange(0, BC), tl.arange(0, BP)
    m_c = (o_c < num_columns)[None, :]
    b_sum = tl.zeros([BP, BC], tl.float32)
    for start in range(0, num_rows, BP):
        o_row = (start + o_p).to(tl.int64)[:, None]
        p_row = rows + (o_row * Q + j) * num_columns + o_c[None, :]
        b_sum += tl.load(p_row, mask=(o_row < num_rows) & m_c, other=0.0)
    if slots is not None:  # noqa: SIM102 - known to the compiler
        if j >= Q - SLOTS:
            p_slot = pointer_to(slots, j - (Q - SLOTS), SLOTS)
            for start in range(0, num_slot_rows, BP):
                o_row = (start + o_p).to(tl.int64)[:, None]
                p_row = p_slot + o_row * num_columns + o_c[None, :]
                b_sum += tl.load(p_row, mask=(o_row < num_slot_rows) & m_c, other=0.0)
    b_total = tl.sum(b_sum, axis=0).to(total.dtype.element_ty)
    tl.store(total + j * num_columns + o_c, b_total, mask=o_c < num_columns)


@triton.jit
def sums(tiles, COUNT: tl.constexpr, AXIS: tl.constexpr):
    """Sum each of COUNT tiles along an axis, four at a time: more would take more registers."""
    totals = ()
    whole: tl.constexpr = COUNT // 4 * 4
    for start in tl.static_range(0, whole, 4):
        totals = totals + tl.reduce(tiles[start : start + 4], AXIS, _add_4)
    if COUNT & 2:
        totals = totals + tl.reduce(tiles[whole : whole + 2], AXIS, _add_2)
    if COUNT & 1:
        totals = totals + (tl.sum(tiles[COUNT - 1], axis=AXIS),)
    return totals


@triton.jit
def inner_products(tiles, b_x, COUNT: tl.constexpr, AXIS: tl.constexpr):
    """Return the inner products along AXIS of tiles `[H, width]` with one x, or with several."""
    products = ()
    for c in tl.static_range(COUNT):
        b_tile = tiles[c].to(tl.float32)
        products = products + ((b_tile if AXIS == 1 else b_tile[None, :, :]) * b_x,)
    return sums(products, COUNT, AXIS)


@triton.jit
def inverse_rms_of(
    b_vs, b_ks, eps, NORM: tl.constexpr, D: tl.constexpr, R: tl.constexpr, COUNT: tl.constexpr
):
    """Return the factor that the key norm multiplies the raw score of each source by."""
    factors = ()
    if NORM == "none":
        for _ in tl.static_range(COUNT):
            factors = factors + (tl.full([], 1.0, tl.float32),)
    else:
        squares = ()
        for c in tl.static_range(COUNT):
            b_x = (b_vs[c] if NORM == "full" else b_ks[c]).to(tl.float32)
            squares = squares + (tl.reshape(b_x * b_x, [b_x.shape[0] * b_x.shape[1]]),)
        squares = sums(squares, COUNT, 0)
        for c in tl.static_range(COUNT):
            factors = factors + (tl.rsqrt(squares[c] / (D if NORM == "full" else R) + eps),)
    return factors


@triton.jit
def _add_2(a, b, e, f):
    return a + e, b + f


@triton.jit
def _add_4(a, b, c, d, e, f, g, h):
    return a + e, b + f, c + g, d + h
