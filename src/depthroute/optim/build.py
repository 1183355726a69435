"""Optimisers for the groups of a model."""

from collections.abc import Iterable
from typing import Any

from torch.optim import AdamW, Muon, Optimizer

from depthroute.optim.config import OptimConfig
from depthroute.optim.groups import Group


def build_optimizers(groups: list[Group], config: OptimConfig) -> list[Optimizer]:
    """Build one optimiser of each kind that the groups name.

    Every optimiser group carries `name` and `peak_lr`; `set_learning_rates` scales the latter.
    """
    optimizers: list[Optimizer] = []
    muon, adamw = config.muon, config.adamw
    if rows := _rows(groups, "muon", muon.lr, muon.weight_decay):
        optimizers.append(
            Muon(
                rows,
                lr=muon.lr,
                momentum=muon.momentum,
                nesterov=True,
                ns_steps=muon.ns_steps,
                adjust_lr_fn=muon.adjust_lr,
            )
        )
    if rows := _rows(groups, "adamw", adamw.lr, adamw.weight_decay):
        betas = (adamw.beta1, adamw.beta2)
        optimizers.append(AdamW(rows, lr=adamw.lr, betas=betas, eps=adamw.eps, fused=True))
    return optimizers


def set_learning_rates(optimizers: Iterable[Optimizer], factor: float) -> dict[str, float]:
    """Set each group's learning rate to `factor * peak_lr` and return them by group name."""
    rates = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rates[group["name"]] = factor * group["peak_lr"]
    return rates


def _rows(groups: list[Group], optimizer: str, lr: float, decay: float) -> list[dict[str, Any]]:
    return [
        {
            "params": list(group.parameters.values()),
            "name": group.name,
            "peak_lr": lr,
            "weight_decay": decay if group.decays else 0.0,
        }
        for group in groups
        if group.optimizer == optimizer
    ]
