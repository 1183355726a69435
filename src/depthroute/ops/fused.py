"""Reads in Triton kernels: autograd functions in eager mode, registered operations in compiled.

Both call the same launchers. An eager call skips torch's dispatcher, which takes longer than a
small read.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from depthroute.ops.checks import Merge, Read
from depthroute.ops.registered import attend_op, merge_op
from depthroute.ops.scores import ScoreRule


def attend(read: Read, out_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return out `[Q, *b, D]` and lse `[Q, *b, H]` of a validated read."""
    if torch.compiler.is_compiling():
        out, lse, _, _ = attend_op(
            read.values, read.keys or (), read.query, read.bias, read.null, out_dtype, *read.rule
        )
        return out, lse
    return _Attend.apply(
        read.query,
        read.bias,
        read.null,
        read.rule,
        out_dtype,
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
        out, lse, *_ = merge_op(*arguments, *read.rule)
        return out, lse
    return _Merge.apply(*arguments, read.rule)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        bias: Tensor | None,
        null: Tensor | None,
        rule: ScoreRule,
        out_dtype: torch.dtype,
        num_sources: int,
        *tensors: Tensor,
    ) -> tuple[Tensor, Tensor]:
        from depthroute.ops.kernels.depth_attend_fwd import depth_attend_fwd

        values, keys = tensors[:num_sources], tensors[num_sources:] or None
        result = depth_attend_fwd(values, keys, query, bias, null, rule, out_dtype)
        ctx.save_for_backward(query, bias, null, result.dots, result.rstds, result.lse, *tensors)
        ctx.rule, ctx.num_sources = rule, num_sources
        ctx.set_materialize_grads(False)
        return result.out, result.lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
        from depthroute.ops.kernels.depth_attend_bwd import depth_attend_bwd

        query, bias, null, dots, rstds, lse, *tensors = ctx.saved_tensors
        values, keys = tensors[: ctx.num_sources], tensors[ctx.num_sources :] or None
        if grad_out is None:
            grad_out = values[0].new_zeros((len(query), *values[0].shape))
        grads = depth_attend_bwd(
            grad_out, grad_lse, values, keys, query, bias, null, dots, rstds, lse, ctx.rule
        )
        return (
            grads.query,
            grads.bias,
            grads.null,
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
        rule: ScoreRule,
    ) -> tuple[Tensor, Tensor]:
        from depthroute.ops.kernels.depth_merge import depth_merge_fwd

        result = depth_merge_fwd(out, lse, value, query, key, bias, rule)
        ctx.save_for_backward(out, lse, value, query, key, bias, *result[2:])
        ctx.rule = rule
        ctx.set_materialize_grads(False)
        return result.out, result.lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
        from depthroute.ops.kernels.depth_merge import depth_merge_bwd

        out, lse, value, query, key, bias, dots, rstds, keep, take = ctx.saved_tensors
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        grads = depth_merge_bwd(
            grad_out, grad_lse, out, lse, value, query, key, bias, dots, rstds, keep, take, ctx.rule
        )
        return *grads, None
