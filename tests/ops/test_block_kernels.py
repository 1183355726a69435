"""The kernels of the block schedule in Triton's interpreter."""

import importlib.util
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from block_cases import (
    CASES,
    NORM,
    OTHER_STACKS,
    STACKS,
    SUM,
    Case,
    Leaves,
    Stack,
    count_launches,
    expected_launches,
    forward_stack,
    make,
    make_stack,
    mean_error,
    one_by_one,
    reads_and_gradients,
    result_names,
    run_stack,
    run_thrice,
    scheduled,
)
from depthroute.ops import backend, block, use_backend
from depthroute.ops import registered_block as registered
from depthroute.ops.block import KeySum, add_merge_norm, add_norm, read_ahead
from depthroute.ops.kernels import block_layout
from depthroute.ops.kernels.block_layout import BlockLayout, Columns
from depthroute.residual import AttnResConfig, ProjectedKey, Summary, TailKey
from helpers import ToyModel, assert_all_close, assert_close, gradients

pytestmark = [
    pytest.mark.kernel,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton"),
]

RTOL = 2e-5  # a stack of sublayers amplifies what a single read has


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(block_layout, "FEW_TOKENS", 0)
    with use_backend("triton"):
        yield


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    return count_launches(monkeypatch)


@pytest.fixture
def as_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the launchers called as registered operations."""
    # not of torch itself: Dynamo keeps what it finds there, for all tests to come
    compiler = SimpleNamespace(is_compiling=lambda: True)
    monkeypatch.setattr(registered, "torch", SimpleNamespace(compiler=compiler))


def upstream_of(case: Case) -> list[Tensor]:
    return [torch.randn(*case.batch, case.width) for _ in range(case.queries)]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_reads_of_a_block_and_all_gradients_equal_single_passes(
    case: Case, launches: Counter[str]
) -> None:
    exact, upstream = make(case), upstream_of(case)
    got = reads_and_gradients(case, exact.to(torch.float32), upstream)
    assert launches["read_ahead_fwd"] == launches["read_ahead_bwd"] == 1
    assert launches["site_fwd"] == launches["site_bwd"] == len(exact.writes)
    with use_backend("reference"):
        want = reads_and_gradients(case, exact, upstream, one_by_one)
    for a, b, name in zip(got, want, result_names(case, exact), strict=True):
        assert_close(a, b, name, RTOL, least=1.0)  # a query of one source does nothing


BY_COLUMNS = {
    "two": Case(sources=2, queries=3, batch=(5,), width=37, rank=7, complete=False, closes=True),
    "four": Case(sources=4, queries=17, batch=(3,), width=40, rank=40, closes=True, share=0.7),
    "seven": Case(sources=7, batch=(5,), closes=True),
    "eight": Case(sources=8, batch=(3,), width=37, rank=7, complete=False, share=0.7),
    "nine": Case(sources=9, width=20, rank=5, key_norm="full", closes=True, share=0.7),
    "twelve": Case(sources=12, queries=9, batch=(3,), separate=True, rank=5, closes=True),
    "sixteen": Case(sources=16, queries=2, batch=(5,), width=300, rank=270, closes=True, scale=0.1),
    "seventeen": Case(sources=17, key_norm="none", complete=False, closes=True, scale=0.3),
    "forty_three": Case(sources=43, queries=6, batch=(3,), width=20, rank=5, closes=True),
}


@pytest.fixture(params=["tiled", "streamed"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have sources taken by columns, however few they are."""

    def choose(at: BlockLayout, dtype: torch.dtype) -> str:
        if at.S > 16:
            return "streamed"
        return str(request.param) if at.S > 1 else "held"

    monkeypatch.setattr(block_layout, "ahead_form", choose)


