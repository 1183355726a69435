"""The Triton kernels in Triton's interpreter: `TRITON_INTERPRET=1 pytest -m kernel`."""

import importlib.util
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from depthroute.ops import depth_attend, depth_merge, use_backend
from depthroute.ops.reference import depth_attend_reference
from depthroute.ops.registered import (
    attend_backward_op,
    attend_op,
    merge_backward_op,
    merge_op,
)
from helpers import assert_all_close, assert_close, gradients, ignore_dynamo_warnings, literal_read
from read_cases import (
    CASES,
    CONSUMERS,
    LARGE_CASES,
    VIEWS,
    Case,
    assert_merge_equals_oracle,
    assert_read_equals_oracle,
    make,
    make_merge,
    options,
)

pytestmark = [
    pytest.mark.kernel,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton"),
]

MIXED = CASES["everything"]


@pytest.fixture(autouse=True)
def _kernels() -> Any:
    with use_backend("triton"):
        yield


@pytest.mark.parametrize("case", (CASES | LARGE_CASES).values(), ids=CASES | LARGE_CASES)
def test_a_read_and_all_its_gradients_equal_the_oracle(case: Case) -> None:
    assert_read_equals_oracle(case, torch.float32)


# null logits and the number of sources mean nothing to a merge
MERGES = {name: case for name, case in CASES.items() if not case.null or name == "everything"}


@pytest.mark.parametrize("case", MERGES.values(), ids=MERGES)
def test_a_merge_and_all_its_gradients_equal_the_oracle(case: Case) -> None:
    assert_merge_equals_oracle(case, torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["plain", "several_queries", "everything", "seventeen_sources"])
def test_half_precision_sources(name: str, dtype: torch.dtype) -> None:
    case = (CASES | LARGE_CASES)[name]
    assert_read_equals_oracle(case, dtype)
    assert_merge_equals_oracle(case, dtype)


@pytest.mark.parametrize(("view", "num_sources"), [*((v, 3) for v in VIEWS), ("columns", 18)])
def test_strided_sources_pass_gradients_to_their_base(view: str, num_sources: int) -> None:
    shape, cut = VIEWS[view]
    bases = [torch.randn(shape, requires_grad=True) for _ in range(num_sources)]
    query = torch.randn(1, 4)
    got = depth_attend([cut(base) for base in bases], query)
    want = literal_read(torch.stack([cut(base) for base in bases]), query)[:2]
    assert_all_close(got, want, ["out", "lse"])
    upstream = [torch.randn_like(t) for t in got]
    wide = [t.double() for t in upstream]
    names = [str(i) for i in range(num_sources)]
    assert_all_close(gradients(got, bases, upstream), gradients(want, bases, wide), names)


def test_rows_apart_are_read_where_they_are() -> None:
    from depthroute.ops.kernels.layout import as_rows

    base = torch.randn(2, 5, 11)
    rows = as_rows(base[..., 2:8])
    assert (rows.data_ptr(), rows.stride()) == (base[..., 2:].data_ptr(), (11, 1))


def test_sources_of_different_strides_and_alignments() -> None:
    bases = [torch.randn(2, 5, width) for width in (6, 11, 8, 16)]
    values = [base[..., start : start + 6] for base, start in zip(bases, (0, 3, 1, 8), strict=True)]
    query = torch.randn(1, 6)
    assert_all_close(
        depth_attend(values, query), literal_read(torch.stack(values), query)[:2], ["out", "lse"]
    )


