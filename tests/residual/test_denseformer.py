"""DenseFormer against its equations, written as a loop over layers."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from depthroute.models import CausalLM
from depthroute.residual import DenseFormerConfig, PreNormConfig, build_residual
from helpers import ToyModel, assert_close, assert_same_gradients, tiny_config, tiny_model

DIM = 16
SHAPES = [*product((1, 2, 3), (1, 2, 3)), (4, 4)]
each_shape = pytest.mark.parametrize(("dilation", "period"), SHAPES)


def literal_pass(toy: ToyModel, x: Tensor) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Return what each site reads, and by layer the outputs X and the averages Y."""
    k, p = toy.residual.config.dilation, toy.residual.config.period
    reads, outputs, averages = [], [x], [x]
    for layer in range(1, len(toy.sublayers) // 2 + 1):
        h = averages[-1]
        for site in (2 * layer - 2, 2 * layer - 1):
            reads.append(h)
            h = h + toy.sublayer(site, (h,))
        outputs.append(h)
        if layer % p == 0:
            weight = toy.residual.weight[layer // p - 1].flatten()
            sources = [j for j in range(layer + 1) if j % k == layer % k]
            assert len(weight) == len(sources) == layer // k + 1
            h = sum(weight[n] * outputs[j] for n, j in enumerate(sources))
            h.retain_grad()
        averages.append(h)
    return [*reads, averages[-1]], outputs, averages


@each_shape
def test_every_read_equals_the_literal_loop(dilation: int, period: int) -> None:
    config = DenseFormerConfig(dilation=dilation, period=period)
    toy, x = ToyModel(config).double(), torch.randn(2, 3, DIM, dtype=torch.float64)
    reads, _, _ = literal_pass(toy, x)
    steps = toy.steps(x)
    for step, read in zip(steps, reads, strict=True):
        assert_close(step.inputs[0], read, f"site {step.site}")
    assert_same_gradients(toy, steps[-1].inputs[0], reads[-1])


def test_the_gradient_of_a_weight_is_average_gradient_times_output() -> None:
    toy = ToyModel(DenseFormerConfig()).double()
    x, upstream = torch.randn(2, 2, 3, DIM, dtype=torch.float64)
    reads, outputs, averages = literal_pass(toy, x)
    reads[-1].backward(upstream)
    expected = [
        [(averages[i].grad * outputs[j]).sum().item() for j in range(i + 1)] for i in range(1, 5)
    ]
    toy.zero_grad()
    toy(x).backward(upstream)
    for weight, row in zip(toy.residual.weight, expected, strict=True):
        torch.testing.assert_close(weight.grad.flatten(), torch.tensor(row, dtype=torch.float64))


@each_shape
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_untrained_model_is_the_plain_sum_bit_for_bit(
    dilation: int, period: int, dtype: torch.dtype
) -> None:
    ids = torch.arange(18).view(2, 9)
    config = DenseFormerConfig(dilation=dilation, period=period)
    routed, plain = (CausalLM(tiny_config(c)) for c in (config, PreNormConfig()))
    for model in (routed, plain):
        model.model.compute_dtype = dtype
    assert torch.equal(routed(ids), plain(ids))


def test_other_weights_are_another_function() -> None:
    ids = torch.arange(18).view(2, 9)
    plain, routed = tiny_model(PreNormConfig()), tiny_model(DenseFormerConfig())
    assert (routed(ids) - plain(ids)).abs().max() > 1e-2 * plain(ids).abs().max()


def test_a_scheme_built_alone_starts_as_the_plain_sum() -> None:
    x = torch.randn(2, 3, DIM)
    steps = {}
    for config in (DenseFormerConfig(), PreNormConfig()):
        residual = build_residual(config, dim=DIM, kinds=("attention", "mlp") * 3)
        state = residual(x)
        for site in range(6):
            (h,), state = residual.read(state, site, torch.tanh)
            state = residual.write(state, site, h)
        steps[config.name] = residual.finish(state, torch.tanh)
    assert torch.equal(steps["denseformer"], steps["prenorm"])


def test_a_last_average_of_the_embedding_alone_returns_it() -> None:
    toy, x = ToyModel(DenseFormerConfig()), torch.randn(2, 3, DIM)
    with torch.no_grad():
        toy.residual.weight[-1].zero_()
        toy.residual.weight[-1][0] = 1.0
    assert torch.equal(toy(x), x)


def test_averages_of_bfloat16_outputs_are_rounded_once() -> None:
    residual = build_residual(DenseFormerConfig(), dim=1, kinds=("attention", "mlp"))
    with torch.no_grad():
        residual.weight[0].copy_(torch.tensor([[-1.0], [1.00390625]]))
    state = residual(torch.full((1, 1, 1), 1.0, dtype=torch.bfloat16))
    for site in (0, 1):
        state = residual.write(state, site, torch.zeros(1, 1, 1, dtype=torch.bfloat16))
    # 1.00390625 = 1 + 2^-8 is not a bfloat16
    assert residual.finish(state, torch.clone).item() == 2**-8


@pytest.mark.parametrize(("shape", "scalars"), [((1, 1), 324), ((4, 1), 90), ((4, 5), 15)])
def test_cost_of_24_layers(shape: tuple[int, int], scalars: int) -> None:
    config = DenseFormerConfig(dilation=shape[0], period=shape[1])
    residual = build_residual(config, dim=1024, kinds=("attention", "mlp") * 24)
    assert residual.cost() == (scalars, scalars * 1024, 25 * 1024, 0)
    state = residual(torch.zeros(1, 1, 1024))
    for site in range(48):
        state = residual.write(state, site, torch.zeros(1, 1, 1024))
    assert sum(x.numel() for x in state.outputs) == residual.cost().cached


def test_the_last_layer_ends_with_the_last_sublayer() -> None:
    kinds = ("attention", "mlp", "mlp", "attention")
    residual = build_residual(DenseFormerConfig(), dim=4, kinds=kinds)
    assert [len(weight) for weight in residual.weight] == [2, 3, 4]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dilation": 0}, "dilation must be >= 1, got 0"),
        ({"period": -1}, "period must be >= 1, got -1"),
        ({"dilation": 3}, "dilation must be at most the 2 layers of the model, got 3"),
        ({"period": 3}, "period must be at most the 2 layers of the model, got 3"),
    ],
)
def test_wrong_settings_are_refused(changes: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_residual(DenseFormerConfig(**changes), dim=4, kinds=("attention", "mlp") * 2)
