"""Settings of every test: one seed each, one thread, few surprises."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny tensors: threads only cost
os.environ.setdefault("MPLBACKEND", "Agg")

import pytest
import torch


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def _threads() -> None:
    torch.set_num_threads(1)
