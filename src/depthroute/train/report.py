"""What a person sees of a run: a bar on a terminal, plain lines elsewhere."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.segment import Segment, Segments


class Reporter:
    """Show progress of one run, as a context manager.

    Args:
        title: Name of the run.
        steps: Of the whole run.
        console: Where to; None is standard output.
    """

    def __init__(self, title: str, steps: int, console: Console | None = None) -> None:
        self.title, self.steps = title, steps
        self.console = console or Console(soft_wrap=True)
        self.bar: Progress | None = None

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self.bar = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[numbers]}", markup=False),
                TimeRemainingColumn(),
                console=self.console,
            )
            self.task = self.bar.add_task(self.title, total=self.steps, numbers="")
            self.bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.bar is not None:
            self.bar.stop()

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        # a segment, since of a string rich would read emoji codes and change tabs
        self.console.print(Segments([Segment(f"{text}\n")]))

    def step(self, step: int, numbers: str) -> None:
        """Show that `step` steps are done."""
        if self.bar is not None:
            self.bar.update(self.task, completed=step, numbers=numbers)
        else:
            self.say(f"{self.title} step {step}/{self.steps} {numbers}")


class _ReportHandler(logging.Handler):
    """Says log records in a report."""

    def __init__(self, report: Reporter) -> None:
        super().__init__()
        self.report = report

    def emit(self, record: logging.LogRecord) -> None:
        self.report.say(record.getMessage())


@contextmanager
def reported(logger: logging.Logger, report: Reporter) -> Iterator[None]:
    """Say in a report what a logger says within the block, from level INFO on."""
    handler, level = _ReportHandler(report), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)
