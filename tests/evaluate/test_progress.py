import pytest
import torch
import torch.distributed as dist
from rich.console import Console

from depthroute.evaluate import Processes, Work
from depthroute.evaluate.progress import launched
from depthroute.train.report import Reporter
from helpers import full_disk


class Killed(BaseException):
    """What ends a process in the middle."""


class Batches:
    """Squares, three a batch; dies at one of the batches."""

    def __init__(self, dies_at: int | None = None) -> None:
        self.dies_at, self.computed = dies_at, []

    def __call__(self, i: int) -> list[list[float]]:
        if i == self.dies_at:
            raise Killed
        self.computed.append(i)
        return [[(3 * i + k) ** 2 / 7, i] for k in range(3)]


EXPECTED = [[n**2 / 7, n // 3] for n in range(15)]


def test_a_full_disk_is_named(tmp_path):
    pattern = r"File too large: '.*\.0\.jsonl'"
    with full_disk(), pytest.raises(OSError, match=pattern):
        Work(tmp_path, {}).do([3], Batches())


def test_killed_and_continued_equals_uninterrupted(tmp_path):
    work, first, second = Work(tmp_path, {"a": 1}), Batches(dies_at=3), Batches()
    with pytest.raises(Killed):
        work.do([3] * 5, first)
    assert work.do([3] * 5, second) == EXPECTED
    assert first.computed + second.computed == [0, 1, 2, 3, 4]
    again = Batches(dies_at=0)
    assert work.do([3] * 5, again) == EXPECTED  # nothing is left to do


@pytest.mark.parametrize("cut", [1, 5, 12])
def test_a_line_that_was_cut_short_does_not_count(tmp_path, cut):
    work = Work(tmp_path, {})
    with pytest.raises(Killed):
        work.do([3] * 5, Batches(dies_at=3))
    (file,) = tmp_path.iterdir()
    file.write_text(file.read_text()[:-cut])
    rest = Batches()
    assert work.do([3] * 5, rest) == EXPECTED
    assert rest.computed == [2, 3, 4]
    assert work.do([3] * 5, Batches(dies_at=2)) == EXPECTED


def test_what_is_left_is_shared_at_any_world_size(tmp_path):
    with pytest.raises(Killed):
        Work(tmp_path, {}).do([3] * 5, Batches(dies_at=1))
    first, second = Batches(), Batches()
    with pytest.raises(ValueError, match="2 of 5 batches are left to other processes"):
        Work(tmp_path, {}, processes=Processes(0, 2)).do([3] * 5, first)
    with pytest.raises(ValueError, match="1 of 5 batches are left to other processes"):
        Work(tmp_path, {}, processes=Processes(1, 2)).do([3] * 5, second)
    assert (first.computed, second.computed) == ([1, 3], [4])  # not all odd ones to the second
    rest = Batches()
    assert Work(tmp_path, {}).do([3] * 5, rest) == EXPECTED
    assert rest.computed == [2]


@pytest.mark.parametrize(
    "line",
    [b"3", b"null", b"[0, 5]", b'{"a": 1}', b"[0, [[1.0, 3]]]", b"[7, [1, 2, 3]]", b"\xff\xfe"],
)
def test_a_line_that_is_no_batch_does_not_count(tmp_path, line):
    work = Work(tmp_path, {})
    work.do([3] * 5, Batches())
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes() + b"\n" + line)
    assert work.do([3] * 5, Batches(dies_at=0)) == EXPECTED


def test_processes_wait_for_each_other_for_days(monkeypatch):
    asked = {}
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(dist, "init_process_group", lambda _, **settings: asked.update(settings))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    with launched():
        assert asked["timeout"].days >= 7


def test_other_settings_are_other_work(tmp_path):
    work = Work(tmp_path, {"a": 1})
    work.do([3] * 5, Batches())
    other = Batches()
    assert work.with_settings({"b": 2}).do([3] * 5, other) == EXPECTED
    assert other.computed == [0, 1, 2, 3, 4]
    same = Batches()
    assert Work(tmp_path, {"b": 2, "a": 1}).do([3] * 5, same) == EXPECTED
    assert same.computed == []


def test_progress_counts_what_was_done_before(tmp_path, monkeypatch):
    clock = iter(range(0, 10_000, 60))
    monkeypatch.setattr("depthroute.evaluate.progress.time.monotonic", lambda: next(clock))
    with pytest.raises(Killed):
        Work(tmp_path, {}).do([3] * 5, Batches(dies_at=3))
    console = Console(record=True, width=80)
    Work(tmp_path, {}, show=lambda n: Reporter("tiny", n, console)).do([3] * 5, Batches())
    said = console.export_text().split()
    assert [word for word in said if "/" in word] == ["4/5", "5/5"]
