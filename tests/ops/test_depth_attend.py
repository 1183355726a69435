"""`depth_attend` and `depth_weights` against their formula, and where tensors are awkward."""

import gc
import math
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from depthroute.ops import depth_attend, depth_read, depth_weights
from depthroute.ops.reference import depth_attend_reference
from helpers import assert_all_close, assert_close, gradients, ignore_dynamo_warnings, literal_read
from read_cases import (
    CASES,
    CONSUMERS,
    VIEWS,
    Case,
    make,
    normed_by_hand,
    options,
    weight_options,
)


def by_literal_loop(case: Case, leaves: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    wide = dict(leaves)
    shape = (case.queries, case.sources, *case.batch)
    if case.bias == "s":
        wide["bias"] = leaves["bias"].view(-1, *[1] * len(case.batch))
    if case.bias:
        wide["bias"] = wide["bias"].expand(shape)
    if case.null:
        wide["null"] = leaves["null"].expand(case.queries, case.heads)
    out, lse, weights = literal_read(**wide, **weight_options(case))
    return normed_by_hand(out, case.out_norm_eps), lse, weights


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("op", [depth_attend, depth_attend_reference])
def test_outputs_and_all_gradients_equal_the_literal_loop(op: Any, case: Case) -> None:
    leaves = make(case)
    expected = by_literal_loop(case, leaves)
    actual = (*op(**leaves, **options(case)), depth_weights(**leaves, **weight_options(case)))
    assert_all_close(actual, expected, ["out", "lse", "weights"])
    upstream = [torch.randn_like(t) for t in expected[:2]]
    inputs = list(leaves.values())
    assert_all_close(
        gradients(actual[:2], inputs, upstream),
        gradients(expected[:2], inputs, upstream),
        [f"gradient of {name}" for name in leaves],
    )


@pytest.mark.parametrize("name", ["plain", "full_norm_heads", "no_norm", "everything"])
def test_gradients_pass_gradcheck(name: str) -> None:
    case = CASES[name]._replace(batch=(2,))
    leaves = make(case)

    def read(*tensors: Tensor) -> Any:
        return depth_attend(**dict(zip(leaves, tensors, strict=True)), **options(case))

    assert torch.autograd.gradcheck(read, tuple(leaves.values()))


@pytest.mark.parametrize("used", ["out", "lse"])
def test_one_unused_output_counts_as_a_zero_gradient(used: str) -> None:
    leaves = list(make(CASES["plain"]).values())
    pick = ["out", "lse"].index(used)
    got, want = (op(*leaves)[pick].square().sum() for op in (depth_attend, depth_attend_reference))
    assert_all_close(
        torch.autograd.grad(got, leaves), torch.autograd.grad(want, leaves), ["values", "query"]
    )


def test_worked_example() -> None:
    values = torch.tensor([[4.0, 0, 1, 0], [0, 4, 0, 1]], dtype=torch.float64)
    query = torch.tensor([math.log(3) / math.sqrt(2), 0.0], dtype=torch.float64)
    for first, mixed in ((4.0, 3.0), (8.0, 6.0)):  # a key is the tail: the first column only mixes
        values[0, 0] = first
        out, _ = depth_attend(values, query, eps=1e-15)
        assert_close(depth_weights(values, query, eps=1e-15).flatten(), torch.tensor([0.75, 0.25]))
        assert_close(out, torch.tensor([mixed, 1.0, 0.75, 0.25]))


def test_query_without_its_axis_is_one_row() -> None:
    values, query = torch.randn(3, 2, 5, 8), torch.randn(1, 4)
    with_axis = (*depth_attend(values, query, heads=2), depth_weights(values, query, heads=2))
    without = (*depth_attend(values, query[0], heads=2), depth_weights(values, query[0], heads=2))
    for a, b in zip(with_axis, without, strict=True):
        assert torch.equal(a[0], b)


def test_stacked_sources_equal_a_list() -> None:
    stacked = torch.randn(4, 4, 4, 8, requires_grad=True)  # S = B = T: only the order tells
    query = torch.randn(2, 8)
    results = [depth_attend(values, query)[0] for values in (stacked, [*stacked])]
    assert torch.equal(*results)
    upstream = torch.randn_like(results[0])
    grads = [torch.autograd.grad(out, stacked, upstream)[0] for out in results]
    assert torch.equal(*grads)
    moved = depth_attend(stacked.transpose(0, 1), query)[0]
    assert not torch.allclose(moved, results[0])


def test_a_source_given_twice_gets_both_gradients() -> None:
    x, y = (torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True) for _ in range(2))
    query = torch.randn(1, 4, dtype=torch.float64)
    got, want = depth_attend([x, y, x], query), literal_read(torch.stack([x, y, x]), query)
    upstream = [torch.randn_like(t) for t in got]
    assert_all_close(
        gradients(got, (x, y), upstream), gradients(want[:2], (x, y), upstream), ["x", "y"]
    )


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_strided_sources_read_as_packed_ones_and_pass_gradients_to_their_base(view: Any) -> None:
    shape, cut = view
    bases = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    query = torch.randn(2, 4, dtype=torch.float64)
    got = depth_attend([cut(base) for base in bases], query)
    want = literal_read(torch.stack([cut(base) for base in bases]), query)[:2]
    assert_all_close(got, want, ["out", "lse"])
    upstream = [torch.randn_like(t) for t in got]
    assert_all_close(gradients(got, bases, upstream), gradients(want, bases, upstream), "abc")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("out_norm_eps", [None, 0.1])