@pytest.mark.parametrize("case", BY_COLUMNS.values(), ids=BY_COLUMNS)
def test_reads_by_columns_and_all_gradients_equal_single_passes(case: Case, form: None) -> None:
    exact, upstream = make(case), upstream_of(case)
    got = reads_and_gradients(case, exact.to(torch.float32), upstream)
    with use_backend("reference"):
        want = reads_and_gradients(case, exact, upstream, one_by_one)
    assert_all_close(got, want, result_names(case, exact), RTOL)


@torch.no_grad()
@pytest.mark.parametrize("case", BY_COLUMNS.values(), ids=BY_COLUMNS)
def test_reads_by_columns_in_bfloat16_are_as_good_as_plain_pytorch(case: Case, form: None) -> None:
    exact = make(case, dtype=torch.bfloat16)
    tested = scheduled(case, exact.to(torch.bfloat16))
    with use_backend("reference"):
        plain, want = (scheduled(case, leaves) for leaves in (exact.to(torch.bfloat16), exact))
    # the interpreter rounds bfloat16 towards zero
    assert mean_error(tested, want) <= 4 * mean_error(plain, want)


@torch.no_grad()
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_programs_that_share_a_token_read_what_one_program_reads(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaves = make(case).to(torch.float32)
    alone = scheduled(case, leaves)
    monkeypatch.setattr(block_layout, "FEW_TOKENS", 10**6)
    assert_all_close(scheduled(case, leaves), alone, result_names(case, leaves)[: len(alone)])


@pytest.mark.parametrize("used", [[0], [1], [2], [3], [0, 2], [1, 2, 3]], ids=str)
@pytest.mark.parametrize("name", ["plain", "separate", "emitted", "closes"])
def test_reads_without_a_gradient_count_as_zeros(name: str, used: list[int]) -> None:
    case = CASES[name]

    def some(case: Case, leaves: Leaves, norm: Any) -> list[Tensor]:
        outs = scheduled(case, leaves, norm)
        return [outs[i] for i in used]

    exact, upstream = make(case), [upstream_of(case)[i] for i in used]
    names = [*map(str, used), *exact.names]
    got = reads_and_gradients(case, exact.to(torch.float32), upstream, some)
    with use_backend("reference"):
        want = reads_and_gradients(case, exact, upstream, some)
    assert_all_close(got, want, names, RTOL)


def test_gradients_of_passed_on_sources_and_of_the_open_block_join() -> None:
    case = CASES["separate"]
    exact, upstream = make(case), torch.randn(*case.batch, case.width)

    def later(leaves: Leaves, used: int) -> list[Tensor]:
        """Use the last read, one of the passed-on values and one of the keys."""
        ahead, values, keys = read_ahead(
            leaves.values,
            *leaves.query,
            keys=leaves.keys,
            pending=leaves.pending[0],
            share=1.0,
            bias=None,
            rule=case.rule,
            complete=1,
            norm=NORM,
        )
        wide = upstream.to(values[0].dtype)
        loss = (ahead.outs[0] * wide).sum() + (values[used] * wide).square().sum()
        return gradients([loss + keys[used].pow(3).sum()], leaves.all, [torch.ones_like(loss)])

    for used in range(3):
        got = later(exact.to(torch.float32), used)
        with use_backend("reference"):
            assert_all_close(got, later(exact, used), exact.names, RTOL)


@pytest.mark.parametrize("with_gradients", [False, True])
def test_reads_of_one_source_take_no_memory(with_gradients: bool) -> None:
    case = Case(sources=1, queries=3, complete=False)
    leaves = make(case).to(torch.float32)
    with torch.set_grad_enabled(with_gradients):
        ahead, _, _ = read_ahead(
            leaves.values, *leaves.query, keys=None, pending=None, share=1.0, bias=None,
            rule=case.rule, complete=0, norm=NORM,
        )  # fmt: skip
    assert {out.data_ptr() for out in ahead.outs} == {leaves.values[0].data_ptr()}
    assert len(ahead.outs) == len(ahead.lses) == 3


@pytest.mark.parametrize("stack", STACKS.values(), ids=STACKS)
def test_stacks_and_all_their_gradients_equal_float64(stack: Stack, launches: Counter[str]) -> None:
    runs = run_thrice(stack, torch.float32)
    assert_all_close(runs.tested, runs.exact, runs.names, RTOL)
    for step in ("read_ahead", "site"):
        assert launches[f"{step}_fwd"] == launches[f"{step}_bwd"]
    assert (launches["read_ahead_fwd"], launches["site_fwd"]) == expected_launches(stack)


@pytest.mark.parametrize("key", [TailKey(), TailKey(rank=5), TailKey(rank=5, norm="full")], ids=str)
@pytest.mark.parametrize(("num_blocks", "num_sublayers"), [(2, 6), (0, 18)])
def test_blocks_of_columns_join(
    num_blocks: int, num_sublayers: int, key: TailKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_layout, "ahead_updates", lambda at: Columns(16, 1, programs=2))
    config = AttnResConfig(num_blocks=num_blocks, key=key)
    runs = run_thrice(Stack(config, dim=36, num_sublayers=num_sublayers), torch.float32)
    assert_all_close(runs.tested, runs.exact, runs.names, RTOL)


def test_merges_that_a_program_cannot_hold_go_back_in_two_passes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(block_layout, "one_query_backward", lambda at, adds: None)
    runs = run_thrice(STACKS["last_read_joins"], torch.float32)
    assert_all_close(runs.tested, runs.exact, runs.names, RTOL)


def test_more_sources_than_a_tile_holds_are_read_one_by_one(
    monkeypatch: pytest.MonkeyPatch, launches: Counter[str]
) -> None:
    monkeypatch.setattr(block, "MAX_BLOCK_SOURCES", 4)
    runs = run_thrice(STACKS["full"], torch.float32)
    assert_all_close(runs.tested, runs.exact, runs.names, RTOL)
    # phase 1 over two sources serves the reads up to site 6; no other has so few
    assert launches["read_ahead_fwd"] == 6


HALF = ["prenorm", "block3_odd", "block1_of_12", "projected", "projected_sum", "mean"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", HALF)
def test_half_precision_is_as_good_as_plain_pytorch(name: str, dtype: torch.dtype) -> None:
    runs = run_thrice(STACKS[name], dtype)
    factor = 4 if dtype is torch.bfloat16 else 2  # the interpreter rounds bfloat16 towards zero
    assert mean_error(runs.tested, runs.exact) <= factor * mean_error(runs.plain, runs.exact)


@pytest.mark.parametrize("name", ["prenorm", "block3", "projected"])
def test_runs_repeat_bit_for_bit_with_and_without_gradients(name: str) -> None:
    toy, x, upstream = make_stack(STACKS[name], torch.float32)
    once, again = (run_stack(STACKS[name], toy, x, upstream) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))
    with torch.no_grad():
        assert torch.equal(forward_stack(STACKS[name], toy, x), once[0])


@pytest.mark.parametrize("batch", [(0, 3), (2, 0), (0,)])
@pytest.mark.parametrize("name", ["prenorm", "block3", "projected"])
def test_empty_batch(name: str, batch: tuple[int, ...]) -> None:
    toy, x, upstream = make_stack(STACKS[name], torch.float32, batch=batch)
    out, *grads = run_stack(STACKS[name], toy, x, upstream)
    assert out.shape == x.shape
    assert not any(grad.any() for grad in grads)


# reads ahead and sites that run in the kernels all the same
FUSED = {
    "prenorm_other_norm": (0, 0),
    "block3_other_norm": (1, 2),  # reads at block ends are normed where they are made
    "full_other_norm": (0, 0),
    "heads": (0, 0),
    "beta": (0, 0),
    "roles": (7, 4),  # not where attention reads first of all
    "roles_projected": (3, 8),
    "roles_other_norm": (1, 4),
}


@pytest.mark.parametrize("name", OTHER_STACKS)
def test_what_the_schedule_does_not_fuse_is_right_too(name: str, launches: Counter[str]) -> None:
    runs = run_thrice(OTHER_STACKS[name], torch.float32)
    assert_all_close(runs.tested, runs.exact, runs.names, RTOL)
    assert (launches["read_ahead_fwd"], launches["site_fwd"]) == FUSED[name]


def test_what_the_kernels_do_not_support_is_refused() -> None:
    x, y = torch.randn(2, 2, 3, 8).double()
    wide = torch.randn(2, 1, 9000)
    for run in (
        lambda: add_norm(x, y, NORM),
        lambda: add_norm(*wide, NORM),
        lambda: scheduled(Case(), make(Case())),
    ):
        with pytest.raises(ValueError, match=r'backend "triton": (.*64|9000)'):
            run()


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (AttnResConfig(num_blocks=2, heads=2), "several heads"),
        (AttnResConfig(num_blocks=2, summary=Summary(beta=0.5)), "logits have a bias"),
        (AttnResConfig(num_blocks=2), "2 sources of width 16"),
    ],
)
def test_reads_one_by_one_say_why_once(
    config: AttnResConfig,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    launches: Counter[str],
) -> None:
    monkeypatch.setattr(block, "MAX_NUMBERS", 16)
    monkeypatch.setattr(backend, "_said", set())
    caplog.set_level("INFO", "depthroute.ops")
    runs = run_thrice(Stack(config, dim=16), torch.float32)
    assert_all_close(runs.tested, runs.exact, runs.names, RTOL)
    assert caplog.messages.count(f"depth reads run one by one: {reason}") == 1
    assert launches["read_ahead_fwd"] == ("sources" in reason)  # that of one source


