"""AttnRes and its low-rank keys against the papers' algorithm, written as a loop over sublayers."""

import copy
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from depthroute.models import CausalLM
from depthroute.ops import depth_attend
from depthroute.residual import (
    AttnResConfig,
    FromValueKey,
    ProjectedKey,
    Summary,
    TailKey,
    build_residual,
)
from helpers import ToyModel, assert_close, assert_same_gradients, tiny_config, tiny_model

DIM, EPS = 16, 1e-6


def literal_pass(config: AttnResConfig, toy: ToyModel, x: Tensor) -> tuple[list[Tensor], list[int]]:
    """Return what each site reads, the final read last, and from how many sources."""
    query, weight = toy.residual.query, getattr(toy.residual.key, "weight", None)
    alpha, beta, key = config.summary.alpha, config.summary.beta, config.key
    num_writes = len(toy.sublayers)
    num_blocks = config.num_blocks or num_writes
    ends = {math.ceil(num_writes * j / num_blocks) for j in range(1, num_blocks + 1)}

    def rms(v: Tensor) -> Tensor:
        return v / (v.pow(2).sum(-1, keepdim=True) / v.shape[-1] + EPS).sqrt()

    def emitted(write: Tensor) -> Tensor:
        normed = isinstance(key, ProjectedKey) and key.block == "sum_of_normed"
        return rms(write[..., DIM:]) if normed else write[..., DIM:]

    def source(writes: list[Tensor]) -> tuple[Tensor, Tensor, int]:
        """Sum a block's writes, then take the key of the sum."""
        value = sum(write[..., :DIM] for write in writes)
        routed = value / len(writes) ** alpha
        if isinstance(key, ProjectedKey):
            k = rms(sum(emitted(write) for write in writes))
        elif isinstance(key, FromValueKey):
            k = rms(value @ weight.T)
        elif key.norm == "full":
            k = rms(routed)[..., DIM - (key.rank or DIM) :]
        else:
            k = rms(routed[..., DIM - (key.rank or DIM) :])
        return routed, k, len(writes)

    embedding = torch.cat([x, x @ weight.T], -1) if isinstance(key, ProjectedKey) else x
    bank, block, reads, counts = [source([embedding])], [], [], []
    for t in range(num_writes + 1):
        sources = [*bank, source(block)] if block else bank
        h = sources[0][0]
        if t > 0:
            logits = [k @ query[t - 1] + beta * math.log(count) for _, k, count in sources]
            weights = torch.stack(logits).softmax(0)
            h = sum(w.unsqueeze(-1) * v for w, (v, _, _) in zip(weights, sources, strict=True))
        reads.append(h)
        counts.append(len(sources))
        if t < num_writes:
            block.append(toy.sublayer(t, (h,)))
        if t + 1 in ends:
            bank.append(source(block))
            block = []
    return reads, counts


KEYS = {
    "attn_res": TailKey(),
    "attn_res_full_norm": TailKey(norm="full"),
    "s_lr": TailKey(rank=5),
    "s_lr_full_norm": TailKey(rank=5, norm="full"),
    "p_lr": ProjectedKey(rank=5),
    "p_lr_sum": ProjectedKey(rank=5, block="sum"),
    "from_value": FromValueKey(rank=5),
}


@pytest.mark.parametrize("key", KEYS.values(), ids=KEYS)
@pytest.mark.parametrize("num_blocks", [0, 1, 3, 5, 8])
@pytest.mark.parametrize("summary", [Summary(), Summary(alpha=0.5, beta=0.7)], ids=["sum", "mean"])
def test_every_read_equals_the_literal_loop(key: Any, num_blocks: int, summary: Summary) -> None:
    config = AttnResConfig(num_blocks=num_blocks, key=key, summary=summary)
    toy, x = ToyModel(config).double(), torch.randn(2, 3, DIM, dtype=torch.float64)
    reads, counts = literal_pass(config, toy, x)
    steps = toy.steps(x)
    for step, read, count in zip(steps, reads, counts, strict=True):
        assert_close(step.inputs[0], read, f"site {step.site}")
        assert toy.residual.weights(step.state, step.site).shape == (1, count, 2, 3, 1)
    assert_same_gradients(toy, steps[-1].inputs[0], reads[-1])


