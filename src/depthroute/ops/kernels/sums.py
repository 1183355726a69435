"""Sums of several tiles at once: the warps of a program wait for each other once, not per tile."""

import triton
import triton.language as tl
from torch import Tensor


def sum_programs(rows: Tensor, total: Tensor) -> None:
    """Sum what each program of a kernel has written, `[programs, *shape]`, into `[*shape]`.

    In an order of its own, so that two runs agree.
    """
    columns = total.numel()
    sum_rows_kernel[(triton.cdiv(columns, 32),)](rows, total, len(rows), columns, num_warps=8)


@triton.jit
def sum_rows_kernel(rows, total, num_rows, num_columns):
    """Sum 32 columns of a matrix."""
    o_c = tl.program_id(0) * 32 + tl.arange(0, 32)
    m_c = o_c < num_columns
    b_sum = tl.zeros([128, 32], tl.float32)
    for start in range(0, num_rows, 128):
        o_r = start + tl.arange(0, 128)
        p_rows = rows + o_r[:, None].to(tl.int64) * num_columns + o_c[None, :]
        b_sum += tl.load(p_rows, mask=(o_r < num_rows)[:, None] & m_c[None, :], other=0.0)
    tl.store(total + o_c, tl.sum(b_sum, axis=0).to(total.dtype.element_ty), mask=m_c)


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