@pytest.mark.parametrize("consume", CONSUMERS.values(), ids=CONSUMERS)
def test_upstream_gradients_of_any_strides(
    consume: Any, out_norm_eps: float | None, dtype: torch.dtype
) -> None:
    leaves = list(make(Case(width=12, rank=6, queries=2, heads=2), dtype).values())
    results = []
    for op in (depth_attend, depth_attend_reference):
        out, lse = op(*leaves, heads=2, out_norm_eps=out_norm_eps)
        results.append(torch.autograd.grad(consume(out) + consume(lse), leaves))
    assert_all_close(*results, ["values", "query"])


@pytest.mark.parametrize("batch", [(0, 5), (2, 0), (0,)])
@pytest.mark.parametrize("op", [depth_attend, depth_attend_reference])
def test_empty_batch(op: Any, batch: tuple[int, ...]) -> None:
    case = CASES["everything"]._replace(batch=batch)
    leaves = make(case, torch.float32)
    out, lse = op(**leaves, **options(case))
    assert out.shape == (3, *batch, 12)
    assert lse.shape == (3, *batch, 2)
    (out.sum() + lse.sum()).backward()
    for name, leaf in leaves.items():
        assert leaf.grad is not None, name
        assert leaf.grad.shape == leaf.shape
        assert not leaf.grad.any(), name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("key_norm", ["tail", "full"])
@pytest.mark.parametrize("zero", ["one_source", "one_token", "all"])
def test_zero_sources_give_finite_results(dtype: torch.dtype, key_norm: Any, zero: str) -> None:
    values = torch.randn(3, 2, 4, 8).to(dtype)
    values[{"one_source": 1, "one_token": (slice(None), 0, 2), "all": slice(None)}[zero]] = 0
    values.requires_grad_()
    query = torch.randn(1, 4, requires_grad=True)
    out, lse = depth_attend(values, query, key_norm=key_norm)
    upstream = torch.randn_like(out)
    grad_values, grad_query = torch.autograd.grad(out, (values, query), upstream)
    for tensor in (out, lse, grad_values, grad_query):
        assert tensor.isfinite().all()
    if zero == "all":  # a uniform mean of nothing
        assert not out.any()
        assert_close(grad_values, (upstream / 3).expand_as(values))
        assert not grad_query.any()


def test_zero_separate_keys_give_finite_gradients() -> None:
    values = torch.randn(3, 2, 8, dtype=torch.float16)
    keys = torch.zeros(3, 2, 4, dtype=torch.float16, requires_grad=True)
    query = torch.randn(1, 4, requires_grad=True)
    out, _ = depth_attend(values, query, keys=keys)
    assert_close(out[0], values.double().mean(0))
    for grad in torch.autograd.grad(out.sum(), (keys, query)):
        assert grad.isfinite().all()


@pytest.mark.parametrize("size", [1e4, -1e4])
def test_large_scores(size: float) -> None:
    values = torch.randn(3, 2, 4, 8)
    values[2] = values[0]  # ties must share
    query = (size * torch.ones(1, 8)).requires_grad_()
    values.requires_grad_()
    out, lse = depth_attend(values, query)
    want, want_lse, _ = literal_read(values, query)
    assert_close(out, want, rtol=1e-2)  # a float32 logit near 1e4 is known to 1e-3
    assert_close(lse, want_lse)
    for grad in torch.autograd.grad(out.sum(), (values, query)):
        assert grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_sources_lose_one_rounding(dtype: torch.dtype) -> None:
    values, query = torch.randn(33, 24, 64).to(dtype), 0.3 * torch.randn(1, 64)
    exact, exact_lse, exact_weights = literal_read(values, query)
    out, lse = depth_attend(values, query)
    weights = depth_weights(values, query)
    assert (lse - exact_lse).abs().max() < 1e-5
    assert (weights - exact_weights).abs().max() < 1e-6
    assert (weights.sum(1) - 1).abs().max() < 1e-6
    rounded = exact.to(dtype)
    assert (out == rounded).float().mean() > 0.99
    ulp = torch.finfo(dtype).eps * exact.abs()
    assert ((out - exact).abs() <= 0.51 * ulp.clamp_min(1e-6)).all()
    # rounding to nearest has no drift; truncation would be off by half a unit
    assert ((out - exact) * exact.sign() / ulp).mean().abs() < 0.03


