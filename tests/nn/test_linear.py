"""Products: values, dtypes and the columns emitted for a residual scheme."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_model
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call

from depthroute.nn import JoinedWeights, Linear, OutProjection
from helpers import assert_all_close, assert_close


def filled(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    return module


def test_linear_is_the_product_with_the_transposed_weight() -> None:
    linear, x = filled(Linear(5, 7)).double(), torch.randn(2, 3, 5, dtype=torch.float64)
    assert_close(linear(x), torch.einsum("oi,bti->bto", linear.weight, x))


@pytest.mark.parametrize("emit_dim", [0, 2])
def test_product_runs_in_the_dtype_of_the_input(emit_dim: int) -> None:
    projection = filled(OutProjection(5, 7, emit_dim))
    x = torch.randn(3, 5, dtype=torch.bfloat16)
    y = projection(x)
    assert y.dtype == torch.bfloat16
    weight = torch.cat(list(projection.parameters()))
    assert_close(y, x.float() @ weight.T)
    y.sum().backward()
    for parameter in projection.parameters():
        assert parameter.dtype == parameter.grad.dtype == torch.float32


@pytest.mark.parametrize("batch", [(), (3,), (0, 3), (2, 4)])
def test_emitted_columns_follow_the_output(batch: tuple[int, ...]) -> None:
    projection = filled(OutProjection(5, 7, 2)).double()
    leaves = [torch.randn(*batch, 5, dtype=torch.float64, requires_grad=True)]
    leaves += projection.parameters()
    y, upstream = projection(leaves[0]), torch.randn(*batch, 9, dtype=torch.float64)
    assert y.shape == (*batch, 9)
    wanted = [leaves[0] @ weight.T for weight in leaves[1:]]
    assert_all_close([y[..., :7], y[..., 7:]], wanted, ["out", "emitted"])
    expected = torch.autograd.grad(wanted, leaves, [upstream[..., :7], upstream[..., 7:]])
    got = torch.autograd.grad(y, leaves, upstream)
    assert_all_close(got, expected, ["x", "weight", "emit_weight"])


def test_without_emitted_columns_there_is_no_parameter_for_them() -> None:
    assert list(OutProjection(5, 7).state_dict()) == ["weight"]
    assert list(OutProjection(5, 7, 2).state_dict()) == ["weight", "emit_weight"]


def test_joined_weights_stand_in_for_a_concatenation() -> None:
    model, x = filled(nn.Sequential(OutProjection(5, 7, 2), OutProjection(9, 3))), torch.randn(4, 5)
    expected, joined = model(x), JoinedWeights(model)
    before = model.state_dict()
    with torch.no_grad():
        model[0].weight.zero_()  # which the copies do not see
    with joined:
        with torch.no_grad():
            assert_close(model(x), expected)
        assert_close(model[0](x)[:, :7], torch.zeros(4, 7))  # with gradients, the weights'
        assert model.state_dict().keys() == before.keys()
    assert_close(model[0](x)[:, :7], torch.zeros(4, 7))


def test_both_weights_have_memory_of_their_own(tmp_path: Path) -> None:
    """Some tools save one of two parameters that share it."""
    projection = filled(OutProjection(5, 7, 2))
    save_model(projection, tmp_path / "weights.safetensors")
    loaded = load_file(tmp_path / "weights.safetensors")
    assert {name: len(w) for name, w in loaded.items()} == {"weight": 7, "emit_weight": 2}


def test_weights_of_an_ensemble_and_of_known_shapes_alone_do() -> None:
    projection, x = filled(OutProjection(5, 7, 2)), torch.randn(2, 4, 5)
    both = {name: torch.stack([w, -w]) for name, w in projection.state_dict().items()}
    with torch.no_grad():
        run = torch.vmap(lambda weights: functional_call(projection, weights, (x,)))
        assert_close(run(both), torch.stack([projection(x), -projection(x)]))
        with FakeTensorMode():
            assert OutProjection(5, 7, 2)(torch.empty(2, 4, 5)).shape == (2, 4, 9)
