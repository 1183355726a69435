"""Multi-Head Attention Residuals against their equations, a loop over reads and heads."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from depthroute.ops import depth_attend
from depthroute.residual import (
    AttnResConfig,
    FromValueKey,
    ProjectedKey,
    Summary,
    TailKey,
    build_residual,
)
from helpers import Step, ToyModel, assert_close, assert_same_gradients, before_phase_1

DIM, EPS = 16, 1e-6
KEYS = {
    "full_width": TailKey(),
    "tail": TailKey(rank=8),
    "tail_full_norm": TailKey(rank=8, norm="full"),
    "projected": ProjectedKey(rank=12, block="sum"),
    "from_value": FromValueKey(rank=4),
}


def rms(v: Tensor) -> Tensor:
    return v / (v.pow(2).sum(-1, keepdim=True) / v.shape[-1] + EPS).sqrt()


def literal_pass(config: AttnResConfig, toy: ToyModel, x: Tensor) -> list[Tensor]:
    """Return what each site reads, the final read last."""
    query, weight = toy.residual.query, getattr(toy.residual.key, "weight", None)
    num_writes, heads, beta = len(toy.sublayers), config.heads, config.summary.beta
    num_blocks = config.num_blocks or num_writes
    ends = {math.ceil(num_writes * j / num_blocks) for j in range(1, num_blocks + 1)}

    def normed_key(total: Tensor, count: int) -> Tensor:
        """Norm the whole key; only then is it cut."""
        if config.key.name == "projected":
            return rms(total[..., DIM:])
        if config.key.name == "from_value":
            return rms(total @ weight.T)
        value, start = total / count**config.summary.alpha, DIM - (config.key.rank or DIM)
        return rms(value)[..., start:] if config.key.norm == "full" else rms(value[..., start:])

    # a source is its value, beside it emitted columns if any, and the writes in it
    bank = [(torch.cat([x, x @ weight.T], -1) if config.key.name == "projected" else x, 1)]
    block: list[Tensor] = []
    reads = []
    for t in range(num_writes + 1):
        sources = [*bank, (sum(block), len(block))] if block else bank
        h = torch.zeros_like(x)
        for head in range(heads):
            columns = slice(head * DIM // heads, (head + 1) * DIM // heads)
            if t == 0:
                h[..., columns] = x[..., columns]
                continue
            rank = query.shape[1]
            cut = slice(head * rank // heads, (head + 1) * rank // heads)
            logits = [
                normed_key(total, count)[..., cut] @ query[t - 1, cut] + beta * math.log(count)
                for total, count in sources
            ]
            weights = torch.stack(logits).softmax(0)
            mix = [
                w.unsqueeze(-1) * total[..., columns] / count**config.summary.alpha
                for w, (total, count) in zip(weights, sources, strict=True)
            ]
            h[..., columns] = sum(mix)
        reads.append(h)
        if t < num_writes:
            block.append(toy.sublayer(t, (h,)))
        if t + 1 in ends:
            bank.append((sum(block), len(block)))
            block = []
    return reads


@pytest.mark.parametrize("key", KEYS.values(), ids=KEYS)
@pytest.mark.parametrize("num_blocks", [0, 3, 8])
@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("summary", [Summary(), Summary(alpha=0.5, beta=0.7)], ids=["sum", "mean"])
def test_every_read_equals_the_literal_loop(
    key: Any, num_blocks: int, heads: int, summary: Summary
) -> None:
    config = AttnResConfig(num_blocks=num_blocks, key=key, heads=heads, summary=summary)
    toy, x = ToyModel(config, num_sublayers=8).double(), torch.randn(2, 3, DIM).double()
    reads, steps = literal_pass(config, toy, x), toy.steps(x)
    for step, read in zip(steps, reads, strict=True):
        assert_close(step.inputs[0], read, f"site {step.site}")
        assert toy.residual.weights(step.state, step.site).shape[-1] == heads
    assert_same_gradients(toy, steps[-1].inputs[0], reads[-1])


@pytest.mark.parametrize("num_blocks", [0, 1, 3, 5])
@pytest.mark.parametrize("rank", [None, 8])
def test_two_phases_merged_by_head_equal_one_pass(num_blocks: int, rank: int | None) -> None:
    config = AttnResConfig(num_blocks=num_blocks, heads=4, key=TailKey(rank=rank))
    toy = ToyModel(config)
    for step in toy.steps(torch.randn(2, 3, DIM))[1:]:
        partial = [] if step.state.total is None else [step.state.total]
        query = toy.residual.query[step.site - 1]
        once, _ = depth_attend([*step.state.values, *partial], query, heads=4)
        assert_close(step.inputs[0], once, f"site {step.site}")


@pytest.mark.parametrize("heads", [1, 2, 8, 16])
def test_zero_queries_read_the_mean_whatever_the_heads(heads: int) -> None:
    toy = ToyModel(AttnResConfig(num_blocks=3, heads=heads))
    with torch.no_grad():
        toy.residual.query.zero_()
    for step in toy.steps(torch.randn(2, 3, DIM)):
        partial = [] if step.state.total is None else [step.state.total]
        mean = torch.stack([*step.state.values, *partial]).mean(0)
        assert_close(step.inputs[0], mean, f"site {step.site}")


def read_and_weights(toy: ToyModel, step: Step) -> tuple[Tensor, Tensor]:
    """Read again, phase 1 included."""
    state = before_phase_1(toy.residual, step.state, step.site)
    (h,), _ = toy.residual.read(state, step.site, torch.clone)
    return h, toy.residual.weights(state, step.site)[0]


@pytest.mark.parametrize("rank", [None, 8])
@torch.no_grad()
def test_a_head_depends_on_its_own_slice_of_the_query_alone(rank: int | None) -> None:
    toy = ToyModel(AttnResConfig(num_blocks=3, heads=4, key=TailKey(rank=rank)))
    for step in toy.steps(torch.randn(2, 3, DIM))[1:]:
        read, weights = read_and_weights(toy, step)
        for head in range(4):
            query = toy.residual.query[step.site - 1].view(4, -1)[head]
            before = query.clone()
            query += 1.0
            other_read, other_weights = read_and_weights(toy, step)
            query.copy_(before)
            same = [h for h in range(4) if h != head]
            assert torch.equal(other_weights[..., same], weights[..., same])
            assert not torch.equal(other_weights[..., head], weights[..., head])
            moved = (other_read - read).unflatten(-1, (4, -1)).abs().amax((0, 1, 3))
            assert (moved > 1e-4).tolist() == [h == head for h in range(4)]
            assert (moved[same] == 0).all()


@torch.no_grad()
def test_logits_of_the_heads_add_up_to_that_of_one() -> None:
    """The key is normed before the cut, so that its inner product falls into H parts."""
    config = AttnResConfig(num_blocks=3, heads=4)
    toy = ToyModel(config).double()
    single = build_residual(dataclasses.replace(config, heads=1), dim=DIM, kinds=toy.residual.kinds)
    single.double().load_state_dict(toy.residual.state_dict())
    for step in toy.steps(torch.randn(2, 3, DIM).double())[1:]:
        logits = toy.residual.weights(step.state, step.site).log()
        one = single.weights(step.state, step.site).log()
        summed = (logits - logits[:, :1]).sum(-1, keepdim=True)
        assert_close(summed, one - one[:, :1], f"site {step.site}", rtol=1e-9)


@torch.no_grad()
def test_heads_are_contiguous_slices_that_may_change_places() -> None:
    scheme = build_residual(AttnResConfig(num_blocks=0, heads=4), dim=DIM, kinds=("mlp",) * 3)
    order = torch.tensor([2, 0, 3, 1])

    def permuted(tensor: Tensor) -> Tensor:
        return tensor.unflatten(-1, (4, -1))[..., order, :].flatten(-2)

    query, (x, *writes) = torch.randn(3, DIM), torch.randn(4, 2, 3, DIM)

    def last_read(change: Callable[[Tensor], Tensor]) -> Tensor:
        scheme.query.copy_(change(query))
        state = scheme(change(x))
        for site, write in enumerate(writes):
            state = scheme.write(state, site, change(write))
        return scheme.finish(state, torch.clone)

    assert_close(last_read(permuted), permuted(last_read(torch.clone)))


@pytest.mark.parametrize("key", KEYS.values(), ids=KEYS)
def test_heads_cost_nothing_and_add_no_parameter(key: Any) -> None:
    kinds = ("attention", "mlp") * 4
    one, four = (
        build_residual(AttnResConfig(num_blocks=3, key=key, heads=heads), dim=DIM, kinds=kinds)
        for heads in (1, 4)
    )
    assert four.cost() == one.cost()
    shapes = {name: p.shape for name, p in one.named_parameters()}
    assert {name: p.shape for name, p in four.named_parameters()} == shapes


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AttnResConfig(heads=0), "heads must be >= 1, got 0"),
        (lambda: AttnResConfig(heads=3), "heads must divide .* width 16 and the rank 16, got 3"),
        (lambda: AttnResConfig(heads=32), "heads must divide .* width 16 and the rank 16, got 32"),
        (lambda: AttnResConfig(heads=4, key=TailKey(rank=6)), "the rank 6, got 4"),
        (lambda: AttnResConfig(heads=3, key=TailKey(rank=6)), "the model width 16 .*, got 3"),
    ],
)
def test_heads_that_do_not_divide_are_refused(
    make: Callable[[], AttnResConfig], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ToyModel(make())
