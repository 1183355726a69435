"""What attention needs to know beside its inputs, prepared once for all layers."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from depthroute.nn.cache import CacheAt, KVCache
from depthroute.nn.rope import Rotation, rotation
from depthroute.ops.scores import accumulation_dtype

# up to here a boolean mask beats one call per document on a CPU (measured on 2 cores)
_MASK_MAX_TOKENS = 256


class Documents(NamedTuple):
    """Where packed documents begin, in the form of variable-length attention kernels.

    Attributes:
        cu_seqlens: int32 `[n + 1]`, boundaries in the flattened batch, from 0 to B*T, with every
            row's end among them. Repeated boundaries (empty documents) are allowed as padding.
        max_seqlen: An upper bound of the longest document, in tokens.
    """

    cu_seqlens: Tensor
    max_seqlen: int

    def ids(self, num_tokens: int) -> Tensor:
        """Return which document each of `num_tokens` flattened tokens belongs to, int64."""
        positions = torch.arange(num_tokens, device=self.cu_seqlens.device)
        return torch.searchsorted(self.cu_seqlens[1:].long(), positions, right=True)

    def lengths(self) -> list[int]:
        """Return the lengths of the non-empty documents; waits for the device."""
        return [n for n in self.cu_seqlens.diff().tolist() if n]


class OneLayer(Protocol):
    """Keys and values of past tokens in one layer, in whatever form."""

    def extend(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store new keys and values `[B, heads, T, head_dim]` and return all so far."""
        ...


class Cache(Protocol):
    """Keys and values of past tokens, in whatever form."""

    def layer(self, index: int) -> OneLayer:
        """Return those of a layer."""
        ...


# queries, keys, values [B, heads, T, head_dim], mask, scale of the scores or None
Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None, float | None], Tensor]


class AttentionContext(NamedTuple):
    """Positions, document boundaries and cache of one forward pass."""

    rotation: Rotation
    # boolean [1 or B, 1, T, T'], True where attention may look; or what `attend` takes
    mask: Tensor | None = None
    documents: Documents | None = None  # given where attention runs document by document
    cache: Cache | None = None
    attend: Attend | None = None  # attends in place of this package


def attention_context(
    x: Tensor,
    *,
    head_dim: int,
    theta: float,
    documents: Documents | None = None,
    cache: KVCache | None = None,
) -> AttentionContext:
    """Prepare the context for a batch of embeddings.

    Args:
        x: `[B, T, D]`; its dtype and device decide how documents are kept apart: variable-length
            kernels for half precision on CUDA, one call per document on a CPU, else a mask.
        head_dim: Width of an attention head.
        theta: RoPE base.
        documents: Boundaries of packed documents; None for one document per row.
        cache: Past tokens; the batch continues them.

    Raises:
        ValueError: Documents together with a cache, or more tokens than the cache can hold.
    """
    batch, tokens = x.shape[:2]
    past = cache.length if cache else 0
    positions = torch.arange(past, past + tokens, device=x.device)
    turn = rotation(positions, head_dim, theta, accumulation_dtype(x.dtype))
    if cache is not None:
        if documents is not None:
            raise ValueError("documents and cache exclude each other: decode one document a row")
        if past + tokens > cache.capacity:
            raise ValueError(
                f"the cache holds {cache.capacity} tokens, got {past} and {tokens} more"
            )
        seen = torch.arange(past + tokens, device=x.device)
        mask = (seen <= positions.unsqueeze(1)).view(1, 1, tokens, -1) if past else None
        return AttentionContext(turn, mask, None, cache)
    if documents is None:
        return AttentionContext(turn)
    half_on_cuda = x.is_cuda and x.dtype in (torch.bfloat16, torch.float16)
    long_on_cpu = x.device.type == "cpu" and tokens > _MASK_MAX_TOKENS
    if half_on_cuda or long_on_cpu:
        return AttentionContext(turn, documents=documents)
    ids = documents.ids(batch * tokens).view(batch, tokens)
    same = ids.unsqueeze(-1) == ids.unsqueeze(-2)
    return AttentionContext(turn, same.tril().unsqueeze(1))


def step_context(x: Tensor, cache: CacheAt, *, head_dim: int, theta: float) -> AttentionContext:
    """Prepare the context for embeddings `[B, 1, D]` of one new token in each row.

    Attention runs over all places of the cache; a mask that is added to the scores hides those
    behind the new token.
    """
    places = torch.arange(cache.entries.shape[-2], device=x.device)
    hidden = places > cache.position
    # a boolean mask would be turned into this one by every layer
    mask = x.new_zeros(len(places)).masked_fill_(hidden, float("-inf")).view(1, 1, 1, -1)
    turn = rotation(cache.position, head_dim, theta, accumulation_dtype(x.dtype))
    return AttentionContext(turn, mask, None, cache)
