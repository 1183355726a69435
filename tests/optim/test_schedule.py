import pytest
import torch
from torch import nn

from depthroute.optim import (
    AdamWConfig,
    Group,
    MuonConfig,
    OptimConfig,
    ScheduleConfig,
    build_optimizers,
    schedule_factor,
    set_learning_rates,
)


def factors(num_steps: int, warmup: int, warmdown: float, floor: float = 0.1) -> list[float]:
    config = ScheduleConfig(warmup_steps=warmup, warmdown_fraction=warmdown, floor=floor)
    return [schedule_factor(step, num_steps, config) for step in range(num_steps)]


@pytest.mark.parametrize(
    ("warmup", "warmdown", "expected"),
    [
        (4, 0.3, [0.25, 0.5, 0.75, 1, 1, 1, 1, 0.7, 0.4, 0.1]),
        (1, 0.3, [1, 1, 1, 1, 1, 1, 1, 0.7, 0.4, 0.1]),
        (0, 0.3, [1, 1, 1, 1, 1, 1, 1, 0.7, 0.4, 0.1]),
        (4, 0.0, [0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1, 1]),
        (0, 1.0, [0.91, 0.82, 0.73, 0.64, 0.55, 0.46, 0.37, 0.28, 0.19, 0.1]),
        # they overlap: the smaller one counts
        (8, 0.5, [0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.64, 0.46, 0.28, 0.1]),
        # a run that ends within its warm-up
        (20, 0.0, [0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5]),
    ],
)
def test_factors_are_those_computed_by_hand(warmup, warmdown, expected):
    assert factors(10, warmup, warmdown) == pytest.approx(expected)


@pytest.mark.parametrize("floor", [0.0, 0.25, 1.0])
def test_last_step_has_the_floor(floor):
    assert factors(50, 3, 0.2, floor)[-1] == pytest.approx(floor)


def test_a_single_step_is_warm_up_and_warm_down():
    assert factors(1, 0, 0.5) == [1.0]
    assert factors(1, 0, 1.0) == pytest.approx([0.1])
    assert factors(1, 4, 0.0) == [0.25]


def test_each_group_follows_the_peak_of_its_optimiser():
    groups = [
        Group("sublayer matrices", "muon", True, {"a": nn.Parameter(torch.ones(2, 2))}),
        Group("emitted key rows", "muon", True, {"b": nn.Parameter(torch.ones(2, 2))}),
        Group("embedding", "adamw", True, {"c": nn.Parameter(torch.ones(2, 2))}),
        Group("routing", "adamw", False, {"d": nn.Parameter(torch.ones(2))}),
    ]
    config = OptimConfig(muon=MuonConfig(lr=0.4), adamw=AdamWConfig(lr=0.02))
    optimizers = build_optimizers(groups, config)
    peaks = {group.name: 0.4 if group.optimizer == "muon" else 0.02 for group in groups}
    for factor in (0.5, 1.0, 0.25):  # each time from the peak, not from the rate before
        rates = set_learning_rates(optimizers, factor)
        assert rates == pytest.approx({name: factor * peak for name, peak in peaks.items()})
        used = {group["name"]: group["lr"] for o in optimizers for group in o.param_groups}
        assert used == rates


@pytest.mark.parametrize(
    ("field", "value"), [("warmup_steps", -1), ("warmdown_fraction", 1.5), ("floor", -0.1)]
)
def test_settings_out_of_range_are_named(field, value):
    with pytest.raises(ValueError, match=f"^{field} must be .* got {value}$"):
        ScheduleConfig(**{field: value})