@pytest.mark.parametrize("width", [1, 16, 37, 1000])
def test_writes_and_streams_of_any_strides(width: int) -> None:
    """A write may be columns of a wider tensor, as are those that bring a key with them."""
    wide = [torch.randn(2, 3, width + 5, requires_grad=True) for _ in range(2)]
    x, y = wide[0][..., 2 : width + 2], wide[1][..., :width]
    leaves = [leaf.detach().double().requires_grad_() for leaf in wide]
    total, out = add_norm(x, y, NORM)
    want_total = leaves[0][..., 2 : width + 2] + leaves[1][..., :width]
    want, upstream = NORM(want_total), torch.randn(2, 2, 3, width)
    got = [total, out, *gradients([total, out], wide, [*upstream])]
    wanted = gradients([want_total, want], leaves, [*upstream.double()])
    assert_all_close(got, [want_total, want, *wanted], ["total", "out", "x", "y"])


@pytest.mark.parametrize("block", ["sum", "sum_of_normed"])
def test_keys_of_any_strides(block: Any) -> None:
    """The key of a block's first write, once settled, may be columns of what the sublayer gave."""
    config = AttnResConfig(num_blocks=1, key=ProjectedKey(rank=4, block=block))
    runs = run_thrice(Stack(config, num_sublayers=2, settled=(1,)), torch.float32)
    assert_all_close(runs.tested, runs.exact, runs.names, RTOL)


