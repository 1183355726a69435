"""The Triton reads as operations that torch.compile takes whole, with their shapes and gradients.

Opaque (`custom_op`) rather than traced (`triton_op`): the launchers need addresses of tensors,
which a tracer's tensors lack, and the same path then runs in Triton's interpreter.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from depthroute.ops.kernels.layout import Layout
from depthroute.ops.kernels.results import (
    Attended,
    AttendGradients,
    Merged,
    MergeGradients,
    without_none,
)
from depthroute.ops.scores import KeyNorm, ScoreRule


@torch.library.custom_op("depthroute::attend", mutates_args=())
def attend_op(
    values: Sequence[Tensor],
    keys: Sequence[Tensor],
    query: Tensor,
    bias: Tensor | None,
    null: Tensor | None,
    out_dtype: torch.dtype,
    out_norm_eps: float | None,
    heads: int,
    key_norm: str,
    eps: float,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the `Attended` of a validated read; no keys is an empty list.

    Here and below, empty tensors stand for results that are None.
    """
    from depthroute.ops.kernels.depth_attend_fwd import depth_attend_fwd

    rule = ScoreRule(heads, cast(KeyNorm, key_norm), eps, scale)
    tensors = (values, keys or None, query, bias, null)
    return without_none(depth_attend_fwd(*tensors, rule, out_dtype, out_norm_eps), query)


@attend_op.register_fake
def _(values, keys, query, bias, null, out_dtype, out_norm_eps, *rule):  # type: ignore[no-untyped-def]
    at = Layout.of(values, keys or None, query, ScoreRule(*rule))
    return without_none(Attended.empty(at, values[0], out_dtype, out_norm_eps is not None), query)


@torch.library.custom_op("depthroute::attend_backward", mutates_args=())
def attend_backward_op(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    values: Sequence[Tensor],
    keys: Sequence[Tensor],
    query: Tensor,
    bias: Tensor | None,
    null: Tensor | None,
    out: Tensor,
    lse: Tensor,
    dots: Tensor,
    rstds: Tensor,
    out_rstds: Tensor | None,
    heads: int,
    key_norm: str,
    eps: float,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the `AttendGradients`."""
    from depthroute.ops.kernels.depth_attend_bwd import depth_attend_bwd

    rule = ScoreRule(heads, cast(KeyNorm, key_norm), eps, scale)
    read = Attended(out, lse, dots, rstds, out_rstds)
    given = (values, keys or None, query, bias, null)
    grads = depth_attend_bwd(grad_out, grad_lse, *given, read, rule)
    return without_none(grads, query)


@attend_backward_op.register_fake
def _(grad_out, grad_lse, values, keys, query, bias, null, *rest):  # type: ignore[no-untyped-def]
    return without_none(AttendGradients.empty(values, keys or None, query, bias, null), query)


def _attend_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    values, keys, query, bias, null, _, out_norm_eps, *ctx.rule = inputs
    *results, out_rstds = output
    ctx.num_sources = len(values)
    factors = None if out_norm_eps is None else out_rstds
    ctx.save_for_backward(query, bias, null, *results, factors, *values, *keys)
    ctx.set_materialize_grads(False)


def _attend_backward(
    ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, *unused: Tensor | None
) -> tuple[Any, ...]:
    query, bias, null, out, lse, dots, rstds, out_rstds, *tensors = ctx.saved_tensors
    values, keys = tensors[: ctx.num_sources], tensors[ctx.num_sources :]
    if grad_out is None:
        grad_out = values[0].new_zeros((len(query), *values[0].shape))
    read = (out, lse, dots, rstds, out_rstds)
    grads = attend_backward_op(
        grad_out, grad_lse, values, keys, query, bias, null, *read, *ctx.rule
    )
    return (
        list(grads[0].unbind(0)),
        list(grads[1].unbind(0)) if keys else [],
        grads[2],
        None if bias is None else grads[3],
        None if null is None else grads[4],
        *[None] * 6,
    )


attend_op.register_autograd(_attend_backward, setup_context=_attend_setup)


@torch.library.custom_op("depthroute::merge", mutates_args=())
def merge_op(
    out: Tensor,
    lse: Tensor,
    value: Tensor,
    query: Tensor,
    key: Tensor | None,
    bias: Tensor | None,
    out_norm_eps: float | None,
    heads: int,
    key_norm: str,
    eps: float,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the `Merged` of a validated merge."""
    from depthroute.ops.kernels.depth_merge import depth_merge_fwd

    rule = ScoreRule(heads, cast(KeyNorm, key_norm), eps, scale)
    result = depth_merge_fwd(out, lse, value, query, key, bias, rule, out_norm_eps)
    return without_none(result, query)


@merge_op.register_fake
def _(out, lse, value, query, key, bias, out_norm_eps, *rule):  # type: ignore[no-untyped-def]
    at = Layout.of([value], None if key is None else [key], query, ScoreRule(*rule))
    return without_none(Merged.empty(at, value, out_norm_eps is not None), query)


@torch.library.custom_op("depthroute::merge_backward", mutates_args=())
def merge_backward_op(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    value: Tensor,
    query: Tensor,
    key: Tensor | None,
    bias: Tensor | None,
    dots: Tensor,
    rstds: Tensor,
    keep: Tensor,
    take: Tensor,
    out_rstds: Tensor | None,
    normed: Tensor | None,
    heads: int,
    key_norm: str,
    eps: float,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the `MergeGradients`."""
    from depthroute.ops.kernels.depth_merge import depth_merge_bwd

    rule = ScoreRule(heads, cast(KeyNorm, key_norm), eps, scale)
    numbers = (dots, rstds, keep, take, out_rstds, normed)
    grads = depth_merge_bwd(grad_out, grad_lse, out, lse, value, query, key, bias, *numbers, rule)
    return without_none(grads, query)


@merge_backward_op.register_fake
def _(grad_out, grad_lse, out, lse, value, query, key, bias, *rest):  # type: ignore[no-untyped-def]
    return without_none(MergeGradients.empty(out, lse, value, query, key, bias), query)


def _merge_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *arguments, out_norm_eps = inputs[:7]
    of_norm = (None, None) if out_norm_eps is None else (output[6], output[0])
    ctx.rule = inputs[7:]
    ctx.save_for_backward(*arguments, *output[2:6], *of_norm)
    ctx.set_materialize_grads(False)


def _merge_backward(
    ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, *unused: Tensor | None
) -> tuple[Any, ...]:
    out, lse, value, query, key, bias, *numbers = ctx.saved_tensors
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    *grads, grad_key, grad_bias = merge_backward_op(
        grad_out, grad_lse, out, lse, value, query, key, bias, *numbers, *ctx.rule
    )
    return (
        *grads,
        None if key is None else grad_key,
        None if bias is None else grad_bias,
        *[None] * 5,
    )


merge_op.register_autograd(_merge_backward, setup_context=_merge_setup)
