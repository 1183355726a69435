"""The block schedule on a CUDA device: what only hardware shows."""

from typing import Any

import pytest
import torch
from torch import Tensor

from block_cases import (
    CASES,
    EPS,
    NORM,
    STACKS,
    Case,
    Stack,
    count_launches,
    make,
    make_stack,
    mean_error,
    one_by_one,
    reads_and_gradients,
    result_names,
    run_stack,
    run_thrice,
)
from depthroute.ops import use_backend
from depthroute.ops.block import BlockRead, add_norm
from depthroute.ops.kernels.block_layout import BlockLayout, ahead_form
from depthroute.ops.kernels.read_ahead_bwd import read_ahead_bwd
from depthroute.ops.kernels.read_ahead_fwd import read_ahead_fwd
from depthroute.ops.scores import ScoreRule
from depthroute.residual import AttnResConfig, PreNormConfig, ProjectedKey, TailKey
from helpers import assert_all_close, assert_close, gradients, tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # torch's own compiler warns about settings that do not concern us
    pytest.mark.filterwarnings("default"),
]

BATCH = (2, 101)  # more tokens than a program takes at a time, of no round number
WIDE = Stack(AttnResConfig(num_blocks=2), dim=256)
PLAIN = Stack(PreNormConfig(), dim=256)
# several blocks of columns
WIDER = {
    "emitted": Stack(AttnResConfig(num_blocks=2, key=ProjectedKey(rank=32)), dim=520),
    "low_rank": Stack(AttnResConfig(num_blocks=3, key=TailKey(rank=96)), dim=520),
    "streamed": Stack(AttnResConfig(num_blocks=0), dim=520, num_sublayers=20),
    "streamed_low_rank": Stack(
        AttnResConfig(num_blocks=0, key=TailKey(rank=96)), dim=520, num_sublayers=20
    ),
}


@pytest.fixture(autouse=True)
def _kernels() -> Any:
    with use_backend("triton"):
        yield


@pytest.mark.parametrize("name", ["one_source_many_reads", "separate", "width_37", "nine_sources"])
def test_reads_of_a_block_equal_single_passes(name: str) -> None:
    case = CASES[name]._replace(batch=BATCH)
    exact = make(case, "cuda")
    upstream = [torch.randn(*BATCH, case.width, device="cuda") for _ in range(case.queries)]
    got = reads_and_gradients(case, exact.to(torch.float32), upstream)
    with use_backend("reference"):
        want = reads_and_gradients(case, exact, upstream, one_by_one)
    assert_all_close(got, want, result_names(case, exact), rtol=2e-5)


@pytest.mark.parametrize("name", ["prenorm_odd", "block3", "projected_sum", "mean_settled"])
def test_stacks_in_single_precision_equal_float64(name: str) -> None:
    runs = run_thrice(STACKS[name], torch.float32, "cuda", BATCH)
    assert_all_close(runs.tested, runs.exact, runs.names, rtol=1e-4)


@pytest.mark.parametrize(
    "stack",
    [WIDE, PLAIN, STACKS["block1_of_12"], *WIDER.values()],
    ids=["routed", "plain", "one_block", *WIDER],
)
def test_stacks_in_bfloat16_are_as_good_as_plain_pytorch(stack: Stack) -> None:
    tested = plain = 0.0
    for _ in range(4):  # how much a stack makes of a rounding differs from draw to draw
        runs = run_thrice(stack, torch.bfloat16, "cuda", BATCH)
        tested += mean_error(runs.tested, runs.exact)
        plain += mean_error(runs.plain, runs.exact)
    assert tested <= 2 * plain


def test_the_size_of_a_model() -> None:
    """Eight sources of width 1024 and six queries, in bfloat16."""
    case = Case(8, 6, (2, 509), 1024, 1024, closes=True, scale=1024**-0.5)
    exact = make(case, "cuda", torch.bfloat16)
    upstream = [torch.randn(*case.batch, 1024, device="cuda").bfloat16() for _ in range(6)]
    results = []
    for backend in ("triton", "triton", "reference"):
        with use_backend(backend):
            results.append(reads_and_gradients(case, exact.to(torch.bfloat16), upstream))
    with use_backend("reference"):
        want = reads_and_gradients(case, exact, upstream, one_by_one)
    got, again, plain = results
    for a, b, name in zip(got, want, result_names(case, exact), strict=True):
        assert_close(a, b, name, rtol=3e-2)
    assert mean_error(got, want) <= 4 * mean_error(plain, want)  # plain merges before it rounds
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))


def rounded_alike(actual: Tensor, exact: Tensor) -> float:
    """Return how many numbers are the exact one, rounded once."""
    return (actual == exact.to(actual.dtype)).double().mean().item()


TILED = {
    "seven": Case(7, 6, (509,), 1024, 1024, closes=True, scale=0.1),
    "wide_tiles": Case(8, 5, (2501,), 520, 96, closes=True, share=0.7, scale=0.3),
    "twelve_queries": Case(8, 12, (131,), 260, 260, key_norm="full", closes=True, scale=0.2),
    "many_queries": Case(9, 17, (130,), 37, 7, key_norm="full", closes=True),
    "sixteen": Case(16, 2, (257,), 300, 270, key_norm="none", complete=False, scale=0.1),
    "separate": Case(12, 6, (131,), 96, 32, separate=True, closes=True),
}


