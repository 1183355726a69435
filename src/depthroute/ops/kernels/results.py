"""What the launchers return, and its memory: also the shapes that a compiler is told."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from depthroute.ops.kernels.layout import Layout


class Attended(NamedTuple):
    """Results of a read, and what its backward pass needs of them."""

    out: Tensor  # [Q, *b, D]
    lse: Tensor  # [Q, *b, H]
    dots: Tensor  # [T, S, Q, H], scores before norm, scale and bias
    rstds: Tensor  # [T, S], what the norm multiplies them by
    out_rstds: Tensor | None  # [Q, T], what a norm of the output has multiplied it by

    @classmethod
    def empty(cls, at: Layout, value: Tensor, out_dtype: torch.dtype, has_norm: bool) -> "Attended":
        """Allocate the results of a read whose sources are like `value`."""
        batch, wide = value.shape[:-1], torch.float32
        return cls(
            value.new_empty((at.Q, *batch, at.D), dtype=out_dtype),
            value.new_empty((at.Q, *batch, at.H), dtype=wide),
            value.new_empty((at.T, at.S, at.Q, at.H), dtype=wide),
            value.new_empty((at.T, at.S), dtype=wide),
            value.new_empty((at.Q, at.T), dtype=wide) if has_norm else None,
        )


class AttendGradients(NamedTuple):
    """Gradients of the arguments of a read; None for one that it lacks."""

    values: Tensor  # [S, *b, D]
    keys: Tensor | None  # [S, *b, R]
    query: Tensor  # [Q, R]
    bias: Tensor | None  # of its own shape
    null: Tensor | None  # [Q, H]

    @classmethod
    def empty(
        cls,
        values: Sequence[Tensor],
        keys: Sequence[Tensor] | None,
        query: Tensor,
        bias: Tensor | None,
        null: Tensor | None,
    ) -> "AttendGradients":
        """Allocate them."""
        return cls(
            empty_stack(values),
            None if keys is None else empty_stack(keys),
            query.new_empty(query.shape),
            None if bias is None else bias.new_empty(bias.shape),
            None if null is None else null.new_empty(null.shape),
        )


class Merged(NamedTuple):
    """Results of a merge, and what its backward pass needs of them."""

    out: Tensor  # [Q, *b, D]
    lse: Tensor  # [Q, *b, H]
    dots: Tensor  # [T, Q, H], scores before norm, scale and bias
    rstds: Tensor  # [T], what the norm multiplies them by
    keep: Tensor  # [T, Q, H], weight of the old read
    take: Tensor  # [T, Q, H], weight of the new source
    out_rstds: Tensor | None  # [Q, T], what a norm of the output has multiplied it by

    @classmethod
    def empty(cls, at: Layout, value: Tensor, has_norm: bool) -> "Merged":
        """Allocate the results of a merge of `value`."""
        batch, wide, numbers = value.shape[:-1], torch.float32, (at.T, at.Q, at.H)
        return cls(
            value.new_empty((at.Q, *batch, at.D)),
            value.new_empty((at.Q, *batch, at.H), dtype=wide),
            value.new_empty(numbers, dtype=wide),
            value.new_empty(numbers[:1], dtype=wide),
            value.new_empty(numbers, dtype=wide),
            value.new_empty(numbers, dtype=wide),
            value.new_empty((at.Q, at.T), dtype=wide) if has_norm else None,
        )

    @property
    def normed(self) -> Tensor | None:
        """The output, if the gradient of its norm needs it."""
        return None if self.out_rstds is None else self.out


class MergeGradients(NamedTuple):
    """Gradients of the arguments of a merge, each of its own shape; None for one that it lacks."""

    out: Tensor
    lse: Tensor
    value: Tensor
    query: Tensor
    key: Tensor | None
    bias: Tensor | None

    @classmethod
    def empty(
        cls,
        out: Tensor,
        lse: Tensor,
        value: Tensor,
        query: Tensor,
        key: Tensor | None,
        bias: Tensor | None,
    ) -> "MergeGradients":
        """Allocate them."""
        return cls(
            out.new_empty(out.shape),
            lse.new_empty(lse.shape),
            value.new_empty(value.shape),
            query.new_empty(query.shape),
            None if key is None else key.new_empty(key.shape),
            None if bias is None else bias.new_empty(bias.shape),
        )


def empty_stack(sources: Sequence[Tensor]) -> Tensor:
    """Allocate `[S, *b, width]` for S sources."""
    return sources[0].new_empty((len(sources), *sources[0].shape))


def without_none(results: Sequence[Tensor | None], like: Tensor) -> tuple[Any, ...]:
    """Return empty tensors in place of None, which an operation may not return."""
    return tuple(like.new_empty(0) if x is None else x for x in results)
