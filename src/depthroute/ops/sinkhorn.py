"""Sinkhorn-Knopp: square matrices made doubly stochastic, with a closed-form gradient."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from depthroute.ops.scores import accumulation_dtype


def sinkhorn(logits: Tensor, *, num_steps: int = 20) -> Tensor:
    """Scale the rows and columns of `exp(logits)` in turn until both sum to about 1.

    Each step divides the columns by their sums, then the rows. So rows sum to 1 up to rounding and
    columns only in the limit: after 20 steps the worst of 512 4 x 4 matrices with logits
    `N(0, 3^2)` is off by a few percent. Logits may be of any finite size: the steps run on
    logarithms. The backward pass recomputes them, so that only the logits are kept.

    Args:
        logits: `[..., n, n]`, any floating dtype.
        num_steps: Steps, >= 1.

    Returns:
        `[..., n, n]`, entries >= 0, float32 (float64 for float64).

    Raises:
        ValueError: `logits` are not square or not floating, or `num_steps` is below 1.

    Source: arXiv 2512.24880 (columns first, 20 steps).
    """
    if logits.ndim < 2 or logits.shape[-1] != logits.shape[-2] or not logits.shape[-1]:
        raise ValueError(f"logits must have shape [..., n, n], n >= 1, got {tuple(logits.shape)}")
    if not logits.is_floating_point():
        raise ValueError(f"logits must be floating, got {logits.dtype}")
    if num_steps < 1:
        raise ValueError(f"num_steps must be >= 1, got {num_steps}")
    return _Sinkhorn.apply(logits.to(accumulation_dtype(logits.dtype)), num_steps)


def _passes(logs: Tensor, num_steps: int) -> list[tuple[int, Tensor]]:
    """Return every normalisation: the axis that then sums to 1, and the logarithms after it."""
    passes = []
    for axis in (-2, -1) * num_steps:
        logs = logs.log_softmax(axis)
        passes.append((axis, logs))
    return passes


class _Sinkhorn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, num_steps: int) -> Tensor:
        ctx.save_for_backward(logits)
        ctx.num_steps = num_steps
        return _passes(logits, num_steps)[-1][1].exp()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (logits,) = ctx.saved_tensors
        passes = _passes(logits, ctx.num_steps)
        grad = grad * passes[-1][1].exp()
        for axis, logs in reversed(passes):  # of `y = x - lse(x)`
            grad = grad - logs.exp() * grad.sum(axis, keepdim=True)
        return grad, None
