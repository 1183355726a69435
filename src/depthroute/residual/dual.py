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
        one, two = (self._merge(state.partial, site, s, *pair) for s, pair in enumerate(now))
        gate_one, gate_two = self._read_gates(site)
        h = (gate_one * one + gate_two * two).to(x.dtype)
        return (norm(h),), state._replace(retrieved=(one, two), ahead=tuple(later))

    def write(self, state: DualState, site: int, y: Tensor) -> DualState:
        """Mix the streams and add the output to both; close the block after its last write."""
        wide = y.to(accumulation_dtype(y.dtype))
        written = [2 * gate.sigmoid() * wide for gate in self.write_gate[site]]
        carried = state.retrieved if self.config.form == "state" else state.partial
        if carried is not None:
            mixed = self._mix(carried, site)
            written = [a + b for a, b in zip(mixed, written, strict=True)]
        pair = tuple(value.to(y.dtype) for value in written)
        if site + 1 not in self.ends:
            return state._replace(partial=pair, retrieved=None)
        return DualState((*state.sources, pair), None, None, None)

    def finish(self, state: DualState, norm: Norm) -> Tensor:
        """Read once more, for the final norm and the head."""
        (hidden,), _ = self.read(state, len(self.kinds), norm)
        return hidden

    def weights(self, state: DualState, site: int) -> Tensor:
        """Return the weights `[1, 2 S, B, T, 1]`, read gates included; they sum to 1.

        Column `2 i + s` is source i of stream s: embedding, closed blocks, the open block. At site
        0 the embedding is the only column.
        """
        x = state.sources[0][0]
        if site == 0:
            return x.new_ones((1, 1, *x.shape[:-1], 1), dtype=accumulation_dtype(x.dtype))
        sources = state.sources if state.partial is None else (*state.sources, state.partial)
        streams = []
        for s, gate in enumerate(self._read_gates(site)):
            values, keys = self._stream(sources, s)
            query = self.query[site - 1 : site, s]
            streams.append(gate * depth_weights(values, query, keys=keys, eps=self.eps))
        return torch.stack(streams, dim=2).flatten(1, 2)

    @torch.no_grad()
    def init_weights(self, draw: Draw | None = None) -> None:
        """Start with zero queries, alternating read gates, B = 1, rho = 0.982; nothing is drawn."""
        self.query.zero_()
        self.read_gate[0::2] = -_START  # odd sites
        self.read_gate[1::2] = _START
        self.write_gate.zero_()
        if self.mix_gate is not None:
            self.mix_gate.fill_(_START)

    def cost(self) -> Cost:
        """Count `2 (D + R)` multiply-adds per source and read, and D per product with a gate."""
        count, reads = len(self.kinds), range(1, len(self.kinds) + 1)
        closed = sum(end <= site for site in reads for end in self.ends)
        num_sources = count + closed + sum(site not in self.ends for site in reads)
        gates = 2 * count + 2 * count + 4 * len(self.mixed)  # read, write, mix
        return Cost(
            parameters=sum(p.numel() for p in self.parameters()),
            multiply_adds=2 * (self.dim + self.rank) * num_sources + self.dim * gates,
            cached=self.dim * (2 * len(self.ends) + 1),  # both streams share the embedding
        )

    def _read_ahead(self, state: DualState, site: int) -> tuple[tuple[Pair, ...], ...]:
        """Run phase 1: the queries of `site` and the block's later reads over closed sources."""
        streams, dtype = [], accumulation_dtype(state.sources[0][0].dtype)
        for s in (0, 1):
            values, keys = self._stream(state.sources, s)
            query = self.query[site - 1 : self.stops[site] - 1, s]
            reads = depth_attend(values, query, keys=keys, eps=self.eps, out_dtype=dtype)
            streams.append(zip(*reads, strict=True))
        return tuple(zip(*streams, strict=True))

    def _merge(self, partial: Pair | None, site: int, s: int, out: Tensor, lse: Tensor) -> Tensor:
        """Run phase 2 for stream `s`: add the open block's source."""
        if partial is None:
            return out
        (value,), (key,) = self._stream((partial,), s)
        # a merge rounds to its value's dtype, but the read is rounded once, after the read gate
        wide = value.to(out.dtype)
        return depth_merge(out, lse, wide, self.query[site - 1, s], key=key, eps=self.eps)[0]

    def _stream(self, sources: tuple[Pair, ...], s: int) -> tuple[list[Tensor], list[Tensor]]:
        """Return the values and the keys of stream `s`."""
        t = 1 - s if self.config.keyed_by == "other" else s
        return [pair[s] for pair in sources], [pair[t][..., -self.rank :] for pair in sources]

    def _read_gates(self, site: int) -> Pair:
        """Return what the streams' reads are multiplied by; the two sum to 1."""
        logit = self.read_gate[site - 1]
        return logit.sigmoid(), (-logit).sigmoid()

    def _mix(self, pair: Pair, site: int) -> Pair:
        """Multiply by the doubly stochastic `[[rho, 1 - rho], [1 - rho, rho]]`."""
        if self.mix_gate is None or site not in self.mixed:
            return pair
        rho = self.mix_gate[self.mixed.index(site)].sigmoid()
        a, b = (x.to(accumulation_dtype(x.dtype)) for x in pair)
        return rho * a + (1 - rho) * b, (1 - rho) * a + rho * b
