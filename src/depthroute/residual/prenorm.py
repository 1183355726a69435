"""The plain PreNorm residual sum."""

from typing import Literal

from torch import Tensor

from depthroute.config import config_dataclass
from depthroute.residual.base import Norm, ResidualScheme


@config_dataclass
class PreNormConfig:
    """The fixed residual sum; it has no settings."""

    name: Literal["prenorm"] = "prenorm"


class PreNorm(ResidualScheme):
    """The fixed sum `h_{t+1} = h_t + f_t(norm(h_t))`; the state is the stream itself."""

    Config = PreNormConfig

    def forward(self, x: Tensor) -> Tensor:
        """Start the stream with the embedding."""
        return x

    def read(self, state: Tensor, site: int, norm: Norm) -> tuple[tuple[Tensor, ...], Tensor]:
        """Norm the stream."""
        return (norm(state),), state

    def write(self, state: Tensor, site: int, y: Tensor) -> Tensor:
        """Add to the stream."""
        return state + y

    def finish(self, state: Tensor, norm: Norm) -> Tensor:
        """Norm the stream."""
        return norm(state)
