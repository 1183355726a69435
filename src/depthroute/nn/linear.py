"""Matrix products: float32 master weights, computed in the dtype of the input."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Module):
    """`y = x W^T` without bias, in the dtype of `x`.

    Args:
        in_dim: Width of the input.
        out_dim: Width of the output.
    """

    def __init__(self, in_dim: int, out_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_dim, in_dim))

    def forward(self, x: Tensor) -> Tensor:
        """Map `[..., in_dim]` to `[..., out_dim]`."""
        return F.linear(x, self.weight.to(x.dtype))


class OutProjection(Linear):
    """The last product of a sublayer, which may emit extra columns for the residual scheme.

    `y = x [W; W_emit]^T`: one product of the joined weights or, for fewer tokens than `in_dim`, the
    joined results of two, whichever moves less. The emitted rows are a parameter of their own, so
    that they are initialised, decayed and orthogonalised apart from `W`.

    Args:
        in_dim: Width of the input.
        out_dim: Width D of the residual stream.
        emit_dim: Extra columns, >= 0.
    """

    def __init__(self, in_dim: int, out_dim: int, emit_dim: int = 0) -> None:
        super().__init__(in_dim, out_dim)
        emit = nn.Parameter(torch.empty(emit_dim, in_dim)) if emit_dim else None
        self.register_parameter("emit_weight", emit)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[..., in_dim]` to `[..., out_dim + emit_dim]`."""
        if self.emit_weight is None or math.prod(x.shape[:-1]) < x.shape[-1]:
            return with_emitted(super().forward(x), x, self.emit_weight)
        return F.linear(x, torch.cat([self.weight, self.emit_weight]).to(x.dtype))


def with_emitted(y: Tensor, x: Tensor, emit_weight: Tensor | None) -> Tensor:
    """Return `[y, x W_emit^T]`, y alone if nothing is emitted."""
    if emit_weight is None:
        return y
    return torch.cat([y, F.linear(x, emit_weight.to(x.dtype))], dim=-1)
