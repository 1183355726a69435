"""Keys and values of past tokens."""

from typing import NamedTuple

import torch
from torch import Tensor


class KVCache:
    """Preallocated keys and values of every layer, filled from the left.

    Depth routing mixes within a token, so this is all that decoding needs for any scheme.

    Args:
        num_layers: Layers of the decoder.
        batch: Rows.
        heads: Key and value heads.
        capacity: Most tokens a row can hold.
        head_dim: Width of a head.
        dtype: Of the entries.
        device: Of the entries.
    """

    def __init__(
        self,
        num_layers: int,
        batch: int,
        heads: int,
        capacity: int,
        head_dim: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_layers, 2, batch, heads, capacity, head_dim)
        self.entries = torch.zeros(shape, dtype=dtype, device=device)
        self.length = 0

    @property
    def capacity(self) -> int:
        """Return the most tokens a row can hold."""
        return self.entries.shape[-2]

    def layer(self, index: int) -> "LayerCache":
        """Return the cache of a layer, for one pass."""
        return LayerCache(self.entries[index, 0], self.entries[index, 1], self.length)

    def advance(self, num_tokens: int) -> None:
        """Count `num_tokens` more as stored, once all layers have stored them."""
        self.length += num_tokens


class LayerCache(NamedTuple):
    """Keys and values of a layer, `[B, heads, capacity, head_dim]`, of which `length` count."""

    keys: Tensor
    values: Tensor
    length: int

    def extend(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store new keys and values `[B, heads, T, head_dim]` and return all so far."""
        end = self.length + key.shape[-2]
        self.keys[:, :, self.length : end] = key
        self.values[:, :, self.length : end] = value
        return self.keys[:, :, :end], self.values[:, :, :end]


class CacheAt(NamedTuple):
    """A cache for a pass over one new token, whose place the device alone knows.

    No number of the host decides what happens, so that a CUDA graph of one pass serves all.

    Attributes:
        entries: Those of a `KVCache`, `[L, 2, B, heads, capacity, head_dim]`.
        position: Place of the new token, int64 `[1]`.
    """

    entries: Tensor
    position: Tensor

    def layer(self, index: int) -> "LayerCacheAt":
        """Return the cache of a layer."""
        return LayerCacheAt(self.entries[index, 0], self.entries[index, 1], self.position)


class LayerCacheAt(NamedTuple):
    """Keys and values of a layer, and where the new ones go."""

    keys: Tensor
    values: Tensor
    position: Tensor

    def extend(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store a key and value `[B, heads, 1, head_dim]` and return all places, filled or not."""
        self.keys.index_copy_(2, self.position, key)
        self.values.index_copy_(2, self.position, value)
        return self.keys, self.values
