"""RMS normalisation as a module."""

from torch import Tensor, nn

from depthroute.ops import rms_norm


class RMSNorm(nn.Module):
    """RMSNorm without a learned gain; see `depthroute.ops.rms_norm`.

    Args:
        eps: Added to the mean square, > 0.
    """

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = self.rms_eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis."""
        return rms_norm(x, eps=self.eps)

    def extra_repr(self) -> str:
        """Show the epsilon."""
        return f"eps={self.eps}"
