"""The plain PreNorm residual sum."""

from typing import Literal, NamedTuple

from torch import Tensor

from depthroute.config import config_dataclass
from depthroute.ops.block import add_norm
from depthroute.residual.base import Norm, ResidualScheme


@config_dataclass
class PreNormConfig:
    """The fixed residual sum; it has no settings."""

    name: Literal["prenorm"] = "prenorm"


class PreNormState(NamedTuple):
    """The stream. The last write waits to be added by the next read's kernel."""

    stream: Tensor  # [B, T, D]
    pending: Tensor | None


class PreNorm(ResidualScheme):
    """The fixed sum `h_{t+1} = h_t + f_t(norm(h_t))`."""

    Config = PreNormConfig

    def forward(self, x: Tensor) -> PreNormState:
        """Start the stream with the embedding."""
        return PreNormState(x, None)

    def read(
        self, state: PreNormState, site: int, norm: Norm
    ) -> tuple[tuple[Tensor, ...], PreNormState]:
        """Norm the stream."""
        if state.pending is None:
            return (norm(state.stream),), state
        stream, normed = add_norm(state.stream, state.pending, norm)
        return (normed,), PreNormState(stream, None)

    def write(self, state: PreNormState, site: int, y: Tensor) -> PreNormState:
        """Leave the output to the next read, which adds it to the stream."""
        return state._replace(pending=y)

    def settle(self, state: PreNormState) -> PreNormState:
        """Add the last write to the stream."""
        return state if state.pending is None else PreNormState(state.stream + state.pending, None)

    def finish(self, state: PreNormState, norm: Norm) -> Tensor:
        """Norm the stream."""
        (hidden,), _ = self.read(state, len(self.kinds), norm)
        return hidden
