"""A wrapper around a scheme that shows its depth weights."""

from collections.abc import Callable

import torch
from torch import Tensor

from depthroute.residual.base import Cost, Draw, Norm, ResidualScheme, State

Sink = Callable[[int, Tensor], None]


class Probe(ResidualScheme):
    """Hand the depth weights of every read to a sink, and leave the outputs as they are.

    Pass it in place of the model's own scheme: `model(ids, residual=Probe(scheme, sink))`. The
    model keeps its scheme, so its parameters and state dict do not change.

    Args:
        scheme: Does all the work.
        sink: Called as `sink(site, weights)` before each read, the final one (site M) included;
            `weights` is `[roles, S, B, T, H]`, without gradient. Never called for a scheme or a
            site without depth weights; called again where activation checkpointing recomputes.
    """

    def __init__(self, scheme: ResidualScheme, sink: Sink) -> None:
        super().__init__(scheme.config, dim=scheme.dim, kinds=scheme.kinds, eps=scheme.eps)
        self.scheme, self.sink = scheme, sink
        self.emit_dim, self.token_null = scheme.emit_dim, scheme.token_null

    @property
    def depth_block_ends(self) -> tuple[int, ...]:
        """Return those of the scheme."""
        return self.scheme.depth_block_ends

    def forward(self, x: Tensor) -> State:
        """Start the scheme."""
        return self.scheme(x)

    def read(self, state: State, site: int, norm: Norm) -> tuple[tuple[Tensor, ...], State]:
        """Show the weights, then read."""
        self._show(state, site)
        return self.scheme.read(state, site, norm)

    def write(self, state: State, site: int, y: Tensor) -> State:
        """Write."""
        return self.scheme.write(state, site, y)

    def finish(self, state: State, norm: Norm) -> Tensor:
        """Show the weights of the final read, then finish."""
        self._show(state, len(self.kinds))
        return self.scheme.finish(state, norm)

    def weights(self, state: State, site: int) -> Tensor | None:
        """Return the weights of the scheme."""
        return self.scheme.weights(state, site)

    def init_weights(self, draw: Draw) -> None:
        """Initialise the scheme."""
        self.scheme.init_weights(draw)

    def cost(self) -> Cost:
        """Return the cost of the scheme; probing is not counted."""
        return self.scheme.cost()

    @torch.no_grad()
    def _show(self, state: State, site: int) -> None:
        weights = self.scheme.weights(state, site)
        if weights is not None:
            self.sink(site, weights)
