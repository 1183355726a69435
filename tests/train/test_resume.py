import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from depthroute.cli import main
from depthroute.config import dump
from depthroute.train import RunConfig, load_model, train
from depthroute.train.checkpoint import list_checkpoints
from depthroute.train.report import Reporter

# emitted keys put a parameter into every group; 30 steps of 4 windows are more than an epoch
SETTINGS = (
    'model.residual.key={name="projected", rank=4}',
    "train.steps=30",
    "train.micro_batch_size=2",
    "train.val_every=4",
    "train.log_every=5",
    "train.save_every=10",
)

# dies while the second checkpoint, that of step 20, waits for its name
KILLED_RUN = """
import os, signal, sys
from depthroute.cli import main
replace = os.replace
def replace_or_die(source, target):
    if str(target).endswith("step_00000020"):
        os.kill(os.getpid(), signal.SIGKILL)
    replace(source, target)
os.replace = replace_or_die
main(["train", sys.argv[1]])
"""


def whole_state(folder: Path) -> dict[str, Any]:
    """Read the newest checkpoint with torch's own converter, flattened."""
    path = list_checkpoints(folder / "checkpoints")[-1]
    dcp_to_torch_save(path, folder / "whole.pt")
    state = torch.load(folder / "whole.pt", weights_only=False)
    (folder / "whole.pt").unlink()
    return dict(flatten(state, path.name))


def flatten(value: Any, name: str):
    if isinstance(value, dict):
        for key, item in value.items():
            yield from flatten(item, f"{name}/{key}")
    else:
        yield name, value


def metrics(folder: Path) -> list[dict[str, Any]]:
    """Read every record, without the measured times."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in record.items() if "perf/" not in k} for record in records]


def assert_same_run(folder: Path, expected: Path) -> None:
    assert metrics(folder) == metrics(expected)
    state, wanted = whole_state(folder), whole_state(expected)
    assert state.keys() == wanted.keys()
    for name, value in wanted.items():
        same = torch.equal(state[name], value) if torch.is_tensor(value) else state[name] == value
        assert same, name


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture(autouse=True)
def _interruptible() -> Iterator[None]:
    """Have SIGINT interrupt: a shell starts what runs in the background with it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class StopAt(Reporter):
    """Sends a signal to this process when something is shown."""

    def __init__(self, config: RunConfig, text: str, number: int = signal.SIGTERM) -> None:
        super().__init__("run", config.train.steps)
        self.text, self.number = text, number

    def say(self, text: str) -> None:
        if self.text in text:
            signal.raise_signal(self.number)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("uninterrupted") / "run"


@pytest.fixture
def reference(make_run, uninterrupted: Path) -> Path:
    """Return the folder of a run that nothing stopped."""
    if not uninterrupted.exists():
        train(make_run(*SETTINGS, f"out={uninterrupted}"))
    return uninterrupted


