"""Whole evaluations: what is written and said, comparisons, several processes."""

import io
import itertools
import json
import math
import os
import re
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

import depthroute
from depthroute.config import from_dict, load
from depthroute.data import (
    PrepareConfig,
    TokenDataset,
    load_tokenizer,
    prepare,
    validation_windows,
)
from depthroute.evaluate import EvaluateConfig, Subject, evaluate, format_evaluation
from depthroute.train import load_model
from depthroute.train.validate import validate

needs_harness = pytest.mark.skipif(
    find_spec("lm_eval") is None, reason='needs pip install "depthroute[eval]"'
)
ignore_foreign_warnings = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::ResourceWarning"
)


def table(text: str) -> dict[str, list[str]]:
    """Return the cells of each line of a table by its first one."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("| ")
    ]
    return {row[0]: row[1:] for row in rows}


def test_the_loss_of_a_run_is_written_and_said(make_folder, tiny_dataset):
    run = make_folder()
    result = evaluate(run, EvaluateConfig(tokens=100))
    split = TokenDataset(tiny_dataset).split("val")
    windows = validation_windows(split, context=16, max_tokens=100)
    expected = validate(load_model(run), windows, batch_size=4, mask_documents=True)
    assert result.loss.total == pytest.approx(expected, rel=1e-6)
    assert result.loss.total.tokens == 96
    stored = json.loads((run / "evaluation/results.json").read_text())
    assert stored["loss"]["loss_nats"] == result.loss.total.loss_nats
    assert stored["loss"]["perplexity"] == pytest.approx(expected.perplexity, rel=1e-5)
    assert stored["checkpoint"] == "step_00000001"
    assert stored["environment"]["depthroute"] == depthroute.__version__
    assert from_dict(EvaluateConfig, stored["config"]) == EvaluateConfig(tokens=100)
    said = table(format_evaluation(result))
    assert said["loss, nats per token"][0] == f"{expected.loss_nats:.4f}"
    assert said["bits per byte"][0] == f"{expected.bits_per_byte:.4f}"
    assert said["perplexity"][2] == "96 tokens"


def test_any_split_of_any_dataset_of_the_tokenizer(make_folder, tiny_dataset, tmp_path):
    run = make_folder()
    split = TokenDataset(tiny_dataset).split("train")
    whole = evaluate(run, EvaluateConfig(split="train")).loss.total
    assert whole.tokens == (split.num_tokens - 1) // 16 * 16
    (tmp_path / "text.txt").write_text("a text of its own, long enough for windows")
    other = tmp_path / "other"
    prepare(PrepareConfig(source=str(tmp_path / "text.txt"), val_fraction=0), other)
    found = evaluate(run, EvaluateConfig(split="train", data=str(other))).loss.total
    assert found.tokens == 32
    with pytest.raises(ValueError, match='no split "val"'):
        evaluate(run, EvaluateConfig(data=str(other)))
    bpe = tmp_path / "bpe"
    settings = PrepareConfig(source="stdlib", tokenizer="bpe:257", max_documents=5, val_fraction=0)
    prepare(settings, bpe)
    with pytest.raises(ValueError, match="was made with the tokenizer huggingface"):
        evaluate(run, EvaluateConfig(data=str(bpe), split="train"))


def test_a_run_that_is_trained_on_is_measured_anew(make_folder):
    run = make_folder()
    first = evaluate(run, EvaluateConfig()).loss
    assert evaluate(run, EvaluateConfig()).loss == first
    assert make_folder(seed=1) == run
    assert evaluate(run, EvaluateConfig()).loss != first


def test_losses_are_compared_window_by_window(make_folder, tmp_path):
    ours, theirs = make_folder("ours"), make_folder("theirs", seed=1)
    config = EvaluateConfig(compare_with=str(theirs), bootstrap=500)
    result = evaluate(ours, config)
    alone = [evaluate(run, EvaluateConfig()).loss.total.loss_nats for run in (ours, theirs)]
    mean, low, high = result.comparison.loss_nats
    assert mean == pytest.approx(alone[0] - alone[1])
    assert low < mean < high
    said = table(format_evaluation(result))["loss, nats per token"]
    assert said[3:] == [f"{alone[1]:.4f}", f"{mean:+.4f}", f"{low:+.4f} to {high:+.4f}"]
    assert evaluate(ours, config).comparison.loss_nats == (mean, low, high)
    same = evaluate(ours, EvaluateConfig(compare_with=str(ours), out=str(tmp_path / "out")))
    assert same.comparison.loss_nats == (0.0, 0.0, 0.0)
    assert (tmp_path / "out/compare_with/results.json").exists()


def test_a_comparison_leaves_the_results_of_the_other_run(make_folder):
    ours, theirs = make_folder("ours"), make_folder("theirs", seed=1)
    evaluate(theirs, EvaluateConfig(tokens=64))
    kept = (theirs / "evaluation/results.json").read_text()
    result = evaluate(ours, EvaluateConfig(tokens=96, compare_with=str(theirs)))
    assert (theirs / "evaluation/results.json").read_text() == kept
    stored = json.loads((ours / "evaluation/compare_with/results.json").read_text())
    assert stored["loss"]["loss_nats"] == result.comparison.theirs.loss.total.loss_nats
    assert list((theirs / "evaluation/progress").iterdir())


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.context=8"], r"differ in data or context.*tokens=0"),
        (["data.mask_documents=false"], r"differ in mask_documents, True and False; give"),
    ],
)
def test_losses_of_other_windows_or_masks_are_not_compared(make_folder, overrides, message):
    ours, theirs = make_folder("ours"), make_folder("theirs", *overrides)
    with pytest.raises(ValueError, match=message):
        evaluate(ours, EvaluateConfig(tokens=96, compare_with=str(theirs)))
    assert not (ours / "evaluation").exists()  # found out before the work
    same = {"context": 8, "mask_documents": True}
    found = evaluate(ours, EvaluateConfig(tokens=96, compare_with=str(theirs), **same))
    assert found.comparison.loss_nats is not None


def test_what_is_missing_is_found_out_before_the_work(make_folder, tmp_path):
    run = make_folder()
    with pytest.raises(ValueError, match="typo is neither a run folder"):
        evaluate(run, EvaluateConfig(compare_with=str(tmp_path / "typo")))
    with pytest.raises(ValueError, match=r"tokens must be .* context=16 tokens, got 10"):
        evaluate(run, EvaluateConfig(tokens=10))
    assert not (run / "evaluation").exists()


def test_results_are_there_before_the_comparison(make_folder, monkeypatch):
    ours, theirs = make_folder("ours"), make_folder("theirs", seed=1)

    def fail(*_: object) -> None:
        raise FloatingPointError

    monkeypatch.setattr("depthroute.evaluate.run._compare", fail)
    with pytest.raises(FloatingPointError):
        evaluate(ours, EvaluateConfig(tokens=96, compare_with=str(theirs)))
    stored = json.loads((ours / "evaluation/results.json").read_text())
    assert stored["loss"]["tokens"] == 96
    assert stored["comparison"] is None


@needs_harness
@ignore_foreign_warnings
def test_a_task_that_cannot_be_loaded_is_found_out_before_the_work(make_folder, tasks):
    run = make_folder("run", "data.context=64")
    with pytest.raises(ValueError, match="tasks: far cannot be run: its data are missing"):
        evaluate(run, EvaluateConfig(tasks="choice, far", include_path=str(tasks)))
    assert not (run / "evaluation").exists()


def tasks_beside(theirs, tasks):
    """Return the settings of a comparison by two tasks alone."""
    return EvaluateConfig(
        tokens=0, tasks="choice, few", include_path=str(tasks), compare_with=str(theirs)
    )


@needs_harness
@ignore_foreign_warnings
def test_the_other_runs_lines_and_notes_are_named(make_folder, tasks):
    ours = make_folder("ours", "data.context=64")
    theirs = make_folder("theirs", "data.context=16", seed=1)
    result = evaluate(ours, tasks_beside(theirs, tasks))
    said = format_evaluation(result)
    assert re.search(rf"choice: \d+ requests to {theirs} were longer than its context", said)
    assert f"requests to {ours}" not in said
    other = result.comparison.theirs
    other = other._replace(tasks=other.tasks[::-1])
    turned = result._replace(comparison=result.comparison._replace(theirs=other))
    assert table(format_evaluation(turned)) == table(said)


def test_one_window_has_no_interval(make_folder):
    ours, theirs = make_folder("ours"), make_folder("theirs", seed=1)
    result = evaluate(ours, EvaluateConfig(tokens=16, compare_with=str(theirs)))
    said = table(format_evaluation(result))["loss, nats per token"]
    assert said[4:] == [f"{result.comparison.loss_nats.mean:+.4f}", "-"]


def test_progress_stays_off_standard_output(make_folder, monkeypatch, capsys):
    clock = itertools.count(0, 60)
    monkeypatch.setattr("depthroute.evaluate.progress.time.monotonic", lambda: next(clock))
    evaluate(make_folder(), EvaluateConfig(tokens=96, batch_size=1))
    said = capsys.readouterr()
    assert "run evaluation step 6/6" in said.err
    assert said.out == ""


@needs_harness
@ignore_foreign_warnings
def test_tasks_show_a_bar_on_a_terminal(make_folder, monkeypatch, tasks):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "stderr", Terminal())
    evaluate(make_folder(), EvaluateConfig(tokens=0, tasks="choice", include_path=str(tasks)))
    assert re.search("run evaluation .*━", sys.stderr.getvalue())


def test_a_perplexity_beyond_any_float_is_infinite(make_folder, tmp_path, tiny_dataset):
    model = load_model(make_folder())
    with torch.no_grad():
        model.lm_head.weight.mul_(10_000)
    subject = Subject.of(model, load_tokenizer("bytes"), context=16, data=str(tiny_dataset))
    result = evaluate(subject, EvaluateConfig(tokens=96, out=str(tmp_path)))
    assert table(format_evaluation(result))["perplexity"][0] == "inf"
    assert json.loads((tmp_path / "results.json").read_text())["loss"]["perplexity"] is None
    assert result.loss.total.record(1)["val/perplexity"] is None


def test_numbers_that_json_cannot_say_are_null(make_folder, monkeypatch):
    run = make_folder()
    monkeypatch.setattr(
        "depthroute.evaluate.run._numbers", lambda *_: {"a": [math.nan, 1.0], "b": math.inf}
    )
    evaluate(run, EvaluateConfig(tokens=96))
    assert json.loads((run / "evaluation/results.json").read_text()) == {
        "a": [None, 1.0],
        "b": None,
    }


@needs_harness
@ignore_foreign_warnings
def test_accuracies_are_compared_item_by_item(make_folder, tasks):
    ours = make_folder("ours", "data.context=64")
    theirs = make_folder("theirs", "data.context=64", seed=1)
    result = evaluate(ours, tasks_beside(theirs, tasks))
    pairs = zip(result.tasks, result.comparison.theirs.tasks, strict=True)
    differences = {}
    for mine, other in pairs:
        found = result.comparison.tasks[mine.name]
        assert found.mean == pytest.approx(mine.value - other.value)
        assert found.low <= found.mean <= found.high
        differences[mine.name] = found.mean
    assert set(differences.values()) != {0.0}
    mean = result.comparison.mean
    assert mean.mean == pytest.approx(sum(differences.values()) / 2)
    said = table(format_evaluation(result))
    assert said["mean of tasks"][2] == "2 tasks"
    assert said["mean of tasks"][4] == f"{100 * mean.mean:+.2f}"
    assert said["choice (acc_norm)"][0] == f"{100 * result.tasks[0].value:.2f}"
    stored = json.loads((ours / "evaluation/results.json").read_text())
    assert stored["environment"]["lm_eval"]
    assert stored["comparison"]["mean"]["low"] == mean.low
    assert stored["tasks"]["few"]["scores"] == result.tasks[1].scores.tolist()


@pytest.mark.dist
@needs_harness
@ignore_foreign_warnings
def test_two_processes_give_what_one_gives(make_folder, tasks, tmp_path):
    run = make_folder("run", "data.context=64")
    settings = ["tokens=320", "batch_size=2", "tasks=choice,text", f"include_path={tasks}"]
    alone = evaluate(run, load(EvaluateConfig, None, [*settings, f"out={tmp_path / 'one'}"]))
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]
    command = ["-c", "from depthroute.cli import main; main()", "evaluate", run, *settings]
    ended = subprocess.run(
        [sys.executable, *launch, sys.executable, *command, f"out={tmp_path / 'two'}"],
        env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == format_evaluation(alone) + "\n"  # of one process only
    one, two = (
        json.loads((tmp_path / name / "results.json").read_text()) for name in ("one", "two")
    )
    assert one.pop("config") | {"out": None} == two.pop("config") | {"out": None}
    assert one == two
    parts = [len(list((tmp_path / "two/progress").glob(f"*.{r}.jsonl"))) for r in (0, 1)]
    assert parts == [3, 3]  # loss, choices and texts


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tokens": 0}, "nothing to measure"),
        ({"tokens": -1}, "tokens must be"),
        ({"out": ""}, "out must be a folder"),
        ({"limit": 0}, "limit must be >= 1"),
        ({"batch_size": 0}, "batch_size must be >= 1, got 0"),
        ({"bootstrap": 10}, "bootstrap must be >= 100, got 10"),
        ({"num_fewshot": -1}, "num_fewshot must be >= 0, got -1"),
        ({"tasks": "a,,b"}, "tasks must be different names"),
        ({"tasks": ("a", "a")}, "tasks must be different names"),
    ],
)
def test_wrong_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        EvaluateConfig(**settings)


def test_tasks_without_the_harness_name_the_extra(make_folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ImportError, match=r'pip install "depthroute\[eval\]"'):
        evaluate(make_folder(), EvaluateConfig(tasks="paper8"))


def test_a_dataset_that_the_model_does_not_know_is_refused(make_folder, tmp_path):
    big = tmp_path / "big"
    settings = PrepareConfig(source="stdlib", tokenizer="bpe:300", max_documents=5, val_fraction=0)
    prepare(settings, big)
    with pytest.raises(ValueError, match="has 300 tokens, the model knows 257"):
        evaluate(make_folder(), EvaluateConfig(data=str(big), split="train"))


def test_a_loss_in_bfloat16_is_close(make_folder):
    run = make_folder()
    exact, rounded = (
        evaluate(run, EvaluateConfig(tokens=96, compute_dtype=dtype)).loss.total.loss_nats
        for dtype in ("float32", "bfloat16")
    )
    assert rounded != exact
    assert rounded == pytest.approx(exact, rel=0.02)
    assert torch.isfinite(torch.tensor(rounded))
