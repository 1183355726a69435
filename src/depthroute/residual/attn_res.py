"""Attention Residuals: full or block; keys, depth heads and roles of choice."""

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from depthroute.config import config_dataclass
from depthroute.ops import depth_attend, depth_merge, depth_weights
from depthroute.ops.scores import accumulation_dtype
from depthroute.residual.base import Cost, Draw, Kind, Norm, ResidualScheme
from depthroute.residual.depth_blocks import block_counts, block_ends, block_stops, check_blocks
from depthroute.residual.keys import KeyConfig, TailKey, build_key

_NUM_ROLES = {"shared": 1, "qk_v": 2, "q_k_v": 3}


@config_dataclass
class Summary:
    """How a block of c writes becomes a source: value `sum / c^alpha`, logit `+ beta log c`.

    The paper's form is alpha = beta = 0. With alpha = beta the routed vector only changes by a
    positive factor per token, which the norm after the read removes.
    """

    alpha: float = 0.0
    beta: float = 0.0


@config_dataclass
class AttnResConfig:
    """Settings of Attention Residuals.

    Args:
        num_blocks: N, the blocks that the M writes are summed into; 0 keeps every write (full).
            Block j ends after write `ceil(M j / N)`.
        block_ends: Ends of uneven blocks, in writes, e.g. `(24, 48, 72)`; replaces `num_blocks`.
        key: Where a source's routing key comes from, and its rank.
        heads: H depth heads, >= 1; divides the width and the rank. Head h scores with slice h of
            the R key columns and mixes slice h of the D value columns; keys are normed uncut.
        roles: Which inputs of an attention sublayer have a read, and a query, of their own: none;
            queries with keys, and values; or each of the three.
        summary: Exponents of a block's value and of its count in the logit.
    """

    name: Literal["attn_res"] = "attn_res"
    num_blocks: int = 8
    block_ends: tuple[int, ...] = ()
    key: KeyConfig = TailKey()
    heads: int = 1
    roles: Literal["shared", "qk_v", "q_k_v"] = "shared"
    summary: Summary = Summary()

    def __post_init__(self) -> None:
        check_blocks(self.num_blocks, self.block_ends)
        if self.heads < 1:
            raise ValueError(f"heads must be >= 1, got {self.heads}")
        if self.roles not in _NUM_ROLES:
            raise ValueError(f"roles must be one of {tuple(_NUM_ROLES)}, got {self.roles!r}")


class AttnResState(NamedTuple):
    """Sources of the reads to come."""

    values: tuple[Tensor, ...]  # embedding and closed blocks, [B, T, D]
    keys: tuple[Tensor, ...]  # their separate keys [B, T, R]; empty if cut from the values
    partial: Tensor | None  # sum of the open block's writes
    partial_key: Tensor | None
    # phase 1: (out [roles, B, T, D], lse [roles, B, T, H]) of the block's next reads
    ahead: tuple[tuple[Tensor, Tensor], ...] | None