@pytest.mark.parametrize("used", [[0], [1], [2], [0, 1, 2]], ids=str)
@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("norm_eps", [None, 3e-2])
def test_an_emitted_key_and_its_gradient_of_any_strides(
    norm_eps: float | None, is_first: bool, used: list[int]
) -> None:
    case = Case(separate=True, rank=7, queries=1, complete=False, share=0.7)
    exact, width, total_width = make(case), case.width, case.width + case.rank

    def site(leaves: Leaves, wholes: Sequence[Tensor]) -> list[Tensor]:
        """Return the open block, its key and the read, and the gradients of all that is given."""
        ahead, _, _ = read_ahead(
            leaves.values, *leaves.query, keys=leaves.keys, pending=None, share=1.0, bias=None,
            rule=case.rule, complete=0, norm=NORM,
        )  # fmt: skip
        write, total, key = wholes
        results = add_merge_norm(
            ahead,
            None if is_first else total[..., 2 : width + 2],
            write[..., 1 : total_width + 1],
            key=None if is_first else key[..., 3 : case.rank + 3],
            key_sum=KeySum(norm_eps),
            share=case.share,
            bias=None,
            rule=case.rule,
            norm=NORM,
        )
        given = [*leaves.values, *leaves.keys, *leaves.query, write]
        given += [] if is_first else [total, key]
        outs = [results[i] for i in used]
        grads = [upstream[i].to(outs[0].dtype)[..., 1:-1] for i in used]
        return [*results, *gradients(outs, given, grads)]

    wholes = [torch.randn(*case.batch, total_width + 5) for _ in range(3)]
    upstream = [torch.randn(*case.batch, n + 2) for n in (width, case.rank, width)]
    got = site(exact.to(torch.float32), [x.clone().requires_grad_() for x in wholes])
    with use_backend("reference"):
        want = site(exact, [x.double().requires_grad_() for x in wholes])
    assert_all_close(got, want, [*map(str, range(len(want)))], RTOL)


