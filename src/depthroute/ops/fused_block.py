"""The block schedule in Triton kernels: its two steps with their gradients.

Under torch.compile the launchers are called as registered operations. Their gradients stay in
autograd functions, traced by the compiler: sources pass through them, which no registered operation
with a gradient of its own may do.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from depthroute.ops import registered_block as registered
from depthroute.ops.block import Ahead, BlockRead, Site

_NUM_SAVED = 5  # results of phase 1 that its backward pass takes, from `first` to `norm_rstds`


def read_ahead(
    given: BlockRead, rest: Tensor | None
) -> tuple[Ahead, tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Run phase 1; see `depthroute.ops.block.read_ahead`."""
    if not torch.is_grad_enabled():
        return _read_ahead_alone(given, rest)
    num_values, keys = len(given.values), given.keys or ()
    options = (given.rule, given.share, given.norm_eps)
    tensors = (*given.values, *keys, *(() if given.pending is None else (given.pending,)))
    results = _ReadAhead.apply(given.query, num_values, len(keys), options, *tensors)
    num = len(given.query)
    outs, lses, queries = (results[i * num : (i + 1) * num] for i in range(3))
    values = results[3 * num : 3 * num + num_values]
    return Ahead(outs, lses, queries, True, rest), values, results[3 * num + num_values :]


