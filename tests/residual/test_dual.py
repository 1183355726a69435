"""Dual Attention Residuals against the equations of its page, written as a loop over sublayers."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from depthroute.models import CausalLM
from depthroute.ops import depth_attend
from depthroute.residual import AttnResConfig, DualConfig, build_residual
from helpers import ToyModel, assert_close, assert_same_gradients, tiny_config

DIM, EPS = 16, 1e-6
each_form = pytest.mark.parametrize("form", ["write", "state"])
each_key = pytest.mark.parametrize("keyed_by", ["other", "own"])


def literal_pass(toy: ToyModel, x: Tensor) -> tuple[list[Tensor], int]:
    """Return what each site reads, the final read last, and the multiply-adds per token."""
    residual, config = toy.residual, toy.residual.config
    rank, num_writes = config.rank or DIM, len(toy.sublayers)
    num_blocks = config.num_blocks or num_writes
    ends = {math.ceil(num_writes * j / num_blocks) for j in range(1, num_blocks + 1)}
    rhos = [] if residual.mix_gate is None else [1 / (1 + (-c).exp()) for c in residual.mix_gate]

    def rms(k: Tensor) -> Tensor:
        return k / (k.pow(2).sum(-1, keepdim=True) / rank + EPS).sqrt()

    banks: list[list[Tensor]] = [[x], [x]]
    partial: list[Tensor] | None = None
    reads, count = [], 0
    for t in range(num_writes + 1):
        seen = [[*banks[s], partial[s]] if partial else banks[s] for s in (0, 1)]
        h, read = [x, x], x
        if t > 0:
            for s in (0, 1):
                routed = seen[1 - s] if config.keyed_by == "other" else seen[s]
                logits = [rms(v[..., DIM - rank :]) @ residual.query[t - 1, s] for v in routed]
                weights = torch.stack(logits).softmax(0).unsqueeze(-1)
                h[s] = sum(w * v for w, v in zip(weights, seen[s], strict=True))
                count += (DIM + rank) * len(logits)
            gate = 1 / (1 + (-residual.read_gate[t - 1]).exp())
            read = gate * h[0] + (1 - gate) * h[1]
            count += 2 * DIM
        reads.append(read)
        if t == num_writes:
            break
        u = toy.sublayer(t, (read,))
        old = h if config.form == "state" else partial
        if old and t > 0:
            rho = rhos.pop(0)
            old = [rho * old[0] + (1 - rho) * old[1], (1 - rho) * old[0] + rho * old[1]]
            count += 4 * DIM
        gains = 2 / (1 + (-residual.write_gate[t]).exp())
        partial = [g * u + (old[s] if old else 0) for s, g in enumerate(gains)]
        count += 2 * DIM
        if t + 1 in ends:
            for bank, value in zip(banks, partial, strict=True):
                bank.append(value)
            partial = None
    assert not rhos
    return reads, count


@each_form
@each_key
@pytest.mark.parametrize("rank", [None, 5])
@pytest.mark.parametrize("num_blocks", [0, 1, 3, 5, 8])
def test_every_read_equals_the_literal_loop(
    num_blocks: int, rank: int | None, keyed_by: Any, form: Any
) -> None:
    config = DualConfig(num_blocks=num_blocks, form=form, keyed_by=keyed_by, rank=rank)
    toy, x = ToyModel(config).double(), torch.randn(2, 3, DIM, dtype=torch.float64)
    reads, count = literal_pass(toy, x)
    steps = toy.steps(x)
    for step, read in zip(steps, reads, strict=True):
        assert_close(step.inputs[0], read, f"site {step.site}")
    assert_same_gradients(toy, steps[-1].inputs[0], reads[-1])
    cost = toy.residual.cost()
    held = {id(value): value.numel() for pair in steps[-1].state.sources for value in pair}
    assert cost.multiply_adds == count
    assert cost.cached == sum(held.values()) // 6  # tokens


@each_form
@pytest.mark.parametrize("num_blocks", [0, 3])
def test_two_phases_equal_one_pass_at_every_site(num_blocks: int, form: Any) -> None:
    toy, x = ToyModel(DualConfig(num_blocks=num_blocks, form=form)), torch.randn(2, 3, DIM)
    for step in toy.steps(x)[1:]:
        partial = [] if step.state.partial is None else [step.state.partial]
        one, two = zip(*step.state.sources, *partial, strict=True)
        query, gate = (p[step.site - 1] for p in (toy.residual.query, toy.residual.read_gate))
        first, _ = depth_attend(one, query[0], keys=two)
        second, _ = depth_attend(two, query[1], keys=one)
        once = second + gate.sigmoid() * (first - second)
        assert_close(step.inputs[0], once, f"site {step.site}")


def test_one_first_phase_serves_both_streams_of_a_whole_block() -> None:
    toy = ToyModel(DualConfig(num_blocks=2))  # blocks of 4 writes
    ahead = [step.state.ahead for step in toy.steps(torch.randn(1, 1, DIM))]
    lengths = [None if a is None else len(a) for a in ahead]
    assert lengths == [None, None, 2, 1, None, 3, 2, 1, None]


def dual_and_attn_res(num_blocks: int) -> tuple[ToyModel, ToyModel]:
    """Return a model whose streams have the queries of an AttnRes model, and that model."""
    dual, parent = (
        ToyModel(config(num_blocks=num_blocks)).double() for config in (DualConfig, AttnResConfig)
    )
    with torch.no_grad():
        for ours, theirs in zip(dual.sublayers, parent.sublayers, strict=True):
            ours.copy_(theirs)
        dual.residual.query.copy_(parent.residual.query.unsqueeze(1).expand(-1, 2, -1))
        dual.residual.write_gate.zero_()  # B = 1
    return dual, parent


@pytest.mark.parametrize("num_blocks", [0, 1, 3])
def test_tied_queries_with_open_gates_are_attn_res(num_blocks: int) -> None:
    dual, parent = dual_and_attn_res(num_blocks)
    with torch.no_grad():
        dual.residual.read_gate.zero_()  # A = 1/2
        if dual.residual.mix_gate is not None:
            dual.residual.mix_gate.fill_(100.0)  # rho = 1
    x, upstream = torch.randn(2, 2, 3, DIM, dtype=torch.float64)
    for a, b in zip(dual.steps(x), parent.steps(x), strict=True):
        assert_close(a.inputs[0], b.inputs[0], f"site {a.site}")
    dual(x).backward(upstream)
    parent(x).backward(upstream)
    assert_close(dual.residual.query.grad.sum(1), parent.residual.query.grad, "query", rtol=1e-9)


def test_equal_histories_and_tied_queries_are_attn_res_at_any_read_gate_and_mix() -> None:
    dual, parent = dual_and_attn_res(3)
    x = torch.randn(2, 3, DIM, dtype=torch.float64)
    assert dual.residual.read_gate.abs().min() > 1e-3
    assert_close(dual(x), parent(x))
    with torch.no_grad():
        dual.residual.query[3, 1] += 1.0
    assert (dual(x) - parent(x)).abs().max() > 1e-3


@each_form
@each_key
def test_swapping_the_streams_changes_nothing(keyed_by: Any, form: Any) -> None:
    config = DualConfig(num_blocks=3, form=form, keyed_by=keyed_by)
    a, b = ToyModel(config).double(), ToyModel(config).double()
    b.load_state_dict(a.state_dict())
    with torch.no_grad():
        b.residual.query.copy_(a.residual.query.flip(1))
        b.residual.write_gate.copy_(a.residual.write_gate.flip(1))
        b.residual.read_gate.neg_()
    x = torch.randn(2, 3, DIM, dtype=torch.float64)
    for one, two in zip(a.steps(x), b.steps(x), strict=True):
        assert_close(two.inputs[0], one.inputs[0], f"site {one.site}")
        for ours, theirs in zip(one.state.sources, two.state.sources, strict=True):
            assert_close(theirs[0], ours[1])
            assert_close(theirs[1], ours[0])


@pytest.mark.parametrize(("keyed_by", "moves"), [("other", 1), ("own", 0)])
def test_new_values_in_stream_0_move_the_weights_of_one_stream(keyed_by: Any, moves: int) -> None:
    toy = ToyModel(DualConfig(num_blocks=3, keyed_by=keyed_by))
    state = toy.steps(torch.randn(2, 3, DIM))[7].state
    assert state.partial is not None
    pairs = [(torch.randn_like(one), two) for one, two in (*state.sources, state.partial)]
    changed = state._replace(sources=tuple(pairs[:-1]), partial=pairs[-1])
    before, after = (toy.residual.weights(each, 7) for each in (state, changed))
    assert before.shape == (1, 8, 2, 3, 1)  # two streams of four sources, in turn
    stays = 1 - moves
    assert torch.equal(after[:, stays::2], before[:, stays::2])
    assert (after[:, moves::2] - before[:, moves::2]).abs().max() > 0.05


def mix(pair: tuple[Tensor, Tensor], logit: float, form: Any) -> Tensor:
    """Return what a write of nothing makes of two streams, `[2, B, T, D]`."""
    residual = build_residual(
        DualConfig(num_blocks=1, form=form), dim=pair[0].shape[-1], kinds=("attention", "mlp") * 2
    ).double()
    nn.init.constant_(residual.mix_gate, logit)
    state = residual(torch.zeros_like(pair[0]))
    carried = {"partial": pair} if form == "write" else {"retrieved": pair}
    state = residual.write(state._replace(**carried), 1, torch.zeros_like(pair[0]))
    return torch.stack(state.partial)


@each_form
@pytest.mark.parametrize("logit", [-100.0, -0.7, 0.0, 4.0, 100.0])
def test_the_mixer_is_doubly_stochastic(logit: float, form: Any) -> None:
    eye = torch.eye(2, dtype=torch.float64).view(2, 1, 1, 2)
    matrix = mix((eye[0], eye[1]), logit, form).view(2, 2)
    rho = 1 / (1 + math.exp(-logit))
    expected = torch.tensor([[rho, 1 - rho], [1 - rho, rho]], dtype=torch.float64)
    torch.testing.assert_close(matrix, expected)
    torch.testing.assert_close(matrix.sum(0), torch.ones_like(matrix[0]))
    torch.testing.assert_close(matrix.sum(1), torch.ones_like(matrix[0]))
    pair = torch.randn(2, 2, 3, DIM, dtype=torch.float64)
    mixed = mix((pair[0], pair[1]), logit, form)
    torch.testing.assert_close(mixed.sum(0), pair.sum(0))  # the sum of the streams is kept
    before, after = (x.square().sum((0, -1)) for x in (pair, mixed))
    assert (after <= before * (1 + 1e-12)).all()  # their joint norm never grows


@each_form
def test_half_a_mix_makes_the_streams_equal(form: Any) -> None:
    one, two = torch.randn(2, 2, 3, DIM, dtype=torch.float64)
    mixed = mix((one, two), 0.0, form)
    assert torch.equal(mixed[0], mixed[1])
    torch.testing.assert_close(mixed[0], (one + two) / 2)


def after_three_steps(form: Any, read_gate: Tensor | None) -> tuple[Tensor, Tensor]:
    """Train a small model, its read gates at their start or as given.

    Returns the first gradient of its queries and, by block, the distance of the two sources,
    relative to their size.
    """
    toy = ToyModel(DualConfig(num_blocks=3, form=form))
    residual, (x, target) = toy.residual, torch.randn(2, 4, 10, DIM)
    residual.init_weights()
    if read_gate is not None:
        residual.read_gate.data.copy_(read_gate)
    optimizer = torch.optim.AdamW(toy.parameters(), lr=1e-2, weight_decay=0.0)
    gradients = []
    for _ in range(3):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(toy(x), target).backward()
        gradients.append(residual.query.grad.clone())
        optimizer.step()
    one, two = map(torch.stack, zip(*toy.steps(x)[-1].state.sources[1:], strict=True))
    return gradients[0], ((one - two).flatten(1).norm(dim=1) / one.flatten(1).norm(dim=1)).detach()


@each_form
def test_with_equal_read_gates_the_streams_stay_equal(form: Any) -> None:
    gradient, distance = after_three_steps(form, torch.zeros(8, 1))
    assert torch.equal(gradient[:, 0], gradient[:, 1])
    assert (distance < 1e-5).all()  # roundings


@pytest.mark.parametrize(("form", "apart"), [("write", 5e-4), ("state", 1e-2)])
def test_the_start_breaks_the_symmetry(form: Any, apart: float) -> None:
    gradient, distance = after_three_steps(form, None)
    one, two = gradient.unbind(1)
    assert ((one - two).norm(dim=-1) > 0.1 * (one + two).norm(dim=-1)).all()
    assert (distance > apart).all(), distance


@each_form
def test_start(form: Any) -> None:
    residual = build_residual(
        DualConfig(num_blocks=3, form=form), dim=DIM, kinds=("attention", "mlp") * 4
    )
    assert {p.dtype for p in residual.parameters()} == {torch.float32}
    assert not residual.query.any()
    assert residual.read_gate.flatten().tolist() == [-4.0, 4.0] * 4  # sites 1, 2, ..., 8
    assert not residual.write_gate.any()
    assert residual.mix_gate.flatten().tolist() == [4.0] * (5 if form == "write" else 7)


def test_an_untrained_model_is_an_untrained_attn_res() -> None:
    ids = torch.arange(18).view(2, 9)
    for num_blocks in (0, 3):
        configs = (DualConfig(num_blocks=num_blocks), AttnResConfig(num_blocks=num_blocks))
        dual, parent = (CausalLM(tiny_config(config)).double() for config in configs)
        assert_close(dual(ids), parent(ids))


def test_an_untrained_state_form_carries_what_it_read() -> None:
    residual = build_residual(DualConfig(num_blocks=1, form="state"), dim=1, kinds=("mlp",) * 2)
    x = torch.full((1, 1, 1), 8.0)
    (h,), state = residual.read(residual(x), 0, torch.clone)
    assert h.item() == 8
    (h,), state = residual.read(residual.write(state, 0, torch.ones_like(x)), 1, torch.clone)
    assert h.item() == pytest.approx((8 + 9) / 2)  # the mean of the embedding and the state
    state = residual.write(state, 1, torch.ones_like(x))
    assert residual.finish(state, torch.clone).item() == pytest.approx((8 + 9.5) / 2)


@pytest.mark.parametrize(("num_blocks", "total"), [(0, 1224), (4, 168), (8, 264), (16, 456)])
def test_cost_of_48_sublayers(num_blocks: int, total: int) -> None:
    """Twice the source counts of arXiv 2607.09694, appendix A."""
    residual = build_residual(
        DualConfig(num_blocks=num_blocks), dim=1024, kinds=("attention", "mlp") * 24
    )
    mixes = 48 - (num_blocks or 48)
    parameters, multiply_adds, cached, _ = residual.cost()
    assert parameters == 48 * (2 * 1024 + 3) + mixes
    assert multiply_adds == 4 * 1024 * total + 1024 * (4 * 48 + 4 * mixes)
    assert cached == 1024 * (2 * (num_blocks or 48) + 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_blocks": -1}, r"num_blocks must be >= 0 \(0 is full\), got -1"),
        ({"num_blocks": 9}, "num_blocks must be at most the 8 writes .* got 9"),
        ({"block_ends": (3, 6)}, r"block_ends must end with the 8 .*\(3, 6\)"),
        ({"rank": 0}, "rank must be >= 1, got 0"),
        ({"rank": 17}, "rank must be at most the model width 16, got 17"),
    ],
)
def test_settings_that_do_not_fit_are_refused(changes: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ToyModel(DualConfig(**changes))
