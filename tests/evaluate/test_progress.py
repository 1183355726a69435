import pytest
from rich.console import Console

from depthroute.evaluate import Processes, Work
from depthroute.train.report import Reporter


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


def test_killed_and_continued_equals_uninterrupted(tmp_path):
    work, first, second = Work(tmp_path, {"a": 1}), Batches(dies_at=3), Batches()
    with pytest.raises(Killed):
        work.do(5, first)
    assert work.do(5, second) == EXPECTED
    assert first.computed + second.computed == [0, 1, 2, 3, 4]
    again = Batches(dies_at=0)
    assert work.do(5, again) == EXPECTED  # nothing is left to do


@pytest.mark.parametrize("cut", [1, 5, 12])
def test_a_line_that_was_cut_short_does_not_count(tmp_path, cut):
    work = Work(tmp_path, {})
    with pytest.raises(Killed):
        work.do(5, Batches(dies_at=3))
    (file,) = tmp_path.iterdir()
    file.write_text(file.read_text()[:-cut])
    rest = Batches()
    assert work.do(5, rest) == EXPECTED
    assert rest.computed == [2, 3, 4]
    assert work.do(5, Batches(dies_at=2)) == EXPECTED


def test_progress_of_one_world_size_continues_at_another(tmp_path):
    for rank in range(3):
        with pytest.raises(Killed):
            Work(tmp_path, {}, processes=Processes(rank, 3)).do(5, Batches(dies_at=(3, 4, 2)[rank]))
    rest = Batches()
    assert Work(tmp_path, {}).do(5, rest) == EXPECTED
    assert rest.computed == [2, 3, 4]


def test_other_settings_are_other_work(tmp_path):
    work = Work(tmp_path, {"a": 1})
    work.do(5, Batches())
    other = Batches()
    assert work.with_settings({"b": 2}).do(5, other) == EXPECTED
    assert other.computed == [0, 1, 2, 3, 4]
    same = Batches()
    assert Work(tmp_path, {"b": 2, "a": 1}).do(5, same) == EXPECTED
    assert same.computed == []


def test_progress_counts_what_was_done_before(tmp_path, monkeypatch):
    clock = iter(range(0, 10_000, 60))
    monkeypatch.setattr("depthroute.evaluate.progress.time.monotonic", lambda: next(clock))
    with pytest.raises(Killed):
        Work(tmp_path, {}).do(5, Batches(dies_at=3))
    console = Console(record=True, width=80)
    Work(tmp_path, {}, show=lambda n: Reporter("tiny", n, console)).do(5, Batches())
    said = console.export_text().split()
    assert [word for word in said if "/" in word] == ["4/5", "5/5"]