def _read_ahead_alone(
    given: BlockRead, rest: Tensor | None
) -> tuple[Ahead, tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Run phase 1 without gradients: an autograd function takes as long as a small launch."""
    first, out, lse, closed, *_ = registered.read_ahead_fwd(given)
    values = given.values if closed is None else (*given.values[:-1], closed)
    reads = _reads(first, out, values[-1], len(lse))
    ahead = Ahead(reads, lse.unbind(0), given.query.unsqueeze(1).unbind(0), True, rest)
    return ahead, values, given.keys or ()


def merge(given: BlockRead) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Merge several sources; see `depthroute.ops.block.merge_norm`."""
    if not torch.is_grad_enabled():
        query = given.query[:1]
        return registered.read_ahead_fwd(given._replace(query=query))[0], given.values[1:]
    options = (given.rule, given.norm_eps)
    out, *values = _Merge.apply(given.query, given.lse, options, *given.values)
    return out, tuple(values)


def site(given: Site) -> tuple[Tensor, Tensor | None, Tensor]:
    """Run a site; see `depthroute.ops.block.add_merge_norm`."""
    key = None if given.key is None else given.key.contiguous()
    if not torch.is_grad_enabled():
        new_total, new_key, out, _ = registered.site_fwd(given._replace(key=key))
        value = _block_value(given.pending, new_total, out)
        return value, key if new_key is None else new_key, out
    options = given[6:]
    total, out, *new_key = _Site.apply(options, *given[:5], key)
    return total, new_key[0] if new_key else key, out


class _ReadAhead(torch.autograd.Function):
    """Phase 1. Sources pass through, and their gradients with them.

    What a later block adds to a source's gradient comes back here and is added to in the kernel:
    autograd has nothing to sum. The same holds for the queries, whose sites return rows to sum.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        # not named: without gradients Dynamo of torch 2.11 leaves ctx out where it counts as many
        # arguments as names
        query, num_values, num_keys, options, *tensors = arguments
        values, keys = tensors[:num_values], tensors[num_values : num_values + num_keys]
        pending = tensors[num_values + num_keys] if len(tensors) > num_values + num_keys else None
        rule, share, norm_eps = options
        given = BlockRead(tuple(values), tuple(keys) or None, pending, query, rule, share, norm_eps)
        first, out, lse, closed, *saved = registered.read_ahead_fwd(given)
        threaded = [x.view_as(x) for x in (*values, *keys)]
        if closed is not None:
            threaded[num_values - 1] = closed
            values = [*values[:-1], closed]
        ctx.save_for_backward(query, first, *saved, *values, *keys)
        ctx.num_values, ctx.options, ctx.closes = num_values, options, pending is not None
        ctx.set_materialize_grads(False)
        rows = registered.site_rows(lse[0].numel(), values[0].shape[-1], query.device)
        slots = [row.expand(rows, query.shape[1]) for row in query.unbind(0)]
        reads = _reads(first, out, values[-1], len(query))
        return (*reads, *lse.unbind(0), *slots, *threaded)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        query, *rest = ctx.saved_tensors
        saved, tensors = rest[:_NUM_SAVED], rest[_NUM_SAVED:]
        values, keys = tensors[: ctx.num_values], tensors[ctx.num_values :]
        rule, share, norm_eps = ctx.options
        num = len(query)
        like = values[0]
        grad_outs = [torch.zeros_like(like) if g is None else g for g in grads[:num]]
        grad_lses = [
            like.new_zeros(like.shape[:-1], dtype=torch.float32) if g is None else g
            for g in grads[num : 2 * num]
        ]
        # the first read may have no site; all others have
        slots = _with_zeros(grads[2 * num + (norm_eps is not None) : 3 * num])
        later = grads[3 * num :]
        given = BlockRead(
            tuple(values), tuple(keys) or None, like if ctx.closes else None, query, rule, share,
            norm_eps,
        )  # fmt: skip
        grad_values, grad_keys, _, grad_query = registered.read_ahead_bwd(
            given,
            saved,
            grad_outs,
            grad_lses,
            _with_zeros(later[: ctx.num_values]) or None,
            _with_zeros(later[ctx.num_values :]) or None,
            slots,
        )
        per_value = grad_values.unbind(0)
        per_key = () if grad_keys is None else grad_keys.unbind(0)
        pending = (per_value[-1],) if ctx.closes else ()
        return (grad_query, None, None, None, *per_value, *per_key, *pending)


class _Merge(torch.autograd.Function):
    """Phase 1 of one query over a read and some sources, which pass through."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        query, lse, (rule, norm_eps), *values = arguments  # not named, as above
        given = BlockRead(tuple(values), None, None, query[:1], rule, 1.0, norm_eps, lse)
        first, _, _, _, *saved = registered.read_ahead_fwd(given)
        ctx.save_for_backward(query, lse, first, *saved, *values)
        ctx.options = rule, norm_eps
        ctx.set_materialize_grads(False)
        return (first, *(x.view_as(x) for x in values[1:]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor | None, *later: Tensor | None) -> tuple[Any, ...]:
        query, lse, *rest = ctx.saved_tensors
        saved, values = rest[:_NUM_SAVED], rest[_NUM_SAVED:]
        first = saved[0]
        rule, norm_eps = ctx.options
        given = BlockRead(tuple(values), None, None, query[:1], rule, 1.0, norm_eps, lse)
        grad_values, _, grad_lse, grad_query = registered.read_ahead_bwd(
            given,
            saved,
            [torch.zeros_like(first) if grad_out is None else grad_out],
            [lse],  # not read: the read is complete
            _with_zeros(later) or None,
            None,
            [query],
        )
        return (grad_query, grad_lse, None, *grad_values.unbind(0))


class _Site(torch.autograd.Function):
    """A site: the write joins its block, the block joins the read, and the read is normed."""

    @staticmethod
    def forward(
        ctx: Any,
        options: tuple[Any, ...],
        old: Tensor | None,
        lse: Tensor | None,
        query: Tensor | None,
        total: Tensor | None,
        pending: Tensor,
        key: Tensor | None,
    ) -> tuple[Tensor, ...]:
        given = Site(old, lse, query, total, pending, key, *options)
        new_total, new_key, out, numbers = registered.site_fwd(given)
        value = _block_value(pending, new_total, out)
        # not the write, which is kept by nobody else
        ctx.save_for_backward(query, key, value, new_key, out, numbers)
        ctx.options, ctx.adds = options, total is not None
        ctx.set_materialize_grads(False)
        return value, out, *(() if new_key is None else (new_key,))

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,
        grad_total: Tensor | None,
        grad_out: Tensor | None,
        grad_new_key: Tensor | None = None,
    ) -> tuple[Any, ...]:
        query, key, value, new_key, out, numbers = ctx.saved_tensors
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        given = Site(None, None, query, None, value, key, *ctx.options)
        grads = registered.site_bwd(
            given, new_key, out, numbers, grad_out, grad_total, grad_new_key
        )
        grad_write, grad_old, grad_lse, grad_query, grad_key = grads
        return (
            None,
            grad_old,
            grad_lse,
            grad_query,
            grad_write[..., : out.shape[-1]] if ctx.adds else None,
            grad_write,
            grad_key,
        )


def _reads(
    first: Tensor | None, out: Tensor, source: Tensor, num_queries: int
) -> tuple[Tensor, ...]:
    """Return the reads of phase 1; those of a single source are the source."""
    if first is None and not len(out):
        return tuple(source.view_as(source) for _ in range(num_queries))
    return (*(() if first is None else (first,)), *out.unbind(0))


def _block_value(pending: Tensor, total: Tensor | None, out: Tensor) -> Tensor:
    """Return the open block after a site: the sum, or the only write less its emitted columns."""
    return pending[..., : out.shape[-1]] if total is None else total


def _with_zeros(grads: Sequence[Tensor | None]) -> list[Tensor]:
    """Return gradients of one shape: none if there is none, zeros in place of a single one."""
    like = next((g for g in grads if g is not None), None)
    return [] if like is None else [torch.zeros_like(like) if g is None else g for g in grads]
