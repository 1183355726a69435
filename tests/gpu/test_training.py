"""Training on a CUDA device."""

import os
import signal
from pathlib import Path

import pytest
import torch

from depthroute.train import load_model, train
from depthroute.train.report import Reporter

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # torch's own compiler warns about settings that do not concern us
    pytest.mark.filterwarnings("default"),
]

# documents of some 20 tokens, wide enough that torch's default gradients would add in any order
SETTINGS = (
    "model.hidden_size=256",
    "model.intermediate_size=512",
    "data.context=256",
    "data.val_tokens=512",
    "train.steps=12",
    "train.batch_size=8",
    "train.deterministic=true",
    "train.device=cuda",
)


class StopAfter(Reporter):
    """Asks to stop when a step is shown."""

    def step(self, step: int, text: str) -> None:
        if step == 5:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("mode", ["none", "model"])
def test_deterministic_run_repeats_and_continues_to_the_same_bits(make_run, tmp_path: Path, mode):
    def run(name: str, reporter: Reporter | None = None):
        torch._dynamo.reset()
        settings = (*SETTINGS, f"train.compile={mode}", f"out={tmp_path / name}")
        return train(make_run(*settings), reporter=reporter)

    whole, again = run("whole"), run("again")
    stopped = run("stopped", StopAfter("stopped", 12))
    assert stopped.step == 6
    assert stopped.stopped_by is not None
    continued = run("stopped")
    expected = load_model(whole.path).state_dict()
    for other in (again, continued):
        assert other.validation == whole.validation
        for name, value in load_model(other.path).state_dict().items():
            assert torch.equal(value, expected[name]), name
