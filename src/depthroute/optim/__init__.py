"""Optimisers, parameter groups and the learning-rate schedule."""

from depthroute.optim.build import build_optimizers, set_learning_rates
from depthroute.optim.config import AdamWConfig, MuonConfig, OptimConfig, ScheduleConfig
from depthroute.optim.groups import Group, format_groups, parameter_groups
from depthroute.optim.schedule import schedule_factor

__all__ = [
    "AdamWConfig",
    "Group",
    "MuonConfig",
    "OptimConfig",
    "ScheduleConfig",
    "build_optimizers",
    "format_groups",
    "parameter_groups",
    "schedule_factor",
    "set_learning_rates",
]
