"""Depth-wise attention: one read over all sources, with a closed-form gradient."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from depthroute.ops import backend, checks, fused, reference
from depthroute.ops.rms_norm import rms_norm_backward
from depthroute.ops.scores import (
    KeyNorm,
    ScoreRule,
    accumulation_dtype,
    raw_scores,
    raw_scores_backward,
    split_heads,
)


def depth_attend(
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
    """Mix sources by a softmax over depth, separately for each token.

    `logit_i = scale * <query, norm(key_i)> + bias_i`, `weight = softmax_i(logit)`,
    `out = sum_i weight_i value_i`. A null logit takes part in the softmax with value zero.

    The gradient is a closed form that saves the sources, and per source and token one logit for
    each query and head and one inverse root mean square; nothing of the sources' size is copied.
    The output is saved too, as returned, by the kernels and where it is normed.

    Args:
        values: S sources `[*b, D]`, as a sequence or stacked `[S, *b, D]`; any strides.
        query: `[R]`, or `[Q, R]` for several reads of the same sources in one pass.
        keys: S separate keys `[*b, R]`; None cuts them from the last R columns of the values.
        heads: H routing heads; values and keys are cut into H equal slices, after the norm.
        key_norm: "tail" normalises the R columns of the key, "full" all D columns of the value
            before the cut, "none" takes the key as it is.
        eps: Added to the mean square under the norm, > 0.
        scale: Factor of the inner product.
        bias: Logit offsets, `[S]`, `[S, *b]` or `[Q, S, *b]`.
        null: Logit of the null source: a number, `[H]` or `[Q, H]`.
        out_dtype: Dtype of `out`; None keeps the values' dtype.
        out_norm_eps: Norm `out` over all D columns, as `rms_norm` with this eps, > 0, in float32
            (float64 for float64 values) before its one cast; None leaves it as it is. Gradients
            know the normed output as it was returned, rounded to its dtype.

    Returns:
        `out`: `[Q, *b, D]`; `lse`: `[Q, *b, H]`, the log-sum-exp of the logits, float32 (float64
        for float64 values). For a query `[R]` both lack the first axis.

    Raises:
        ValueError: A shape, dtype, device or number that does not fit; the message names it.

    Source: arXiv 2603.15031 (AttnRes); arXiv 2607.09694, section 3 (low-rank keys).
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
        out_norm_eps=out_norm_eps,
    )
    dtype = checks.out_dtype_of(out_dtype, read.values[0])
    if backend.runs_in_triton("depth_attend", read):
        out, lse = fused.attend(read, dtype)
    # the C++ backend of torch 2.13 gave wrong gradients of a whole decoder with `_DepthAttend`
    # inside, though right ones of a single read; let it derive them from the plain form
    elif torch.compiler.is_compiling():
        out, lse = reference.attend(read, dtype)
    else:
        out, lse = _DepthAttend.apply(
            read.query,
            read.bias,
            read.null,
            read.rule,
            dtype,
            out_norm_eps,
            len(read.values),
            *read.values,
            *(read.keys or ()),
        )
    return (out, lse) if query.ndim == 2 else (out.squeeze(0), lse.squeeze(0))


def depth_read(
    values: Sequence[Tensor] | Tensor, query: Tensor, eps: float = 1e-6, **options: Any
) -> Tensor:
    """Return the mix of `depth_attend` alone: `out = sum_i weight_i value_i`.

    Args:
        values: S sources `[*b, D]`, as a sequence or stacked.
        query: `[R]`, or `[Q, R]` for several reads.
        eps: Added to the mean square under the norm of the keys, > 0.
        options: Others of `depth_attend`.

    Returns:
        `[*b, D]` for a query `[R]`, else `[Q, *b, D]`.

    Raises:
        ValueError: As `depth_attend`.
    """
    return depth_attend(values, query, eps=eps, **options)[0]