@pytest.mark.parametrize("num_sources", [3, 18])
def test_copies_of_rows_live_until_the_launch(
    num_sources: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table knows them by their addresses alone."""
    from depthroute.ops.kernels import depth_attend_bwd, depth_attend_fwd, layout, sources

    copies: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def as_rows(x: Tensor) -> Tensor:
        rows = layout.as_rows(x)
        copies.append(weakref.ref(rows))
        return rows

    class Counted:
        """Counts the copies that are left when a kernel is launched."""

        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: Any) -> Any:
            alive.append(sum(copy() is not None for copy in copies))
            copies.clear()
            return self.kernel[grid]

    monkeypatch.setattr(sources, "as_rows", as_rows)
    for module in (depth_attend_fwd, depth_attend_bwd):
        name = f"{module.__name__.rpartition('.')[2]}_kernel"
        monkeypatch.setattr(module, name, Counted(getattr(module, name)))
    base = torch.randn(num_sources, 3, 12, requires_grad=True)
    values, keys = (base[..., first::2].unbind(0) for first in (0, 1))
    depth_attend(values, torch.randn(1, 6), keys=keys)[0].sum().backward()
    assert alive == [2 * num_sources] * 2


@pytest.mark.parametrize("num_sources", [2, 17])
def test_offsets_beyond_two_to_the_31(num_sources: int) -> None:
    far = torch.empty(2**31 + 64, dtype=torch.bfloat16)  # only the pages of three rows are touched
    values = [torch.as_strided(far, (3, 8), (2**30, 1), 8 * (i % 7)) for i in range(num_sources)]
    for value in values:
        value.copy_(torch.randn(3, 8))
    query = torch.randn(1, 8)
    assert_close(depth_attend(values, query)[0], literal_read(torch.stack(values), query)[0])


@pytest.mark.parametrize("out_norm_eps", [None, 0.1])
@pytest.mark.parametrize("consume", CONSUMERS.values(), ids=CONSUMERS)
def test_upstream_gradients_of_any_strides(consume: Any, out_norm_eps: float | None) -> None:
    leaves = list(make(Case(width=12, rank=6, queries=2, heads=2), torch.float32).values())
    results = []
    for op in (depth_attend, depth_attend_reference):
        out, lse = op(*leaves, heads=2, out_norm_eps=out_norm_eps)
        results.append(torch.autograd.grad(consume(out) + consume(lse), leaves))
    assert_all_close(*results, ["values", "query"])


@pytest.mark.parametrize("used", ["out", "lse"])
def test_one_unused_output_counts_as_a_zero_gradient(used: str) -> None:
    values, query = make(CASES["plain"], torch.float32).values()
    pick = ["out", "lse"].index(used)

    def two_phases(op: Any) -> Tensor:
        with use_backend("triton" if op is depth_attend else "reference"):
            read = op(values[:-1], query)
            return (read[pick] + depth_merge(*read, values[-1], query)[pick]).square().sum()

    got, want = (
        torch.autograd.grad(two_phases(op), (values, query))
        for op in (depth_attend, depth_attend_reference)
    )
    assert_all_close(got, want, ["values", "query"])


def test_a_source_given_twice_gets_both_gradients() -> None:
    x, y = (torch.randn(2, 3, 6, requires_grad=True) for _ in range(2))
    query = torch.randn(1, 4)
    got, want = depth_attend([x, y, x], query), literal_read(torch.stack([x, y, x]), query)[:2]
    upstream = [torch.randn_like(t) for t in got]
    wide = [t.double() for t in upstream]
    assert_all_close(gradients(got, (x, y), upstream), gradients(want, (x, y), wide), "xy")


@pytest.mark.parametrize("batch", [(0, 5), (2, 0), (0,)])
def test_empty_batch(batch: tuple[int, ...]) -> None:
    case = MIXED._replace(batch=batch)
    leaves = make(case, torch.float32)
    out, lse = depth_attend(**leaves, **options(case))
    value, key = leaves["values"][0], leaves["keys"][0]
    merged, _ = depth_merge(out, lse, value, leaves["query"], key=key, out_norm_eps=0.1)
    assert (out.shape, lse.shape) == ((3, *batch, 12), (3, *batch, 2))
    merged.sum().backward()
    for name, leaf in leaves.items():
        assert leaf.grad is not None, name
        assert not leaf.grad.any(), name


def test_a_single_source_comes_back_bitwise() -> None:
    value = torch.randn(2, 4, 8).bfloat16()
    assert torch.equal(depth_attend([value], torch.randn(8), bias=torch.tensor([3.0]))[0], value)


@pytest.mark.parametrize("num_sources", [3, 17])
def test_a_source_may_be_masked_by_a_bias_of_minus_infinity(num_sources: int) -> None:
    values, query = torch.randn(num_sources, 4, 8), torch.randn(2, 8)
    bias = torch.zeros(num_sources)
    bias[: num_sources - 2] = -torch.inf
    assert_all_close(
        depth_attend(values, query, bias=bias), depth_attend(values[-2:], query), ["out", "lse"]
    )


def test_nothing_gives_way_to_the_source() -> None:
    value = torch.randn(2, 4, 12)
    read = torch.zeros(2, 4, 12), torch.full((2, 4, 1), -torch.inf)
    out, lse = depth_merge(*read, value, torch.randn(12))
    assert torch.equal(out, value)
    assert lse.isfinite().all()


@pytest.mark.parametrize("size", [1e4, -1e4])
@pytest.mark.parametrize("num_sources", [3, 18])
def test_large_scores(size: float, num_sources: int) -> None:
    values = torch.randn(num_sources, 4, 8)
    values[2] = values[0]  # ties must share
    values.requires_grad_()
    query = torch.full((1, 8), size, requires_grad=True)
    out, lse = depth_merge(*depth_attend(values[:-1], query), values[-1], query)
    want, want_lse, _ = literal_read(values, query)
    assert_close(out, want, rtol=1e-2)  # a float32 logit near 1e4 is known to 1e-3
    assert_close(lse, want_lse)
    for grad in torch.autograd.grad(out.sum(), (values, query)):
        assert grad.isfinite().all()


@pytest.mark.parametrize("out_norm_eps", [None, 1e-6])
def test_a_read_saves_its_sources_output_and_numbers_only(out_norm_eps: float | None) -> None:
    values = [torch.randn(3, 4, 64, requires_grad=True) for _ in range(5)]
    query = torch.randn(2, 64, requires_grad=True)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        out, _ = depth_attend(values, query, out_norm_eps=out_norm_eps)
    known = {x.data_ptr() for x in (*values, query)}
    assert known <= {x.data_ptr() for x in kept}
    own = sum(x.numel() for x in kept if x.data_ptr() not in known)
    numbers = 5 * 2 + 5 + 2 + 2 * 64  # per token: scores, norms, log-sum-exps, outputs as returned
    assert out.data_ptr() in {x.data_ptr() for x in kept}
    if out_norm_eps is not None:
        numbers += 2  # norms of the outputs
    assert own == 12 * numbers


def test_second_derivatives_raise_instead_of_being_wrong() -> None:
    values, query = make(CASES["plain"], torch.float32).values()
    read = depth_attend(values, query)
    for out in (read[0], depth_merge(*read, values[0], query)[0]):
        (grad,) = torch.autograd.grad(out.square().sum(), query, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            grad.sum().backward()


@ignore_dynamo_warnings
@pytest.mark.parametrize("name", ["everything", "seventeen_sources"])
def test_compiled_reads_equal_the_oracle(name: str) -> None:
    torch.compiler.reset()
    case = (CASES | LARGE_CASES)[name]
    for op, check in (
        (depth_attend, assert_read_equals_oracle),
        (depth_merge, assert_merge_equals_oracle),
    ):
        check(case, torch.float32, op=torch.compile(op, backend="aot_eager", fullgraph=True))


@ignore_dynamo_warnings
def test_compiled_reads_are_one_operation_and_follow_changing_sizes() -> None:
    torch.compiler.reset()
    graphs = []

    def count(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append([str(n.target) for n in graph.graph.nodes if "depthroute" in str(n.target)])
        return graph.forward

    read = torch.compile(depth_attend, backend=count, fullgraph=True)
    for tokens in (4, 5, 6):
        values, query = torch.randn(3, 2, tokens, 8), torch.randn(2, 8)
        got, want = read(values, query), depth_attend_reference(values, query)
        assert_all_close(got, want, ["out", "lse"])
    assert graphs == [["depthroute.attend.default"]] * 2  # the second is for any number of tokens


@ignore_dynamo_warnings
@pytest.mark.parametrize("name", ["plain", "everything"])
def test_operations_are_registered_as_torch_expects(name: str) -> None:
    case = CASES[name]._replace(sources=2, batch=(2,))
    rule = (case.heads, case.key_norm, 1e-3, case.scale)
    norm = case.out_norm_eps
    given = make(case, torch.float32)
    split = {key: list(given[key].detach().unbind(0)) for key in ("values", "keys") if key in given}
    leaves = {key: [x.requires_grad_() for x in items] for key, items in split.items()}
    bias, null = given.get("bias"), given.get("null")
    read = (leaves["values"], leaves.get("keys", []), given["query"], bias, null)
    torch.library.opcheck(attend_op, (*read, torch.float32, norm, *rule))
    *results, out_rstds = attend_op(*read, torch.float32, norm, *rule)
    results.append(None if norm is None else out_rstds)
    check_gradient(attend_backward_op, (*results[:2], *read, *results), rule)
    one = make_merge(case, torch.float32)
    tensors = [one.get(key) for key in ("out", "lse", "value", "query", "key")]
    bias = one["bias"].detach().unsqueeze(1).requires_grad_() if "bias" in one else None
    torch.library.opcheck(merge_op, (*tensors, bias, norm, *rule))
    out, lse, *numbers, out_rstds = merge_op(*tensors, bias, norm, *rule)
    of_norm = (None, None) if norm is None else (out_rstds, out)
    check_gradient(merge_backward_op, (out, lse, *tensors, bias, *numbers, *of_norm), rule)


def check_gradient(operation: Any, given: tuple[Any, ...], rule: tuple[Any, ...]) -> None:
    """Check what a compiler is told of the operation behind a gradient, strides included."""
    given = torch.utils._pytree.tree_map(lambda x: x.detach() if x is not None else x, given)
    torch.library.opcheck(operation, (*given, *rule))
