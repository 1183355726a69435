"""A compiled decoder has the gradients of an eager one, through torch's real code generator."""

import shutil

import pytest
import torch
from torch import Tensor

from depthroute.models import CausalLM, generate
from depthroute.models.compile import compile_model
from helpers import VARIANTS, assert_all_close, ignore_dynamo_warnings, tiny_model


def loss_and_gradients(model: CausalLM) -> list[Tensor]:
    ids = torch.arange(128).view(2, 64) % 61
    sums = model.loss(ids, ids.roll(-1, 1), chunk_tokens=50)
    loss = sums.cross_entropy / sums.tokens
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


# a width of 32 hides it: the generated code was wrong from a width of 128 on
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles for the CPU with g++")
@ignore_dynamo_warnings
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_decoder_has_the_gradients_of_an_eager_one():
    model = tiny_model(
        VARIANTS["attn_res_block3"], hidden_size=128, intermediate_size=352, num_key_value_heads=4
    )
    names = ["loss", *(name for name, _ in model.named_parameters())]
    expected = loss_and_gradients(model)
    compile_model(model, "model")
    assert_all_close(loss_and_gradients(model), expected, names, rtol=1e-4)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles for the CPU with g++")
@ignore_dynamo_warnings
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_sublayers_generate_alike_with_one_graph_for_all_layers():
    model = tiny_model(VARIANTS["s_lr"], num_hidden_layers=9)  # torch gives up at 8 recompilations
    prompts = torch.randint(61, (2, 5))
    expected = generate(model, prompts, max_new_tokens=9, temperature=0)
    torch._dynamo.reset()
    compile_model(model, "sublayer")
    assert torch.equal(generate(model, prompts, max_new_tokens=9, temperature=0), expected)
