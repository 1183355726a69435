"""Dual Attention Residuals: two streams, each weighed by the keys of the other."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from depthroute.config import config_dataclass
from depthroute.ops import depth_attend, depth_merge, depth_weights
from depthroute.ops.scores import accumulation_dtype
from depthroute.residual.base import Cost, Draw, Kind, Norm, ResidualScheme
from depthroute.residual.depth_blocks import block_ends, block_stops, check_blocks

_START = 4.0  # a gate's first logit; sigmoid(4) = 0.982

Pair = tuple[Tensor, ...]  # one tensor per stream


@config_dataclass
class DualConfig:
    """Settings of Dual Attention Residuals.

    Args:
        num_blocks: N, the blocks that the M writes go to; 0 makes every write a block.
        block_ends: Ends of uneven blocks, in writes, e.g. `(24, 48, 72)`; replaces `num_blocks`.
        form: What a write mixes and adds to: `"write"` the partial sums, `"state"` what was read.
        keyed_by: Whose keys weigh a stream's sources: the `"other"` stream's, or its `"own"`.
        rank: R, the last columns of a source that are its key; None takes all D.
    """

    name: Literal["dual"] = "dual"
    num_blocks: int = 8
    block_ends: tuple[int, ...] = ()
    form: Literal["write", "state"] = "write"
    keyed_by: Literal["other", "own"] = "other"
    rank: int | None = None

    def __post_init__(self) -> None:
        check_blocks(self.num_blocks, self.block_ends)
        if self.rank is not None and self.rank < 1:
            raise ValueError(f"rank must be >= 1, got {self.rank}")


class DualState(NamedTuple):
    """Sources of the reads to come; `[B, T, D]` each."""

    sources: tuple[Pair, ...]  # embedding and closed blocks
    partial: Pair | None  # the open block's source
    retrieved: Pair | None  # what was read from each stream, until the write
    ahead: tuple[tuple[Pair, ...], ...] | None  # phase 1: (out, lse) by the block's read and stream


class Dual(ResidualScheme):
    """Keep two streams of sources, and weigh the values of each by the keys of the other.

    `h^s = sum_i softmax_i(<q^s, norm(tail(v_i^{1-s}))>) v_i^s`; the sublayer reads
    `a h^0 + (1 - a) h^1`, and its output u goes to both streams:
    `p^s <- rho p^s + (1 - rho) p^{1-s} + B^s u`. Here p is the open block's partial sum; with
    `form = "state"` it is h on the right-hand side. `a` and `rho` are sigmoids of learned numbers,
    one per site; `B^s` is twice a sigmoid.

    Queries start at zero and both streams with the embedding, so equal gates would give equal
    gradients for ever. Read gates therefore start nearly one-hot and alternate: 0.982 for stream 0
    at even sites, for stream 1 at odd ones.

    Source: arXiv 2607.18730, in part; docs/schemes/dual.md says what is inferred.
    """

    Config = DualConfig

    def __init__(self, config: DualConfig, *, dim: int, kinds: Sequence[Kind], eps: float) -> None:
        super().__init__(config, dim=dim, kinds=kinds, eps=eps)
        count, self.rank = len(self.kinds), config.rank or dim
        if self.rank > dim:
            raise ValueError(f"rank must be at most the model width {dim}, got {self.rank}")
        self.ends = block_ends(config.num_blocks, config.block_ends, count)
        self.stops = block_stops(self.ends)
        # at the other writes both streams hold the embedding, or nothing yet
        alike = (0,) if config.form == "state" else (0, *self.ends)
        self.mixed = tuple(site for site in range(count) if site not in alike)
        # row t serves the read at site t + 1; of write gates, the write at site t
        self.query = nn.Parameter(torch.empty(count, 2, self.rank, dtype=torch.float32))
        self.read_gate = nn.Parameter(torch.empty(count, 1, dtype=torch.float32))
        self.write_gate = nn.Parameter(torch.empty(count, 2, dtype=torch.float32))
        mix_gate = torch.empty(len(self.mixed), 1, dtype=torch.float32)
        self.mix_gate = nn.Parameter(mix_gate) if self.mixed else None
        self.init_weights()

    @property
    def depth_block_ends(self) -> tuple[int, ...]:
        """Cut at block ends, where no phase-1 result is alive."""
        return self.ends

    def forward(self, x: Tensor) -> DualState:
        """Make the embedding the first source of both streams."""
        return DualState(((x, x),), None, None, None)

    def read(self, state: DualState, site: int, norm: Norm) -> tuple[Pair, DualState]:
        """Retrieve from both streams, and weigh the two by the read gate."""
        x = state.sources[0][0]
        if site == 0:
            return (norm(x),), state._replace(retrieved=(x, x))
        now, *later = self._read_ahead(state, site) if state.ahead is None else state.ahead
        retrieved = tuple(self._merge(state.partial, site, s, *pair) for s, pair in enumerate(now))
        h = torch.stack([a * h for a, h in zip(self._read_gates(site), retrieved, strict=True)])
        return (norm(h.sum(0).to(x.dtype)),), state._replace(retrieved=retrieved, ahead=later)

    def write(self, state: DualState, site: int, y: Tensor) -> DualState:
        """Mix the streams and add the output to both; close the block after its last write."""
        carried = state.retrieved if self.config.form == "state" else state.partial
        streams = self._mix(carried, site) if carried else (0, 0)
        gains = 2 * self.write_gate[site].sigmoid()
        streams = tuple((x + b * y).to(y.dtype) for x, b in zip(streams, gains, strict=True))
        if site + 1 not in self.ends:
            return state._replace(partial=streams, retrieved=None)
        return DualState((*state.sources, streams), None, None, None)
