"""The feed-forward sublayer."""

import torch.nn.functional as F
from torch import Tensor, nn

from depthroute.nn.linear import Linear, OutProjection


class SwiGLU(nn.Module):
    """`y = W_down (silu(W_gate x) * W_up x)`.

    Args:
        dim: Width of the residual stream.
        hidden_dim: Width of the gated hidden layer.
        emit_dim: Columns that the down projection emits for the residual scheme.
    """

    def __init__(self, dim: int, hidden_dim: int, emit_dim: int = 0) -> None:
        super().__init__()
        self.gate_proj = Linear(dim, hidden_dim)
        self.up_proj = Linear(dim, hidden_dim)
        self.down_proj = OutProjection(hidden_dim, dim, emit_dim)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[..., D]` to `[..., D + emit_dim]`."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
