"""Positions, masks, caches and attention functions of transformers, as this package's context."""

import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from depthroute.nn import AttentionContext
from depthroute.nn.rope import rotation

# transformers 5.24 renamed the cache, in arguments and in outputs
_NAMES = ("cache", "past_key_values")
MASK_CACHE = next(n for n in _NAMES if n in inspect.signature(create_causal_mask).parameters)
OUTPUT_CACHE = next(n for n in _NAMES if n in BaseModelOutputWithPast.__dataclass_fields__)


class _Caller(NamedTuple):
    """What an attention function may ask of the module that calls it."""

    config: Any
    num_key_value_groups: int = 1  # keys and values come repeated
    is_causal: bool = True
    training: bool = False


class _Cache(NamedTuple):
    """A cache of transformers, in this package's form."""

    cache: Cache

    def layer(self, index: int) -> "_OneLayer":
        return _OneLayer(self.cache, index)


class _OneLayer(NamedTuple):
    cache: Cache
    index: int

    def extend(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return self.cache.update(key, value, self.index)


def positions(
    x: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None, cache: Cache | None
) -> Tensor:
    """Return the position of each token, `[1 or B, T]`; padding has 0.

    They are the given ones, else counted from the row's first real token, else from the cache.

    Raises:
        ValueError: The mask has another length than the tokens, or positions another shape.
    """
    batch, tokens = x.shape[:2]
    past = 0 if cache is None else cache.get_seq_length()
    if position_ids is not None:
        if position_ids.shape not in ((1, tokens), (batch, tokens)):
            raise ValueError(
                f"position_ids must be [1 or {batch}, {tokens}], got {tuple(position_ids.shape)}"
            )
        return position_ids
    if attention_mask is not None and attention_mask.ndim == 2:
        if attention_mask.shape != (batch, past + tokens):
            raise ValueError(
                f"attention_mask must be [{batch}, {past + tokens}], cached tokens included, "
                f"got {tuple(attention_mask.shape)}"
            )
        return (attention_mask.long().cumsum(-1) - 1).clamp_min(0)[:, -tokens:]
    return (torch.arange(tokens, device=x.device) + past).unsqueeze(0)


def transformers_context(
    config: Any,
    x: Tensor,
    *,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    cache: Cache | None,
    token_null: bool,
    attentions: list[Tensor] | None,
) -> AttentionContext:
    """Prepare a context whose attention is that of `config._attn_implementation`.

    Args:
        config: A `DepthRouteConfig`.
        x: Embeddings `[B, T, D]`.
        attention_mask: `[B, past + T]`, 0 for padding; or `[B, 1, T, past + T]`, ready for the
            attention function: False, or what is added to the scores, where it must not look.
        position_ids: `[1 or B, T]`; where they restart in a row, without mask and past, a packed
            document begins.
        cache: Past keys and values, extended in place.
        token_null: Whether attention runs Softmax1, which needs a mask of its own.
        attentions: Gets the weights `[B, heads, T, past + T]` of each layer, in order; the null
            is one more column, the first. None leaves them alone.

    Raises:
        ValueError: Weights are asked of an attention function that does not return them, or
            positions or mask have another shape.
    """
    implementation, tokens = config._attn_implementation, x.shape[1]
    if attentions is not None and implementation != "eager":
        raise ValueError(
            f'output_attentions needs attn_implementation="eager", got "{implementation}"'
        )
    places = positions(x, attention_mask, position_ids, cache)
    # documents are told apart only without a cache; an empty one that grows changes no mask
    grows = isinstance(cache, DynamicCache) and cache.get_seq_length() == 0
    mask = create_causal_mask(
        config=config,
        inputs_embeds=x,
        attention_mask=attention_mask,
        position_ids=places if position_ids is not None else None,
        allow_is_causal_skip=not token_null,
        **{MASK_CACHE: None if grows else cache},
    )
    function = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention)

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
        scaling = q.shape[-1] ** -0.5 if scale is None else scale
        out, weights = function(_Caller(config), q, k, v, mask, scaling=scaling, dropout=0.0)
        if attentions is not None:
            attentions.append(weights[:, :, -tokens:])
        return out.transpose(1, 2)

    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    turn = rotation(places, config.head_dim, config.rope_theta, wide)
    return AttentionContext(turn, mask, None, None if cache is None else _Cache(cache), attend)


def eager_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    dropout: float,
) -> tuple[Tensor, Tensor]:
    """Attend by explicit products; returns `[B, T, heads, head_dim]` and the weights."""
    scores = query @ key.mT * scaling
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
    elif attention_mask is not None:
        scores = scores + attention_mask
    wide = torch.float64 if scores.dtype == torch.float64 else torch.float32
    weights = scores.softmax(-1, dtype=wide).to(query.dtype)
    return (weights @ value).transpose(1, 2), weights
