"""Products: values, dtypes and the columns emitted for a residual scheme."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call

from depthroute.nn import Linear, OutProjection
from helpers import assert_all_close, assert_close


def filled(module: Linear) -> Linear:
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


def concatenations(projection: OutProjection, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return how often a product without gradients concatenates; its result is checked."""
    weights, count = list(projection.parameters()), 0
    x, cat = torch.randn(2, 4, 5, dtype=weights[0].dtype), torch.cat

    def counted(tensors: list[Tensor], *args: int, **kwargs: int) -> Tensor:
        nonlocal count
        count += 1
        return cat(tensors, *args, **kwargs)

    wanted = cat([x @ weight.T for weight in weights], dim=-1)
    with torch.no_grad(), monkeypatch.context() as patch:
        patch.setattr(torch, "cat", counted)
        assert_close(projection(x), wanted)
        assert_close(projection(x[0, :2]), wanted[0, :2])
    return count


@pytest.mark.parametrize(
    "change",
    [
        lambda p: p,
        lambda p: p.double(),
        lambda p: p.to_empty(device="cpu"),
        lambda p: p.share_memory(),
        lambda p: p.requires_grad_(False),
    ],
    ids=["new", "converted", "allocated", "shared", "frozen"],
)
def test_weights_lie_side_by_side(
    change: Callable[[OutProjection], OutProjection], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert concatenations(filled(change(filled(OutProjection(5, 7, 2)))), monkeypatch) == 0


def test_weights_that_were_moved_apart_are_joined_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        projection = OutProjection(5, 7, 2)
    assert all(weight.is_meta for weight in projection.parameters())
    loaded = filled(OutProjection(5, 7, 2)).state_dict()
    loaded = {name: weight.clone() for name, weight in loaded.items()}
    projection.load_state_dict(loaded, assign=True)
    assert concatenations(projection, monkeypatch) == 2
    assert concatenations(copy.deepcopy(projection), monkeypatch) == 2
    assert concatenations(projection.float(), monkeypatch) == 0
    assert all(torch.equal(projection.state_dict()[name], w) for name, w in loaded.items())


def test_weights_of_two_kinds_keep_them() -> None:
    projection = filled(OutProjection(5, 7, 2))
    projection.emit_weight.data = projection.emit_weight.data.bfloat16()
    assert [w.dtype for w in projection.cpu().parameters()] == [torch.float32, torch.bfloat16]


def test_weights_that_are_not_plain_are_taken_as_they_are() -> None:
    """Those of an ensemble, and those of which only shapes are known."""
    projection, x = filled(OutProjection(5, 7, 2)), torch.randn(2, 4, 5)
    both = {name: torch.stack([w, -w]) for name, w in projection.state_dict().items()}
    with torch.no_grad():
        run = torch.vmap(lambda weights: functional_call(projection, weights, (x,)))
        assert_close(run(both), torch.stack([projection(x), -projection(x)]))
        with FakeTensorMode():
            assert OutProjection(5, 7, 2)(torch.empty(2, 4, 5)).shape == (2, 4, 9)


def test_weights_side_by_side_are_saved_apart(tmp_path: Path) -> None:
    projection = filled(OutProjection(5, 7, 2))
    save_file(projection.state_dict(), tmp_path / "weights.safetensors")
    torch.save(projection.state_dict(), tmp_path / "weights.pt")
    for loaded in (
        load_file(tmp_path / "weights.safetensors"),
        torch.load(tmp_path / "weights.pt", weights_only=True),
    ):
        projection.load_state_dict(loaded)
        assert {name: len(w) for name, w in loaded.items()} == {"weight": 7, "emit_weight": 2}
