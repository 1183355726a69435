"""Sums of several tiles at once: the warps of a program wait for each other once, not per tile."""

import triton
import triton.language as tl


@triton.jit
def sums(tiles, COUNT: tl.constexpr, AXIS: tl.constexpr):
    """Sum each of COUNT tiles along an axis."""
    totals = ()
    whole: tl.constexpr = COUNT // 8 * 8
    for start in tl.static_range(0, whole, 8):
        totals = totals + tl.reduce(tiles[start : start + 8], AXIS, _add_8)
    if COUNT & 4:
        totals = totals + tl.reduce(tiles[whole : whole + 4], AXIS, _add_4)
    if COUNT & 2:
        first: tl.constexpr = COUNT // 4 * 4
        totals = totals + tl.reduce(tiles[first : first + 2], AXIS, _add_2)
    if COUNT & 1:
        totals = totals + (tl.sum(tiles[COUNT - 1], axis=AXIS),)
    return totals


@triton.jit
def inner_products(tiles, b_x, COUNT: tl.constexpr):
    """Return `<tile, x>` over the last of the axes `[Q, H, width]` of x, for tiles `[H, width]`."""
    products = ()
    for c in tl.static_range(COUNT):
        products = products + (tiles[c].to(tl.float32)[None, :, :] * b_x,)
    return sums(products, COUNT, 2)


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
            squares = squares + (b_x * b_x,)
        squares = sums(squares, COUNT, 1)
        for c in tl.static_range(COUNT):
            mean = tl.sum(squares[c], axis=0) / (D if NORM == "full" else R)
            factors = factors + (tl.rsqrt(mean + eps),)
    return factors


@triton.jit
def _add_2(a, b, e, f):
    return a + e, b + f


@triton.jit
def _add_4(a, b, c, d, e, f, g, h):
    return a + e, b + f, c + g, d + h


@triton.jit
def _add_8(a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p):
    return a + i, b + j, c + k, d + l, e + m, f + n, g + o, h + p
