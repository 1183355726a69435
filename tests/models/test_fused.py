"""A decoder whose reads run in the kernels, in Triton's interpreter, equals one without them."""

import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor

from block_cases import count_launches
from depthroute.models import CausalLM
from depthroute.models.decoder import Checkpointing
from depthroute.ops import use_backend
from helpers import VARIANTS, assert_all_close, assert_close, ignore_dynamo_warnings, tiny_model

pytestmark = [
    pytest.mark.kernel,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton"),
]


IDS = torch.arange(24).view(2, 12) * 17 % 61


def loss_and_gradients(model: CausalLM, loss: Any = None) -> list[Tensor]:
    sums = (loss or model.loss)(IDS, IDS.roll(-1, 1), chunk_tokens=10)
    mean = sums.cross_entropy / sums.tokens
    return [mean.detach(), *torch.autograd.grad(mean, list(model.parameters()))]


def names_of(model: CausalLM) -> list[str]:
    return ["loss", *(name for name, _ in model.named_parameters())]


@ignore_dynamo_warnings
@pytest.mark.parametrize("name", ["prenorm", "attn_res_block3", "s_lr", "p_lr"])
def test_a_compiled_decoder_has_the_gradients_of_plain_pytorch(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, launches = tiny_model(VARIANTS[name], num_hidden_layers=3), count_launches(monkeypatch)
    with use_backend("reference"):
        expected = loss_and_gradients(model)
    with use_backend("triton"):
        loss_and_gradients(model)
        eager = dict(launches)
        launches.clear()
        torch.compiler.reset()
        compiled = torch.compile(model.loss, backend="aot_eager", fullgraph=True)
        actual = loss_and_gradients(model, compiled)
    assert_all_close(actual, expected, names_of(model), rtol=1e-4)
    assert eager
    assert launches == eager


@ignore_dynamo_warnings
@torch.no_grad()
@pytest.mark.parametrize("name", ["prenorm", "attn_res_block3", "attn_res_full", "p_lr"])
def test_a_compiled_decoder_evaluates_like_an_eager_one(name: str) -> None:
    model = tiny_model(VARIANTS[name], num_hidden_layers=3)
    with use_backend("triton"):
        expected = model(IDS)
        torch.compiler.reset()
        actual = torch.compile(model, backend="aot_eager", fullgraph=True)(IDS)
    assert_close(actual, expected, rtol=1e-5)


@pytest.mark.parametrize("checkpointing", ["layer", "depth_block"])
@pytest.mark.parametrize("name", ["prenorm", "attn_res_block3", "p_lr"])
def test_checkpointing_keeps_the_gradients(name: str, checkpointing: Checkpointing) -> None:
    model = tiny_model(VARIANTS[name], num_hidden_layers=3)
    with use_backend("triton"):
        expected = loss_and_gradients(model)
        model.model.checkpointing = checkpointing
        actual = loss_and_gradients(model)
    assert_all_close(actual, expected, names_of(model))


@ignore_dynamo_warnings
@pytest.mark.parametrize("checkpointing", ["layer", "depth_block"])
def test_a_compiled_decoder_may_be_checkpointed(checkpointing: Checkpointing) -> None:
    model = tiny_model(VARIANTS["attn_res_block3"], num_hidden_layers=3)
    with use_backend("triton"):
        expected = loss_and_gradients(model)
        model.model.checkpointing = checkpointing
        torch.compiler.reset()
        compiled = torch.compile(model.loss, backend="aot_eager", fullgraph=True)
        actual = loss_and_gradients(model, compiled)
    assert_all_close(actual, expected, names_of(model), rtol=1e-4)


@ignore_dynamo_warnings
def test_one_graph_serves_any_number_of_tokens() -> None:
    model, graphs = tiny_model(VARIANTS["attn_res_block3"], num_hidden_layers=3), []

    def count(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    compiled = torch.compile(model.model.forward, backend=count, fullgraph=True)
    for tokens in (5, 6, 7, 8):
        with use_backend("triton"):
            actual = compiled(IDS[:, :tokens])
        with use_backend("reference"):
            assert_all_close([actual], [model.model(IDS[:, :tokens])], ["hidden"], rtol=1e-4)
    assert len(graphs) == 2  # the second is for any number of tokens
