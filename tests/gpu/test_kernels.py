"""The Triton kernels on a CUDA device: the interpreter's cases, and what only hardware shows."""

import logging
from typing import Any

import pytest
import torch
from torch import Tensor

from depthroute.ops import depth_attend, depth_merge, use_backend
from depthroute.ops.reference import depth_attend_reference
from helpers import RTOL, assert_all_close, assert_close, gradients
from read_cases import (
    CASES,
    CONSUMERS,
    LARGE_CASES,
    VIEWS,
    Case,
    assert_equals_oracle,
    assert_merge_equals_oracle,
    assert_read_equals_oracle,
    make,
    options,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # torch's own compiler warns about settings that do not concern us
    pytest.mark.filterwarnings("default"),
]

ALL_CASES = CASES | LARGE_CASES
HALF = [torch.bfloat16, torch.float16]

# sizes of models, where the launch table differs
MODEL_CASES = {
    "block": Case(sources=5, batch=(2, 512), width=1024, rank=1024),
    "block_end": Case(sources=9, batch=(2, 512), width=1024, rank=256, out_norm_eps=1e-6),
    "full": Case(sources=49, batch=(2, 256), width=1024, rank=1024),
    "ahead": Case(sources=8, batch=(2, 512), width=1024, rank=1024, queries=6),
    "ahead_low_rank": Case(sources=8, batch=(2, 512), width=1024, rank=128, queries=6),
    "heads": Case(sources=6, batch=(2, 512), width=1024, rank=256, heads=8),
    "projected": Case(sources=6, batch=(2, 512), width=1024, rank=32, separate=True),
    "odd": Case(sources=6, batch=(2, 511), width=1000, rank=1000),
    "wide": Case(sources=9, batch=(2, 256), width=4096, rank=4096),
    "widest": Case(sources=5, batch=(1, 128), width=8192, rank=512, queries=2, out_norm_eps=1e-6),
}


@pytest.fixture(autouse=True)
def _kernels() -> Any:
    with use_backend("triton"):
        yield


@pytest.mark.parametrize("case", ALL_CASES.values(), ids=ALL_CASES)
def test_single_precision_equals_the_oracle(case: Case) -> None:
    assert_read_equals_oracle(case, torch.float32, "cuda")
    if not case.null or case is CASES["everything"]:
        assert_merge_equals_oracle(case, torch.float32, "cuda")


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", ["plain", "several_queries", "everything", "seventeen_sources"])
def test_half_precision_equals_the_oracle(name: str, dtype: torch.dtype) -> None:
    assert_read_equals_oracle(ALL_CASES[name], dtype, "cuda")
    assert_merge_equals_oracle(ALL_CASES[name], dtype, "cuda")


@pytest.mark.parametrize("case", MODEL_CASES.values(), ids=MODEL_CASES)
def test_sizes_of_models(case: Case) -> None:
    leaves = make(case, torch.bfloat16, "cuda")
    with torch.no_grad():  # logits of order one
        leaves["query"].mul_(case.rank**-0.5)
    assert_equals_oracle(depth_attend, depth_attend_reference, leaves, options(case), 1.6e-2)
    assert_merge_equals_oracle(case, torch.bfloat16, "cuda")


def test_rounding_is_to_nearest() -> None:
    values, query = torch.randn(9, 64, 1024, device="cuda").bfloat16(), torch.randn(1, 1024)
    query = (0.05 * query).cuda()
    out, lse = depth_attend(values, query)
    exact, exact_lse = depth_attend_reference(values.double(), query.double())
    assert (lse - exact_lse).abs().max() < 1e-5
    assert (out == exact.to(torch.bfloat16)).float().mean() > 0.99


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("num_sources", [3, 18])
def test_strided_sources(view: Any, num_sources: int) -> None:
    shape, cut = view
    bases = [torch.randn(shape, device="cuda", requires_grad=True) for _ in range(num_sources)]
    leaves = {str(i): base for i, base in enumerate(bases)}
    query = torch.randn(2, 4, device="cuda")

    def read(op: Any) -> Any:
        return lambda **bases: op(
            [cut(base) for base in bases.values()], query.to(bases["0"].dtype), eps=1e-3
        )

    assert_equals_oracle(read(depth_attend), read(depth_attend_reference), leaves, {}, 1e-5)


@pytest.mark.parametrize("consume", CONSUMERS.values(), ids=CONSUMERS)
def test_upstream_gradients_of_any_strides(consume: Any) -> None:
    case = Case(width=12, rank=6, queries=2, heads=2)
    leaves = list(make(case, torch.float32, "cuda").values())
    results = []
    for op in (depth_attend, depth_attend_reference):
        out, lse = op(*leaves, heads=2)
        results.append(torch.autograd.grad(consume(out) + consume(lse), leaves))
    assert_all_close(*results, ["values", "query"])


