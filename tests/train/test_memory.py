import sys

import pytest
import torch

from depthroute.train import memory, train
from depthroute.train.memory import PeakMemory

CPU = torch.device("cpu")
MIB = 2**20


@pytest.mark.skipif(sys.platform != "linux", reason="Linux keeps the peak of a process")
def test_peak_is_that_of_the_time_watched():
    before = PeakMemory(CPU).gib()
    large = torch.ones(64 * MIB)  # 256 MiB
    del large
    watch = PeakMemory(CPU)
    assert watch.gib() < before + 0.1
    large = torch.ones(64 * MIB)
    del large
    assert 0.2 < watch.gib() - before < 0.4


def test_a_system_that_does_not_tell_gives_none(monkeypatch, tmp_path, make_run):
    monkeypatch.setattr(memory, "_RESET", tmp_path / "missing" / "clear_refs")
    assert PeakMemory(CPU).gib() is None
    assert "peak_memory" not in (train(make_run()).path / "metrics.jsonl").read_text()
