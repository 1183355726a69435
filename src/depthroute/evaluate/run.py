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
from depthroute.evaluate.subject import Subject, context_of, loss_windows, open_subject
from depthroute.evaluate.tasks import TaskResult, mean_over_tasks, run_tasks
from depthroute.files import write_text
from depthroute.train.report import Reporter
from depthroute.train.run import environment


class Comparison(NamedTuple):
    """Differences to another model, this one minus that one, item by item.

    Attributes:
        run: The other one's folder.
        loss_nats: Of the loss per token, resampled over windows; None without a loss.
        tasks: Of each task whose metric is a mean over items.
        mean: Of the mean in which these tasks weigh equally; None if there are none.
        theirs: Results of the other model.
    """

    run: str
    loss_nats: Difference | None
    tasks: dict[str, Difference]
    mean: Difference | None
    theirs: "Evaluation"


class Evaluation(NamedTuple):
    """What was measured of a model.

    Attributes:
        run: Its folder, or the name of a model in memory.
        checkpoint: Name of a run's checkpoint, else None.
        loss: By window; None if it was not asked for.
        tasks: In the order asked for.
        comparison: Differences to another model, if one was given.
    """

    run: str
    checkpoint: str | None
    loss: WindowLosses | None
    tasks: tuple[TaskResult, ...]
    comparison: Comparison | None


def evaluate(model: str | Path | Subject, config: EvaluateConfig) -> Evaluation:
    """Measure a model and write `results.json`.

    The same call continues where it was killed. Under torch.distributed the processes share the
    batches, and each returns the whole result.

    Args:
        model: A run folder, whose newest checkpoint is measured; a Hugging Face folder that
            `depthroute export` or `save_pretrained` wrote; or a model in memory, `Subject.of`.
        config: What to measure. For a model in memory `out` must be given; `device` and
            `compute_dtype` must not, since it is measured as it is.

    Raises:
        ValueError: The model, the data or the tasks are not there, or do not fit.
        ImportError: There are tasks, and lm_eval is not installed; or transformers is missing.
        FloatingPointError: A loss is not finite.
    """
    if config.task_names:
        require_harness()
    if isinstance(model, Subject):
        _check_in_memory(config)
        subject = model
    else:
        subject = open_subject(model, config)
    name = subject.name
    out = Path(name) / "evaluation" if config.out is None else Path(config.out)
    processes = Processes.current()

    def show(num_batches: int) -> Reporter:
        return Reporter(f"{Path(name).name} evaluation", num_batches)

    work = Work(out / "progress", subject.identity(), processes=processes, show=show)
    loss = None if config.tokens == 0 else _loss(subject, config, work)
    tasks = _tasks(subject, config, work) if config.task_names else []
    result = Evaluation(name, subject.checkpoint, loss, tuple(tasks), None)
    if config.compare_with is not None:
        del subject, work  # one model at a time
        place = None if config.out is None else str(out / "compare_with")
        theirs = evaluate(config.compare_with, replace(config, compare_with=None, out=place))
        result = result._replace(comparison=_compare(result, theirs, config.bootstrap))
    if processes.rank == 0:
        write_text(out / "results.json", json.dumps(_numbers(result, config), indent=1) + "\n")
    return result


def _check_in_memory(config: EvaluateConfig) -> None:
    """Refuse settings that only a model from a folder can follow.

    Raises:
        ValueError: There is one.
    """
    if config.out is None:
        raise ValueError("out: a model in memory has no folder for its results; give out")
    if (config.device, config.compute_dtype) != ("auto", "auto"):
        raise ValueError(
            "device, compute_dtype: a model in memory is measured as it is, "
            f"got {config.device}, {config.compute_dtype}"
        )


def _loss(subject: Subject, config: EvaluateConfig, work: Work) -> WindowLosses:
    windows, shards = loss_windows(subject, config)
    mask = subject.mask_documents if config.mask_documents is None else config.mask_documents
    return window_losses(
        subject.model,
        windows,
        work,
        shards=shards,
        batch_size=config.batch_size,
        mask_documents=mask,
    )


def _tasks(subject: Subject, config: EvaluateConfig, work: Work) -> list[TaskResult]:
    scorer = Scorer(
        subject.model,
        subject.tokenizer(),
        context=context_of(subject, config),
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
