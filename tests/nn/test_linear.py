"""Products: values, dtypes and the columns emitted for a residual scheme."""

import pytest
import torch

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


@pytest.mark.parametrize("batch", [(), (3,), (0, 3), (2, 2), (5,), (2, 4)])
def test_emitted_columns_follow_the_output(batch: tuple[int, ...]) -> None:
    """Fewer tokens than input columns, as many, and more."""
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
