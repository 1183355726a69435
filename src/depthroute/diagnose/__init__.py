"""What a model does with depth: records of its depth weights, and plots."""

from depthroute.diagnose.plots import (
    plot_depth_weights,
    plot_differences,
    plot_effective_sources,
    plot_losses,
)
from depthroute.diagnose.record import DepthRecord, record_depth

__all__ = [
    "DepthRecord",
    "plot_depth_weights",
    "plot_differences",
    "plot_effective_sources",
    "plot_losses",
    "record_depth",
]
