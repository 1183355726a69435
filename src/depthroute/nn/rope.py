"""Rotary position embedding, half-rotation form."""

from typing import NamedTuple

import torch
from torch import Tensor


class Rotation(NamedTuple):
    """Cosines and sines of each position, `[1 or B, 1, T, head_dim / 2]`."""

    cos: Tensor
    sin: Tensor


def rotation(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> Rotation:
    """Return the rotation of each position.

    `angle_j = position * theta^(-2 j / head_dim)`; the angles are float64, since a float32 angle
    loses the sixth digit at position 10^5.

    Args:
        positions: `[T]` or `[B, T]`, integers.
        head_dim: Even width of a head.
        theta: Base, > 1.
        dtype: Of the result.
    """
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device)
    angle = positions.unsqueeze(-1) * theta ** (-exponent / head_dim)
    if angle.ndim == 2:
        angle = angle.unsqueeze(0)
    angle = angle.unsqueeze(1)
    return Rotation(angle.cos().to(dtype), angle.sin().to(dtype))


def rotate(x: Tensor, by: Rotation) -> Tensor:
    """Rotate the pairs `(x_j, x_{j + head_dim / 2})` of `[B, heads, T, head_dim]`."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat(
        [first * by.cos - second * by.sin, second * by.cos + first * by.sin], dim=-1
    ).to(x.dtype)
