"""The one RMS normalisation of the package."""

from collections.abc import Callable

from torch import Tensor

from depthroute.ops.checks import check_eps
from depthroute.ops.scores import accumulation_dtype


def rms_norm(x: Tensor, *, eps: float) -> Tensor:
    """Divide each vector by its root mean square, without a learned gain.

    `y = x / sqrt(mean_d x_d^2 + eps)`, over the last axis.

    Args:
        x: `[..., D]`, any floating dtype.
        eps: Added to the mean square, > 0.

    Returns:
        `[..., D]` in the dtype of `x`; the arithmetic is float32 (float64 for float64).

    Raises:
        ValueError: An x that is no floating tensor, or an eps that is not > 0.
    """
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise ValueError(f"x must be a floating tensor, got {getattr(x, 'dtype', type(x))}")
    check_eps("eps", eps)
    wide = x.to(accumulation_dtype(x.dtype))
    return (wide * inverse_rms(wide, eps=eps)).to(x.dtype)


def inverse_rms(x: Tensor, *, eps: float) -> Tensor:
    """Return the factor `[..., 1]` that `rms_norm` multiplies each vector by."""
    return (x.square().mean(-1, keepdim=True) + eps).rsqrt()


def rms_norm_backward(grad: Tensor, normed: Tensor, rstd: Tensor) -> Tensor:
    """Take a gradient back through `rms_norm`, by its result alone.

    `dx = rstd * (dy - y * mean_d(dy_d y_d))` with `y = rstd * x`.

    Args:
        grad: Gradient of the result, `[..., D]`, in the dtype of the arithmetic.
        normed: The result; if rounded to 16 bits, its second term is known as well as that.
        rstd: What `inverse_rms` returned.
    """
    normed = normed.to(grad.dtype)
    return rstd * (grad - normed * (grad * normed).mean(-1, keepdim=True))


def rms_eps(norm: Callable[[Tensor], Tensor]) -> float | None:
    """Return the eps of a norm that is `rms_norm` and says so; None for any other function."""
    return getattr(norm, "rms_eps", None)
