"""Settings of every test: one seed each, one thread, few surprises; and what a tiny run needs."""

import os
import random
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny tensors: threads only cost
os.environ.setdefault("MPLBACKEND", "Agg")

import pytest
import torch

from depthroute.config import load
from depthroute.data import PrepareConfig, prepare
from depthroute.train import RunConfig

MakeRun = Callable[..., RunConfig]

TINY_RUN = {
    "model": {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "residual": {"name": "attn_res", "num_blocks": 2, "key": {"name": "tail", "rank": 8}},
    },
    "data": {"context": 16, "val_tokens": 160},
    "optim": {"muon": {"lr": 0.02}, "adamw": {"lr": 0.003}, "schedule": {"warmup_steps": 2}},
    "train": {"steps": 6, "batch_size": 4, "log_every": 1},
}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _interpreter(request: pytest.FixtureRequest) -> None:
    if "kernel" in request.keywords and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.fail("these tests run in Triton's interpreter: set TRITON_INTERPRET=1")


@pytest.fixture(scope="session", autouse=True)
def _threads() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepare 120 documents of 6 to 40 bytes, so that most windows of 16 hold several."""
    source = tmp_path_factory.mktemp("text")
    draw = random.Random(0)
    for i in range(120):
        letters = draw.choices("abcd \u00e9", k=draw.randint(5, 30))
        (source / f"{i:03d}.txt").write_text("".join(letters) + "\n", encoding="utf-8")
    out = source.parent / "tiny_dataset"
    prepare(PrepareConfig(source=str(source), tokenizer="bytes", val_fraction=0.25), out)
    return out


@pytest.fixture
def make_run(tmp_path: Path, tiny_dataset: Path) -> MakeRun:
    """Make the settings of a run of milliseconds, with `key=value` over them."""

    def make(*overrides: str) -> RunConfig:
        places = (f"out={tmp_path / 'run'}", f"data.path={tiny_dataset}")
        return load(RunConfig, None, (*places, *overrides), base=TINY_RUN)

    return make
