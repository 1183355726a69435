"""Sizes of a read, the tiles that cover them, and operands flattened to rows."""

import math
import os
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from depthroute.ops.scores import ScoreRule

# the interpreter multiplies 16-bit matrices wrongly
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def power_of_two(n: int) -> int:
    """Return the least power of two that is at least n."""
    return 1 << (n - 1).bit_length()


class Layout(NamedTuple):
    """S sources of T tokens and width D, read by Q queries of rank R in H heads.

    A source is a tile `[HP, BC]`, its key a tile `[HP, BK]`: powers of two that cover
    `[H, D / H]` and `[H, R / H]`. Where a value's tile shows its key, that is the key's tile too.
    """

    S: int
    T: int
    Q: int
    D: int
    R: int
    H: int
    norm: str
    keys: str  # "value": a key is columns of the value's tile; "tail": of the value; "separate"

    @classmethod
    def of(
        cls,
        values: Sequence[Tensor],
        keys: Sequence[Tensor] | None,
        query: Tensor,
        rule: ScoreRule,
    ) -> "Layout":
        """Read the sizes off the arguments of a read."""
        width, (num_queries, rank) = values[0].shape[-1], query.shape
        # several queries hold a tile each of what concerns keys: small ones, for a small rank
        within = rank == width or (rule.heads == 1 and num_queries == 1)
        kind = "separate" if keys is not None else "value" if within else "tail"
        tokens = math.prod(values[0].shape[:-1])  # `Size.numel` would fix it for a compiler
        return cls(len(values), tokens, num_queries, width, rank, rule.heads, rule.key_norm, kind)

    @property
    def tile(self) -> tuple[int, int, int]:
        """HP, BC, BK."""
        key_width = self.D if self.keys == "value" else self.R
        return (
            power_of_two(self.H),
            power_of_two(self.D // self.H),
            power_of_two(key_width // self.H),
        )

    @property
    def value_tile(self) -> int:
        """HP BC, the numbers of a value's tile."""
        return self.tile[0] * self.tile[1]

    @property
    def key_tile(self) -> int:
        """HP BK, the numbers of a key's tile."""
        return self.tile[0] * self.tile[2]

    @property
    def key_heads_apart(self) -> bool:
        """Whether a column of a value may be the key of another head than it is a value of."""
        return self.keys == "tail" and self.H > 1

    @property
    def constants(self) -> dict[str, int | str]:
        """Compile-time constants of every kernel."""
        return _constants(self)


@lru_cache
def _constants(at: Layout) -> dict[str, int | str]:
    names = ("D", "R", "H", "NORM", "KEYS", "HP", "BC", "BK")
    return dict(zip(names, (at.D, at.R, at.H, at.norm, at.keys, *at.tile), strict=True))


def as_rows(x: Tensor) -> Tensor:
    """View `[*b, width]` as `[T, width]` with contiguous columns, without a copy if it can."""
    if x.ndim == 2 and x.is_contiguous():
        return x
    rows = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


def as_query_rows(x: Tensor) -> Tensor:
    """View `[Q, *b, width]` as `[Q, T, width]` with contiguous columns, like `as_rows`."""
    if x.ndim == 3 and x.is_contiguous():
        return x
    rows = x.reshape(x.shape[0], x.shape[1:-1].numel(), x.shape[-1])
    return rows if rows.stride(2) == 1 or rows.shape[2] == 1 else rows.contiguous()


class Bias(NamedTuple):
    """Logit offsets and their strides over queries, sources and tokens; 0 where they repeat."""

    data: Tensor
    query: int
    source: int
    token: int


def of_queries(x: Tensor | None, axis: int, first: int, count: int) -> Tensor | None:
    """Cut some queries out of an axis of queries; all of them cost nothing."""
    return x if x is None or count == x.shape[axis] else x.narrow(axis, first, count)


def as_bias(bias: Tensor | None, layout: Layout, batch: torch.Size) -> Bias | None:
    """Flatten a bias `[Q or 1, S, *(b or ones)]` to `[Q, S, T]` without repeating it in memory."""
    if bias is None:
        return None
    flat = bias.expand(layout.Q, layout.S, *batch).reshape(layout.Q, layout.S, layout.T)
    return Bias(flat, *flat.stride())
