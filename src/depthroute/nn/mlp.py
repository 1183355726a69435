"""The feed-forward sublayer."""

from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from depthroute.nn.low_rank import LowRankConfig, build_projection


class SwiGLU(nn.Module):
    """`y = W_down (silu(W_gate x) * W_up x)`.

    Args:
        dim: Width of the residual stream.
        hidden_dim: Width of the gated hidden layer.
        emit_dim: Columns that the down projection emits for the residual scheme.
        low_rank: Low-rank maps in place of the projections in its scope.
    """

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        emit_dim: int = 0,
        *,
        low_rank: LowRankConfig | None = None,
    ) -> None:
        super().__init__()
        build = partial(build_projection, low_rank=low_rank)
        self.gate_proj = build("gate", dim, hidden_dim)
        self.up_proj = build("up", dim, hidden_dim)
        self.down_proj = build("down", hidden_dim, dim, emit_dim)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[..., D]` to `[..., D + emit_dim]`."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
