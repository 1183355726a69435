"""Work in batches that several processes share and that a kill does not undo."""

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from depthroute.files import naming
from depthroute.train.report import Reporter

T = TypeVar("T")

_PATIENCE = timedelta(days=30)


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

    def agreed(self, value: T) -> T:
        """Return rank 0's value in every process of torch.distributed."""
        if not dist.is_initialized():
            return value
        box = [value]
        dist.broadcast_object_list(box)
        return box[0]


@contextmanager
def launched() -> Iterator[None]:
    """Join the processes that torchrun started, if it did; each takes the GPU of its local rank."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        yield
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    # the processes only wait for each other, and one may wait for hours
    dist.init_process_group("gloo", timeout=_PATIENCE)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Work:
    """Batches of results, kept in a folder from attempt to attempt.

    The batches do not depend on the processes, so neither do the results. Of the batches that are
    left, process r of n does every n-th from r on, and appends a line per batch to a file of its
    own. All lines of equal settings count, whoever wrote them; one that a kill cut short, or that
    is no batch, does not.

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

    def do(self, sizes: Sequence[int], compute: Callable[[int], list[Any]]) -> list[Any]:
        """Return the rows of all batches, in order.

        Args:
            sizes: Rows of each batch.
            compute: Returns the rows of a batch, which JSON must be able to say.

        Raises:
            ValueError: Without torch.distributed, another process still has its part to do.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        done, num_batches = self._read(sizes), len(sizes)
        # one process says what is left: another may read when lines have been added
        rest = self.processes.agreed([i for i in range(num_batches) if i not in done])
        mine = rest[self.processes.rank :: self.processes.world]
        path = self.folder / f"{self._name}.{self.processes.rank}.jsonl"
        with path.open("ab", buffering=0) as file:
            for i in self._shown(mine, num_batches, len(rest)):
                line = json.dumps([i, compute(i)])
                with naming(path):
                    # it begins with its own end: what a kill left before it stays apart
                    file.write(f"\n{line}".encode())
        self.processes.wait()
        done = self._read(sizes)
        missing = sum(i not in done for i in range(num_batches))
        if missing:
            raise ValueError(f"{missing} of {num_batches} batches are left to other processes")
        return [row for i in range(num_batches) for row in done[i]]

    @property
    def _name(self) -> str:
        text = json.dumps(self.settings, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def _read(self, sizes: Sequence[int]) -> dict[int, list[Any]]:
        files = sorted(self.folder.glob(f"{self._name}.*.jsonl"))
        lines = (line for file in files for line in file.read_bytes().split(b"\n"))
        return dict(record for line in lines if (record := _parse(line, sizes)) is not None)

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


def _parse(line: bytes, sizes: Sequence[int]) -> tuple[int, list[Any]] | None:
    """Read the number and the rows of a batch; None for a line that is cut short or no batch."""
    try:
        match json.loads(line.decode()):
            case [int(i), list(rows)] if 0 <= i < len(sizes) and len(rows) == sizes[i]:
                return i, rows
    except ValueError:  # neither UTF-8 nor JSON
        pass
    return None
