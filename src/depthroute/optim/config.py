"""Settings of the optimisers; the defaults are those of arXiv 2607.09694, section 4.1."""

from typing import Literal

from depthroute.config import config_dataclass


def _check(config: object, **ranges: tuple[float, float | None]) -> None:
    """Require each named field in `[low, high)`."""
    for name, (low, high) in ranges.items():
        value = getattr(config, name)
        if not value >= low or (high is not None and not value < high):
            upper = "" if high is None else f" and < {high}"
            raise ValueError(f"{name} must be >= {low}{upper}, got {value}")


@config_dataclass
class MuonConfig:
    """Muon, for the matrices of the sublayers.

    Args:
        lr: Peak learning rate.
        momentum: Of the Nesterov average, in [0, 1).
        weight_decay: Decoupled, times the learning rate.
        ns_steps: Newton-Schulz iterations.
        adjust_lr: How a matrix's shape scales its update: "original" by
            `sqrt(max(1, rows / columns))`, "match_rms_adamw" by `0.2 sqrt(max(rows, columns))`.
    """

    lr: float = 1e-3
    momentum: float = 0.95
    weight_decay: float = 0.1
    ns_steps: int = 5
    adjust_lr: Literal["original", "match_rms_adamw"] = "original"

    def __post_init__(self) -> None:
        _check(self, lr=(0, None), momentum=(0, 1), weight_decay=(0, None), ns_steps=(1, None))


@config_dataclass
class AdamWConfig:
    """AdamW, for embedding, head and routing parameters.

    Args:
        lr: Peak learning rate.
        beta1: Of the gradient average, in [0, 1).
        beta2: Of the squared-gradient average, in [0, 1).
        eps: Added to the root, > 0.
        weight_decay: Decoupled, for embedding and head; routing parameters never decay.
    """

    lr: float = 3e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        _check(self, lr=(0, None), beta1=(0, 1), beta2=(0, 1), weight_decay=(0, None))
        if not self.eps > 0:
            raise ValueError(f"eps must be > 0, got {self.eps}")


@config_dataclass
class ScheduleConfig:
    """Linear warm-up, a plateau, linear warm-down.

    Args:
        warmup_steps: Steps of the warm-up.
        warmdown_fraction: Share of all steps in the warm-down, in [0, 1].
        floor: Factor that the last step has, in [0, 1].
    """

    warmup_steps: int = 2000
    warmdown_fraction: float = 0.2
    floor: float = 0.1

    def __post_init__(self) -> None:
        _check(self, warmup_steps=(0, None))
        for name in ("warmdown_fraction", "floor"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be in [0, 1], got {getattr(self, name)}")


@config_dataclass
class OptimConfig:
    """Optimisers, schedule and the objective's regularisers.

    Args:
        muon: For the matrices of the sublayers.
        adamw: For everything else.
        schedule: Factor of every learning rate.
        clip_norm: Largest global gradient norm, > 0.
        z_loss: Weight of the mean squared log-sum-exp of the logits, >= 0.
    """

    muon: MuonConfig = MuonConfig()
    adamw: AdamWConfig = AdamWConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    clip_norm: float = 1.0
    z_loss: float = 1e-5

    def __post_init__(self) -> None:
        _check(self, z_loss=(0, None))
        if not self.clip_norm > 0:
            raise ValueError(f"clip_norm must be > 0, got {self.clip_norm}")
