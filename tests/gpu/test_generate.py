"""Decoding steps replayed from a CUDA graph, against the same steps launched one by one."""

import pytest
import torch

from depthroute.models import CausalLM, DecodeStep, generate
from helpers import VARIANTS, tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("default"),
]


def make_model(name: str, dtype: torch.dtype) -> CausalLM:
    """Make a model with heads of 64, for the kernels that are used, and clear preferences."""
    shape = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = tiny_model(VARIANTS[name], noise=0.1, **shape).cuda()
    with torch.no_grad():
        model.lm_head.weight.mul_(10)
    model.model.compute_dtype = dtype
    return model


@pytest.mark.parametrize("name", VARIANTS)
def test_replayed_logits_are_those_of_launched_steps(name):
    model = make_model(name, torch.bfloat16)
    ids = torch.randint(61, (3, 24), device="cuda")
    found = []
    for cuda_graph in (False, True):
        cache = model.new_cache(3, 24)
        with torch.no_grad():
            model(ids[:, :9], cache=cache)
        step = DecodeStep(model, cache, cuda_graph=cuda_graph)
        found.append(torch.stack([step(token).clone() for token in ids[:, 9:].split(1, dim=1)]))
        assert (step.graph is not None) == cuda_graph
    assert torch.equal(*found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "name",
    ["prenorm", "attn_res_full", "attn_res_block3", "s_lr", "p_lr", "delta", "hc", "summary"],
)
def test_texts_do_not_depend_on_the_graph(name, dtype):
    model = make_model(name, dtype)
    prompts = torch.randint(61, (4, 9), device="cuda")
    for settings in ({"temperature": 0}, {"seed": 1}, {"temperature": 0, "stop_id": 7}):
        replayed, launched = (
            generate(model, prompts, max_new_tokens=20, cuda_graph=flag, **settings)
            for flag in (True, False)
        )
        assert torch.equal(replayed, launched)


def test_texts_are_those_of_forwards_without_cache():
    model = make_model("s_lr", torch.float32)
    prompts = torch.randint(61, (4, 9), device="cuda")
    ids = prompts
    with torch.no_grad():
        for _ in range(12):
            ids = torch.cat([ids, model(ids)[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(generate(model, prompts, max_new_tokens=12, temperature=0), ids)


def test_memory_does_not_grow_with_the_tokens():
    model = make_model("s_lr", torch.bfloat16)
    cache = model.new_cache(2, 64)
    ids = torch.randint(61, (2, 4), device="cuda")
    with torch.no_grad():
        model(ids, cache=cache)
    step = DecodeStep(model, cache)
    allocated = []
    for _ in range(20):
        step(ids[:, :1])
        allocated.append(torch.cuda.memory_allocated())
    assert len(set(allocated[3:])) == 1
