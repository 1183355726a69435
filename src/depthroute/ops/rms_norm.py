"""The one RMS normalisation of the package."""

from collections.abc import Callable

from torch import Tensor

from depthroute.ops.scores import accumulation_dtype


def rms_norm(x: Tensor, *, eps: float) -> Tensor:
    """Divide each vector by its root mean square, without a learned gain.

    `y = x / sqrt(mean_d x_d^2 + eps)`, over the last axis.

    Args:
        x: `[..., D]`, any floating dtype.
        eps: Added to the mean square, > 0.

    Returns:
        `[..., D]` in the dtype of `x`; the arithmetic is float32 (float64 for float64).
    """
    wide = x.to(accumulation_dtype(x.dtype))
    return (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()).to(x.dtype)


def rms_eps(norm: Callable[[Tensor], Tensor]) -> float | None:
    """Return the eps of a norm that is `rms_norm` and says so; None for any other function."""
    return getattr(norm, "rms_eps", None)