@torch.no_grad()
@pytest.mark.parametrize("case", TILED.values(), ids=TILED)
def test_reads_in_tiles_are_those_of_registers_rounded_once(case: Case) -> None:
    """The same sources in float32 are held in registers, by another kernel."""
    leaves = make(case, "cuda", torch.bfloat16)
    narrow, wide = leaves.to(torch.bfloat16), leaves.to(torch.float32)
    eps, keys = EPS if case.complete else None, tuple(wide.keys) or None
    pending = narrow.pending[0] if case.closes else None
    given = BlockRead(tuple(narrow.values), keys, pending, *wide.query, case.rule, case.share, eps)
    assert ahead_form(BlockLayout.of(given), torch.bfloat16) == "tiled"
    got, values = read_ahead_fwd(given), wide.values
    if got.closed is not None:
        closed = case.share * (values[-1] + wide.pending[0])
        assert torch.equal(got.closed, closed.bfloat16())
        values[-1] = got.closed.float()
    want = read_ahead_fwd(given._replace(values=tuple(values), pending=None))
    for name in ("lse", "weights", "logits", "rstds", "norm_rstds"):
        actual, exact = getattr(got, name), getattr(want, name)
        assert (actual is None) == (exact is None)
        if exact is not None:
            assert_close(actual, exact, name, rtol=2e-5)
    assert rounded_alike(got.out, want.out) > 0.98
    assert got.first is None or rounded_alike(got.first, want.first) > 0.98


@pytest.mark.parametrize("sources", [3, 8, 20])
def test_float32_factors_keep_their_digits_in_tensor_cores(sources: int) -> None:
    """A factor of bfloat16 would round a third of the results to another number."""
    width, queries, tokens = 96, 5, 130
    rule = ScoreRule(1, "none", EPS, 1.0)

    def draw(*size: int, to: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(size, device="cuda").to(to)

    values = tuple(draw(tokens, width) for _ in range(sources))
    later, outs = ([draw(tokens, width) for _ in range(n)] for n in (sources, queries))
    query = draw(queries, width, to=torch.float32) / width**0.5
    given = BlockRead(values, None, None, query, rule, 1.0, None)
    read = read_ahead_fwd(given)
    v, g = torch.stack(values, 1).double(), torch.stack(outs, 1).double()  # [T, S or Q, D]
    logits = v @ query.double().T  # [T, S, Q]
    weights = logits.softmax(1)
    assert_close(read.lse, logits.logsumexp(1).T, rtol=2e-5)
    assert rounded_alike(read.out, torch.einsum("tsq,tsd->qtd", weights, v)) > 0.98
    rest = draw(queries, tokens, to=torch.float32)
    grads = read_ahead_bwd(
        given, None, read.weights, read.logits, read.rstds, None, outs, list(rest), later, None,
        [draw(7, width, to=torch.float32) * 0 for _ in range(queries)],
    )  # fmt: skip
    gz = weights * (torch.einsum("tqd,tsd->tsq", g, v) + rest.double().T.unsqueeze(1))
    exact = weights @ g + gz @ query.double() + torch.stack(later, 1)
    assert_close(grads.query, torch.einsum("tsq,tsd->qd", gz, v), rtol=5e-5)
    assert rounded_alike(grads.values, exact.transpose(0, 1)) > 0.98


@pytest.mark.parametrize("stack", [WIDE, PLAIN], ids=["routed", "plain"])
def test_runs_repeat_bit_for_bit(stack: Stack) -> None:
    toy, x, upstream = make_stack(stack, torch.bfloat16, "cuda", BATCH)
    once, *others = (run_stack(stack, toy, x, upstream) for _ in range(3))
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(other, once, strict=True))


@pytest.mark.parametrize("stack", [WIDE, PLAIN], ids=["routed", "plain"])
def test_a_cuda_graph_repeats_a_step_on_new_data(stack: Stack) -> None:
    toy, x, upstream = make_stack(stack, torch.bfloat16, "cuda", BATCH)
    run_stack(stack, toy, x, upstream)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run_stack(stack, toy, x, upstream)
    with torch.no_grad():
        for given in (x, upstream, *toy.parameters()):
            given.copy_(torch.randn_like(given))
    graph.replay()
    for actual, expected in zip(captured, run_stack(stack, toy, x, upstream), strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("columns", [64, 67])
def test_rows_apart_at_any_address(columns: int) -> None:
    base = torch.randn(2, 5, 7, columns + 5, device="cuda")
    x, y = (part[..., 3 : columns + 3].requires_grad_() for part in base)
    wide = [t.detach().double().requires_grad_() for t in (x, y)]
    upstream = list(torch.randn(2, 5, 7, columns, device="cuda"))
    got, total = add_norm(x, y, NORM), wide[0] + wide[1]
    want = (total, NORM(total))
    names = ["total", "out", "x", "y"]
    got = [*got, *gradients(got, [x, y], upstream)]
    want = [*want, *gradients(want, wide, [u.double() for u in upstream])]
    assert_all_close(got, want, names)


def test_a_decoder_compiled_by_inductor_has_the_gradients_of_an_eager_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_model(AttnResConfig(num_blocks=2), hidden_size=128, num_hidden_layers=2).cuda()
    ids = torch.arange(128, device="cuda").view(2, 64) % 61
    launches = count_launches(monkeypatch)

    def loss_and_gradients(loss: Any) -> list[Tensor]:
        sums = loss(ids, ids.roll(-1, 1))
        mean = sums.cross_entropy / sums.tokens
        return [mean.detach(), *torch.autograd.grad(mean, list(model.parameters()))]

    expected = loss_and_gradients(model.loss)
    eager = dict(launches)
    launches.clear()
    torch._dynamo.reset()
    actual = loss_and_gradients(torch.compile(model.loss, fullgraph=True))
    assert launches == eager
    names = ["loss", *(name for name, _ in model.named_parameters())]
    assert_all_close(actual, expected, names, rtol=1e-4)