@pytest.mark.parametrize("source", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("parameter", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("autocast", [False, True])
def test_dtypes_follow_the_sources_and_autocast_changes_nothing(
    source: torch.dtype, parameter: torch.dtype, autocast: bool
) -> None:
    values = torch.randn(5, 2, 4, 16).to(source).requires_grad_()
    query = torch.randn(2, 16).to(parameter).requires_grad_()
    exact, exact_lse, exact_weights = literal_read(values, query)
    upstream = torch.randn(exact.shape).to(source)
    want = gradients([exact], (values, query), [upstream.double()])
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out, lse = depth_attend(values, query)
        weights = depth_weights(values, query)
        got = gradients([out], (values, query), [upstream])
    assert (out.dtype, lse.dtype) == (source, torch.float32)
    assert_all_close((out, lse, weights), (exact, exact_lse, exact_weights), ("out", "lse", "w"))
    assert [g.dtype for g in got] == [source, parameter]
    assert_all_close(got, want, ["values", "query"])


def test_out_dtype_keeps_the_accumulated_result() -> None:
    values, query = torch.randn(3, 2, 8).bfloat16(), torch.randn(1, 8)
    out, _ = depth_attend(values, query, out_dtype=torch.float32)
    assert out.dtype == torch.float32
    assert_close(out, literal_read(values, query)[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("op", [depth_attend, depth_attend_reference])
def test_the_norm_of_the_output_comes_before_its_rounding(op: Any, dtype: torch.dtype) -> None:
    values, query = torch.randn(33, 24, 64).to(dtype), 0.3 * torch.randn(1, 64)
    out, _ = op(values, query, out_norm_eps=1e-6)
    exact = normed_by_hand(literal_read(values, query)[0], 1e-6)
    assert (out == exact.to(dtype)).float().mean() > 0.99  # 0.75 if it comes after


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_single_source_comes_back_bitwise(dtype: torch.dtype) -> None:
    value = torch.randn(2, 4, 8).to(dtype).requires_grad_()
    out, _ = depth_attend([value], torch.randn(8), bias=torch.tensor([3.0]))
    assert torch.equal(out, value)
    assert out.data_ptr() != value.data_ptr()
    twice = out + out * 2  # used by two consumers, then backward through both
    assert torch.equal(torch.autograd.grad(twice.sum(), value)[0], torch.full_like(value, 3))


def test_a_null_logit_takes_its_share_of_the_mass() -> None:
    values, query = torch.randn(3, 2, 8, dtype=torch.float64), torch.zeros(1, 8).double()
    out, lse = depth_attend(values, query, null=math.log(2))
    assert_close(lse, torch.full((1, 2, 1), math.log(3 + 2), dtype=torch.float64))
    assert_close(out[0], values.sum(0) / 5)
    assert_close(
        depth_weights(values, query, null=math.log(2)).sum(1),
        torch.full((1, 2, 1), 0.6, dtype=torch.float64),
    )


def test_weights_pass_the_gradient_of_an_entropy_penalty() -> None:
    values = torch.randn(4, 3, 6, dtype=torch.float64)
    query = torch.randn(6, dtype=torch.float64, requires_grad=True)
    weights = depth_weights(values, query)[..., 0]  # [S, N]
    entropy = -(weights * weights.log()).sum(0)
    (grad,) = torch.autograd.grad(entropy.sum(), query)
    keys = values / (values.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    by_logit = -weights * (weights.log() + entropy)  # dH / dz_i = -w_i (log w_i + H)
    assert_close(grad, torch.einsum("sn,snd->d", by_logit, keys))


def test_second_derivatives_raise_instead_of_being_wrong() -> None:
    values, query = make(CASES["plain"]).values()
    out, _ = depth_attend(values, query)
    (grad,) = torch.autograd.grad(out.square().sum(), values, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()
    values, query = make(Case(sources=2, batch=(1,), width=3, rank=2)).values()
    assert torch.autograd.gradgradcheck(depth_attend_reference, (values, query))


def test_a_source_changed_in_place_before_backward_is_noticed() -> None:
    values = [torch.randn(2, 4) for _ in range(2)]
    query = torch.randn(4, requires_grad=True)
    out, _ = depth_attend(values, query)
    values[1].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_sources_are_freed_after_backward() -> None:
    source = torch.randn(2, 4)
    alive = weakref.ref(source)
    query = torch.randn(4, requires_grad=True)
    out, lse = depth_attend([source, torch.randn(2, 4)], query)
    (out.sum() + lse.sum()).backward()
    del source
    gc.collect()
    assert alive() is None
    assert out.requires_grad  # the result itself is still there


def test_the_same_step_twice_is_bitwise_the_same() -> None:
    leaves = list(make(CASES["seven_sources"], torch.float32).values())
    runs = []
    for _ in range(3):
        out, lse = depth_attend(*leaves)
        runs.append([out, lse, *torch.autograd.grad(out.square().sum() + lse.sum(), leaves)])
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))


@ignore_dynamo_warnings
@pytest.mark.parametrize("name", ["one_source", "everything", "full_norm"])
def test_compiled_read_equals_eager(name: str) -> None:
    case = CASES[name]
    leaves = make(case, torch.float32)
    inputs = list(leaves.values())

    def read(**tensors: Tensor) -> tuple[Tensor, Tensor]:
        return depth_attend(**tensors, **options(case))

    torch.compiler.reset()
    eager = read(**leaves)
    compiled = torch.compile(read, backend="aot_eager", fullgraph=True)(**leaves)
    assert_all_close(compiled, eager, ["out", "lse"])
    upstream = [torch.randn_like(t) for t in eager]
    want, got = gradients(eager, inputs, upstream), gradients(compiled, inputs, upstream)
    assert all(g.any() for g in got)
    assert_all_close(got, want, list(leaves))


@ignore_dynamo_warnings
def test_compiled_read_follows_changing_sizes() -> None:
    torch.compiler.reset()
    read = torch.compile(depth_attend, backend="aot_eager", fullgraph=True)
    for queries, tokens, biased in ((2, 4, False), (3, 4, True), (3, 5, True)):
        values, query = torch.randn(3, 2, tokens, 8), torch.randn(queries, 8)
        bias = torch.randn(queries, 3, 2, tokens) if biased else None
        got, want = (op(values, query, bias=bias) for op in (read, depth_attend_reference))
        assert_all_close(got, want, ["out", "lse"])


def test_meta_tensors_give_shapes() -> None:
    values, query = torch.empty(3, 2, 8, device="meta"), torch.empty(2, 4, device="meta")
    out, lse = depth_attend(values, query, heads=2)
    assert (out.shape, lse.shape) == ((2, 2, 8), (2, 2, 2))


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    num_sources=st.integers(1, 6),
    rank=st.sampled_from([2, 4, 8]),
    heads=st.sampled_from([1, 2]),
    size=st.floats(0.1, 1e3),
)
def test_laws_of_a_read(seed: int, num_sources: int, rank: int, heads: int, size: float) -> None:
    source = torch.Generator().manual_seed(seed)
    values = torch.randn(num_sources, 3, 8, generator=source, dtype=torch.float64)
    query = torch.randn(2, rank, generator=source, dtype=torch.float64)
    order = torch.randperm(num_sources, generator=source)
    weights = depth_weights(values, query, heads=heads, eps=1e-14)
    out, lse = depth_attend(values, query, heads=heads, eps=1e-14)

    assert (weights > 0).all()
    assert_close(weights.sum(1), torch.ones_like(lse))
    mix = torch.einsum("qsnh,snhd->qnhd", weights, values.unflatten(-1, (heads, -1)))
    assert_close(out, mix.flatten(-2))
    # the order of the sources does not matter
    shuffled, shuffled_lse = depth_attend(values[order], query, heads=heads, eps=1e-14)
    assert_all_close((shuffled, shuffled_lse), (out, lse), ["out", "lse"])
    # a source's size does not change who is looked at
    scaled = torch.cat([values[:-1], size * values[-1:]])
    assert_close(depth_weights(scaled, query, heads=heads, eps=1e-14), weights, rtol=1e-7)


@pytest.mark.parametrize("num_queries", [0, 2])
def test_a_read_is_the_mix_alone(num_queries: int) -> None:
    values, query = list(torch.randn(3, 2, 4, 8)), torch.randn(5)
    if num_queries:
        query = query * torch.ones(num_queries, 1)
    for more in ({}, {"key_norm": "full", "bias": torch.randn(3)}):
        expected, _ = depth_attend(values, query, eps=1e-2, **more)
        assert torch.equal(depth_read(values, query, 1e-2, **more), expected)
