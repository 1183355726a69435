"""OASIS: Attention Residuals that discount what token attention could not place."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from depthroute.config import config_dataclass
from depthroute.ops import depth_attend, depth_merge, depth_weights
from depthroute.ops.scores import accumulation_dtype
from depthroute.residual.base import Cost, Draw, Kind, Norm, ResidualScheme
from depthroute.residual.depth_blocks import block_counts, block_ends, block_stops, check_blocks
from depthroute.residual.keys import TailKey, build_key


@config_dataclass
class OasisConfig:
    """Settings of OASIS on Attention Residuals.

    Args:
        num_blocks, block_ends: As for `AttnResConfig`.
        key: How many last columns of a value are its key, and their norm.
        depth_null: Run Softmax1 over depth too: a null source with logit 0 and value 0.
    """

    name: Literal["oasis"] = "oasis"
    num_blocks: int = 8
    block_ends: tuple[int, ...] = ()
    key: TailKey = TailKey()
    depth_null: bool = False

    def __post_init__(self) -> None:
        check_blocks(self.num_blocks, self.block_ends)


class OasisState(NamedTuple):
    """Sources of the reads to come, and their null masses `[B, T]`."""

    values: tuple[Tensor, ...]  # embedding and closed blocks, [B, T, D]
    nulls: tuple[Tensor, ...]  # 0 for the embedding, the mean over its writes for a block
    partial: tuple[Tensor, Tensor] | None  # sums of the open block: writes, null masses
    latest: Tensor  # null mass of the latest attention
    ahead: tuple[tuple[Tensor, Tensor], ...] | None  # phase 1: (out, lse) of the block's next reads


class Oasis(ResidualScheme):
    """Read as AttnRes does, but lower a source's logit by the null mass of its attention.

    `h_t = sum_i softmax_i(<q_t, norm(key_i)> - beta_t (psi_i - mean_j psi_j)) value_i`, with
    `beta_t = min(softplus(beta_raw_t), 10)`. The null mass psi is what Softmax1 token attention
    gave to no token; an MLP's write has that of the attention before it. At the start queries are
    zero and `beta_raw` is -5: nearly a uniform mean.

    A softmax over depth ignores the mean. With a depth null, to raise all logits by `beta mean psi`
    is to lower the null's by it: the first phase need not know the sources still to come.

    Raises:
        ValueError: Blocks or rank do not fit the model.

    Source: arXiv 2605.17887, on the base of arXiv 2603.15031.
    """

    Config = OasisConfig
    token_null = True

    def __init__(self, config: OasisConfig, *, dim: int, kinds: Sequence[Kind], eps: float) -> None:
        super().__init__(config, dim=dim, kinds=kinds, eps=eps)
        self.ends = block_ends(config.num_blocks, config.block_ends, len(self.kinds))
        self.counts, self.stops = block_counts(self.ends), block_stops(self.ends)
        self.key = build_key(config.key, dim=dim, eps=eps)
        # row t serves the read at site t + 1
        self.query = nn.Parameter(torch.empty(len(self.kinds), self.key.rank, dtype=torch.float32))
        self.beta_raw = nn.Parameter(torch.empty(len(self.kinds), 1, dtype=torch.float32))
        self.init_weights()

    @property
    def depth_block_ends(self) -> tuple[int, ...]:
        """Cut at block ends, where no phase-1 result is alive."""
        return self.ends

    def forward(self, x: Tensor) -> OasisState:
        """Make the embedding the first source, with a null mass of 0."""
        null = x.new_zeros(x.shape[:-1], dtype=accumulation_dtype(x.dtype))
        return OasisState((x,), (null,), None, null, None)

    def read(
        self, state: OasisState, site: int, norm: Norm
    ) -> tuple[tuple[Tensor, ...], OasisState]:
        """Mix the sources by the query of `site`."""
        if site == 0:
            return (norm(state.values[0]),), state
        ahead = self._read_ahead(state, site) if state.ahead is None else state.ahead
        (out, lse), *rest = ahead
        values, bias = self._sources(state, site)
        if self.config.depth_null:
            total = torch.logaddexp(lse, bias.mean(0).unsqueeze(-1))
            out, lse = torch.exp(lse - total) * out, total
        if state.partial is not None:
            query, bias = self.query[site - 1], bias[-1]
            out, _ = depth_merge(
                out, lse, values[-1], query, key_norm=self.key.norm, eps=self.eps, bias=bias
            )
        return (norm(out.to(values[0].dtype)),), state._replace(ahead=tuple(rest))

    def write(self, state: OasisState, site: int, y: Tensor) -> OasisState:
        """Add to the open block, and close it after its last write."""
        value, null = y, state.latest
        if self.kinds[site] == "attention":
            value, null = y[..., : self.dim], y[..., self.dim].to(null.dtype)
        total = null
        if state.partial is not None:
            value, total = state.partial[0] + value, state.partial[1] + null
        if site + 1 not in self.ends:
            return state._replace(partial=(value, total), latest=null)
        nulls = (*state.nulls, total / self.counts[site + 1])
        return OasisState((*state.values, value), nulls, None, null, None)

    def finish(self, state: OasisState, norm: Norm) -> Tensor:
        """Mix the sources once more, for the final norm and the head."""
        (hidden,), _ = self.read(state, len(self.kinds), norm)
        return hidden

    def weights(self, state: OasisState, site: int) -> Tensor:
        """Return the weights `[1, S, B, T, 1]`; with a depth null, its share is the last source."""
        if site == 0:
            return torch.ones_like(state.nulls[0]).view(1, 1, *state.nulls[0].shape, 1)
        values, bias = self._sources(state, site)
        bias = bias - bias.mean(0)
        if self.config.depth_null:
            values = (*values, torch.zeros_like(values[0]))
            bias = torch.cat([bias, torch.zeros_like(bias[:1])])
        query = self.query[site - 1 : site]
        return depth_weights(values, query, key_norm=self.key.norm, eps=self.eps, bias=bias)

    @torch.no_grad()
    def init_weights(self, draw: Draw | None = None) -> None:
        """Set the queries to zero and every `beta_raw` to -5; nothing is drawn."""
        self.query.zero_()
        self.beta_raw.fill_(-5.0)

    def cost(self) -> Cost:
        """Count `D + R + 1` multiply-adds per source and read, and D per read for a depth null."""
        reads = range(1, len(self.kinds) + 1)
        closed = [1 + sum(end <= site for end in self.ends) for site in reads]
        num_scores = sum(closed) + sum(site not in self.ends for site in reads)
        products = (self.dim + self.key.rank + 1) * num_scores
        products += self.config.depth_null * self.dim * len(reads)
        num_parameters = self.query.numel() + self.beta_raw.numel()
        num_kept = len(self.ends) + 1
        return Cost(num_parameters, products, (self.dim + 1) * num_kept, cached_wide=num_kept)

    def _sources(self, state: OasisState, site: int) -> tuple[tuple[Tensor, ...], Tensor]:
        """Return all sources, the open block's last, and `-beta psi` of each, `[S, B, T]`."""
        values, nulls = state.values, state.nulls
        if state.partial is not None:
            value, total = state.partial
            values, nulls = (*values, value), (*nulls, total / self.counts[site])
        return values, self._bias(nulls, site, site + 1).squeeze(0)

    def _bias(self, nulls: tuple[Tensor, ...], site: int, stop: int) -> Tensor:
        """Return `-beta psi` of the reads at `site` to `stop - 1`, `[reads, S, B, T]`."""
        beta = F.softplus(self.beta_raw[site - 1 : stop - 1]).clamp(max=10.0)
        return -beta[..., None, None] * torch.stack(nulls)

    def _read_ahead(self, state: OasisState, site: int) -> tuple[tuple[Tensor, Tensor], ...]:
        """Run phase 1: the queries of `site` and the block's later reads over closed sources."""
        stop = self.stops[site]
        out, lse = depth_attend(
            state.values,
            self.query[site - 1 : stop - 1],
            key_norm=self.key.norm,
            eps=self.eps,
            bias=self._bias(state.nulls, site, stop),
            out_dtype=state.latest.dtype,  # rounded once, after the null and the merge
        )
        return tuple(zip(out.unbind(0), lse.unbind(0), strict=True))
