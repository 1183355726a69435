"""Work in batches that several processes share and that a kill does not undo."""

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from depthroute.train.report import Reporter


class Processes(NamedTuple):
    """Who shares the work: this process and how many there are."""

    rank: int = 0
    world: int = 1

    @classmethod
    def current(cls) -> "Processes":
        """Return the processes of torch.distributed, or this one alone."""
        if not dist.is_initialized():
            return cls()
        return cls(dist.get_rank(), dist.get_world_size())

    def wait(self) -> None:
        """Return once every process of torch.distributed has come here."""
        if dist.is_initialized():
            dist.barrier()


@contextmanager
def launched() -> Iterator[None]:
    """Join the processes that torchrun started, if it did; each takes the GPU of its local rank."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        yield
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo")  # the processes only wait for each other
    try:
        yield
    finally:
        dist.destroy_process_group()


class Work:
    """Batches of results, kept in a folder from attempt to attempt.

    The batches do not depend on the processes, so neither do the results. Process r of n does
    every n-th batch from r on, unless it is done, and appends a line per batch to a file of its
    own. All lines of equal settings count, whoever wrote them; one that a kill cut short does not.

    Args:
        folder: Where the lines are kept; the processes must share it.
        settings: Everything that the results depend on; part of the file's name, as a hash.
        processes: Who shares the work; None is this process alone.
        show: Where progress goes; None shows none.
    """

    def __init__(
        self,
        folder: Path,
        settings: Mapping[str, Any],
        *,
        processes: Processes | None = None,
        show: Callable[[int], Reporter] | None = None,
    ) -> None:
        self.folder = folder
        self.settings = dict(settings)
        self.processes = processes or Processes()
        self.show = show if self.processes.rank == 0 else None

    def with_settings(self, settings: Mapping[str, Any]) -> "Work":
        """Return work whose results depend on further settings."""
        both = {**self.settings, **settings}
        return Work(self.folder, both, processes=self.processes, show=self.show)

    def do(self, num_batches: int, compute: Callable[[int], list[Any]]) -> list[Any]:
        """Return the rows of all batches, in order.

        Args:
            num_batches: How many batches there are.
            compute: Returns the rows of a batch, which JSON must be able to say.

        Raises:
            ValueError: Without torch.distributed, another process still has its part to do.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        done = self._read()
        rest = [i for i in range(num_batches) if i not in done]
        mine = [i for i in rest if i % self.processes.world == self.processes.rank]
        with (self.folder / f"{self._name}.{self.processes.rank}.jsonl").open("a") as file:
            for i in self._shown(mine, num_batches, len(rest)):
                # a line begins with its own end: what a kill left before it stays apart
                file.write("\n" + json.dumps([i, compute(i)]))
                file.flush()
        self.processes.wait()
        done = self._read()
        missing = sum(i not in done for i in range(num_batches))
        if missing:
            raise ValueError(f"{missing} of {num_batches} batches are left to other processes")
        return [row for i in range(num_batches) for row in done[i]]

    @property
    def _name(self) -> str:
        text = json.dumps(self.settings, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def _read(self) -> dict[int, list[Any]]:
        files = sorted(self.folder.glob(f"{self._name}.*.jsonl"))
        lines = (line for file in files for line in file.read_text().splitlines())
        return dict(record for record in map(_parse, lines) if record)

    def _shown(self, mine: list[int], num_batches: int, num_left: int) -> Iterator[int]:
        """Go through this process's batches and show how many of all are done."""
        if self.show is None or not mine:
            yield from mine
            return
        with self.show(num_batches) as report:
            pause_s = 30.0 if report.bar is None else 0.5
            shown_at = time.monotonic()
            for count, i in enumerate(mine, start=1):
                yield i
                if time.monotonic() - shown_at > pause_s:
                    shown_at = time.monotonic()
                    own = min(count * self.processes.world, num_left)  # others are as far
                    report.step(num_batches - num_left + own, "")


def _parse(line: str) -> list[Any] | None:
    """Read one line; None for one that is empty or cut short."""
    try:
        return json.loads(line)
    except json.JSONDecodeError:
        return None
