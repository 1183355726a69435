"""Cross-entropy from hidden states, without the logits of the whole batch."""

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
    hidden: Tensor, weight: Tensor, targets: Tensor, *, chunk_tokens: int = 4096
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
    sums = [
        checkpoint(_chunk, h, weight, t, use_reentrant=False, preserve_rng_state=False)
        for h, t in zip(hidden.split(chunk_tokens), targets.split(chunk_tokens), strict=True)
    ]
    cross_entropy, squared_lse = (torch.stack(part).sum() for part in zip(*sums, strict=True))
    return LossSums(cross_entropy, squared_lse, (targets != IGNORE).sum())


def _chunk(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    logits = F.linear(hidden, weight)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    lse = logits.logsumexp(-1)
    known = targets != IGNORE
    picked = logits.gather(-1, targets.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    zero = lse.new_zeros(())
    return torch.where(known, lse - picked, zero).sum(), torch.where(known, lse**2, zero).sum()