class _DepthAttend(torch.autograd.Function):
    """Loop over the sources; the stacked `[S, *b, D]` never exists."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        bias: Tensor | None,
        null: Tensor | None,
        rule: ScoreRule,
        out_dtype: torch.dtype,
        out_norm_eps: float | None,
        num_sources: int,
        *tensors: Tensor,
    ) -> tuple[Tensor, Tensor]:
        values = tensors[:num_sources]
        keys = tensors[num_sources:] or (None,) * num_sources
        wide = query.to(accumulation_dtype(values[0].dtype))
        scores = [raw_scores(v, k, wide, rule) for v, k in zip(values, keys, strict=True)]
        dots = torch.stack([dot for dot, _ in scores], dim=1)  # [Q, S, *b, H]
        rstds = torch.stack([rstd for _, rstd in scores])  # [S, *b, 1]
        logits = _logits(dots, rstds, bias, rule)
        lse = reference.lse_of(logits, null)
        weights = torch.exp(logits - lse.unsqueeze(1)).unsqueeze(-1)
        out = torch.zeros(
            (len(wide), *split_heads(values[0], rule.heads).shape),
            dtype=wide.dtype,
            device=wide.device,
        )
        for i, value in enumerate(values):
            out.addcmul_(weights[:, i], split_heads(value, rule.heads).to(wide.dtype))
        out, out_rstd = reference.finish(out.flatten(-2), out_norm_eps, out_dtype)
        normed = None if out_rstd is None else out
        ctx.save_for_backward(query, bias, null, dots, rstds, lse, normed, out_rstd, *tensors)
        ctx.rule, ctx.num_sources = rule, num_sources
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Any, ...]:
        query, bias, null, dots, rstds, lse, normed, out_rstd, *tensors = ctx.saved_tensors
        rule: ScoreRule = ctx.rule
        values = tensors[: ctx.num_sources]
        keys = tensors[ctx.num_sources :] or (None,) * ctx.num_sources
        wide = query.to(lse.dtype)
        grad = grad_out.to(lse.dtype)
        if out_rstd is not None:
            grad = rms_norm_backward(grad, normed, out_rstd)
        grad = split_heads(grad, rule.heads)  # [Q, *b, H, D/H]
        weights = torch.exp(_logits(dots, rstds, bias, rule) - lse.unsqueeze(1))
        along = torch.stack(
            [(grad * split_heads(v, rule.heads).to(lse.dtype)).sum(-1) for v in values], dim=1
        )  # <grad, value_i>, [Q, S, *b, H]
        rest = grad_lse - (weights * along).sum(1)  # [Q, *b, H]
        grad_logits = weights * (along + rest.unsqueeze(1))

        grad_query = torch.zeros_like(wide)
        grad_values, grad_keys = [], []
        for i, (value, key) in enumerate(zip(values, keys, strict=True)):
            pull = raw_scores_backward(
                grad_logits[:, i], value, key, wide, dots[:, i], rstds[i], rule
            )
            grad_query += pull.query
            grad_value = (weights[:, i].unsqueeze(-1) * grad).sum(0).flatten(-2)
            if pull.value is not None:
                grad_value += pull.value
            if key is None:
                grad_value[..., grad_value.shape[-1] - wide.shape[-1] :] += pull.key
            else:
                grad_keys.append(pull.key.to(key.dtype))
            grad_values.append(grad_value.to(value.dtype))

        grad_bias = None if bias is None else grad_logits.sum(-1).sum_to_size(bias.shape)
        grad_null = None
        if null is not None:
            spread = null.view(null.shape[0], *([1] * (lse.ndim - 2)), null.shape[1])
            share = torch.exp(spread - lse) * rest
            grad_null = share.sum(tuple(range(1, share.ndim - 1)))
        return (
            grad_query.to(query.dtype),
            grad_bias,
            grad_null,
            None,
            None,
            None,
            None,
            *grad_values,
            *grad_keys,
        )


def _logits(dots: Tensor, rstds: Tensor, bias: Tensor | None, rule: ScoreRule) -> Tensor:
    logits = dots * (rstds * rule.scale)
    return logits if bias is None else logits + bias.unsqueeze(-1)
