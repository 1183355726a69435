"""Statistics of a model's depth weights over many tokens.

S sources, M sublayers (the reads are at sites 0 .. M), B batch, T tokens, H depth heads.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from depthroute.files import replacing
from depthroute.models import CausalLM
from depthroute.nn import Documents
from depthroute.residual.probe import Probe


@dataclass(frozen=True, kw_only=True, eq=False)
class DepthRecord:
    """Depth weights of a model, as statistics over tokens, averaged over roles and depth heads.

    Row t is the read at site t; the last one (site M) feeds the head, and site 0 sees the embedding
    alone. Column i is source i: the embedding, then blocks (or single writes) in order; several
    streams come in turn. The last source of a row may be the partial sum of a block still open, in
    the column that the block keeps when it closes; or the null. What a read does not see, or a site
    without weights, is NaN.

    Attributes:
        weights: Mean weight, float64 `[M + 1, S]`.
        spread: Standard deviation of the weight over tokens, float64 `[M + 1, S]`; 0 where the
            weights do not depend on the content.
        effective_sources: Mean of `N_eff = exp(entropy)`, the entropy taken per token, float64
            `[M + 1]`; from 1 (one source has all the weight) to the number of sources (uniform).
        max_weight: Mean of the largest weight of a token, float64 `[M + 1]`, in [0, 1].
        num_tokens: Tokens that the statistics cover.
    """

    weights: np.ndarray
    spread: np.ndarray
    effective_sources: np.ndarray
    max_weight: np.ndarray
    num_tokens: int

    @property
    def num_sources(self) -> np.ndarray:
        """Return how many sources each read sees, int64 `[M + 1]`: the upper limit of N_eff."""
        return np.count_nonzero(~np.isnan(self.weights), axis=1)

    @property
    def mean_effective_sources(self) -> float:
        """Return the mean of N_eff over the reads at sites 1 .. M, those with a choice."""
        return float(np.nanmean(self.effective_sources[1:]))

    def to_json(self) -> str:
        """Return all numbers as JSON, with null for NaN."""
        content = {
            name: np.where(np.isnan(value), np.array(None), value).tolist()
            for name, value in asdict(self).items()
        }
        return json.dumps({**content, "mean_effective_sources": self.mean_effective_sources})

    def save(self, path: str | Path) -> Path:
        """Write the arrays to one `.npz` file, atomically, and return its path.

        Raises:
            ValueError: `path` does not end in `.npz`.
        """
        path = Path(path)
        with replacing(path, suffix=".npz") as file:
            np.savez(file, **asdict(self))
        return path

    @classmethod
    def load(cls, path: str | Path) -> "DepthRecord":
        """Read what `save` wrote."""
        with np.load(path) as arrays:
            content = dict(arrays)
        return cls(**{**content, "num_tokens": int(content["num_tokens"])})


@torch.no_grad()
def record_depth(
    model: CausalLM, batches: Iterable[tuple[Tensor, Documents | None]]
) -> DepthRecord | None:
    """Run a model over batches and record how its reads weigh their sources.

    Sums run in float64; the memory does not grow with the number of tokens.

    Args:
        model: The model, which stays as it is.
        batches: Tokens `[B, T]` and document boundaries (None for one document per row) on the
            model's device. Every token counts the same, so how tokens are batched does not matter.

    Returns:
        The record, or None for a scheme without depth weights.

    Raises:
        ValueError: No tokens, or weights that are not finite.
    """
    sums: dict[int, _Sums] = {}

    def add(site: int, weights: Tensor) -> None:
        new = _sum_tokens(weights)
        sums[site] = _Sums(*map(torch.add, sums[site], new)) if site in sums else new

    scheme = model.model.residual
    probe = Probe(scheme, add)
    num_tokens = 0
    for ids, documents in batches:
        model.model(ids, documents=documents, residual=probe)
        num_tokens += ids.numel()
    if not num_tokens:
        raise ValueError("batches must hold at least one token, got none")
    return _record(sums, len(scheme.kinds) + 1, num_tokens) if sums else None


class _Sums(NamedTuple):
    """Sums of one read over tokens, float64."""

    weights: Tensor  # [roles, S, H]
    squares: Tensor  # [roles, S, H]
    effective: Tensor  # [roles, H]
    largest: Tensor  # [roles, H]


def _sum_tokens(weights: Tensor) -> _Sums:
    """Reduce weights `[roles, S, B, T, H]` over tokens."""
    weights = weights.double()
    effective = torch.special.entr(weights).sum(1).exp()  # [roles, B, T, H]
    return _Sums(
        weights=weights.sum((2, 3)),
        squares=weights.square().sum((2, 3)),
        effective=effective.sum((1, 2)),
        largest=weights.amax(1).sum((1, 2)),
    )


def _record(sums: dict[int, _Sums], num_reads: int, num_tokens: int) -> DepthRecord:
    num_sources = max(read.weights.shape[1] for read in sums.values())
    weights, spread = np.full((2, num_reads, num_sources), np.nan)
    effective, largest = np.full((2, num_reads), np.nan)
    for site, read in sums.items():
        mean = read.weights / num_tokens
        if not bool(mean.isfinite().all()):
            raise ValueError(f"the depth weights at site {site} are not finite: check the model")
        # per role and head, so that differences between them do not count as content;
        # rounding can leave a variance just below 0
        deviation = (read.squares / num_tokens - mean.square()).clamp_min(0).sqrt()
        seen = slice(mean.shape[1])
        weights[site, seen] = mean.mean((0, 2)).cpu()
        spread[site, seen] = deviation.mean((0, 2)).cpu()
        effective[site] = (read.effective / num_tokens).mean().item()
        largest[site] = (read.largest / num_tokens).mean().item()
    return DepthRecord(
        weights=weights,
        spread=spread,
        effective_sources=effective,
        max_weight=largest,
        num_tokens=num_tokens,
    )
