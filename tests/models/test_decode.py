"""The decoding step: the same work at every place, whatever the host knew when it was recorded."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from depthroute.models import DecodeStep, generate
from depthroute.models.decode import next_logits
from depthroute.nn import CacheAt
from helpers import VARIANTS, assert_close, ignore_dynamo_warnings, tiny_model

PROMPTS = torch.tensor([[3, 1, 4], [1, 5, 9]])
LENGTH = 11
ATEN = torch.ops.aten
# a tensor made of numbers of the host, a number of the host made of a tensor, a size made of values
NOT_ON_THE_DEVICE = {
    *(ATEN.lift_fresh.default, ATEN.lift_fresh_copy.default),
    *(ATEN._local_scalar_dense.default, ATEN.nonzero.default),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_steps_give_the_logits_of_a_forward_without_cache(name):
    model = tiny_model(VARIANTS[name], dtype=torch.float64)
    ids = torch.randint(61, (2, LENGTH))
    cache = model.new_cache(2, LENGTH)
    model(ids[:, :4], cache=cache)
    step = DecodeStep(model, cache)
    logits = [step(token).clone() for token in ids[:, 4:].split(1, dim=1)]
    assert cache.length == LENGTH
    assert_close(torch.stack(logits, dim=1), model(ids)[:, 4:].float())
    with pytest.raises(ValueError, match="the cache is full: it holds 11 tokens a row"):
        step(ids[:, :1])


@ignore_dynamo_warnings
@pytest.mark.parametrize("name", VARIANTS)
def test_a_step_recorded_at_one_place_serves_all(name):
    """Trace the operations of one step, as a CUDA graph records them, and run them everywhere."""
    model = tiny_model(VARIANTS[name], dtype=torch.float64)
    expected = generate(model, PROMPTS, max_new_tokens=LENGTH - 3, temperature=0)
    cache = model.new_cache(2, LENGTH)

    def step(ids, position, entries):
        return next_logits(model, ids, CacheAt(entries, position))

    with torch.no_grad():
        ids, position = PROMPTS[:, :1], torch.tensor([2])
        recorded = make_fx(step)(ids, position, torch.zeros_like(cache.entries))
        assert not NOT_ON_THE_DEVICE & {node.target for node in recorded.graph.nodes}
        fresh, tokens = model(PROMPTS, cache=cache)[:, -1].argmax(-1, keepdim=True), [PROMPTS]
        for place in range(3, LENGTH):
            tokens.append(fresh)
            fresh = recorded(fresh, torch.tensor([place]), cache.entries).argmax(-1, keepdim=True)
    assert torch.equal(torch.cat(tokens, dim=1), expected)


def test_a_step_goes_on_from_wherever_the_cache_is():
    model = tiny_model(VARIANTS["s_lr"], dtype=torch.float64)
    ids = torch.randint(61, (2, LENGTH))
    cache = model.new_cache(2, 16)
    step = DecodeStep(model, cache)
    parts = [model(ids[:, :3], cache=cache)[:, -1]]
    parts.append(step(ids[:, 3:4]).clone())
    parts.append(model(ids[:, 4:8], cache=cache)[:, -1])
    parts.append(step(ids[:, 8:9]).clone())
    whole = model(ids)
    for found, place in zip(parts, (2, 3, 7, 8), strict=True):
        assert_close(found.float(), whole[:, place].float())
