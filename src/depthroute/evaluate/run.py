"""An evaluation from settings to a table."""

import json
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from depthroute.config import to_dict
from depthroute.evaluate.config import EvaluateConfig
from depthroute.evaluate.harness import require_harness
from depthroute.evaluate.loss import WindowLosses, window_losses
from depthroute.evaluate.progress import Processes, Work
from depthroute.evaluate.scoring import Scorer
from depthroute.evaluate.statistics import Difference, paired_differences
from depthroute.evaluate.subject import Subject, loss_windows, open_run
from depthroute.evaluate.tasks import TaskResult, mean_over_tasks, run_tasks
from depthroute.files import write_text
from depthroute.train.report import Reporter
from depthroute.train.run import environment


class Comparison(NamedTuple):
    """Differences to another run, this one minus that one, item by item.

    Attributes:
        run: The other run.
        loss_nats: Of the loss per token, resampled over windows; None without a loss.
        tasks: Of each task whose metric is a mean over items.
        mean: Of the mean in which these tasks weigh equally; None if there are none.
        theirs: Results of the other run.
    """

    run: str
    loss_nats: Difference | None
    tasks: dict[str, Difference]
    mean: Difference | None
    theirs: "Evaluation"


class Evaluation(NamedTuple):
    """What was measured of a run.

    Attributes:
        run: The run folder.
        checkpoint: Name of the checkpoint.
        loss: By window; None if it was not asked for.
        tasks: In the order asked for.
        comparison: Differences to another run, if one was given.
    """

    run: str
    checkpoint: str
    loss: WindowLosses | None
    tasks: tuple[TaskResult, ...]
    comparison: Comparison | None


def evaluate(run: str | Path, config: EvaluateConfig) -> Evaluation:
    """Measure the newest checkpoint of a run and write `results.json`.

    The same call continues where it was killed. Under torch.distributed the processes share the
    batches, and each returns the whole result.

    Args:
        run: A run folder.
        config: What to measure.

    Raises:
        ValueError: The run, the data or the tasks are not there, or do not fit.
        ImportError: There are tasks, and lm_eval is not installed.
        FloatingPointError: A loss is not finite.
    """
    if config.task_names:
        require_harness()
    run = Path(run)
    out = run / "evaluation" if config.out is None else Path(config.out)
    processes = Processes.current()
    subject = open_run(run, config)

    def show(num_batches: int) -> Reporter:
        return Reporter(f"{run.name} evaluation", num_batches)

    work = Work(out / "progress", subject.identity, processes=processes, show=show)
    loss = None if config.tokens == 0 else _loss(subject, config, work)
    tasks = _tasks(subject, config, work) if config.task_names else []
    result = Evaluation(str(run), subject.checkpoint, loss, tuple(tasks), None)
    if config.compare_with is not None:
        del subject, work  # one model at a time
        place = None if config.out is None else str(out / "compare_with")
        theirs = evaluate(config.compare_with, replace(config, compare_with=None, out=place))
        result = result._replace(comparison=_compare(result, theirs, config.bootstrap))
    if processes.rank == 0:
        write_text(out / "results.json", json.dumps(_numbers(result, config), indent=1) + "\n")
    return result


def _loss(subject: Subject, config: EvaluateConfig, work: Work) -> WindowLosses:
    windows, shards = loss_windows(subject, config)
    return window_losses(
        subject.model,
        windows,
        work,
        shards=shards,
        batch_size=config.batch_size,
        mask_documents=subject.settings.data.mask_documents,
        chunk_tokens=subject.settings.train.loss_chunk_tokens,
    )


def _tasks(subject: Subject, config: EvaluateConfig, work: Work) -> list[TaskResult]:
    tokenizer = subject.dataset().tokenizer()
    scorer = Scorer(
        subject.model,
        tokenizer,
        context=subject.settings.data.context,
        batch_size=config.batch_size,
        work=work,
    )
    return run_tasks(
        scorer,
        config.task_names,
        include_path=config.include_path,
        num_fewshot=config.num_fewshot,
        limit=config.limit,
    )


def _compare(ours: Evaluation, theirs: Evaluation, resamples: int) -> Comparison:
    """Pair two evaluations of the same settings.

    Raises:
        ValueError: Their windows or items are not the same.
    """
    loss = None
    if ours.loss is not None and theirs.loss is not None:
        if ours.loss.source != theirs.loss.source:
            raise ValueError(
                f"compare_with: {ours.run} and {theirs.run} differ in data or context, so there is "
                "no loss of the same windows; tokens=0 compares tasks alone"
            )
        pair = ({"loss": one.loss.means_nats} for one in (ours, theirs))
        loss = paired_differences(*pair, resamples=resamples)[1]
    means = {task.name: task for task in ours.tasks if task.scores is not None}
    other = {task.name: task for task in theirs.tasks}
    if any(task.items != other[name].items for name, task in means.items()):
        raise ValueError("compare_with: the tasks changed between the two runs")
    tasks, mean = {}, None
    if means:
        scores = ({name: one[name].scores for name in means} for one in (means, other))
        tasks, mean = paired_differences(*scores, resamples=resamples)
    return Comparison(theirs.run, loss, tasks, mean, theirs)


def _numbers(result: Evaluation, config: EvaluateConfig) -> dict[str, Any]:
    """Return the content of `results.json`."""
    mean = mean_over_tasks(result.tasks)
    numbers: dict[str, Any] = {
        "run": result.run,
        "checkpoint": result.checkpoint,
        "config": to_dict(config),
        "environment": environment() | _harness_versions(bool(result.tasks)),
        "loss": None if result.loss is None else result.loss.summary(),
        "tasks": {task.name: task.summary() for task in result.tasks},
        "mean": None if mean is None else {"value": mean[0], "standard_error": mean[1]},
        "comparison": None,
    }
    if (found := result.comparison) is not None:
        numbers["comparison"] = {
            "run": found.run,
            "loss_nats": found.loss_nats and found.loss_nats._asdict(),
            "tasks": {name: difference._asdict() for name, difference in found.tasks.items()},
            "mean": found.mean and found.mean._asdict(),
        }
    return numbers


def _harness_versions(used: bool) -> dict[str, str]:
    return {name: version(name) for name in ("lm_eval", "datasets")} if used else {}