def two_phases(values: list[Tensor], query: Tensor) -> Tensor:
    read = depth_attend(values[:-1], query, out_dtype=torch.float32)
    return depth_merge(*read, values[-1], query)[0]


def sources(num: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    return [torch.randn(shape, device="cuda").to(dtype).requires_grad_() for _ in range(num)]


@pytest.mark.parametrize("num_sources", [5, 9, 18])
@pytest.mark.parametrize("queries", [1, 6])
def test_runs_repeat_bit_for_bit(num_sources: int, queries: int) -> None:
    values = sources(num_sources, 4096, 1024)
    query = torch.randn(queries, 1024, device="cuda", requires_grad=True)
    runs = []
    for _ in range(3):
        out = two_phases(values, query)
        runs.append([out, *torch.autograd.grad(out.square().sum(), [*values, query])])
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))


@pytest.mark.parametrize("num_sources", [3, 18])
def test_inductor_keeps_values_and_gradients(num_sources: int) -> None:
    torch._dynamo.reset()
    values = sources(num_sources, 2, 64, 96)
    query = torch.randn(3, 32, device="cuda", requires_grad=True)
    leaves = [*values, query]
    results = []
    for read in (two_phases, torch.compile(two_phases, fullgraph=True)):
        out = read(values, query)
        results.append([out, *torch.autograd.grad(out.float().pow(3).sum(), leaves)])
    names = ["out", *map(str, range(num_sources)), "query"]
    assert_all_close(results[1], results[0], names)


@pytest.mark.parametrize("num_sources", [4, 18])
def test_a_cuda_graph_repeats_a_step_on_new_data(num_sources: int) -> None:
    values = sources(num_sources, 100, 256)
    query = torch.randn(2, 64, device="cuda", requires_grad=True)
    leaves = [*values, query]

    def step() -> list[Tensor]:
        out = two_phases(values, query)
        return [out, *torch.autograd.grad(out.float().square().sum(), leaves)]

    step()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for leaf in leaves:
            leaf.copy_(torch.randn_like(leaf))
    graph.replay()
    for actual, expected in zip(captured, step(), strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("num_sources", [2, 17])
def test_more_than_two_to_the_31_numbers(num_sources: int) -> None:
    """A source alone has more for 2 sources, their gradients together for 17."""
    width = 1024
    tokens = (2**31 if num_sources == 2 else 2**27) // width + 128
    if torch.cuda.mem_get_info()[0] < (3 * num_sources + 2) * tokens * width * 2:
        pytest.skip("needs more memory")
    values = [
        torch.empty(tokens, width, device="cuda", dtype=torch.bfloat16).normal_().requires_grad_()
        for _ in range(num_sources)
    ]
    query = torch.randn(1, 64, device="cuda").div(8).requires_grad_()  # logits of order one
    out, _ = depth_attend(values, query)
    grads = torch.autograd.grad(out, values, out.detach())
    end = [value[-64:].detach().double().requires_grad_() for value in values]
    want, _ = depth_attend_reference(end, query.double())
    assert_close(out[:, -64:], want)
    wanted = gradients([want], end, [out[:, -64:].double()])
    names = [str(i) for i in range(num_sources)]
    assert_all_close([g[-64:] for g in grads], wanted, names, RTOL[torch.bfloat16])


def test_a_read_allocates_its_output_and_numbers_only() -> None:
    values, query = sources(9, 8192, 1024), torch.randn(1, 1024, device="cuda")
    depth_attend(values, query)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out, _ = depth_attend(values, query)
    numbers = 4 * 8192 * (9 + 9 + 1)
    assert torch.cuda.max_memory_allocated() - before <= out.nbytes + numbers + 2**16


def test_auto_takes_the_kernels_and_says_why_it_does_not(caplog: pytest.LogCaptureFixture) -> None:
    from depthroute.ops import backend

    backend._said.clear()
    values, query = sources(2, 4, 8), torch.randn(1, 8, device="cuda")
    with use_backend("auto"), caplog.at_level(logging.INFO, "depthroute.ops"):
        for _ in range(2):
            depth_attend(values, query)
            depth_attend([value.double() for value in values], query)
    assert [record.getMessage() for record in caplog.records] == [
        "depth_attend runs in Triton kernels",
        "depth_attend runs in plain PyTorch: torch.float64 is not one of "
        "float32, bfloat16, float16",
    ]
