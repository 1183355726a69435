import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

import depthroute
from depthroute.cli import main
from depthroute.cli.main import app
from depthroute.config import dump, load
from depthroute.ops import backend
from depthroute.train import CompareConfig, RunConfig

CONFIGS = sorted((Path(__file__).parents[2] / "configs").rglob("*.toml"))


class Said(NamedTuple):
    status: int
    out: str
    err: str


@pytest.fixture
def call(capsys):
    """Call the command as a shell would."""

    def run(*arguments: object) -> Said:
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        assert "\r" not in out + err
        assert "\x1b" not in out + err
        code = ended.value.code
        assert isinstance(code, int)
        return Said(code, out, err)

    return run


@pytest.fixture
def run_file(make_run, tmp_path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(dump(make_run("train.steps=3")))
    return path


def assert_mistake(said: Said, *parts: str) -> None:
    """Expect one message on standard error, and nothing else."""
    assert said.status == 2
    assert said.out == ""
    assert said.err.startswith("depthroute: ")
    assert said.err.count("depthroute: ") == 1
    assert "Traceback" not in said.err
    for part in parts:
        assert part in said.err


def test_doctor_shows_versions_and_optional_packages(call):
    status, out, _ = call("doctor")
    assert status == 0
    lines = dict(line.split(": ", 1) for line in out.splitlines())
    assert lines["depthroute"] == depthroute.__version__
    assert lines["torch"] == torch.__version__
    assert {
        "tokenizers",
        "tiktoken",
        "pyarrow",
        "matplotlib",
        "triton",
        "transformers",
    } <= lines.keys()


def backend_line(said: Said) -> str:
    (line,) = (line for line in said.out.splitlines() if "backend" in line)
    return line


def test_doctor_says_what_runs_depth_reads(call, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    plain = "backend of depth reads: plain PyTorch, since"
    assert backend_line(call("doctor")) == f"{plain} the tensors are on cpu"
    device = SimpleNamespace(name="a GPU", total_memory=2**36, major=9)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: device.name)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(backend, "_has_triton", True)
    assert backend_line(call("doctor")) == "backend of depth reads: Triton kernels"
    device.major = 7
    assert backend_line(call("doctor")).startswith(f"{plain} the device has compute capability 7")
    monkeypatch.setattr(backend, "_has_triton", False)
    assert backend_line(call("doctor")).startswith(f"{plain} triton is not installed: pip install")


def test_text_becomes_a_dataset_a_run_and_a_continuation(call, run_file, tmp_path):
    text = "\n\n".join(f"once upon a time {i}" for i in range(60))
    (tmp_path / "text.txt").write_text(text)
    data = tmp_path / "data set"  # a space in a path is fine
    said = call(
        "prepare", data, f"source={tmp_path / 'text.txt'}", 'separator="\\n\\n"', "val_fraction=0.3"
    )
    assert said.status == 0
    assert said.out.splitlines()[:2] == [f"made {data}", "vocabulary: 257 (bytes)"]
    assert_mistake(call("prepare", data, "source=stdlib"), "exists")

    run = tmp_path / "trained"
    said = call("train", run_file, f"data.path={data}", f"out={run}", "train.log_every=2")
    assert said.status == 0
    lines = said.out.splitlines()
    assert [line for line in lines if "step 2/3 loss" in line]
    assert any("sublayer matrices" in line for line in lines)
    assert lines[-1] == f"{run} at step 3"

    greedy = call("generate", run, "once", "tokens=6", "temperature=0")
    assert greedy.status == 0
    assert greedy.out.startswith("once")
    assert call("generate", run, "once", "tokens=6", "top_k=1", "seed=1") == greedy
    assert call("generate", run, "tokens=0").out == "\n"  # no prompt, no tokens
    prompts = (
        "",
        "a = b",
        "tokens = 5",
        "stop=1",
        "=",
        "tokenz",
        "- x",
        "--all",
        "x[:1]\t:smile: [b]",
    )
    for prompt in prompts:
        assert call("generate", run, prompt, "tokens=0").out == f"{prompt}\n"


def test_generate_does_without_the_device_of_the_run(call, run_file, tmp_path, monkeypatch):
    assert call("train", run_file).status == 0
    settings = tmp_path / "run/config.toml"
    settings.write_text(settings.read_text().replace('device = "auto"', 'device = "cuda"'))
    assert load(RunConfig, settings).train.device == "cuda"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    said = call("generate", tmp_path / "run", "ab", "tokens=0")
    assert (said.status, said.out) == (0, "ab\n")


def test_a_run_goes_to_hugging_face_and_back(call, run_file, tmp_path):
    pytest.importorskip("transformers")
    run, folder, start = tmp_path / "run", tmp_path / "hf", tmp_path / "start"
    assert call("train", run_file).status == 0
    said = call("export", run, folder, "license=mit", "--with-code")
    assert (said.status, said.out) == (0, f"made {folder}\n")
    assert "license: mit" in (folder / "README.md").read_text()
    assert (folder / "depthroute_models_decoder.py").exists()
    assert_mistake(call("export", run, folder), "exists")
    said = call("import", folder, start)
    assert said.status == 0
    assert said.out.splitlines()[0] == f"made {start}"
    base = tomllib.loads(run_file.read_text())
    data = [f"data.{key}={json.dumps(value)}" for key, value in base["data"].items()]
    file = start / "start.toml"
    more = call(
        "train", file, *data, f"out={tmp_path / 'more'}", "train.steps=1", "train.batch_size=2"
    )
    assert more.status == 0
    assert f"starting with the weights of {start}" in more.out


def test_wrong_exports_are_refused(call, tmp_path):
    pytest.importorskip("transformers")
    assert_mistake(call("export", tmp_path / "none", tmp_path / "out"), "none is no run folder")
    assert_mistake(call("export", tmp_path, tmp_path / "out", "licence=mit"), "license")
    assert_mistake(call("import", tmp_path, tmp_path / "out"), "no Hugging Face folder")
    assert not (tmp_path / "out").exists()


def test_evaluate_says_the_loss_of_a_run(call, run_file, tmp_path):
    assert call("train", run_file).status == 0
    metrics = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    loss = next(json.loads(line)["val/loss_nats"] for line in reversed(metrics) if "val/" in line)
    said = call("evaluate", tmp_path / "run", "tokens=160", "batch_size=3")
    assert said.status == 0
    assert said.out.splitlines()[2].split("|")[2].strip() == f"{loss:.4f}"
    assert call("evaluate", tmp_path / "run", "tokens=160", "batch_size=3") == said
    assert_mistake(call("evaluate", tmp_path / "run", "split=test"), 'no split "test"')
    assert_mistake(call("evaluate", tmp_path / "run", "tokns=3"), 'did you mean "tokens"?')
    assert_mistake(call("evaluate", tmp_path / "none"), "none is neither a run folder")
    assert_mistake(
        call("evaluate", tmp_path / "run", "include_path=nowhere"),
        "include_path must be a folder, got nowhere",
    )


def test_account_counts_the_model_of_a_run(call, run_file):
    said = call("account", run_file, "model.vocab_size=257", "model.residual.name=prenorm")
    assert said.status == 0
    numbers = dict(line.rsplit(None, 1) for line in said.out.splitlines() if line[-1].isdigit())
    assert numbers["parameters"] == f"{2 * 257 * 16 + 2 * (4 * 16 * 16 + 3 * 16 * 24):,}"
    assert "the scheme adds 0.0000 % of the core" in said.out
    assert_mistake(call("account", run_file), "give model.vocab_size=N")


def test_account_of_the_paper_agrees_in_every_row(call):
    said = call("account", "--paper")
    assert said.status == 0
    assert "19 of 19 rows agree" in said.out
    assert_mistake(call("account", "--paper", "junk=3"), "--paper takes no settings, got junk=3")


def test_compare_writes_its_table_and_names_its_files(call, run_file, tmp_path):
    path = tmp_path / "compare.toml"
    path.write_text(
        f"out = {json.dumps(str(tmp_path / 'out'))}\n"
        f"config = {json.dumps(str(run_file))}\n"
        "record_tokens = 16\n"
        '[variants]\nplain = ["model.residual.name=prenorm"]\nrouted = []\n'
    )
    said = call("compare", path, "train.steps=2", "sample_tokens=3", "seeds=[3]")
    assert said.status == 0
    table = (tmp_path / "out/table.md").read_text()
    assert table in said.out
    assert [line.split("|")[1].strip() for line in table.splitlines()[2:]] == ["plain", "routed"]
    assert "--- a continuation by routed ---" in said.out
    assert said.out.splitlines()[-1] == str(tmp_path / "out/table.md")
    stored = tomllib.loads((tmp_path / "out/routed-seed3/config.toml").read_text())
    assert stored["train"]["steps"] == 2
    assert json.loads((tmp_path / "out/results.json").read_text())["config"]["sample_tokens"] == 3


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        (
            "model.residual.key.rnk=8",
            ["model.residual.key.rnk: unknown key", 'did you mean "rank"?'],
        ),
        ("model.residual.key.rank=8.5", ["model.residual.key.rank: expected int", "float 8.5"]),
        ("train.steps=ten", ["train.steps: expected int, got string", "ten"]),
        (
            "model.residual.name=attn_ress",
            ['unknown "attn_ress"', 'did you mean "attn_res"?', "prenorm"],
        ),
        (
            "model.residual.key.rank=17",
            ["model", "rank must be at most the model width 16, got 17"],
        ),
        ("model.residual.num_blocks=-1", ["model.residual", "num_blocks must be >= 0", "got -1"]),
        ("train.device=tpu", ['train.device: unknown "tpu"', "choices: auto, cpu, cuda"]),
        ("train.micro_batch_size=3", ["micro_batch_size must divide batch_size=4, got 3"]),
        ("optim.schedule.floor=2", ["optim.schedule", "floor must be in [0, 1], got 2"]),
        ("data.path=nowhere", ["nowhere", "depthroute prepare nowhere"]),
    ],
)
def test_wrong_setting_is_named_in_one_message(call, run_file, tmp_path, override, parts):
    said = call("train", run_file, override)
    assert_mistake(said, *parts)
    assert len(said.err.splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_wrong_files_are_named(call, run_file, tmp_path):
    assert_mistake(call("train", tmp_path / "no.toml"), "no.toml: cannot be read")
    assert_mistake(call("train", run_file, run_file), "expected at most one file")
    assert_mistake(call("train", "train.steps=1", run_file), "before all key=value")
    assert_mistake(call("compare", run_file), "variants: required key is missing")
    assert_mistake(call("generate", tmp_path / ":100:", "x"), ":100: is no run folder")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/config.toml").write_text(run_file.read_text())
    assert_mistake(call("generate", tmp_path / "empty"), "empty has no checkpoint yet")


def test_path_of_a_file_may_contain_an_equals_sign(call, run_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lr=1").mkdir()
    (tmp_path / "lr=1/config.toml").write_text(run_file.read_text())
    size = "model.vocab_size=257"
    expected = call("account", run_file, size)
    assert expected.status == 0
    assert call("account", "lr=1/config.toml", size) == expected
    assert call("account", tmp_path / "lr=1/config.toml", size) == expected
    assert_mistake(call("account", tmp_path / "lr=1/none.toml"), "lr=1/none.toml: cannot be read")
    assert_mistake(call("compare", "config=none.toml"), "out: required key is missing")  # a setting
    assert_mistake(call("account", run_file, f"out={'x' * 5000}"), "give model.vocab_size=N")


def test_places_that_cannot_be_written_are_one_message(call, run_file, tmp_path):
    (tmp_path / "file").touch()
    for arguments in (
        ("train", run_file, f"out={tmp_path / 'file'}"),
        ("train", run_file, f"out={tmp_path / 'file/run'}"),
        ("prepare", tmp_path / "file/data", "source=stdlib"),
    ):
        said = call(*arguments)
        assert (said.status, "Traceback" in said.err) == (2, False)
        (line,) = said.err.splitlines()
        assert line.startswith("depthroute: ")
        assert str(tmp_path / "file") in line
    assert (tmp_path / "file").read_bytes() == b""


def test_folders_in_examples_are_those_that_examples_make(call):
    commands = [command.name or command.callback.__name__ for command in app.registered_commands]
    shown = " ".join(call(command, "--help").out for command in commands)
    comparison = load(CompareConfig, CONFIGS[0].parent / "demo_compare.toml")
    made = set(re.findall(r" out=(runs/\S+)", shown)) | {
        f"{comparison.out}/{label}-seed{seed}"
        for label in comparison.variants
        for seed in comparison.seeds
    }
    named = set(re.findall(r"runs/[\w/-]+", shown))
    assert len(named) >= 3
    assert named <= made


def test_a_reader_that_stops_early_is_no_error():
    """A pipe closed by `head` ends the command with status 1, and no words."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-c", "from depthroute.cli import main; main(['doctor'])"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


def test_wrong_arguments_are_refused(call, tmp_path):
    assert_mistake(call("generate", tmp_path, "x", "tokns=3"), 'did you mean "tokens"?')
    assert_mistake(call("generate", tmp_path, "x", "tokens=-1"), "tokens must be >= 0, got -1")
    assert_mistake(call("generate", tmp_path, "--tokens=5"), "--tokens: unknown")
    assert_mistake(call("generate", tmp_path, "tokenz=5"), "tokenz: unknown", 'mean "tokens"?')
    assert_mistake(call("generate", tmp_path, "topk=", "tokens=1"), 'did you mean "top_k"?')
    assert_mistake(
        call("generate", tmp_path, "caf\udce9"),  # what Python makes of a byte 0xe9
        "prompt must be valid UTF-8, got b'\\xe9' at character 3",
    )
    assert_mistake(call("prepare", tmp_path / "out", "source=stdlib", "tokenizer=foo"), "bpe:N")
    assert_mistake(call("prepare", tmp_path / "out", "sorce=stdlib"), 'did you mean "source"?')
    assert_mistake(call("prepare", tmp_path / "out", "source=nowhere"), "nowhere")
    assert not (tmp_path / "out").exists()
    unknown = call("trian")
    assert unknown.status == 2
    assert "trian" in unknown.err


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_file_in_configs_loads_as_what_it_is(path, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])  # comparisons name their run file from there
    if "variants" not in tomllib.loads(path.read_text()):
        assert load(RunConfig, path).train.steps > 0
        return
    config = load(CompareConfig, path)
    runs = {label: load(RunConfig, config.config, own) for label, own in config.variants.items()}
    assert len({run.model.residual for run in runs.values()}) == len(runs)


def test_configs_are_where_they_are_looked_for():
    assert len(CONFIGS) >= 4
