"""Routing scores of one source and their gradient, shared by every read.

`b` stands for the batch axes, Q queries, H heads, R key width, D value width.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

KeyNorm = Literal["tail", "full", "none"]


class ScoreRule(NamedTuple):
    """How a key becomes a logit: `scale * <query_h, key_h> * rstd + bias`."""

    heads: int
    key_norm: KeyNorm
    eps: float
    scale: float


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which softmax, norms and sums over depth run."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def split_heads(x: Tensor, heads: int) -> Tensor:
    """View `[..., W]` as `[..., H, W / H]`."""
    return x.unflatten(-1, (heads, x.shape[-1] // heads))


def key_of(value: Tensor, key: Tensor | None, rank: int) -> Tensor:
    """Return the key of a source: the given one, or a view of its value's last `rank` columns."""
    return value[..., value.shape[-1] - rank :] if key is None else key


def contract(equation: str, *operands: Tensor) -> Tensor:
    """Compute an einsum in the dtype of its operands; under autocast it would round to 16 bits."""
    device = operands[0].device.type
    # meta has no autocast; asking which devices have one cannot be traced by torch 2.11
    if device == "meta" or not torch.is_autocast_enabled(device):
        return torch.einsum(equation, *operands)
    with torch.autocast(device, enabled=False):
        return torch.einsum(equation, *operands)


def raw_scores(
    value: Tensor, key: Tensor | None, query: Tensor, rule: ScoreRule
) -> tuple[Tensor, Tensor]:
    """Score one source against every query, before norm, scale and bias.

    Args:
        value: `[*b, D]`.
        key: `[*b, R]`, or None for the last R columns of `value`.
        query: `[Q, R]` in the accumulation dtype.
        rule: Heads, norm and eps.

    Returns:
        `dot`: `[Q, *b, H]`, the inner products; `rstd`: `[*b, 1]`, the inverse root mean square
        that the norm multiplies them by (ones for `key_norm="none"`).
    """
    key = key_of(value, key, query.shape[-1]).to(query.dtype)
    dot = contract("...hr,qhr->q...h", split_heads(key, rule.heads), split_heads(query, rule.heads))
    if rule.key_norm == "none":
        return dot, key.new_ones(()).expand(*key.shape[:-1], 1)
    wide = value.to(query.dtype) if rule.key_norm == "full" else key
    return dot, (wide.square().mean(-1, keepdim=True) + rule.eps).rsqrt()


class ScoreGrads(NamedTuple):
    """Gradients of the scores of one source, in the accumulation dtype."""

    key: Tensor  # [*b, R]
    value: Tensor | None  # [*b, D]; only the full-width norm reaches the whole value
    query: Tensor  # [Q, R]


def raw_scores_backward(
    grad_logit: Tensor,
    value: Tensor,
    key: Tensor | None,
    query: Tensor,
    dot: Tensor,
    rstd: Tensor,
    rule: ScoreRule,
) -> ScoreGrads:
    """Pull the gradient of the logits back to key, value and query.

    With `u = scale * grad_logit`, `n` the width under the norm and `x` what it normalises:
    `dk = rstd * sum_q u_q query_q`, `dx -= rstd^3 / n * (sum u dot) x`, `dquery = sum rstd u k`.

    Args:
        grad_logit: `[Q, *b, H]`.
        value, key, query, rule: As given to `raw_scores`.
        dot, rstd: As returned by it.
    """
    narrow = key_of(value, key, query.shape[-1]).to(query.dtype)
    grad_dot = grad_logit * (rule.scale * rstd)
    grad_key = contract("q...h,qhr->...hr", grad_dot, split_heads(query, rule.heads)).flatten(-2)
    grad_query = contract("q...h,...hr->qhr", grad_dot, split_heads(narrow, rule.heads)).flatten(-2)
    if rule.key_norm == "none":
        return ScoreGrads(grad_key, None, grad_query)
    pull = (grad_dot * dot).sum((0, -1)).unsqueeze(-1) * rstd.square()  # [*b, 1]
    if rule.key_norm == "full":
        wide = value.to(query.dtype)
        return ScoreGrads(grad_key, wide * (pull / -wide.shape[-1]), grad_query)
    return ScoreGrads(grad_key - narrow * (pull / narrow.shape[-1]), None, grad_query)