@pytest.mark.parametrize("num_blocks", [0, 3])
def test_two_phases_equal_one_pass_at_every_site(num_blocks: int) -> None:
    toy, x = ToyModel(AttnResConfig(num_blocks=num_blocks)), torch.randn(2, 3, DIM)
    for step in toy.steps(x)[1:]:
        partial = [] if step.state.total is None else [step.state.total]
        once, _ = depth_attend([*step.state.values, *partial], toy.residual.query[step.site - 1])
        assert_close(step.inputs[0], once, f"site {step.site}")


def test_one_first_phase_serves_a_whole_block() -> None:
    toy = ToyModel(AttnResConfig(num_blocks=2))  # blocks of 4 writes
    ahead = [step.state.ahead for step in toy.steps(torch.randn(1, 1, DIM))]
    # a block's first read leaves the others' results; site 0 has no query, so site 1 comes first
    assert [None if a is None else len(a.outs) for a in ahead] == [
        *(None, None, 2, 1),
        *(None, 3, 2, 1),
        None,
    ]


@pytest.mark.parametrize(
    ("parent", "special"),
    [
        (AttnResConfig(num_blocks=0), AttnResConfig(num_blocks=8)),
        (AttnResConfig(num_blocks=3), AttnResConfig(block_ends=(3, 6, 8))),
        (AttnResConfig(num_blocks=3), AttnResConfig(num_blocks=3, key=TailKey(rank=DIM))),
        (
            AttnResConfig(num_blocks=3, key=TailKey(norm="full")),
            AttnResConfig(num_blocks=3, key=TailKey(rank=DIM)),
        ),
        (
            AttnResConfig(num_blocks=0, key=ProjectedKey(rank=4)),
            AttnResConfig(num_blocks=8, key=ProjectedKey(rank=4, block="sum")),
        ),
    ],
    ids=["as_many_blocks_as_writes", "ends_by_hand", "full_rank", "full_norm", "no_block_to_sum"],
)
def test_special_cases_equal_their_parent(parent: AttnResConfig, special: AttnResConfig) -> None:
    a, b = ToyModel(parent).double(), ToyModel(special).double()
    b.load_state_dict(a.state_dict())
    x = torch.randn(2, 3, DIM, dtype=torch.float64)
    # P-LR norms a key once or twice: the same up to eps
    assert_close(a(x), b(x), rtol=1e-5 if isinstance(parent.key, ProjectedKey) else 0)


def test_blocks_differ_from_full_and_sum_rules_differ() -> None:
    x = torch.randn(2, 3, DIM)
    for change in ({"num_blocks": 5}, {"key": ProjectedKey(rank=4, block="sum")}):
        config = AttnResConfig(num_blocks=3, key=ProjectedKey(rank=4))
        a, b = ToyModel(config), ToyModel(dataclasses.replace(config, **change))
        b.load_state_dict(a.state_dict())
        assert (a(x) - b(x)).abs().max() > 1e-3


def test_averaged_blocks_with_a_count_prior_are_the_same_model() -> None:
    ids = torch.randint(0, 61, (2, 9))
    plain = AttnResConfig(num_blocks=3)
    models = [
        tiny_model(dataclasses.replace(plain, summary=summary), norm_eps=1e-12, dtype=torch.float64)
        for summary in (Summary(), Summary(alpha=1.0, beta=1.0))
    ]
    # the read changes by a positive factor per token, which the norm after it removes
    assert_close(models[1](ids), models[0](ids), rtol=1e-6)
    schemes = [copy.deepcopy(model.model.residual) for model in models]
    x, y = torch.randn(2, 1, 3, 32, dtype=torch.float64)
    weights = []
    for scheme in schemes:
        state = scheme(x)
        for site in range(2):
            _, state = scheme.read(state, site, torch.clone)
            state = scheme.write(state, site, y)
        weights.append(scheme.weights(state, 2))
    assert (weights[0] - weights[1]).abs().max() > 1e-2


