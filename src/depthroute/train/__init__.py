"""The training loop, its run folder, and comparisons of runs."""

from depthroute.train.compare import CompareConfig, compare
from depthroute.train.config import DataConfig, RunConfig, TrainConfig
from depthroute.train.run import load_model
from depthroute.train.trainer import RunResult, train

__all__ = [
    "CompareConfig",
    "DataConfig",
    "RunConfig",
    "RunResult",
    "TrainConfig",
    "compare",
    "load_model",
    "train",
]
