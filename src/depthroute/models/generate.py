"""Sampling from a model."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from depthroute.models.decode import DecodeStep
from depthroute.models.decoder import CausalLM

# attention kernels want rows of a mask in multiples of 8
_ROUND = 8


@torch.no_grad()
def generate(
    model: CausalLM,
    ids: Tensor,
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    stop_id: int | None = None,
    stop: Callable[[Tensor], Tensor] | None = None,
    seed: int | None = None,
    cuda_graph: bool = True,
) -> Tensor:
    """Continue each row of `ids`: one pass over the prompts, then one step per token, with a cache.

    Args:
        model: The model.
        ids: Prompts of equal length, `[B, T]` with T >= 1.
        max_new_tokens: Tokens to add at most, >= 0.
        temperature: Divides the logits; 0 takes the most likely token.
        top_k: Sample among the k most likely tokens, >= 1.
        top_p: Sample among the fewest tokens that hold this probability, in (0, 1].
        stop_id: Ends a row, whose later tokens repeat it; generation ends with the last row.
        stop: Told the tokens so far, prompts included, says which rows end here, boolean `[B]`.
        seed: Seed of the sampling; None draws a new one.
        cuda_graph: On a CUDA device, record the step in a CUDA graph; see `DecodeStep`.

    Returns:
        `[B, T + n]` with n <= max_new_tokens.

    Raises:
        ValueError: A number outside its range, or an empty prompt.
    """
    if ids.ndim != 2 or ids.shape[1] < 1:
        raise ValueError(f"ids must be [B, T] with at least one token, got {tuple(ids.shape)}")
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens must be >= 0, got {max_new_tokens}")
    if not temperature >= 0:
        raise ValueError(f"temperature must be >= 0, got {temperature}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k must be >= 1, got {top_k}")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p must be in (0, 1], got {top_p}")
    source = torch.Generator(device=ids.device)
    source.seed() if seed is None else source.manual_seed(seed)
    start, end = ids.shape[1], ids.shape[1] + max_new_tokens
    tokens = F.pad(ids, (0, max_new_tokens))
    cache = model.new_cache(len(ids), end + -end % _ROUND)
    step = DecodeStep(model, cache, cuda_graph=cuda_graph)
    done = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
    for length in range(start, end):
        if length == start:
            with step.joined:
                logits = model.lm_head(model.model(ids, cache=cache)[:, -1]).float()
        else:
            logits = step(tokens[:, length - 1 : length])
        fresh = _pick(logits, temperature, top_k, top_p, source)
        if stop_id is not None:
            fresh = fresh.masked_fill(done.unsqueeze(1), stop_id)
            done |= fresh.squeeze(1) == stop_id
        tokens[:, length : length + 1] = fresh
        if stop is not None:
            done |= stop(tokens[:, : length + 1])
        if (stop_id is not None or stop is not None) and bool(done.all()):
            return tokens[:, : length + 1]
    return tokens


def _pick(
    logits: Tensor, temperature: float, top_k: int | None, top_p: float, source: torch.Generator
) -> Tensor:
    """Choose one token per row from logits `[B, V]`; returns `[B, 1]`."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    ranked, order = (logits / temperature).sort(-1, descending=True)
    if top_k is not None:
        ranked[:, top_k:] = float("-inf")
    probability = ranked.softmax(-1)
    # a token stays if the more likely ones do not already hold top_p; the first always does
    before = probability.cumsum(-1) - probability
    probability = probability.masked_fill(before >= top_p, 0.0)
    return order.gather(-1, torch.multinomial(probability, 1, generator=source))