@pytest.mark.parametrize(("num_blocks", "total"), [(0, 1224), (4, 168), (8, 264), (16, 456)])
def test_source_counts_of_48_sublayers(num_blocks: int, total: int) -> None:
    """The papers' counts over the reads that follow a write (arXiv 2607.09694, appendix A)."""
    toy = ToyModel(AttnResConfig(num_blocks=num_blocks), dim=2, num_sublayers=48)
    with torch.no_grad():
        steps = toy.steps(torch.randn(1, 1, 2))
        counts = [toy.residual.weights(step.state, step.site).shape[1] for step in steps]
    assert counts[0] == 1
    assert sum(counts[1:]) == total
    assert counts[-1] == (num_blocks or 48) + 1
    assert toy.residual.cost().multiply_adds == 2 * 2 * total  # a score and a mix of width 2


@pytest.mark.parametrize("num_blocks", range(9))
def test_zero_queries_give_the_mean_of_sources_that_hold_everything_once(num_blocks: int) -> None:
    scheme = build_residual(
        AttnResConfig(num_blocks=num_blocks), dim=4, kinds=("attention", "mlp") * 4
    )
    state = scheme(torch.ones(1, 1, 4, dtype=torch.float64))
    closed, ends = (
        0,
        [math.ceil(8 * j / (num_blocks or 8)) for j in range(1, (num_blocks or 8) + 1)],
    )
    for site in range(8):
        (h,), state = scheme.read(state, site, torch.clone)
        is_open = site > 0 and site not in ends
        # the embedding is 1 and write i is 2^i: any double or lost source shows in the binary sum
        assert_close(h, torch.full_like(h, (2**site) / (1 + closed + is_open)), f"site {site}")
        state = scheme.write(state, site, torch.full_like(h, 2.0**site))
        closed += site + 1 in ends
    hidden = scheme.finish(state, torch.clone)
    assert_close(hidden, torch.full_like(hidden, 2**8 / (1 + closed)))
    state = scheme.settle(state)
    assert len(state.values) == 1 + closed
    assert state.total is None


@pytest.mark.parametrize("key", KEYS.values(), ids=KEYS)
def test_routing_parameters_are_float32_and_queries_start_at_zero(key: Any) -> None:
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        model = CausalLM(tiny_config(AttnResConfig(num_blocks=3, key=key)))
    finally:
        torch.set_default_dtype(before)
    scheme = model.model.residual
    rank = key.rank or 32
    assert scheme.query.shape == (8, rank)  # 2L rows: the first read has one source and no query
    assert not scheme.query.any()
    assert {p.dtype for p in scheme.parameters()} == {torch.float32}
    projection = getattr(scheme.key, "weight", None)
    assert (projection is not None) == (key.name != "tail")
    if projection is not None:  # zero too, and neither would ever move
        assert projection.shape == (rank, 32)
        assert 0.01 < projection.std() < 0.03
    assert scheme.emit_dim == (rank if key.name == "projected" else 0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AttnResConfig(num_blocks=-1), r"num_blocks must be >= 0 \(0 is full\), got -1"),
        (lambda: AttnResConfig(num_blocks=9), "num_blocks must be at most the 8 writes .* got 9"),
        (lambda: AttnResConfig(block_ends=(0, 8)), r"block_ends must increase .*\(0, 8\)"),
        (lambda: AttnResConfig(block_ends=(3, 3, 8)), r"block_ends must increase .*\(3, 3, 8\)"),
        (lambda: AttnResConfig(block_ends=(3, 6)), r"block_ends must end with the 8 .*\(3, 6\)"),
        (lambda: AttnResConfig(block_ends=(3, 9)), r"block_ends must end with the 8 .*\(3, 9\)"),
        (lambda: AttnResConfig(key=TailKey(rank=17)), "rank .* the model width 16, got 17"),
        (lambda: AttnResConfig(key=TailKey(rank=0)), "rank must be >= 1, got 0"),
        (lambda: AttnResConfig(key=ProjectedKey(rank=0)), "rank must be >= 1, got 0"),
        (lambda: AttnResConfig(key=FromValueKey(rank=-1)), "rank must be >= 1, got -1"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    make: Callable[[], AttnResConfig], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ToyModel(make())
