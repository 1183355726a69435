"""The routing key of a source: cut from its value, emitted beside it, or projected from it."""

from abc import ABC, abstractmethod
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from depthroute.config import config_dataclass, tagged_union
from depthroute.ops.block import KeySum
from depthroute.ops.scores import KeyNorm


@config_dataclass
class TailKey:
    """The last `rank` columns of the value (S-LR); all of them by default (AttnRes).

    `norm = "tail"` normalises those columns, `"full"` the whole value before the cut.
    """

    name: Literal["tail"] = "tail"
    rank: int | None = None
    norm: Literal["tail", "full"] = "tail"

    def __post_init__(self) -> None:
        if self.rank is not None and self.rank < 1:
            raise ValueError(f"rank must be >= 1, got {self.rank}")


@config_dataclass
class ProjectedKey:
    """`rank` columns that each output projection emits beside its value (P-LR).

    `block` is how a block's key is made of its writes' keys: `"sum_of_normed"` is
    `rms(sum rms(k))`, as the paper's authors coded it; `"sum"` is `rms(sum k)`.
    """

    name: Literal["projected"] = "projected"
    rank: int
    block: Literal["sum_of_normed", "sum"] = "sum_of_normed"

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"rank must be >= 1, got {self.rank}")


@config_dataclass
class FromValueKey:
    """One learned `[rank, D]` projection of the source's value, shared by all sources."""

    name: Literal["from_value"] = "from_value"
    rank: int

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"rank must be >= 1, got {self.rank}")


KeyConfig = tagged_union(TailKey, ProjectedKey, FromValueKey)
ValueKeyConfig = tagged_union(TailKey, FromValueKey)
"""The keys that follow from the value alone, for schemes that widen no output projection."""


class Key(nn.Module, ABC):
    """How a source gets its key; a block's key is the sum of what its writes contribute.

    Attributes:
        rank: Width R of the key.
        emit_dim: Columns that it needs from every output projection.
        key_sum: How those columns of a block's writes make its key.
        norm: The key norm that the read applies.
    """

    rank: int
    emit_dim: int = 0
    key_sum: KeySum | None = None
    norm: KeyNorm = "tail"

    @property
    def kept_dim(self) -> int:
        """Return the columns that a source keeps beside its value."""
        return self.rank

    @abstractmethod
    def forward(
        self, value: Tensor, emitted: Tensor | None, total: Tensor | None = None
    ) -> Tensor | None:
        """Return the key of a block with one write more, or None to cut keys from values.

        Args:
            value: The write, `[*b, D]`; or the embedding.
            emitted: Its emitted columns `[*b, emit_dim]`; None for the embedding.
            total: Key of the block before the write; None if it is the first.

        Returns:
            `[*b, R]`, float32 (float64 for float64 values).
        """

    def multiply_adds(self, num_writes: int) -> int:
        """Return the multiply-adds per token of this module's own products."""
        return 0


class _Tail(Key):
    def __init__(self, config: TailKey, dim: int, eps: float) -> None:
        super().__init__()
        self.rank, self.norm = config.rank or dim, config.norm
        if self.rank > dim:
            raise ValueError(f"rank must be at most the model width {dim}, got {self.rank}")

    @property
    def kept_dim(self) -> int:
        return 0  # a view of the value

    def forward(self, value: Tensor, emitted: Tensor | None, total: Tensor | None = None) -> None:
        return None


class _Projected(Key):
    key_sum: KeySum

    def __init__(self, config: ProjectedKey, dim: int, eps: float) -> None:
        super().__init__()
        self.rank = self.emit_dim = config.rank
        self.key_sum = KeySum(eps if config.block == "sum_of_normed" else None)
        self.weight = nn.Parameter(torch.empty(config.rank, dim, dtype=torch.float32))

    def forward(self, value: Tensor, emitted: Tensor | None, total: Tensor | None = None) -> Tensor:
        key = F.linear(value, self.weight.to(value.dtype)) if emitted is None else emitted
        return self.key_sum.add(total, key)

    def multiply_adds(self, num_writes: int) -> int:
        return self.weight.numel()  # the embedding's key


class _FromValue(Key):
    def __init__(self, config: FromValueKey, dim: int, eps: float) -> None:
        super().__init__()
        self.rank = config.rank
        self.weight = nn.Parameter(torch.empty(config.rank, dim, dtype=torch.float32))

    def forward(self, value: Tensor, emitted: Tensor | None, total: Tensor | None = None) -> Tensor:
        key = F.linear(value, self.weight.to(value.dtype))
        return KeySum(None).add(total, key)

    def multiply_adds(self, num_writes: int) -> int:
        return self.weight.numel() * (num_writes + 1)


_KEYS: dict[type, type[Key]] = {
    TailKey: _Tail,
    ProjectedKey: _Projected,
    FromValueKey: _FromValue,
}


def build_key(config: TailKey | ProjectedKey | FromValueKey, *, dim: int, eps: float) -> Key:
    """Build the key rule that a config describes.

    Raises:
        ValueError: A tail wider than the model.
    """
    return _KEYS[type(config)](config, dim, eps)