@torch.no_grad()
@pytest.mark.parametrize("key", [TailKey(), ProjectedKey(rank=4), SUM], ids=str)
def test_a_site_is_one_kernel_whatever_the_key(key: Any, as_compiled: None) -> None:
    scheme = ToyModel(AttnResConfig(num_blocks=1, key=key), num_sublayers=6).residual
    state, names = scheme(torch.randn(2, 3, 16)), []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, op: Any, *rest: Any) -> Any:
            _, args, kwargs = rest
            names.extend([] if op.is_view else [op.name()])
            return op(*args, **(kwargs or {}))

    for site in range(6):
        y = torch.randn(2, 3, 16 + scheme.emit_dim)
        with Record():
            _, state = scheme.read(state, site, NORM)
            state = scheme.write(state, site, y) if site < 5 else state
        if site > 1:
            assert names == ["depthroute::site"]
        names.clear()


@pytest.mark.parametrize("name", ["plain", "separate", "emitted", "closes", "tail"])
def test_operations_are_registered_as_torch_expects(
    name: str, monkeypatch: pytest.MonkeyPatch, as_compiled: None
) -> None:
    checked = []
    for op in ("_read_ahead", "_read_ahead_backward", "_site", "_site_backward"):
        operation = getattr(registered, op)

        def check(*args: Any, operation: Any = operation) -> Any:
            args = tree_map_only(Tensor, Tensor.detach, args)  # gradients are not theirs
            torch.library.opcheck(operation, args)
            checked.append(operation)
            return operation(*args)

        monkeypatch.setattr(registered, op, check)
    case = CASES[name]._replace(queries=3, sources=2, batch=(2,))
    leaves = make(case).to(torch.float32)
    reads_and_gradients(case, leaves, upstream_of(case))
    assert len(checked) == 6


@pytest.mark.parametrize("used", ["total", "out"])
def test_one_unused_output_counts_as_a_zero_gradient(used: str) -> None:
    x, y = (torch.randn(2, 3, 8, requires_grad=True) for _ in range(2))
    pick, upstream = ["total", "out"].index(used), torch.randn(2, 3, 8)
    got = gradients([add_norm(x, y, NORM)[pick]], (x, y), [upstream])
    want = gradients([[x + y, NORM(x + y)][pick]], (x, y), [upstream])
    assert_all_close(got, want, "xy")


def test_second_derivatives_raise_instead_of_being_wrong() -> None:
    case = CASES["plain"]
    leaves = make(case).to(torch.float32)
    for outs in (scheduled(case, leaves), add_norm(*leaves.values[:2], NORM)):
        loss = outs[-1].pow(3).sum()
        (grad,) = torch.autograd.grad(loss, leaves.values[1], create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            grad.sum().backward()
