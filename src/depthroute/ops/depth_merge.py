"""Adding one source to a finished read: the second phase of a two-phase read."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from depthroute.ops import backend, checks, fused, reference
from depthroute.ops.rms_norm import rms_norm_backward
from depthroute.ops.scores import (
    KeyNorm,
    ScoreRule,
    raw_scores,
    raw_scores_backward,
    split_heads,
)


def depth_merge(
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
    """Add one source to a finished read.

    `lse' = log(exp(lse) + exp(logit))`, `out' = exp(lse - lse') out + exp(logit - lse') value`.
    Exact: equals `depth_attend` over the old sources and this one, up to rounding.

    Args:
        out: The read so far, `[Q, *b, D]` (`[*b, D]` for a query `[R]`), any floating dtype; not
            normed, as only a mix of values merges.
        lse: Log-sum-exp of its logits, `[Q, *b, H]` (`[*b, H]`); its last axis sets the heads.
        value: The new source, `[*b, D]`.
        query: `[Q, R]` or `[R]`.
        key: Its separate key `[*b, R]`; None cuts it from the last R columns of `value`.
        key_norm, eps, scale: As for `depth_attend`.
        bias: Logit offset of the new source: a number, `[*b]` or `[Q, *b]`.
        out_norm_eps: As for `depth_attend`: norm the merged output, for a last merge.

    Returns:
        `(out, lse)` of the shapes given; `out` in the dtype of `value`, `lse` as it came.

    Raises:
        ValueError: A shape, dtype, device or number that does not fit; the message names it.

    Source: arXiv 2603.15031, two-phase computation.
    """
    given = checks.merge(
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
    if backend.runs_in_triton("depth_merge", given.read):
        out, lse = fused.merge(given)
    elif torch.compiler.is_compiling():  # see depth_attend
        out, lse = reference.merge(given)
    else:
        read = given.read
        offset = None if read.bias is None else read.bias.squeeze(1)
        out, lse = _DepthMerge.apply(
            given.out, given.lse, value, read.query, key, offset, read.rule, out_norm_eps
        )
    return (out, lse) if query.ndim == 2 else (out.squeeze(0), lse.squeeze(0))


class _DepthMerge(torch.autograd.Function):
    """The online-softmax step with its gradient in closed form."""

    @staticmethod
    def forward(
        ctx: Any,
        out: Tensor,
        lse: Tensor,
        value: Tensor,
        query: Tensor,
        key: Tensor | None,
        bias: Tensor | None,
        rule: ScoreRule,
        out_norm_eps: float | None,
    ) -> tuple[Tensor, Tensor]:
        wide = query.to(lse.dtype)
        dot, rstd = raw_scores(value, key, wide, rule)
        logit = dot * (rstd * rule.scale)
        if bias is not None:
            logit = logit + bias.unsqueeze(-1)
        total = torch.logaddexp(lse, logit)
        keep, take = torch.exp(lse - total), torch.exp(logit - total)  # [Q, *b, H]
        merged = keep.unsqueeze(-1) * split_heads(out, rule.heads).to(lse.dtype)
        merged.addcmul_(take.unsqueeze(-1), split_heads(value, rule.heads).to(lse.dtype))
        merged, out_rstd = reference.finish(merged.flatten(-2), out_norm_eps, value.dtype)
        normed = None if out_rstd is None else merged
        ctx.save_for_backward(out, value, query, key, dot, rstd, keep, take, normed, out_rstd)
        ctx.rule, ctx.has_bias = rule, bias is not None
        return merged, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Any, ...]:
        out, value, query, key, dot, rstd, keep, take, normed, out_rstd = ctx.saved_tensors
        rule: ScoreRule = ctx.rule
        wide = query.to(keep.dtype)
        grad = grad_out.to(keep.dtype)
        if out_rstd is not None:
            grad = rms_norm_backward(grad, normed, out_rstd)
        grad = split_heads(grad, rule.heads)  # [Q, *b, H, D/H]
        along_old = (grad * split_heads(out, rule.heads).to(keep.dtype)).sum(-1)
        along_new = (grad * split_heads(value, rule.heads).to(keep.dtype)).sum(-1)
        # moving mass from the old read to the new source changes the output along their difference
        moved = keep * take * (along_new - along_old)
        grad_logit = take * grad_lse + moved
        pull = raw_scores_backward(grad_logit, value, key, wide, dot, rstd, rule)
        grad_value = (take.unsqueeze(-1) * grad).sum(0).flatten(-2)
        if pull.value is not None:
            grad_value += pull.value
        grad_key = None
        if key is None:
            grad_value[..., grad_value.shape[-1] - wide.shape[-1] :] += pull.key
        else:
            grad_key = pull.key.to(key.dtype)
        return (
            (keep.unsqueeze(-1) * grad).flatten(-2).to(out.dtype),
            keep * grad_lse - moved,
            grad_value.to(value.dtype),
            pull.query.to(query.dtype),
            grad_key,
            grad_logit.sum(-1) if ctx.has_bias else None,
            None,
            None,
        )
