"""Backward pass of `read_ahead`: of one query in one pass, of several in two."""

from collections.abc import Sequence

import torch
from torch import Tensor

from depthroute.ops.block import BlockRead
from depthroute.ops.kernels import block_layout
from depthroute.ops.kernels.block_layout import BlockLayout, contiguous_rows
from depthroute.ops.kernels.block_results import GradientCall, ReadAheadGradients
from depthroute.ops.kernels.read_many_bwd import read_many_bwd
from depthroute.ops.kernels.read_one_bwd import read_one_bwd
from depthroute.ops.kernels.separate_keys import scores_bwd
from depthroute.ops.kernels.sources import num_programs
from depthroute.ops.kernels.sums import sum_programs


def read_ahead_bwd(
    given: BlockRead,
    first: Tensor | None,
    weights: Tensor,
    logits: Tensor,
    rstds: Tensor,
    norm_rstds: Tensor | None,
    grad_outs: Sequence[Tensor],
    grad_lses: Sequence[Tensor],
    later_values: Sequence[Tensor] | None,
    later_keys: Sequence[Tensor] | None,
    slots: Sequence[Tensor],
) -> ReadAheadGradients:
    """Launch the backward pass.

    Args:
        given: Arguments of the forward pass, its last source complete.
        first, weights, logits, rstds, norm_rstds: Results of the forward pass.
        grad_outs: Q gradients of the reads, `[*b, D]`.
        grad_lses: Q of what sites return for `lse`, `[*b]`.
        later_values, later_keys: What later blocks have added to the sources' gradients.
        slots: What sites return for their queries, Q or fewer `[rows, R]`, the last ones.
    """
    at = BlockLayout.of(given)
    grads = ReadAheadGradients.empty(given, slots)
    if not at.T:
        return grads._replace(query=torch.zeros_like(grads.query))
    one, device = block_layout.one_query_backward(at, later_values is not None), rstds.device
    if one is None:
        parts, programs = block_layout.ahead_parts(at, device)
    else:
        parts, programs = 1, num_programs(at.T, one.programs, device)
    if given.lse is None:
        grad_query = None if at.separate else rstds.new_empty((parts, programs, at.Q, at.R))
    else:
        # the slot takes rows of its own number: programs write zeros to those left over
        programs = min(programs, len(slots[0]))
        grad_query = grads.query.view(1, len(slots[0]), 1, at.R)
    grad_logits = torch.empty_like(logits) if one is None or at.separate else None
    call = GradientCall(
        given._replace(values=contiguous_rows(given.values), query=given.query.contiguous()),
        at,
        contiguous_rows(grad_outs),
        tuple(grad_lses),
        None if later_values is None else contiguous_rows(later_values),
        *(first, weights, logits, rstds, norm_rstds),
        *(grads, grad_logits, grad_query),
    )
    if one is None:
        read_many_bwd(call, programs)
    else:
        read_one_bwd(call, one, programs)
    if grad_query is None:
        assert grad_logits is not None  # keys are separate
        assert grads.keys is not None
        grad_query = scores_bwd(given, grad_logits, logits, rstds, later_keys, grads.keys)
    if given.lse is None:
        sum_programs(grad_query.flatten(0, -3), grads.query, slots)
    return grads
