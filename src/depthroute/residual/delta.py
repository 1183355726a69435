"""Delta Attention Residuals: a read over past changes of the stream is added to the stream."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from depthroute.config import config_dataclass
from depthroute.ops import depth_attend, depth_weights
from depthroute.ops.scores import accumulation_dtype
from depthroute.residual.base import Cost, Draw, Kind, Norm, ResidualScheme
from depthroute.residual.depth_blocks import block_ends, block_stops, check_blocks
from depthroute.residual.keys import TailKey, ValueKeyConfig, build_key

_GATE_STARTS = {"scalar": 0.0, "sigmoid": -2.0}


@config_dataclass
class DeltaConfig:
    """Settings of Delta Attention Residuals.

    Args:
        num_blocks: N, the depth blocks whose deltas are sources; 0 makes every write a source.
            Block j ends after write `ceil(M j / N)`. The last block is no source, so not 1.
        block_ends: Ends of uneven blocks, in writes, e.g. `(24, 48, 72)`; replaces `num_blocks`.
        key: Where a source's routing key comes from, and its rank.
        gate: Factor of what is added, one per read: 1; a learned number, 0 at the start; or the
            sigmoid of one, -2 at the start.
        null: Whether each softmax has a null source, with a learned logit, 0 at the start.
        recurrence: What a block's delta is the difference to: the stream at the block's start, or
            the source before, as in the authors' released code. Without blocks no difference.
    """

    name: Literal["delta"] = "delta"
    num_blocks: int = 8
    block_ends: tuple[int, ...] = ()
    key: ValueKeyConfig = TailKey()
    gate: Literal["none", "scalar", "sigmoid"] = "none"
    null: bool = False
    recurrence: Literal["block_start", "previous_entry"] = "block_start"

    def __post_init__(self) -> None:
        check_blocks(self.num_blocks, self.block_ends)
        if (len(self.block_ends) or self.num_blocks) == 1:
            raise ValueError("num_blocks must be 0 or >= 2: the last block is no source, got 1")


class DeltaState(NamedTuple):
    """The stream, and the sources of the reads to come."""

    stream: Tensor  # the plain residual sum, [B, T, D]
    start: Tensor  # the stream at the start of the open block
    values: tuple[Tensor, ...]  # embedding and deltas, [B, T, D]
    keys: tuple[Tensor, ...]  # their separate keys [B, T, R]; empty if cut from the values
    ahead: tuple[Tensor, ...] | None  # what the block's next reads add to the stream


class Delta(ResidualScheme):
    """Keep the residual sum; each sublayer reads it plus a softmax mix of its past changes.

    `x_t = s_t + g_t sum_i softmax_i(<q_t, norm(key_i)>) v_i`, `s_{t+1} = s_t + f_t(norm(x_t))`. The
    sources `v_i` are the embedding and all earlier writes, or the deltas of closed blocks. The mix
    never enters the stream. The first sublayer and the head read the stream alone. Queries start at
    zero: a uniform mean. With `gate = "scalar"` the start is, bit for bit, the plain residual sum.

    One pass over the sources, when a block's first read comes, serves all its queries. Without a
    null the first block's reads see the embedding alone: no choice, hence no queries.

    Raises:
        ValueError: Blocks or rank do not fit the model.

    Source: arXiv 2605.18855.
    """

    Config = DeltaConfig

    def __init__(self, config: DeltaConfig, *, dim: int, kinds: Sequence[Kind], eps: float) -> None:
        super().__init__(config, dim=dim, kinds=kinds, eps=eps)
        self.ends = block_ends(config.num_blocks, config.block_ends, len(self.kinds))
        self.stops = block_stops(self.ends)
        # the first row of queries and null logits serves the read at this site
        self.first = self.ends[0] if self.ends and not config.null else 1
        num_queries, num_reads = (max(len(self.kinds) - t, 0) for t in (self.first, 1))
        self.key = build_key(config.key, dim=dim, eps=eps)
        self.query = _filled(0.0, num_queries, self.key.rank)
        self.null = _filled(0.0, num_queries, 1) if config.null else None
        start = _GATE_STARTS.get(config.gate)
        self.gate = None if start is None else _filled(start, num_reads, 1)

    @property
    def depth_block_ends(self) -> tuple[int, ...]:
        """Cut at block ends, where no result of a read is alive."""
        return self.ends

    def forward(self, x: Tensor) -> DeltaState:
        """Start the stream with the embedding, which is also the first source."""
        key = self.key(x, None)
        return DeltaState(x, x, (x,), () if key is None else (key,), None)

    def read(
        self, state: DeltaState, site: int, norm: Norm
    ) -> tuple[tuple[Tensor, ...], DeltaState]:
        """Add the read of `site` to the stream, in float32, for this sublayer alone."""
        if site == 0:
            return (norm(state.stream),), state
        ahead = self._read_ahead(state, site) if state.ahead is None else state.ahead
        routed, *rest = ahead
        if self.gate is not None:
            gate = self.gate[site - 1]
            routed = routed * (gate.sigmoid() if self.config.gate == "sigmoid" else gate)
        x = (state.stream + routed).to(state.stream.dtype)
        return (norm(x),), state._replace(ahead=tuple(rest))

    def write(self, state: DeltaState, site: int, y: Tensor) -> DeltaState:
        """Add to the stream; after each block but the last, add its delta to the sources."""
        stream = state.stream + y
        if site + 1 not in self.ends[:-1]:
            return state._replace(stream=stream)
        previous = self.config.recurrence == "previous_entry"
        has_blocks = self.config.num_blocks or self.config.block_ends
        value = stream - (state.values[-1] if previous else state.start) if has_blocks else y
        key = self.key(value, None)
        keys = state.keys if key is None else (*state.keys, key)
        return DeltaState(stream, stream, (*state.values, value), keys, None)

    def finish(self, state: DeltaState, norm: Norm) -> Tensor:
        """Norm the stream."""
        return norm(state.stream)

    def weights(self, state: DeltaState, site: int) -> Tensor | None:
        """Return `[1, S, B, T, 1]` over embedding, deltas and a null; None without a query."""
        if not self.first <= site < len(self.kinds):
            return None
        weights = self._over_sources(depth_weights, state, site, site + 1)
        if self.null is None:
            return weights
        _, lse = self._over_sources(depth_attend, state, site, site + 1)
        null = (self.null[site - self.first] - lse).exp()
        return torch.cat((weights, null.unsqueeze(1)), dim=1)

    def init_weights(self, draw: Draw) -> None:
        """Set queries and null logits to zero, gates to their start; key projections are drawn."""
        super().init_weights(draw)
        if self.gate is not None:
            nn.init.constant_(self.gate, _GATE_STARTS[self.config.gate])
        for parameter in self.key.parameters():
            draw(parameter)

    def cost(self) -> Cost:
        """Count `(D + R)` multiply-adds per source and query, D per gate, and the key path."""
        sites = range(self.first, len(self.kinds))
        num_sources = sum(1 + sum(end <= site for end in self.ends) for site in sites)
        width = self.dim + self.key.rank
        scores_and_mixes = width * num_sources + self.key.multiply_adds(len(self.ends) - 1)
        gates = 0 if self.gate is None else self.dim * self.gate.numel()
        num_kept = max(len(self.ends), 1)
        return Cost(
            parameters=sum(p.numel() for p in self.parameters()),
            multiply_adds=scores_and_mixes + gates,
            cached=(self.dim + self.key.kept_dim) * num_kept,
            cached_wide=self.key.kept_dim * num_kept,
        )

    def _read_ahead(self, state: DeltaState, site: int) -> tuple[Tensor, ...]:
        """Read for `site` and the block's later sites."""
        stop = self.stops[site]
        if site < self.first:
            return (state.values[0],) * (stop - site)
        dtype = accumulation_dtype(state.stream.dtype)  # rounded once, after the sum
        out, _ = self._over_sources(depth_attend, state, site, stop, out_dtype=dtype)
        return out.unbind(0)

    def _over_sources(
        self, op: Callable[..., Any], state: DeltaState, site: int, stop: int, **options: Any
    ) -> Any:
        """Apply an op of the depth reads to the queries of the sites from `site` to `stop`."""
        rows = slice(site - self.first, stop - self.first)
        return op(
            state.values,
            self.query[rows],
            keys=state.keys or None,
            key_norm=self.key.norm,
            eps=self.eps,
            null=None if self.null is None else self.null[rows],
            **options,
        )


def _filled(start: float, *shape: int) -> nn.Parameter:
    return nn.Parameter(torch.full(shape, start, dtype=torch.float32))
