"""Accuracy on tasks: which ones, by which metric, and what came out per item."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from depthroute.evaluate.harness import (
    find_tasks,
    harness_model,
    is_mean,
    load_task,
    naming_task,
    require_harness,
    run_task,
)
from depthroute.evaluate.scoring import Scorer
from depthroute.evaluate.statistics import equal_mean_error, mean_and_error

# task -> metric; the paper's choice of tasks is inferred, see docs/evaluation.md
PRESETS: dict[str, dict[str, str]] = {
    "paper8": {
        "arc_challenge": "acc_norm",
        "arc_easy": "acc_norm",
        "commonsense_qa": "acc",
        "hellaswag": "acc_norm",
        "openbookqa": "acc_norm",
        "piqa": "acc_norm",
        "social_iqa": "acc",
        "winogrande": "acc",
    }
}
_PREFERRED = ("acc_norm", "acc")


class TaskResult(NamedTuple):
    """What came of a task or group.

    Attributes:
        name: As asked for.
        metric: The metric of `value`.
        value: The metric over all items; of a group, over the items of all its tasks.
        standard_error: Of a mean over items; else None.
        scores: Metric of each item; None if the metric is no mean over items.
        items: Task, number and hash of each item.
        num_fewshot: Solved examples before each question, of every task.
        num_cut: Requests that lost their beginning, since the model reads no more at a time.
        metrics: All metrics of every task.
        versions: Version of every task.
    """

    name: str
    metric: str
    value: float
    standard_error: float | None
    scores: np.ndarray | None
    items: tuple[str, ...]
    num_fewshot: dict[str, int]
    num_cut: int
    metrics: dict[str, dict[str, float]]
    versions: dict[str, Any]

    def summary(self) -> dict[str, Any]:
        """Return the entry of `results.json`."""
        scores = None if self.scores is None else self.scores.tolist()
        return {**self._asdict(), "scores": scores, "num_items": len(self.items)}


def expand_presets(names: Sequence[str]) -> dict[str, str | None]:
    """Return the tasks behind the names, with the metric that a preset gives.

    Raises:
        ValueError: A task is named twice.
    """
    found: dict[str, str | None] = {}
    for name in names:
        for task, metric in PRESETS.get(name, {name: None}).items():
            if task in found:
                raise ValueError(f'tasks: "{task}" is named twice')
            found[task] = metric
    return found


class LoadedTask(NamedTuple):
    """A task or group with its data, before a model has seen it.

    Attributes:
        name: As asked for.
        metric: That of a preset; None leaves the choice to the task.
        loaded: In the harness's form.
    """

    name: str
    metric: str | None
    loaded: dict[str, Any]


def load_tasks(names: Sequence[str], *, include_path: str | None = None) -> list[LoadedTask]:
    """Load tasks, groups or presets of lm-evaluation-harness.

    Args:
        names: What to load.
        include_path: Folder with further tasks.

    Raises:
        ImportError: The harness is not installed.
        ValueError: A task is not known, its data are missing, or its file has a mistake.
    """
    require_harness()
    wanted = expand_presets(names)
    manager = find_tasks(tuple(wanted), include_path)
    found = []
    for name, metric in wanted.items():
        with naming_task(name):
            found.append(LoadedTask(name, metric, load_task(manager, name)))
    return found


def run_tasks(
    scorer: Scorer,
    names: Sequence[str],
    *,
    include_path: str | None = None,
    num_fewshot: int = 0,
    limit: int | None = None,
) -> list[TaskResult]:
    """Run tasks, groups or presets of lm-evaluation-harness.

    Args:
        scorer: The model.
        names: What to run.
        include_path: Folder with further tasks.
        num_fewshot: Solved examples before each question.
        limit: First items of each task only.

    Raises:
        ImportError: The harness is not installed.
        ValueError: A task is not known, its data are missing, its file has a mistake, or its
            metric cannot be told.
        FloatingPointError: The model gave a number that is not finite.
    """
    tasks = load_tasks(names, include_path=include_path)
    return run_loaded(scorer, tasks, num_fewshot=num_fewshot, limit=limit)


def run_loaded(
    scorer: Scorer, tasks: Sequence[LoadedTask], *, num_fewshot: int, limit: int | None
) -> list[TaskResult]:
    """Run tasks that are loaded, which may be done again.

    Args:
        scorer: The model.
        tasks: What to run.
        num_fewshot: Solved examples before each question.
        limit: First items of each task only.

    Raises:
        ValueError: A task cannot be run, or its metric cannot be told.
        FloatingPointError: The model gave a number that is not finite.
    """
    model = harness_model(scorer)
    results = []
    for task in tasks:
        before = scorer.num_cut
        with naming_task(task.name):
            found = run_task(model, task.loaded, num_fewshot=num_fewshot, limit=limit)
            results.append(_result(task, found, num_cut=scorer.num_cut - before))
    return results


def mean_over_tasks(results: Sequence[TaskResult]) -> tuple[float, float | None] | None:
    """Return the mean in which tasks weigh equally, and its standard error.

    Only metrics that are means over items enter; None if there is none.
    """
    means = [result for result in results if result.scores is not None]
    if not means:
        return None
    mean = math.fsum(result.value for result in means) / len(means)
    return mean, equal_mean_error([result.standard_error for result in means])


def _result(wanted: LoadedTask, found: dict[str, Any], *, num_cut: int) -> TaskResult:
    """Pool the tasks of a group, item by item.

    Raises:
        ValueError: There is no one metric, or there are no items.
        FloatingPointError: A score is not finite.
    """
    metrics = {task: _metrics(found["results"][task]) for task in found["samples"]}
    keys = {task: _choose(task, wanted.metric, values) for task, values in metrics.items()}
    items: list[str] = []
    scores: list[Any] = []
    all_means = True
    for task, samples in found["samples"].items():
        name_of_metric, _, rule = keys[task].partition(",")
        own = [sample for sample in samples if sample["filter"] == rule]
        items += [f"{task}/{one['doc_id']}/{one['doc_hash'][:16]}" for one in own]
        all_means = all_means and is_mean(wanted.loaded["tasks"][task], name_of_metric)
        scores += [one[name_of_metric] for one in own]
    chosen = {key.partition(",")[0] for key in keys.values()}
    if len(chosen) > 1 or (len(keys) > 1 and not all_means):
        raise ValueError(
            "it has no metric that is a mean over the items of all its tasks, "
            f"got {sorted(chosen)}; name the tasks one by one"
        )
    known = np.array(scores, dtype=float) if all_means else None
    if known is not None and not np.isfinite(known).all():
        raise FloatingPointError(
            f"a score of {items[int(np.isfinite(known).argmin())]} is not finite"
        )
    if known is None:
        ((task, key),) = keys.items()
        value, error = metrics[task][key], None
    else:
        value, error = mean_and_error(known)
    return TaskResult(
        name=wanted.name,
        metric=chosen.pop(),
        value=value,
        standard_error=error,
        scores=known,
        items=tuple(items),
        num_fewshot={task: found["n-shot"][task] for task in metrics},
        num_cut=num_cut,
        metrics=metrics,
        versions={task: found["versions"][task] for task in metrics},
    )


def _metrics(results: dict[str, Any]) -> dict[str, float]:
    """Return the harness's metrics of a task by `name,filter`, without its errors."""
    return {
        key: float(value) for key, value in results.items() if "," in key and "_stderr," not in key
    }


def _choose(task: str, metric: str | None, metrics: dict[str, float]) -> str:
    """Return the `name,filter` that stands for a task: the preset's, a preferred, or its first.

    Raises:
        ValueError: The task lacks the preset's metric.
    """
    names = [key.partition(",")[0] for key in metrics]
    for wanted in _PREFERRED if metric is None else (metric,):
        if wanted in names:
            return list(metrics)[names.index(wanted)]
    if metric is not None:
        raise ValueError(f"{task} has no metric {metric}, only {', '.join(names)}")
    return next(iter(metrics))
