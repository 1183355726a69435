"""Sinkhorn-Knopp against division in a loop, and its limits."""

import functools

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from depthroute.ops import sinkhorn
from helpers import assert_close, ignore_dynamo_warnings


def literal(logits: Tensor, num_steps: int) -> Tensor:
    """Divide one matrix's columns, then its rows, element by element."""
    size = len(logits)
    m = [[logits[i, j].exp() for j in range(size)] for i in range(size)]
    for _ in range(num_steps):
        columns = [sum(m[i][j] for i in range(size)) for j in range(size)]
        m = [[m[i][j] / columns[j] for j in range(size)] for i in range(size)]
        m = [[entry / sum(row) for entry in row] for row in m]
    return torch.stack([torch.stack(row) for row in m])


@pytest.mark.parametrize(("size", "num_steps"), [(1, 1), (2, 3), (3, 1), (5, 20)])
def test_values_and_gradient_equal_division_in_a_loop(size: int, num_steps: int) -> None:
    logits = (2 * torch.randn(2, size, size, dtype=torch.float64)).requires_grad_()
    upstream = torch.randn_like(logits)
    want = torch.stack([literal(matrix, num_steps) for matrix in logits])
    (want_grad,) = torch.autograd.grad(want, logits, upstream)
    out = sinkhorn(logits, num_steps=num_steps)
    (grad,) = torch.autograd.grad(out, logits, upstream)
    assert_close(out, want)
    assert (grad - want_grad).abs().max() < 1e-12  # zero for one entry and for n = 1


def test_gradient_equals_finite_differences() -> None:
    logits = torch.randn(3, 4, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(functools.partial(sinkhorn, num_steps=20), logits)


def test_rows_sum_to_one_and_columns_come_near_with_more_steps() -> None:
    logits = 3 * torch.randn(512, 4, 4, dtype=torch.float64)
    errors = []
    for num_steps in (1, 5, 20, 1000):
        out = sinkhorn(logits, num_steps=num_steps)
        assert (out >= 0).all()
        assert_close(out.sum(-1), torch.ones(512, 4, dtype=torch.float64), rtol=1e-14)
        errors.append((out.sum(-2) - 1).abs().max().item())
    assert errors == sorted(errors, reverse=True)
    assert 1e-3 < errors[2] < 0.2
    assert errors[3] < 1e-5


def test_a_product_of_converged_matrices_is_doubly_stochastic_and_expands_nothing() -> None:
    matrices = sinkhorn(torch.randn(60, 4, 4, dtype=torch.float64), num_steps=200)
    product = functools.reduce(torch.matmul, matrices)
    ones = torch.ones(4, dtype=torch.float64)
    assert_close(product.sum(-1), ones)
    assert_close(product.sum(-2), ones)
    assert abs(torch.linalg.matrix_norm(product, 2) - 1) < 1e-9


def test_logits_far_apart_give_no_nan() -> None:
    # exp(-300) is 0 in float32: division would give 0 / 0 in the last row
    logits = torch.zeros(3, 3)
    logits[2] = -300.0
    assert_close(sinkhorn(logits), torch.full((3, 3), 1 / 3), rtol=1e-4)


def test_a_constant_on_a_row_or_column_changes_only_the_way_to_the_limit() -> None:
    logits = torch.randn(4, 4, dtype=torch.float64)
    shifted = logits + torch.randn(4, 1, dtype=torch.float64) + torch.randn(4, dtype=torch.float64)
    assert_close(sinkhorn(shifted, num_steps=500), sinkhorn(logits, num_steps=500))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_result_is_float32(dtype: torch.dtype) -> None:
    logits = torch.randn(7, 3, 3).to(dtype)
    out = sinkhorn(logits)
    assert out.dtype == torch.float32
    assert_close(out, sinkhorn(logits.double()), rtol=1e-5)


@ignore_dynamo_warnings
def test_compiles_to_one_graph() -> None:
    torch.compiler.reset()
    logits = torch.randn(5, 3, 3, requires_grad=True)
    upstream = torch.randn(5, 3, 3)
    counter = CompileCounterWithBackend("aot_eager")
    out = torch.compile(sinkhorn, backend=counter, fullgraph=True)(logits)
    (grad,) = torch.autograd.grad(out, logits, upstream)
    want = sinkhorn(logits)
    assert_close(out, want)
    assert_close(grad, torch.autograd.grad(want, logits, upstream)[0], rtol=1e-4)
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    ("logits", "num_steps", "message"),
    [
        (torch.zeros(3), 1, r"logits must have shape \[..., n, n\], n >= 1, got \(3,\)"),
        (torch.zeros(2, 3), 1, r"got \(2, 3\)"),
        (torch.zeros(2, 0, 0), 1, r"got \(2, 0, 0\)"),
        (torch.zeros(3, 3, dtype=torch.int64), 1, "logits must be floating, got torch.int64"),
        (torch.zeros(3, 3), 0, "num_steps must be >= 1, got 0"),
    ],
)
def test_wrong_arguments_are_named(logits: Tensor, num_steps: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sinkhorn(logits, num_steps=num_steps)
