"""Attention Residuals: full or block; keys, depth heads and roles of choice."""

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from depthroute.config import config_dataclass
from depthroute.ops import depth_weights
from depthroute.ops.block import Ahead, add_merge_norm, merge_norm, read_ahead, scaled
from depthroute.ops.scores import ScoreRule, accumulation_dtype
from depthroute.residual.base import Cost, Draw, Kind, Norm, ResidualScheme
from depthroute.residual.depth_blocks import (
    block_counts,
    block_ends,
    block_stops,
    check_blocks,
    read_groups,
)
from depthroute.residual.keys import KeyConfig, TailKey, build_key

# reads that one pass over the closed sources serves, where blocks are shorter
_READS_AHEAD = 7
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
    """Sources of the reads to come. The last write waits to be added by the next read's kernel.

    So does a key that was emitted with it: as columns of the write, `[B, T, D + R]`, which is the
    total if it is the block's first. A write that closes its block has its key taken at once.
    """

    values: tuple[Tensor, ...]  # embedding and closed blocks, [B, T, D]
    keys: tuple[Tensor, ...]  # their separate keys [B, T, R]; empty if cut from the values
    total: Tensor | None  # sum of the open block's writes
    pending: Tensor | None  # a write that `total` lacks, or the last value where no block is open
    total_key: Tensor | None
    queries: tuple[Tensor, ...]  # of the blocks to come, [rows, R]
    ahead: Ahead | None  # phase 1 of the next reads
    num_read: int  # values that it has read

    @property
    def last_write(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the open block, if it has more than its last write, and that write."""
        return (None, self.total) if self.pending is None else (self.total, self.pending)


class AttnRes(ResidualScheme):
    """Replace the residual sum by a softmax over depth with a learned query per read and role.

    `h_t = sum_i softmax_i(<q_t, norm(key_i)>) value_i` over the embedding, the sums of closed
    blocks and the open block's partial sum; with heads, separately for each pair of slices. Queries
    start at zero: a uniform mean. The first read sees the embedding alone and has no query, so it
    gives one input whatever the roles; the last one feeds the final norm.

    Reads run in two phases: when a block's first query comes, one pass over the closed sources
    serves all queries of the block, in kernels those of some short blocks; each read then only
    merges what came since.

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
        self.rule = ScoreRule(config.heads, self.key.norm, eps, 1.0)
        roles = {"attention": _NUM_ROLES[config.roles]}
        # the inputs that each read gives by a query, sites 0 .. M
        self.num_roles = (0, *(roles.get(kind, 1) for kind in (*self.kinds, "head")[1:]))
        # rows starts[t] to starts[t + 1] serve the read at site t
        self.starts = (0, *accumulate(self.num_roles))
        self.groups = read_groups(self.ends, _READS_AHEAD)
        cuts = [*(self.starts[site] for site in self.groups), self.starts[-1]]
        self.rows = [stop - start for start, stop in pairwise(cuts)] if self.ends else []
        self.query = nn.Parameter(torch.zeros(self.starts[-1], self.key.rank, dtype=torch.float32))

    @property
    def depth_block_ends(self) -> tuple[int, ...]:
        """Cut at block ends where no phase-1 result is alive."""
        return (*(site for site in self.groups if 1 < site < len(self.kinds)), len(self.kinds))

    def forward(self, x: Tensor) -> AttnResState:
        """Make the embedding the first source."""
        key = self.key(x, None)
        # without gradients detached: views of a parameter say that they have one, and torch's tools
        # that hook a module's results believe it
        query = self.query if torch.is_grad_enabled() else self.query.detach()
        # cut once: the gradient of the queries is then put together once
        queries = query.split(self.rows)
        keys = () if key is None else (key,)
        return AttnResState((x,), keys, None, None, None, queries, None, 0)

    def read(
        self, state: AttnResState, site: int, norm: Norm
    ) -> tuple[tuple[Tensor, ...], AttnResState]:
        """Mix the sources by the queries of `site`."""
        if site == 0:
            return (norm(state.values[0]),), state
        if state.ahead is None:
            state = self._read_ahead(state, site, norm)
        if len(state.values) > state.num_read:
            return self._merge(state, site, norm)
        ahead, num_roles = state.ahead, self.num_roles[site]
        assert ahead is not None
        total, y = state.last_write
        if y is None:
            return ahead.outs[:num_roles], state._replace(ahead=ahead.without(num_roles))
        key, count, roles = state.total_key, self.counts[site], []
        for _ in range(num_roles):
            y, key, role = add_merge_norm(
                ahead,
                total,
                y,
                key=key,
                key_sum=self.key.key_sum,
                share=self._share(count),
                bias=self.config.summary.beta * math.log(count) or None,
                rule=self.rule,
                norm=norm,
            )
            roles.append(role)
            total, ahead = None, ahead.without(1)
        return tuple(roles), state._replace(total=y, pending=None, total_key=key, ahead=ahead)

    def _merge(
        self, state: AttnResState, site: int, norm: Norm
    ) -> tuple[tuple[Tensor, ...], AttnResState]:
        """Read at a site before which blocks closed that phase 1 did not see."""
        state = self.settle(state)
        is_open = () if state.total is None else (self._scaled(state.total, site),)
        ahead, values, roles = state.ahead, state.values, []
        assert ahead is not None
        for _ in range(self.num_roles[site]):
            new = (*values[state.num_read :], *is_open)
            role, new = merge_norm(ahead, new, rule=self.rule, norm=norm)
            values = (*values[: state.num_read], *new[: len(values) - state.num_read])
            roles.append(role)
            ahead = ahead.without(1)
        return tuple(roles), state._replace(values=values, ahead=ahead)

    def write(self, state: AttnResState, site: int, y: Tensor) -> AttnResState:
        """Leave the output to the next read, which adds it to its block."""
        closes, key = site + 1 in self.ends, state.total_key
        if not self.emit_dim:
            key = self.key(y, None, key)
        elif closes:  # phase 1 takes keys whole
            y, key = self._take_key(y, key)
        if closes:
            return self._close(state, site + 1, y, key)
        if state.total is None:
            return state._replace(total=y, total_key=key)
        return state._replace(pending=y, total_key=key)

    def _take_key(self, y: Tensor, total_key: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the value of a write, and the key of its block, which may lack the write's."""
        if y.shape[-1] == self.dim:
            return y, total_key
        value, emitted = y.tensor_split((self.dim,), dim=-1)
        return value, self.key(value, emitted, total_key)

    def _close(
        self, state: AttnResState, end: int, value: Tensor, key: Tensor | None
    ) -> AttnResState:
        """Make the open block a source, with its last write pending if there are others."""
        if state.total is None:
            last, pending = self._scaled(value, end), None
        else:
            last, pending = state.total, value
        return state._replace(
            values=(*state.values, last),
            keys=state.keys if key is None else (*state.keys, key),
            total=None,
            pending=pending,
            total_key=None,
            ahead=state.ahead if state.ahead is not None and state.ahead.outs else None,
        )

    def settle(self, state: AttnResState) -> AttnResState:
        """Add the last write to its block."""
        total, y = state.last_write
        if y is None:
            return state
        if state.total is not None:
            value, key = self._take_key(y, state.total_key)
            total = value if total is None else total + value
            return state._replace(total=total, pending=None, total_key=key)
        *values, last = state.values
        end = self.ends[len(values) - 1]
        last = self._scaled(last + y, end)
        return state._replace(values=(*values, last), pending=None)

    def finish(self, state: AttnResState, norm: Norm) -> Tensor:
        """Mix the sources once more, for the final norm and the head."""
        (hidden,), _ = self.read(state, len(self.kinds), norm)
        return hidden

    def weights(self, state: AttnResState, site: int) -> Tensor:
        """Return the softmax weights `[roles, S, B, T, H]`: embedding, blocks, partial sum."""
        state = self.settle(state)
        values, keys = state.values, state.keys
        if site == 0:
            shape = (1, 1, *values[0].shape[:-1], self.config.heads)
            return values[0].new_ones(shape, dtype=accumulation_dtype(values[0].dtype))
        if state.total is not None:
            values = (*values, self._scaled(state.total, site))
            keys = keys if state.total_key is None else (*keys, state.total_key)
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

    def _read_ahead(self, state: AttnResState, site: int, norm: Norm) -> AttnResState:
        """Run phase 1: the queries of `site` and the block's later reads over closed sources."""
        query, *queries = state.queries
        is_open = state.total is not None
        ahead, values, keys = read_ahead(
            state.values,
            query,
            keys=state.keys or None,
            pending=None if is_open else state.pending,
            share=1.0 if is_open else self._share(self.counts[site]),
            bias=self._bias(len(state.values), site, state.values[0]),
            rule=self.rule,
            complete=0 if is_open else self.num_roles[site],
            num_now=self.starts[self.stops[site]] - self.starts[site],
            norm=norm,
        )
        if ahead.rest is not None:
            queries = [ahead.rest, *queries]
        return state._replace(
            values=values,
            keys=keys,
            pending=state.pending if is_open else None,
            queries=tuple(queries),
            ahead=ahead,
            num_read=len(values),
        )

    def _queries(self, site: int, stop: int) -> Tensor:
        """Return the query rows of the reads at `site` to `stop - 1`."""
        return self.query[self.starts[site] : self.starts[stop]]

    def _num_sources(self, site: int) -> int:
        """Return how many sources the read at `site` sees."""
        return 1 + sum(end <= site for end in self.ends) + (site > 0 and site not in self.ends)

    def _share(self, count: int) -> float:
        """Return the factor of a sum of so many writes as a source."""
        return count**-self.config.summary.alpha

    def _scaled(self, total: Tensor, site: int) -> Tensor:
        return scaled(total, self._share(self.counts[site]))

    def _bias(self, num_sources: int, site: int, like: Tensor) -> Tensor | None:
        beta = self.config.summary.beta
        if not beta:
            return None
        closed = [self.counts[end] for end in self.ends if end <= site]
        sizes = [1, *closed, self.counts[site]][:num_sources]
        # filled on the device: a CUDA graph cannot record a copy from the host
        dtype = accumulation_dtype(like.dtype)
        return torch.cat([like.new_full((1,), beta * math.log(c), dtype=dtype) for c in sizes])
