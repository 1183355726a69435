"""An evaluation from settings to a table."""

import gc
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from depthroute.config import to_dict
from depthroute.evaluate.config import EvaluateConfig
from depthroute.evaluate.loss import WindowLosses, window_losses
from depthroute.evaluate.progress import Processes, Work
from depthroute.evaluate.scoring import Scorer
from depthroute.evaluate.statistics import Difference, paired_differences
from depthroute.evaluate.subject import (
    Subject,
    TokenSet,
    context_of,
    open_subject,
    token_set,
)
from depthroute.evaluate.tasks import (
    LoadedTask,
    TaskResult,
    load_tasks,
    mean_over_tasks,
    run_loaded,
)
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
    """Measure a model and write `results.json`, before a comparison and again after it.

    Whatever can be checked is checked before the work: data, tasks and the model to compare with.
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
        FloatingPointError: A loss, a log-likelihood or a logit is not finite.
    """
    if isinstance(model, Subject):
        _check_in_memory(config)
    other = None
    if config.compare_with is not None:  # before the model itself is loaded: one at a time
        other = _checked(open_subject(config.compare_with, config), config)
    subject = model if isinstance(model, Subject) else open_subject(model, config)
    tokens = _checked(subject, config)
    if tokens is not None and other is not None:
        _check_alike(subject.name, tokens, str(config.compare_with), other)
    names, path = config.task_names, config.include_path
    tasks = load_tasks(names, include_path=path) if names else []
    out = Path(subject.name) / "evaluation" if config.out is None else Path(config.out)
    result = _measure(subject, config, tokens, tasks, out / "progress")
    _write(out, result, config)
    if config.compare_with is not None:
        del subject
        gc.collect()  # the harness's model refers to it in a cycle
        subject = open_subject(config.compare_with, config)
        place = Path(subject.name) / "evaluation" if config.out is None else out / "compare_with"
        theirs = _measure(subject, config, other, tasks, place / "progress")
        # what the other one's own evaluation wrote stays
        _write(out / "compare_with", theirs, replace(config, compare_with=None))
        result = result._replace(comparison=_compare(result, theirs, config.bootstrap))
        _write(out, result, config)
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


def _checked(subject: Subject, config: EvaluateConfig) -> TokenSet | None:
    """Check that a model can be measured, and return what its loss is measured on, if it is.

    Raises:
        ValueError: Its data are not there, or do not fit.
    """
    if config.task_names:
        context_of(subject, config)
        subject.tokenizer()
    return None if config.tokens == 0 else token_set(subject, config)


def _check_alike(name: str, tokens: TokenSet, other_name: str, other: TokenSet) -> None:
    """Refuse to compare losses that are not of the same thing.

    Raises:
        ValueError: Windows or masks differ.
    """
    if tokens.source != other.source:
        raise ValueError(
            f"compare_with: {name} and {other_name} differ in data or context, so there is "
            "no loss of the same windows; tokens=0 compares tasks alone"
        )
    masks = tokens.mask_documents, other.mask_documents
    if masks[0] != masks[1]:
        raise ValueError(
            f"compare_with: {name} and {other_name} differ in mask_documents, {masks[0]} and "
            f"{masks[1]}; give mask_documents=true or false for both"
        )


def _measure(
    subject: Subject,
    config: EvaluateConfig,
    tokens: TokenSet | None,
    tasks: Sequence[LoadedTask],
    progress: Path,
) -> Evaluation:
    """Measure one model, with what is done kept in a folder."""
    # standard output is for the table; the harness runs with another sys.stderr
    console = Console(file=sys.stderr, soft_wrap=True)

    def show(num_batches: int) -> Reporter:
        return Reporter(f"{Path(subject.name).name} evaluation", num_batches, console)

    work = Work(progress, subject.identity(), processes=Processes.current(), show=show)
    loss, results = None, []
    if tokens is not None:
        loss = window_losses(
            subject.model,
            tokens.windows,
            work,
            shards=tokens.shards,
            batch_size=config.batch_size,
            mask_documents=tokens.mask_documents,
        )
    if tasks:
        scorer = Scorer(
            subject.model,
            subject.tokenizer(),
            context=context_of(subject, config),
            batch_size=config.batch_size,
            work=work,
        )
        results = run_loaded(scorer, tasks, num_fewshot=config.num_fewshot, limit=config.limit)
    return Evaluation(subject.name, subject.checkpoint, loss, tuple(results), None)


def _compare(ours: Evaluation, theirs: Evaluation, resamples: int) -> Comparison:
    """Pair two evaluations of the same settings.

    Raises:
        ValueError: Their items are not the same.
    """
    loss = None
    if ours.loss is not None and theirs.loss is not None:
        pair = ({"loss": one.loss.means_nats} for one in (ours, theirs))
        loss = paired_differences(*pair, resamples=resamples)[1]
    other = {task.name: task for task in theirs.tasks if task.scores is not None}
    means = {
        task.name: task for task in ours.tasks if task.scores is not None and task.name in other
    }
    if any(task.items != other[name].items for name, task in means.items()):
        raise ValueError("compare_with: the tasks changed between the two runs")
    tasks, mean = {}, None
    if means:
        scores = ({name: one[name].scores for name in means} for one in (means, other))
        tasks, mean = paired_differences(*scores, resamples=resamples)
    return Comparison(theirs.run, loss, tasks, mean, theirs)


def _write(out: Path, result: Evaluation, config: EvaluateConfig) -> None:
    """Write `results.json`, by one of the processes."""
    if Processes.current().rank == 0:
        text = json.dumps(_in_json(_numbers(result, config)), indent=1, allow_nan=False)
        write_text(out / "results.json", text + "\n")


def _in_json(value: Any) -> Any:
    """Return a value with None in place of each number that JSON cannot say: inf and nan."""
    if isinstance(value, dict):
        return {key: _in_json(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_in_json(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


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