def test_run_killed_in_a_save_continues_to_the_same_bits(make_run, reference, tmp_path):
    config = make_run(*SETTINGS)
    (tmp_path / "run.toml").write_text(dump(config))
    command = [sys.executable, "-c", KILLED_RUN, str(tmp_path / "run.toml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr
    folder = Path(config.out)
    left = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert left == [".writing_step_00000020", "step_00000010"]
    assert metrics(folder)[-1]["step"] == 20
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 21, "train/lo')  # a record that the kill cut short
    result = train(config)
    assert (result.step, result.stopped_by) == (30, None)
    assert_same_run(folder, reference)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_saves_and_the_next_call_continues(make_run, reference, number):
    config = make_run(*SETTINGS)
    result = train(config, reporter=StopAt(config, "step 5/30", number))
    assert (result.step, result.validation, result.stopped_by) == (6, None, number)
    assert [path.name for path in list_checkpoints(result.path / "checkpoints")] == [
        "step_00000006"
    ]
    assert train(config).step == 30
    assert_same_run(Path(config.out), reference)


def test_signal_in_a_validation_is_not_lost(make_run, reference):
    config = make_run(*SETTINGS)
    result = train(config, reporter=StopAt(config, "step 8 validation"))
    assert (result.step, result.stopped_by) == (9, signal.SIGTERM)
    assert list_checkpoints(result.path / "checkpoints")[-1].name == "step_00000009"
    train(config)
    assert_same_run(Path(config.out), reference)


class StopTwice(StopAt):
    """Sends its signal twice in a row, as timeout(1) does."""

    def say(self, text: str) -> None:
        if self.text in text:  # to the handler: two signals can become one on the way
            for _ in range(2):
                signal.getsignal(self.number)(self.number, None)


def test_signal_that_arrives_twice_is_one_request(make_run, reference):
    config = make_run(*SETTINGS)
    result = train(config, reporter=StopTwice(config, "step 5/30"))
    assert (result.step, result.stopped_by) == (6, signal.SIGTERM)
    train(config)
    assert_same_run(Path(config.out), reference)


def test_later_signal_acts_at_once(make_run, monkeypatch):
    monkeypatch.setattr("depthroute.train.signals._SAME_REQUEST_S", -1.0)
    config = make_run(*SETTINGS)
    with pytest.raises(KeyboardInterrupt):
        train(config, reporter=StopTwice(config, "step 5/30", signal.SIGINT))
    assert list_checkpoints(Path(config.out) / "checkpoints") == []


def test_handlers_of_signals_are_those_of_before(make_run):
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    train(make_run("train.steps=1"))
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_command_that_a_signal_stopped_exits_by_the_shells_convention(
    make_run, tmp_path, monkeypatch
):
    (tmp_path / "run.toml").write_text(dump(make_run("train.steps=4")))
    say = Reporter.say

    def say_and_stop(self: Reporter, text: str) -> None:
        say(self, text)
        if "step 2/4" in text:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Reporter, "say", say_and_stop)
    with pytest.raises(SystemExit) as stopped:
        main(["train", str(tmp_path / "run.toml")])
    assert stopped.value.code == 143
    with pytest.raises(SystemExit) as finished:
        main(["train", str(tmp_path / "run.toml")])
    assert finished.value.code == 0


def test_finished_run_is_validated_again_and_stays_as_it_is(make_run):
    config = make_run("train.save_every=3")
    first = train(config)
    before = contents(first.path)
    assert train(config) == first
    assert contents(first.path) == before


def test_checkpoints_are_pruned_in_a_run(make_run):
    result = train(make_run("train.save_every=1", "train.keep_checkpoints=3"))
    names = [path.name for path in list_checkpoints(result.path / "checkpoints")]
    assert names == ["step_00000004", "step_00000005", "step_00000006"]


def test_folder_of_other_settings_is_refused_and_the_change_named(make_run):
    # the new rate equals one that is in the file already, under another key
    config = make_run("train.steps=1", "optim.muon.lr=0.02", "optim.adamw.lr=0.003")
    train(config)
    before = contents(Path(config.out))
    with pytest.raises(ValueError, match=r"Changed: optim\.muon\.lr was 0\.02, is 0\.003$"):
        train(make_run("train.steps=1", "optim.muon.lr=0.003"))
    with pytest.raises(ValueError, match=r"model\.residual\.key\.rank was 8, is not set"):
        train(make_run("train.steps=1", "model.residual.name=prenorm"))
    assert contents(Path(config.out)) == before


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("train.init_from=nowhere", r"^train\.init_from: there is no folder nowhere$"),
        ("data.context=100000", "context"),
        pytest.param(
            "train.device=cuda",
            "torch sees no CUDA device",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="needs no CUDA"),
        ),
    ],
)
def test_start_that_fails_leaves_no_run(make_run, mistake, message):
    more = ("train.steps=1", "data.val_tokens=100000")
    with pytest.raises(ValueError, match=message):
        train(make_run(*more, mistake))
    assert not Path(make_run().out).exists()
    assert train(make_run(*more)).step == 1


def test_weights_that_do_not_fit_leave_no_run(make_run, tmp_path):
    other = train(make_run("train.steps=1", f"out={tmp_path / 'other'}", "model.hidden_size=32"))
    with pytest.raises(ValueError, match=r"step_00000001 cannot be loaded .*Size mismatch"):
        train(make_run("train.steps=1", f"train.init_from={other.path}"))
    assert not Path(make_run().out).exists()


def test_source_of_the_weights_is_looked_for_before_a_model_is_built(make_run, monkeypatch):
    monkeypatch.setattr("depthroute.train.trainer.CausalLM", None)  # building one would fail
    with pytest.raises(ValueError, match=r"train\.init_from: there is no folder nowhere"):
        train(make_run("train.init_from=nowhere"))


def test_run_that_started_continues_without_the_source_of_its_weights(make_run, tmp_path):
    source = train(make_run("train.steps=1", f"out={tmp_path / 'source'}")).path
    config = make_run("train.save_every=1", f"train.init_from={source}")
    assert train(config, reporter=StopAt(config, "step 2/6")).step < 6
    shutil.rmtree(source)
    assert train(config).step == 6


def test_run_from_before_a_setting_existed_continues(make_run):
    config = make_run("train.save_every=1")
    assert train(config, reporter=StopAt(config, "step 2/6")).step < 6
    file = Path(config.out) / "config.toml"
    text = file.read_text()
    older = text.replace("deterministic = false\n", "").replace("keep_checkpoints = 2\n", "")
    assert len(older.splitlines()) == len(text.splitlines()) - 2
    file.write_text(older)
    only = r"Changed: train\.deterministic was False, is True$"
    with pytest.raises(ValueError, match=only):
        train(make_run("train.save_every=1", "train.deterministic=true"))
    assert file.read_text() == older
    assert train(config).step == 6
    assert file.read_text() == text


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("steps = = 3", r"run/config\.toml: not a TOML file"),
        ("future = 1", r"the settings of the run in .*run cannot be read: future: unknown key"),
    ],
)
def test_settings_that_cannot_be_read_are_named(make_run, line, message):
    config = make_run("train.steps=1")
    file = train(config).path / "config.toml"
    damaged = f"{line}\n{file.read_text()}"
    file.write_text(damaged)
    with pytest.raises(ValueError, match=message):
        train(config)
    with pytest.raises(ValueError, match=message):
        load_model(file.parent)
    assert file.read_text() == damaged


def test_dataset_that_is_not_there_says_how_to_make_it(make_run, tmp_path):
    config = make_run(f"data.path={tmp_path / 'nowhere'}")
    with pytest.raises(ValueError, match=r"data\.path: .*nowhere.*depthroute prepare .*nowhere"):
        train(config)
    assert not Path(config.out).exists()
