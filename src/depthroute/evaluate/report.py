"""The table of an evaluation."""

from typing import NamedTuple

from depthroute.evaluate.run import Evaluation
from depthroute.evaluate.statistics import Difference
from depthroute.evaluate.tasks import mean_over_tasks
from depthroute.table import markdown_table


class _Line(NamedTuple):
    measure: str
    value: str
    error: str
    count: str
    difference: str
    interval: str


def format_evaluation(result: Evaluation) -> str:
    """Return the results as a table, and notes below it.

    Accuracies are in percent. With a comparison there are the other run's values too, and the
    paired differences with their 95 % bootstrap intervals.
    """
    lines = _lines(result)
    table = [["measure", "value", "std error", "count"], *(list(line[:4]) for line in lines)]
    if (found := result.comparison) is not None:
        table[0] += [found.run, "difference", "95 % interval"]
        theirs = {line.measure: line.value for line in _lines(found.theirs)}
        for row, line in zip(table[1:], lines, strict=True):
            row += [theirs.get(line.measure, "-"), line.difference, line.interval]
    notes = _notes(result) if found is None else _notes(result) + _notes(found.theirs)
    return "\n".join([markdown_table(table), *notes])


def _notes(result: Evaluation) -> list[str]:
    """Say whose requests lost their beginning."""
    return [
        f"{task.name}: {task.num_cut} requests to {result.run} were longer than its context and "
        "lost their beginning"
        for task in result.tasks
        if task.num_cut
    ]


def _lines(result: Evaluation) -> list[_Line]:
    lines, found = [], result.comparison
    if result.loss is not None:
        total, error = result.loss.total, result.loss.standard_error_nats
        tokens = f"{total.tokens:,} tokens"
        loss = _number(total.loss_nats, ".4f"), _number(error, ".4f"), tokens
        lines = [
            _Line("loss, nats per token", *loss, *_ends(found and found.loss_nats, ".4f")),
            _Line("perplexity", f"{total.perplexity:.3f}", "-", tokens, "-", "-"),
            _Line("bits per byte", _number(total.bits_per_byte, ".4f"), "-", tokens, "-", "-"),
        ]
    for task in result.tasks:
        value = _percent(task.value) if task.scores is not None else f"{task.value:.4f}"
        numbers = value, _percent(task.standard_error), f"{len(task.items):,} items"
        ends = _ends(found and found.tasks.get(task.name), ".2f", 100)
        lines.append(_Line(f"{task.name} ({task.metric})", *numbers, *ends))
    mean = mean_over_tasks(result.tasks)
    if mean is not None and len(result.tasks) > 1:
        count = sum(task.scores is not None for task in result.tasks)
        ends = _ends(found and found.mean, ".2f", 100)
        lines.append(_Line("mean of tasks", *map(_percent, mean), f"{count} tasks", *ends))
    return lines


def _ends(found: Difference | None, form: str, scale: int = 1) -> tuple[str, str]:
    if found is None:
        return "-", "-"
    mean, low, high = (
        "-" if number is None else format(scale * number, f"+{form}") for number in found
    )
    return mean, "-" if found.low is None else f"{low} to {high}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f}"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
