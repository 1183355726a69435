"""Matrix products: float32 master weights, computed in the dtype of the input."""

from collections.abc import Callable
from typing import Any, Self

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
    initialised, decayed and orthogonalised apart from `W`; but they follow it in memory, as long as
    nobody moves one of the two alone. Without gradients the product then takes both as they are,
    else their concatenation.

    Args:
        in_dim: Width of the input.
        out_dim: Width D of the residual stream.
        emit_dim: Extra columns, >= 0.
    """

    def __init__(self, in_dim: int, out_dim: int, emit_dim: int = 0) -> None:
        super().__init__(in_dim, out_dim)
        emit = nn.Parameter(torch.empty(emit_dim, in_dim)) if emit_dim else None
        self.register_parameter("emit_weight", emit)
        self.join_weights()

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        """Move, convert or allocate the weights, and leave them side by side."""
        super()._apply(fn, recurse)
        self.join_weights()
        return self

    def join_weights(self) -> None:
        """Lay the weights side by side, for loaders that put another tensor in the place of each.

        Weights of two devices or dtypes stay where they are, and so do sharded ones.
        """
        weights = self._plain_weights()
        if weights and self._side_by_side() is None:
            joined = torch.cat([w.detach() for w in weights])
            for weight, rows in zip(weights, joined.split([len(w) for w in weights]), strict=True):
                weight.data = rows

    def _plain_weights(self) -> list[nn.Parameter]:
        """Return both weights, or none if they are not alike or have no memory of their own.

        Sharded and fake tensors have none, nor has what torch's transforms put in their place.
        """
        weights = [self.weight, self.emit_weight]
        plain = all(isinstance(w, nn.Parameter) and type(w.data) is Tensor for w in weights)
        alike = plain and len({(w.device, w.dtype) for w in weights}) == 1
        return weights if alike and not self.weight.is_meta else []

    def _side_by_side(self) -> Tensor | None:
        """Return `[W; W_emit]` without a copy, if they follow each other in memory."""
        weights = self._plain_weights()
        if not weights or not all(w.is_contiguous() for w in weights):
            return None
        first, second = (w.detach() for w in weights)
        if first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr():
            return None
        if second.storage_offset() != first.storage_offset() + first.numel():
            return None
        return first.as_strided((len(first) + len(second), first.shape[1]), first.stride())

    def forward(self, x: Tensor) -> Tensor:
        """Map `[..., in_dim]` to `[..., out_dim + emit_dim]`."""
        if self.emit_weight is None:
            return super().forward(x)
        if not (torch.is_grad_enabled() or torch.compiler.is_compiling()):
            joined = self._side_by_side()
            if joined is not None:
                return F.linear(x, joined.to(x.dtype))
        return F.linear(x, torch.cat([self.weight, self.emit_weight]).to(x.dtype))
