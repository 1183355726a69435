"""Matrix products: float32 master weights, computed in the dtype of the input."""

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

    `y = x [W; W_emit]^T`. The emitted rows are a parameter of their own, so that they are
    initialised, decayed and orthogonalised apart from `W`.

    Args:
        in_dim: Width of the input.
        out_dim: Width D of the residual stream.
        emit_dim: Extra columns, >= 0.

    Attributes:
        joined: `[W; W_emit]` as `JoinedWeights` keeps it; None to concatenate in each pass.
    """

    def __init__(self, in_dim: int, out_dim: int, emit_dim: int = 0) -> None:
        super().__init__(in_dim, out_dim)
        emit = nn.Parameter(torch.empty(emit_dim, in_dim)) if emit_dim else None
        self.register_parameter("emit_weight", emit)
        self.joined: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Map `[..., in_dim]` to `[..., out_dim + emit_dim]`."""
        if self.emit_weight is None:
            return super().forward(x)
        joined = self.joined
        if joined is None or torch.is_grad_enabled():
            joined = torch.cat([self.weight, self.emit_weight])
        return F.linear(x, joined.to(x.dtype))


class JoinedWeights:
    """Copies of `[W; W_emit]` of a model's output projections, for many passes over few tokens.

    Within the context the projections take them, unless gradients are recorded. Nothing is copied
    for a scheme that has no emitted rows.

    Args:
        model: The model; later changes of its weights do not reach the copies.
    """

    def __init__(self, model: nn.Module) -> None:
        self._copies = [
            (part, torch.cat([part.weight.detach(), part.emit_weight.detach()]))
            for part in model.modules()
            if isinstance(part, OutProjection) and part.emit_weight is not None
        ]

    def __enter__(self) -> None:
        for projection, copy in self._copies:
            projection.joined = copy

    def __exit__(self, *_: object) -> None:
        for projection, _ in self._copies:
            projection.joined = None
