"""Reads in Triton kernels: autograd functions in eager mode, registered operations in compiled.

Both call the same launchers. An eager call skips torch's dispatcher, which takes longer than a
small read.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from depthroute.ops.checks import Merge, Read
from depthroute.ops.kernels.results import Attended
from depthroute.ops.registered import attend_op, merge_op
from depthroute.ops.scores import ScoreRule

_NUM_RESULTS = len(Attended._fields)


def attend(read: Read, out_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return out `[Q, *b, D]` and lse `[Q, *b, H]` of a validated read."""
    if torch.compiler.is_compiling():
        tensors = (read.values, read.keys or (), read.query, read.bias, read.null)
        out, lse, *_ = attend_op(*tensors, out_dtype, read.out_norm_eps, *read.rule)
        return out, lse
    return _Attend.apply(
        read.query,
        read.bias,
        read.null,
        read.rule,
        out_dtype,
        read.out_norm_eps,
        len(read.values),
        *read.values,
        *(read.keys or ()),
    )


def merge(given: Merge) -> tuple[Tensor, Tensor]:
    """Return out `[Q, *b, D]` and lse `[Q, *b, H]` of a validated merge."""
    read = given.read
    key = None if read.keys is None else read.keys[0]
    arguments = (given.out, given.lse, read.values[0], read.query, key, read.bias)
    if torch.compiler.is_compiling():
        out, lse, *_ = merge_op(*arguments, read.out_norm_eps, *read.rule)
        return out, lse
    return _Merge.apply(*arguments, read.out_norm_eps, read.rule)


class _Attend(torch.autograd.Function):
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
        from depthroute.ops.kernels.depth_attend_fwd import depth_attend_fwd

        values, keys = tensors[:num_sources], tensors[num_sources:] or None
        result = depth_attend_fwd(values, keys, query, bias, null, rule, out_dtype, out_norm_eps)
        ctx.save_for_backward(query, bias, null, *result, *tensors)
        ctx.rule, ctx.num_sources = rule, num_sources
        ctx.set_materialize_grads(False)
        return result.out, result.lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
        from depthroute.ops.kernels.depth_attend_bwd import depth_attend_bwd

        query, bias, null, *rest = ctx.saved_tensors
        read, tensors = Attended(*rest[:_NUM_RESULTS]), rest[_NUM_RESULTS:]
        values, keys = tensors[: ctx.num_sources], tensors[ctx.num_sources :] or None
        if grad_out is None:
            grad_out = values[0].new_zeros((len(query), *values[0].shape))
        given = (values, keys, query, bias, null)
        grads = depth_attend_bwd(grad_out, grad_lse, *given, read, ctx.rule)
        return (
            grads.query,
            grads.bias,
            grads.null,
            None,
            None,
            None,
            None,
            *grads.values.unbind(0),
            *(() if grads.keys is None else grads.keys.unbind(0)),
        )


class _Merge(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        out: Tensor,
        lse: Tensor,
        value: Tensor,
        query: Tensor,
        key: Tensor | None,
        bias: Tensor | None,
        out_norm_eps: float | None,
        rule: ScoreRule,
    ) -> tuple[Tensor, Tensor]:
        from depthroute.ops.kernels.depth_merge import depth_merge_fwd

        arguments = (out, lse, value, query, key, bias)
        result = depth_merge_fwd(*arguments, rule, out_norm_eps)
        ctx.save_for_backward(*arguments, *result[2:], result.normed)
        ctx.rule = rule
        ctx.set_materialize_grads(False)
        return result.out, result.lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
        from depthroute.ops.kernels.depth_merge import depth_merge_bwd

        arguments = (*ctx.saved_tensors, ctx.rule)
        if grad_out is None:
            grad_out = torch.zeros_like(arguments[0])
        return *depth_merge_bwd(grad_out, grad_lse, *arguments), None, None
