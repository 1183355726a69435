"""LAuReL against its equations, written as a loop over connections."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from depthroute.models import CausalLM
from depthroute.residual import LaurelConfig, PreNormConfig, build_residual
from helpers import RTOL, ToyModel, assert_close, assert_same_gradients, tiny_config, tiny_model

DIM = 16
FORMS: dict[str, dict[str, Any]] = {
    "rw": {"rank": 0},
    "lr": {"balance": "fixed", "rank": 5},
    "pa": {"balance": "fixed", "rank": 0, "previous": 3},
    "pa_low_rank": {"balance": "fixed", "rank": 5, "previous": 3},
    "rw_lr": {"rank": 5},
    "rw_pa": {"rank": 0, "previous": 3},
    "rw_lr_pa": {"rank": 5, "previous": 3},
}
each_form = pytest.mark.parametrize("form", FORMS)
around = pytest.mark.parametrize("around", ["layer", "sublayer"])


def literal_pass(toy: ToyModel, x: Tensor) -> tuple[list[Tensor], list[int]]:
    """Return what each site reads, the final read last, and the terms of each connection."""
    residual, config = toy.residual, toy.residual.config
    width = 2 if config.around == "layer" else 1
    reads, past, num_terms = [], [x], []
    for i in range(len(toy.sublayers) // width):
        h, f = past[-1], torch.zeros_like(x)
        for site in range(width * i, width * (i + 1)):
            reads.append(h)
            y = toy.sublayer(site, (h,))
            h, f = h + y, f + y
        alpha = beta = 1.0
        if config.balance == "softmax":
            exps = residual.balance[:, i].exp()
            alpha, beta = 2 * exps[0] / exps.sum(), 2 * exps[1] / exps.sum()
        carried, terms, first = past[-1], 0, sum(num_terms)
        for j in range(config.previous or int(config.rank > 0)):
            if i - j < 0:
                continue
            term = past[i - j]
            if config.rank:
                term = (residual.up[first + j] @ (residual.down[first + j] @ term[..., None]))[
                    ..., 0
                ]
            if config.previous:
                term = residual.gain[first + j] * term
            carried, terms = carried + term, terms + 1
        past.append(alpha * f + beta * carried)
        num_terms.append(terms)
    return [*reads, past[-1]], num_terms


@around
@each_form
def test_every_read_equals_the_literal_loop(form: str, around: Any) -> None:
    config = LaurelConfig(**FORMS[form], around=around)
    toy, x = ToyModel(config).double(), torch.randn(2, 3, DIM, dtype=torch.float64)
    reads, num_terms = literal_pass(toy, x)
    steps = toy.steps(x)
    for step, read in zip(steps, reads, strict=True):
        assert_close(step.inputs[0], read, f"site {step.site}")
    assert_same_gradients(toy, steps[-1].inputs[0], reads[-1])
    products = (2 * config.rank or 1) * sum(num_terms)
    balance = 2 * len(num_terms) if config.balance == "softmax" else 0
    assert toy.residual.cost().multiply_adds == DIM * (products + balance)


@each_form
def test_an_untrained_model_around_sublayers_is_the_plain_sum_bit_for_bit(form: str) -> None:
    ids = torch.arange(18).view(2, 9)
    config = LaurelConfig(**FORMS[form], around="sublayer")
    for dtype in (torch.float32, torch.bfloat16):
        routed, plain = (CausalLM(tiny_config(c)) for c in (config, PreNormConfig()))
        routed.model.compute_dtype = plain.model.compute_dtype = dtype
        assert torch.equal(routed(ids), plain(ids))


@each_form
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_untrained_model_around_layers_is_the_plain_sum(form: str, dtype: torch.dtype) -> None:
    # x + (f + g) for (x + f) + g: roundings apart
    ids = torch.arange(18).view(2, 9)
    routed = CausalLM(tiny_config(LaurelConfig(**FORMS[form]))).to(dtype)
    plain = CausalLM(tiny_config(PreNormConfig())).to(dtype)
    assert_close(routed(ids), plain(ids), rtol=min(RTOL[dtype], 3e-6))


@each_form
def test_other_weights_are_another_function(form: str) -> None:
    ids = torch.arange(18).view(2, 9)
    plain, routed = tiny_model(PreNormConfig()), tiny_model(LaurelConfig(**FORMS[form]))
    assert (routed(ids) - plain(ids)).abs().max() > 1e-2 * plain(ids).abs().max()


def test_low_rank_is_a_dense_matrix_beside_the_identity() -> None:
    toy = ToyModel(LaurelConfig(balance="fixed", rank=5, around="sublayer")).double()
    h = x = torch.randn(3, DIM, dtype=torch.float64)
    for site in range(8):
        dense = torch.eye(DIM) + toy.residual.up[site] @ toy.residual.down[site]
        h = toy.sublayer(site, (h,)) + h @ dense.T
    assert_close(toy(x), h)


def test_weights_of_new_and_old_sum_to_two_and_stay_positive() -> None:
    residual = build_residual(LaurelConfig(rank=0), dim=1, kinds=("attention", "mlp"))

    def result(x: float, f: float) -> float:
        state = residual(torch.full((1, 1, 1), x))
        state = residual.write(state, 0, torch.full((1, 1, 1), f))
        return residual.finish(residual.write(state, 1, torch.zeros(1, 1, 1)), torch.clone).item()

    for logits in ([0.0, 0.0], [0.3, -1.2], [-30.0, 30.0], [200.0, -200.0]):
        with torch.no_grad():
            residual.balance.copy_(torch.tensor(logits).view(2, 1))
        new, old = result(0.0, 1.0), result(1.0, 0.0)
        assert min(new, old) >= 0
        assert new + old == pytest.approx(2.0, rel=1e-6)
        assert result(1.0, 1.0) == pytest.approx(2.0, rel=1e-6)
    assert (new, old) == (2.0, 0.0)


def test_the_window_holds_the_latest_activations_newest_first() -> None:
    config = LaurelConfig(balance="fixed", rank=0, previous=3, around="sublayer")
    residual = build_residual(config, dim=1, kinds=("attention", "mlp") * 2)
    state, windows = residual(torch.ones(1, 1, 1)), []
    for site in range(4):  # with gains of 0 the stream doubles
        windows.append([x.item() for x in state.recent])
        state = residual.write(state, site, state.recent[0])
    assert windows == [[1], [2, 1], [4, 2, 1], [8, 4, 2]]


def test_at_the_start_only_the_outer_map_has_a_gradient() -> None:
    for form in ("lr", "rw_lr", "rw_lr_pa"):
        model = CausalLM(tiny_config(LaurelConfig(**FORMS[form])))
        model(torch.arange(18).view(2, 9)).square().sum().backward()
        residual = model.model.residual
        assert residual.up.grad.flatten(1).any(1).all()
        assert not residual.down.grad.any()
        if residual.gain is not None:
            assert not residual.gain.grad.any()


def test_the_inner_map_starts_with_orthogonal_rows() -> None:
    residual = build_residual(LaurelConfig(rank=4), dim=16, kinds=("attention", "mlp") * 2)
    for down in residual.down:
        torch.testing.assert_close(down @ down.T, torch.eye(4) / 16)
        expected = [[1 / 8 if i % 4 == j else 0.0 for i in range(16)] for j in range(4)]
        assert down.tolist() == expected
    assert not residual.up.any()


@pytest.mark.parametrize(
    ("changes", "parameters", "retained"),
    [
        ({"rank": 0}, 96, 0),
        ({"rank": 32}, 3_145_824, 0),
        ({"rank": 32, "previous": 3}, 9_240_813, 2 * 1024),
    ],
)
def test_cost_of_48_connections(changes: Any, parameters: int, retained: int) -> None:
    config = LaurelConfig(**changes, around="sublayer")
    with torch.device("meta"):
        residual = build_residual(config, dim=1024, kinds=("attention", "mlp") * 24)
        state = residual(torch.zeros(1, 1, 1024))
        with FlopCounterMode(display=False) as counter:
            for site in range(48):
                state = residual.write(state, site, torch.zeros(1, 1, 1024))
    cost = residual.cost()
    assert (cost.parameters, cost.cached) == (parameters, retained)
    assert sum(x.numel() for x in state.recent[1:]) == retained
    scalars = 2 * 1024 * 48  # the balance, which the counter does not see
    assert 2 * (cost.multiply_adds - scalars) == counter.get_total_flops()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": -1}, "rank must be >= 0"),
        ({"previous": -1}, "previous must be >= 0"),
        ({"balance": "fixed", "rank": 0}, 'balance must be "softmax" if rank and previous are 0'),
        ({"rank": 9}, "rank must be at most the model width 8, got 9"),
        ({"rank": 4, "previous": 3}, "previous must be at most 2 connections, got 3"),
    ],
)
def test_wrong_settings_are_refused(changes: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_residual(LaurelConfig(**changes), dim=8, kinds=("attention", "mlp") * 2)
