"""Cross-entropy from hidden states, without the logits of the whole batch."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

IGNORE = -100
"""Target of a token that has no loss."""


class LossSums(NamedTuple):
    """Sums over the tokens that have a target; divide by the global `tokens`."""

    cross_entropy: Tensor  # float32 scalar, nats
    squared_lse: Tensor  # float32 scalar, sum of squared log-sum-exp, for the z-loss
    tokens: Tensor  # int64 scalar


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    chunk_tokens: int = 4096,
    chunk: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
) -> LossSums:
    """Sum the cross-entropy of `softmax(hidden W^T)` against targets, in recomputed chunks.

    `ce = sum_t lse_t - logit_t[target_t]`, with `lse_t = log sum_v exp logit_t[v]`. The product
    runs in the dtype of `hidden`, everything after it in float32 (float64 for float64). At most
    `chunk_tokens * V` logits exist at a time, in the backward pass too.

    Args:
        hidden: `[..., D]`.
        weight: `[V, D]`.
        targets: `[...]`, int64 in `[0, V)`, or `IGNORE`.
        chunk_tokens: Tokens per chunk, >= 1.
        chunk: What computes a chunk; None is `chunk_sums`, a compiled form of it may be given. The
            last chunk is left to `chunk_sums` if it is smaller than the others.

    Returns:
        The sums; a batch without targets gives zeros with zero gradients.

    Raises:
        ValueError: Shapes that do not match, or `chunk_tokens` below 1.
    """
    if hidden.shape[:-1] != targets.shape:
        raise ValueError(
            f"targets must have the shape {tuple(hidden.shape[:-1])} of the hidden states, "
            f"got {tuple(targets.shape)}"
        )
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be >= 1, got {chunk_tokens}")
    hidden, targets = hidden.flatten(0, -2), targets.flatten()
    weight = weight.to(hidden.dtype)
    # a compiled form has a graph for each size, or one for all after some: which of them runs must
    # not change between a chunk and its recomputation, as what they keep may differ
    whole, sums = min(chunk_tokens, len(targets)), []
    for h, t in zip(hidden.split(chunk_tokens), targets.split(chunk_tokens), strict=True):
        run = chunk_sums if chunk is None or len(t) < whole else chunk
        sums.append(checkpoint(run, h, weight, t, use_reentrant=False, preserve_rng_state=False))
    cross_entropy, squared_lse = (torch.stack(part).sum() for part in zip(*sums, strict=True))
    return LossSums(cross_entropy, squared_lse, (targets != IGNORE).sum())


def chunk_sums(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the summed cross-entropy and squared log-sum-exp of one chunk, `[N, D]` and `[N]`."""
    logits = F.linear(hidden, weight)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    known = targets != IGNORE
    cross_entropy = F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="none")
    picked = logits.gather(-1, targets.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    lse = torch.where(known, cross_entropy + picked, 0.0)
    return cross_entropy.sum(), lse.square().sum()
