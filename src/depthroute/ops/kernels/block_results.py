"""Results of a block's reads and of their backward passes, and the memory of them."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from depthroute.ops.block import BlockRead, Site
from depthroute.ops.kernels.block_layout import BlockLayout
from depthroute.ops.kernels.results import empty_stack


class ReadAhead(NamedTuple):
    """Results of phase 1, and what its backward pass needs of them."""

    # apart from the rest: a sublayer keeps it, and a view would keep the whole
    first: Tensor | None  # [*b, D], the first read if it is complete, normed
    out: Tensor  # the others, [Q or Q - 1, *b, D]; of one source none: they are the source
    lse: Tensor  # [Q, *b]
    closed: Tensor | None  # [*b, D], the source that closed
    weights: Tensor  # [T, S, Q]
    logits: Tensor  # [T, S, Q]
    rstds: Tensor  # [T, S], what the key norm multiplies by
    norm_rstds: Tensor | None  # [T], what the norm of the first read multiplies by

    @classmethod
    def empty(cls, at: BlockLayout, given: BlockRead) -> "ReadAhead":
        """Allocate them."""
        value, wide = given.values[0], torch.float32
        batch, has_first = value.shape[:-1], given.norm_eps is not None
        num_mixed = at.Q - has_first if at.S > 1 or has_first else 0
        return cls(
            value.new_empty(value.shape) if has_first else None,
            value.new_empty((num_mixed, *batch, at.D)),
            value.new_empty((at.Q, *batch), dtype=wide),
            None if given.pending is None else value.new_empty((*batch, at.D)),
            value.new_empty((at.T, at.S, at.Q), dtype=wide),
            value.new_empty((at.T, at.S, at.Q), dtype=wide),
            value.new_empty((at.T, at.S), dtype=wide),
            value.new_empty((at.T,), dtype=wide) if has_first else None,
        )


class ReadAheadGradients(NamedTuple):
    """Gradients of the arguments of phase 1."""

    values: Tensor  # [S, *b, D]
    keys: Tensor | None  # [S, *b, R]
    lse: Tensor | None  # [*b], less `<grad_value, value>` of the read that it belongs to
    query: Tensor  # [Q, R]; of a merge, its slot `[programs, R]`

    @classmethod
    def empty(cls, given: BlockRead, slots: Sequence[Tensor]) -> "ReadAheadGradients":
        """Allocate them."""
        values, keys = given.values, given.keys
        query = given.query if given.lse is None else slots[0]
        return cls(
            empty_stack(values),
            None if keys is None else empty_stack(keys),
            None if given.lse is None else given.lse.new_empty(given.lse.shape),
            query.new_empty(query.shape),
        )


class GradientCall(NamedTuple):
    """What the kernels take: arguments and results of the forward pass, and where gradients go."""

    given: BlockRead
    at: BlockLayout
    upstream: tuple[Tensor, ...]
    grad_lses: tuple[Tensor, ...]
    later: tuple[Tensor, ...] | None
    first: Tensor | None
    weights: Tensor
    logits: Tensor
    rstds: Tensor
    norm_rstds: Tensor | None
    grads: ReadAheadGradients
    grad_logits: Tensor | None
    grad_query: Tensor | None  # [parts, programs, Q, R]

    @property
    def share(self) -> float:
        """Factor of the last source."""
        return self.given.share if self.given.pending is not None else 1.0

    @property
    def num_old(self) -> int:
        """How many of the sources, the first ones, are reads."""
        return int(self.given.lse is not None)

    @property
    def num_rows(self) -> int:
        """How many rows the query's gradient comes in."""
        return 0 if self.grad_query is None else self.grad_query.shape[1]


class SiteResult(NamedTuple):
    """Results of a site, and what its backward pass needs of them."""

    total: Tensor | None  # [*b, D]; None if the block has this one write
    key: Tensor | None  # [*b, R]; None if the write emits none
    out: Tensor  # [*b, D]
    # [T, 4]: logit, factors of key norm, of the block, and of the norm; a fifth is the factor of
    # the norm of an emitted key
    numbers: Tensor

    @classmethod
    def empty(cls, given: Site) -> "SiteResult":
        """Allocate them."""
        y, rank, key_sum = given.pending, emitted_columns(given), given.key_sum
        batch, wide, width = y.shape[:-1], torch.float32, y.shape[-1] - rank
        num_numbers = 4 if key_sum is None or key_sum.norm_eps is None else 5
        return cls(
            None if given.total is None else y.new_empty((*batch, width)),
            None if key_sum is None else y.new_empty((*batch, rank), dtype=wide),
            y.new_empty((*batch, width)),
            y.new_empty((y.numel() // y.shape[-1], num_numbers), dtype=wide),
        )


class SiteGradients(NamedTuple):
    """Gradients of the arguments of a site."""

    write: Tensor  # [*b, D or D + R], of the write, and of the total in the first D columns
    old: Tensor | None  # [*b, D]
    lse: Tensor | None  # [*b], less `<grad_old, old>`
    query: Tensor | None  # [programs, R]
    key: Tensor | None  # [*b, R]

    @classmethod
    def empty(cls, given: Site) -> "SiteGradients":
        """Allocate them."""
        value, query, key = given.pending, given.query, given.key
        merges = query is not None
        return cls(
            value.new_empty((*value.shape[:-1], value.shape[-1] + emitted_columns(given))),
            value.new_empty(value.shape) if merges else None,
            value.new_empty(value.shape[:-1], dtype=torch.float32) if merges else None,
            None if query is None else query.new_empty(query.shape),
            None if key is None else key.new_empty(key.shape),
        )


def emitted_columns(given: Site) -> int:
    """Return how many columns the write has beyond its value."""
    return 0 if given.key_sum is None or given.query is None else given.query.shape[-1]
