"""Measuring trained models: the loss of a token set, and tasks of lm-evaluation-harness."""

from depthroute.evaluate.config import EvaluateConfig
from depthroute.evaluate.harness import harness_model
from depthroute.evaluate.loss import WindowLosses, window_losses
from depthroute.evaluate.progress import Processes, Work
from depthroute.evaluate.report import format_evaluation
from depthroute.evaluate.run import Comparison, Evaluation, evaluate
from depthroute.evaluate.scoring import Score, Scorer
from depthroute.evaluate.statistics import Difference, paired_differences
from depthroute.evaluate.subject import Subject
from depthroute.evaluate.tasks import PRESETS, TaskResult, run_tasks

__all__ = [
    "PRESETS",
    "Comparison",
    "Difference",
    "EvaluateConfig",
    "Evaluation",
    "Processes",
    "Score",
    "Scorer",
    "Subject",
    "TaskResult",
    "WindowLosses",
    "Work",
    "evaluate",
    "format_evaluation",
    "harness_model",
    "paired_differences",
    "run_tasks",
    "window_losses",
]
