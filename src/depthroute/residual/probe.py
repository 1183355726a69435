"""A wrapper around a scheme that shows its depth weights and reads."""

from collections.abc import Callable

import torch
from torch import Tensor

from depthroute.residual.base import Cost, Draw, Norm, ResidualScheme, State

Sink = Callable[[int, Tensor], None]
ReadSink = Callable[[int, tuple[Tensor, ...]], None]


class Probe(ResidualScheme):
    """Hand the depth weights or results of reads to sinks, and leave the outputs as they are.

    Pass it in place of the model's own scheme: `model(ids, residual=Probe(scheme, sink))`. The
    model keeps its scheme, so its parameters and state dict do not change.

    Args:
        scheme: Does all the work.
        sink: Called as `sink(site, weights)` before each read, the final one (site M) included;
            `weights` is `[roles, S, B, T, H]`, without gradient. Never called for a scheme or a
            site without depth weights; called again where activation checkpointing recomputes.
            None leaves the weights uncomputed.
        reads: Called as `reads(site, inputs)` after each read, the final one included, with what
            it returned: the normed inputs, one `[B, T, D]` per role, with their gradient.
    """

    def __init__(
        self, scheme: ResidualScheme, sink: Sink | None = None, *, reads: ReadSink | None = None
    ) -> None:
        super().__init__(scheme.config, dim=scheme.dim, kinds=scheme.kinds, eps=scheme.eps)
        self.scheme, self.sink, self.reads = scheme, sink, reads
        self.emit_dim, self.token_null = scheme.emit_dim, scheme.token_null

    @property
    def depth_block_ends(self) -> tuple[int, ...]:
        """Return those of the scheme."""
        return self.scheme.depth_block_ends

    def forward(self, x: Tensor) -> State:
        """Start the scheme."""
        return self.scheme(x)

    def read(self, state: State, site: int, norm: Norm) -> tuple[tuple[Tensor, ...], State]:
        """Show the weights, read, then show what was read."""
        self._show(state, site)
        inputs, state = self.scheme.read(state, site, norm)
        if self.reads is not None:
            self.reads(site, inputs)
        return inputs, state

    def write(self, state: State, site: int, y: Tensor) -> State:
        """Write."""
        return self.scheme.write(state, site, y)

    def settle(self, state: State) -> State:
        """Settle."""
        return self.scheme.settle(state)

    def finish(self, state: State, norm: Norm) -> Tensor:
        """Show the weights of the final read, finish, then show the result."""
        self._show(state, len(self.kinds))
        hidden = self.scheme.finish(state, norm)
        if self.reads is not None:
            self.reads(len(self.kinds), (hidden,))
        return hidden

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
        if self.sink is None:
            return
        weights = self.scheme.weights(state, site)
        if weights is not None:
            self.sink(site, weights)
