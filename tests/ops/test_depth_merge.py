"""`depth_merge` is the second half of `depth_attend`: any split of the sources gives the same."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from depthroute.ops import depth_attend, depth_merge
from depthroute.ops.reference import depth_merge_reference
from helpers import assert_all_close, assert_close, gradients, ignore_dynamo_warnings, literal_read
from read_cases import normed_by_hand

SHAPE = (5, 2, 4, 12)  # S, B, T, D
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tail": {"rank": 5, "queries": 3},
    "heads": {"rank": 6, "heads": 3, "queries": 2},
    "full_norm": {"rank": 4, "key_norm": "full"},
    "no_norm": {"rank": 4, "key_norm": "none", "scale": 0.3},
    "separate_keys": {"rank": 7, "separate": True, "queries": 2},
    "bias": {"bias": True, "queries": 2},
    "everything": {"rank": 6, "heads": 2, "separate": True, "bias": True, "queries": 3},
}


class Sources:
    """Differentiable sources, keys, query and bias of one set of options."""

    def __init__(
        self,
        rank: int = 12,
        queries: int = 1,
        separate: bool = False,
        bias: bool = False,
        dtype: torch.dtype = torch.float64,
        **rule: Any,
    ) -> None:
        def leaf(*shape: int) -> Tensor:
            return torch.randn(shape, dtype=dtype, requires_grad=True)

        self.values = [leaf(*SHAPE[1:]) for _ in range(SHAPE[0])]
        self.query = leaf(queries, rank)
        self.keys = [leaf(*SHAPE[1:-1], rank) for _ in self.values] if separate else None
        self.bias = leaf(queries, *SHAPE[:-1]) if bias else None
        self.rule = {"eps": 1e-3, **rule}
        extra = [] if self.bias is None else [self.bias]
        self.leaves = [*self.values, *(self.keys or ()), *extra, self.query]

    def attend(self, start: int, stop: int, **options: Any) -> tuple[Tensor, Tensor]:
        keys = None if self.keys is None else self.keys[start:stop]
        bias = None if self.bias is None else self.bias[:, start:stop]
        values = self.values[start:stop]
        return depth_attend(values, self.query, keys=keys, bias=bias, **self.rule, **options)

    def merge(
        self, read: tuple[Tensor, Tensor], i: int, op: Any = depth_merge, **options: Any
    ) -> Any:
        rule = {name: value for name, value in self.rule.items() if name != "heads"}
        key = None if self.keys is None else self.keys[i]
        bias = None if self.bias is None else self.bias[:, i]
        return op(*read, self.values[i], self.query, key=key, bias=bias, **rule, **options)

    def literal(self, null: Tensor | None = None) -> tuple[Tensor, Tensor]:
        keys = None if self.keys is None else torch.stack(self.keys)
        values = torch.stack(self.values)
        read = literal_read(values, self.query, keys=keys, bias=self.bias, null=null, **self.rule)
        return read[:2]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("split", [1, 2, 4])
def test_any_split_of_the_sources_equals_one_read(options: dict[str, Any], split: int) -> None:
    sources = Sources(**options)
    read = sources.attend(0, split)
    for i in range(split, SHAPE[0]):
        read = sources.merge(read, i)
    expected = sources.literal()
    assert_all_close(read, expected, ["out", "lse"])
    upstream = [torch.randn_like(t) for t in expected]
    got, want = (gradients(outputs, sources.leaves, upstream) for outputs in (read, expected))
    assert_all_close(got, want, [f"leaf {i}" for i in range(len(got))])


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("op", [depth_merge, depth_merge_reference])
def test_the_last_merge_may_norm_its_output(op: Any, options: dict[str, Any]) -> None:
    sources = Sources(**options)
    read = sources.merge(sources.attend(0, 3), 3)
    merged = sources.merge(read, 4, op, out_norm_eps=0.1)
    out, lse = sources.literal()
    expected = normed_by_hand(out, 0.1), lse
    assert_all_close(merged, expected, ["out", "lse"])
    upstream = [torch.randn_like(t) for t in expected]
    got, want = (gradients(outputs, sources.leaves, upstream) for outputs in (merged, expected))
    assert_all_close(got, want, [f"leaf {i}" for i in range(len(got))])


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_gradients_of_every_argument_equal_autograd(options: dict[str, Any]) -> None:
    sources = Sources(**options)
    read = [t.detach().requires_grad_() for t in sources.attend(0, 2)]
    leaves = [*read, *sources.leaves]
    merged = [sources.merge(tuple(read), 3, op) for op in (depth_merge, depth_merge_reference)]
    assert_all_close(*merged, ["out", "lse"])
    upstream = [torch.randn_like(t) for t in merged[0]]
    got, want = (gradients(outputs, leaves, upstream) for outputs in merged)
    assert_all_close(got, want, [f"leaf {i}" for i in range(len(got))])
    assert sum(bool(g.any()) for g in got) >= 4  # out, lse, value, query


def test_gradients_pass_gradcheck() -> None:
    out, lse, value, key, query, bias = (
        torch.randn(shape, dtype=torch.float64, requires_grad=True)
        for shape in ((2, 3, 6), (2, 3, 2), (3, 6), (3, 4), (2, 4), (2, 3))
    )

    def merge(*tensors: Tensor) -> Any:
        out, lse, value, key, query, bias = tensors
        return depth_merge(out, lse, value, query, key=key, bias=bias)

    assert torch.autograd.gradcheck(merge, (out, lse, value, key, query, bias))


def test_nothing_and_a_null_logit_start_the_sum() -> None:
    sources = Sources(queries=2, rank=6, heads=2)
    null = torch.randn(2, 2, dtype=torch.float64)
    read = torch.zeros(2, *SHAPE[1:]).double(), null[:, None, None].expand(2, 2, 4, 2)
    for i in range(SHAPE[0]):
        read = sources.merge(read, i)
    assert_all_close(read, sources.literal(null), ["out", "lse"])
    assert_all_close(read, sources.attend(0, SHAPE[0], null=null), ["out", "lse"])


def test_an_empty_read_gives_way_to_the_source() -> None:
    value = torch.randn(2, 4, 12)
    read = torch.zeros(2, 4, 12), torch.full((2, 4, 1), -torch.inf)
    out, lse = depth_merge(*read, value, torch.randn(12))
    assert torch.equal(out, value)
    assert lse.isfinite().all()


def test_each_query_may_merge_another_source() -> None:
    sources = Sources(queries=3, rank=5)
    ahead = sources.attend(0, 3)
    for q, i in ((0, 3), (1, 4), (2, 3)):  # two phases: one pass for all queries, then each alone
        query = sources.query[q]
        out, lse = depth_merge(ahead[0][q], ahead[1][q], sources.values[i], query, eps=1e-3)
        values = torch.stack([*sources.values[:3], sources.values[i]])
        want = literal_read(values, query[None], eps=1e-3)
        assert_all_close((out, lse), (want[0][0], want[1][0]), ["out", "lse"])


@pytest.mark.parametrize("bias", [0.7, "b", "qb"])
def test_bias_shapes(bias: Any) -> None:
    sources = Sources(queries=2)
    shape = {"b": (2, 4), "qb": (2, 2, 4)}.get(bias)
    given = bias if shape is None else torch.randn(shape, dtype=torch.float64)
    full = torch.zeros(2, 5, 2, 4, dtype=torch.float64)
    full[:, 4] = given
    read = depth_merge(
        *sources.attend(0, 4), sources.values[4], sources.query, eps=1e-3, bias=given
    )
    want = literal_read(torch.stack(sources.values), sources.query, eps=1e-3, bias=full)
    assert_all_close(read, want[:2], ["out", "lse"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
def test_two_phases_round_once(dtype: torch.dtype, autocast: bool) -> None:
    values, query = torch.randn(9, 4, 64).to(dtype), 0.3 * torch.randn(1, 64)
    exact, exact_lse, _ = literal_read(values, query)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        ahead = depth_attend([*values[:8]], query, out_dtype=torch.float32)
        out, lse = depth_merge(*ahead, values[8], query)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    assert (out == exact.to(dtype)).float().mean() > 0.99
    assert (lse - exact_lse).abs().max() < 1e-5


@pytest.mark.parametrize("size", [1e4, -1e4])
def test_large_scores(size: float) -> None:
    values = torch.randn(3, 2, 8, requires_grad=True)
    query = torch.full((1, 8), size, requires_grad=True)
    out, lse = depth_merge(*depth_attend([*values[:2]], query), values[2], query)
    want = literal_read(values, query)
    assert_close(out, want[0], rtol=1e-2)  # a float32 logit near 1e4 is known to 1e-3
    assert_close(lse, want[1])
    for grad in torch.autograd.grad(out.sum(), (values, query)):
        assert grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_zero_source_gives_finite_gradients(dtype: torch.dtype) -> None:
    value = torch.zeros(2, 8, dtype=dtype, requires_grad=True)
    query = torch.randn(1, 8, requires_grad=True)
    read = depth_attend([torch.randn(2, 8).to(dtype)], query)
    out, _ = depth_merge(*read, value, query)
    for grad in torch.autograd.grad(out.sum(), (value, query)):
        assert grad.isfinite().all()


def test_upstream_gradients_of_any_strides() -> None:
    sources = Sources(queries=2)
    read = sources.attend(0, 4)
    grads = []
    for op in (depth_merge, depth_merge_reference):
        out, lse = sources.merge(read, 4, op)
        loss = out.sum() + lse.sum() + out.permute(3, 1, 0, 2).reshape(-1, 8).pow(3).sum()
        grads.append(torch.autograd.grad(loss, sources.leaves, retain_graph=True))
    assert_all_close(*grads, [f"leaf {i}" for i in range(len(sources.leaves))])


@pytest.mark.parametrize("batch", [(0, 4), (2, 0)])
def test_empty_batch(batch: tuple[int, ...]) -> None:
    value, query = torch.randn(*batch, 8, requires_grad=True), torch.randn(2, 8, requires_grad=True)
    read = torch.zeros(2, *batch, 8), torch.zeros(2, *batch, 1)
    out, lse = depth_merge(*read, value, query)
    (out.sum() + lse.sum()).backward()
    assert out.shape == (2, *batch, 8)
    assert value.grad is not None
    assert query.grad is not None
    assert not query.grad.any()


def test_second_derivatives_raise_instead_of_being_wrong() -> None:
    sources = Sources()
    out, _ = sources.merge(sources.attend(0, 2), 2)
    (grad,) = torch.autograd.grad(out.square().sum(), sources.query, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@ignore_dynamo_warnings
@pytest.mark.parametrize("out_norm_eps", [None, 0.1])
@pytest.mark.parametrize("name", ["plain", "everything"])
def test_compiled_merge_equals_eager(name: str, out_norm_eps: float | None) -> None:
    torch.compiler.reset()
    sources = Sources(**OPTIONS[name], dtype=torch.float32)
    read = [t.detach().requires_grad_() for t in sources.attend(0, 2)]
    leaves = [*read, *sources.leaves]
    merge = partial(sources.merge, tuple(read), 3, out_norm_eps=out_norm_eps)
    eager = merge()
    compiled = torch.compile(merge, backend="aot_eager", fullgraph=True)()
    assert_all_close(compiled, eager, ["out", "lse"])
    upstream = [torch.randn_like(t) for t in eager]
    want, got = gradients(eager, leaves, upstream), gradients(compiled, leaves, upstream)
    assert want[0].any()
    assert_all_close(got, want, [f"leaf {i}" for i in range(len(got))])