class AttnRes(ResidualScheme):
    """Replace the residual sum by a softmax over depth with a learned query per read and role.

    `h_t = sum_i softmax_i(<q_t, norm(key_i)>) value_i` over the embedding, the sums of closed
    blocks and the open block's partial sum; with heads, separately for each pair of slices. Queries
    start at zero: a uniform mean. The first read sees the embedding alone and has no query, so it
    gives one input whatever the roles; the last one feeds the final norm.

    Reads run in two phases: when a block's first query comes, one pass over the closed sources
    serves all queries of the block; each read then only merges the partial sum.

    Raises:
        ValueError: Blocks, rank or heads do not fit the model.

    Source: arXiv 2603.15031 (full, block, two phases); arXiv 2607.09694, sections 3.2 to 3.5
    (low-rank keys); arXiv 2607.27230 (heads); arXiv 2608.01075 (roles).
    """

    Config = AttnResConfig

    def __init__(
        self, config: AttnResConfig, *, dim: int, kinds: Sequence[Kind], eps: float
    ) -> None:
        super().__init__(config, dim=dim, kinds=kinds, eps=eps)
        self.ends = block_ends(config.num_blocks, config.block_ends, len(self.kinds))
        self.counts, self.stops = block_counts(self.ends), block_stops(self.ends)
        self.key = build_key(config.key, dim=dim, eps=eps)
        self.emit_dim = self.key.emit_dim
        if dim % config.heads or self.key.rank % config.heads:
            raise ValueError(
                f"heads must divide the model width {dim} and the rank {self.key.rank}, "
                f"got {config.heads}"
            )
        roles = {"attention": _NUM_ROLES[config.roles]}
        # the inputs that each read gives by a query, sites 0 .. M
        self.num_roles = (0, *(roles.get(kind, 1) for kind in (*self.kinds, "head")[1:]))
        # rows starts[t] to starts[t + 1] serve the read at site t
        self.starts = (0, *accumulate(self.num_roles))
        self.query = nn.Parameter(torch.zeros(self.starts[-1], self.key.rank, dtype=torch.float32))

    @property
    def depth_block_ends(self) -> tuple[int, ...]:
        """Cut at block ends, where no phase-1 result is alive."""
        return self.ends

    def forward(self, x: Tensor) -> AttnResState:
        """Make the embedding the first source."""
        key = self.key(x, None)
        return AttnResState((x,), () if key is None else (key,), None, None, None)

    def read(
        self, state: AttnResState, site: int, norm: Norm
    ) -> tuple[tuple[Tensor, ...], AttnResState]:
        """Mix the sources by the queries of `site`."""
        if site == 0:
            return (norm(state.values[0]),), state
        ahead = self._read_ahead(state, site) if state.ahead is None else state.ahead
        (out, lse), *rest = ahead
        state = state._replace(ahead=tuple(rest))
        if state.partial is not None:
            count = self.counts[site]
            out, _ = depth_merge(
                out,
                lse,
                self._value(state.partial, count),
                self._queries(site, site + 1),
                key=state.partial_key,
                key_norm=self.key.norm,
                eps=self.eps,
                bias=self.config.summary.beta * math.log(count) or None,
            )
        out = out.to(state.values[0].dtype)
        return tuple(norm(role) for role in out.unbind(0)), state

    def write(self, state: AttnResState, site: int, y: Tensor) -> AttnResState:
        """Add to the open block, and close it after its last write."""
        value, emitted = (y, None) if not self.emit_dim else y.tensor_split((self.dim,), dim=-1)
        key = self.key(value, emitted)
        if state.partial is not None:
            value = state.partial + value
            key = None if key is None else state.partial_key + key
        if site + 1 not in self.ends:
            return state._replace(partial=value, partial_key=key)
        value = self._value(value, self.counts[site + 1])
        keys = state.keys if key is None else (*state.keys, key)
        return AttnResState((*state.values, value), keys, None, None, None)

    def finish(self, state: AttnResState, norm: Norm) -> Tensor:
        """Mix the sources once more, for the final norm and the head."""
        (hidden,), _ = self.read(state, len(self.kinds), norm)
        return hidden

    def weights(self, state: AttnResState, site: int) -> Tensor:
        """Return the softmax weights `[roles, S, B, T, H]`: embedding, blocks, partial sum."""
        values, keys = state.values, state.keys
        if site == 0:
            shape = (1, 1, *values[0].shape[:-1], self.config.heads)
            return values[0].new_ones(shape, dtype=accumulation_dtype(values[0].dtype))
        if state.partial is not None:
            values = (*values, self._value(state.partial, self.counts[site]))
            keys = keys if state.partial_key is None else (*keys, state.partial_key)
        return depth_weights(
            values,
            self._queries(site, site + 1),
            keys=keys or None,
            heads=self.config.heads,
            key_norm=self.key.norm,
            eps=self.eps,
            bias=self._bias(len(values), site, values[0]),
        )

    def init_weights(self, draw: Draw) -> None:
        """Set the queries to zero; key projections are drawn, or both would never move."""
        super().init_weights(draw)
        for parameter in self.key.parameters():
            draw(parameter)

    def cost(self) -> Cost:
        """Count `(D + R)` multiply-adds per source and query, and the key path."""
        num_scores = sum(n * self._num_sources(t) for t, n in enumerate(self.num_roles))
        width = self.dim + self.key.rank
        num_kept = len(self.ends) + 1
        return Cost(
            parameters=sum(p.numel() for p in self.parameters()),
            multiply_adds=width * num_scores + self.key.multiply_adds(len(self.kinds)),
            cached=(self.dim + self.key.kept_dim) * num_kept,
            cached_wide=self.key.kept_dim * num_kept,
        )

    def _read_ahead(self, state: AttnResState, site: int) -> tuple[tuple[Tensor, Tensor], ...]:
        """Run phase 1: the queries of `site` and the block's later reads over closed sources."""
        stop = self.stops[site]
        alone = stop == site + 1 and state.partial is None
        first = state.values[0]
        out, lse = depth_attend(
            state.values,
            self._queries(site, stop),
            keys=state.keys or None,
            heads=self.config.heads,
            key_norm=self.key.norm,
            eps=self.eps,
            bias=self._bias(len(state.values), site, first),
            # a result that will be merged is rounded once, after the merge
            out_dtype=None if alone else accumulation_dtype(first.dtype),
        )
        num_roles = self.num_roles[site:stop]
        return tuple(zip(out.split(num_roles), lse.split(num_roles), strict=True))

    def _queries(self, site: int, stop: int) -> Tensor:
        """Return the query rows of the reads at `site` to `stop - 1`."""
        return self.query[self.starts[site] : self.starts[stop]]

    def _num_sources(self, site: int) -> int:
        """Return how many sources the read at `site` sees."""
        return 1 + sum(end <= site for end in self.ends) + (site > 0 and site not in self.ends)

    def _value(self, total: Tensor, count: int) -> Tensor:
        alpha = self.config.summary.alpha
        return total * count**-alpha if alpha else total

    def _bias(self, num_sources: int, site: int, like: Tensor) -> Tensor | None:
        beta = self.config.summary.beta
        if not beta:
            return None
        closed = [self.counts[end] for end in self.ends if end <= site]
        sizes = [1, *closed, self.counts[site]][:num_sources]
        # filled on the device: a CUDA graph cannot record a copy from the host
        dtype = accumulation_dtype(like.dtype)
        return torch.cat([like.new_full((1,), beta * math.log(c), dtype=dtype) for c in sizes])
