"""The oracle of every op: plain PyTorch, differentiable twice, clear rather than fast."""

from collections.abc import Sequence

import torch
from torch import Tensor

from depthroute.ops import checks
from depthroute.ops.rms_norm import inverse_rms
from depthroute.ops.scores import KeyNorm, accumulation_dtype, raw_scores, split_heads


def logits_of(read: checks.Read) -> Tensor:
    """Return the logits `[Q, S, *b, H]` of a validated read."""
    query = read.query.to(accumulation_dtype(read.values[0].dtype))
    keys = read.keys or (None,) * len(read.values)
    scores = [raw_scores(v, k, query, read.rule) for v, k in zip(read.values, keys, strict=True)]
    logits = torch.stack([dot * rstd for dot, rstd in scores], dim=1) * read.rule.scale
    return logits if read.bias is None else logits + read.bias.unsqueeze(-1)


def lse_of(logits: Tensor, null: Tensor | None) -> Tensor:
    """Return the log-sum-exp `[Q, *b, H]` of logits `[Q, S, *b, H]` and the null logit `[Q, H]`."""
    lse = logits.logsumexp(dim=1)
    if null is None:
        return lse
    return torch.logaddexp(lse, null.view(null.shape[0], *([1] * (lse.ndim - 2)), null.shape[1]))


def finish(
    out: Tensor, out_norm_eps: float | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Norm an output `[Q, *b, D]` if asked to, and cast it; return it and the norm's factor."""
    if out_norm_eps is None:
        return out.to(dtype), None
    rstd = inverse_rms(out, eps=out_norm_eps)
    return (out * rstd).to(dtype), rstd


def attend(read: checks.Read, out_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return out `[Q, *b, D]` and lse `[Q, *b, H]` of a validated read."""
    logits = logits_of(read)
    lse = lse_of(logits, read.null)
    weights = torch.exp(logits - lse.unsqueeze(1)).unsqueeze(-1)
    # term by term, so that a compiler fuses casts and sum; stacked float32 copies cost memory
    first, *rest = (
        weights[:, i] * split_heads(value.to(lse.dtype), read.rule.heads)
        for i, value in enumerate(read.values)
    )
    out = sum(rest, first).flatten(-2)
    return finish(out, read.out_norm_eps, out_dtype)[0], lse


def merge(given: checks.Merge) -> tuple[Tensor, Tensor]:
    """Return out `[Q, *b, D]` and lse `[Q, *b, H]` of a validated merge."""
    out, lse, read = given
    logit = logits_of(read).squeeze(1)
    total = torch.logaddexp(lse, logit)
    wide = read.values[0].to(lse.dtype)
    old = split_heads(out.to(lse.dtype), read.rule.heads) * torch.exp(lse - total).unsqueeze(-1)
    new = split_heads(wide, read.rule.heads) * torch.exp(logit - total).unsqueeze(-1)
    merged = (old + new).flatten(-2)
    return finish(merged, read.out_norm_eps, read.values[0].dtype)[0], total


def depth_weights(
    values: Sequence[Tensor] | Tensor,
    query: Tensor,
    *,
    keys: Sequence[Tensor] | Tensor | None = None,
    heads: int = 1,
    key_norm: KeyNorm = "tail",
    eps: float = 1e-6,
    scale: float = 1.0,
    bias: Tensor | None = None,
    null: Tensor | float | None = None,
) -> Tensor:
    """Return the weights that `depth_attend` gives each source, differentiably.

    They sum to 1 over the sources, or to 1 minus the null's share where a null logit is given.

    Args:
        values, query, keys, heads, key_norm, eps, scale, bias, null: As for `depth_attend`.

    Returns:
        `[Q, S, *b, H]`, or `[S, *b, H]` for a query `[R]`; float32 (float64 for float64 values).

    Raises:
        ValueError: As for `depth_attend`.
    """
    read = checks.read(
        values,
        query,
        keys=keys,
        heads=heads,
        key_norm=key_norm,
        eps=eps,
        scale=scale,
        bias=bias,
        null=null,
    )
    logits = logits_of(read)
    weights = torch.exp(logits - lse_of(logits, read.null).unsqueeze(1))
    return weights if query.ndim == 2 else weights.squeeze(0)


def depth_attend_reference(
    values: Sequence[Tensor] | Tensor,
    query: Tensor,
    *,
    keys: Sequence[Tensor] | Tensor | None = None,
    heads: int = 1,
    key_norm: KeyNorm = "tail",
    eps: float = 1e-6,
    scale: float = 1.0,
    bias: Tensor | None = None,
    null: Tensor | float | None = None,
    out_dtype: torch.dtype | None = None,
    out_norm_eps: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute `depth_attend` by autograd; its oracle in the tests."""
    read = checks.read(
        values,
        query,
        keys=keys,
        heads=heads,
        key_norm=key_norm,
        eps=eps,
        scale=scale,
        bias=bias,
        null=null,
        out_norm_eps=out_norm_eps,
    )
    out, lse = attend(read, checks.out_dtype_of(out_dtype, read.values[0]))
    return (out, lse) if query.ndim == 2 else (out.squeeze(0), lse.squeeze(0))


def depth_merge_reference(
    out: Tensor,
    lse: Tensor,
    value: Tensor,
    query: Tensor,
    *,
    key: Tensor | None = None,
    key_norm: KeyNorm = "tail",
    eps: float = 1e-6,
    scale: float = 1.0,
    bias: Tensor | float | None = None,
    out_norm_eps: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute `depth_merge` by autograd; its oracle in the tests."""
    out, lse = merge(
        checks.merge(
            out,
            lse,
            value,
            query,
            key=key,
            key_norm=key_norm,
            eps=eps,
            scale=scale,
            bias=bias,
            out_norm_eps=out_norm_eps,
        )
    )
    return (out, lse) if query.ndim == 2 else (out.squeeze(0), lse.squeeze(0))
