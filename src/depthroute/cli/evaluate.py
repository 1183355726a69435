"""What `depthroute evaluate` does."""

from depthroute.evaluate import EvaluateConfig, Processes, evaluate, format_evaluation
from depthroute.evaluate.progress import launched


def run(folder: str, config: EvaluateConfig) -> str | None:
    """Evaluate a model; returns what to say, but for one of several processes only."""
    with launched():
        result = evaluate(folder, config)
        return format_evaluation(result) if Processes.current().rank == 0 else None
