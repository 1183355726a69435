"""What can be evaluated: a run, its export, and a model in memory, which give the same."""

import json
import shutil
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from depthroute.convert import ExportConfig, export_run, to_hugging_face
from depthroute.data import PrepareConfig, load_tokenizer, prepare
from depthroute.evaluate import EvaluateConfig, Evaluation, Subject, evaluate
from depthroute.models import CausalLM
from depthroute.train import load_model, train
from helpers import VARIANTS, tiny_model

needs_transformers = pytest.mark.skipif(
    find_spec("transformers") is None, reason='needs pip install "depthroute[hf]"'
)


@pytest.fixture
def run(make_run) -> Path:
    return train(
        make_run(
            "train.steps=30",
            "data.context=64",
            "model.residual.key={name='projected', rank=4}",
            "model.low_rank={rank=5, scope=['gate', 'o']}",
        )
    ).path


def scores_of(result: Evaluation, out: Path) -> list[float]:
    """Return every log-likelihood that an evaluation kept."""
    lines = (json.loads(line) for line in _lines(out) if line)
    rows = [row for _, batch in lines for row in batch]
    return sorted(row[0] for row in rows if isinstance(row, list) and isinstance(row[1], bool))


def _lines(out: Path) -> list[str]:
    return [
        line for file in (out / "progress").glob("*.jsonl") for line in file.read_text().split("\n")
    ]


@needs_transformers
@pytest.mark.parametrize("with_code", [False, True], ids=["import", "with_code"])
def test_an_export_has_the_loss_of_its_run(run, tiny_dataset, tmp_path, with_code):
    folder = tmp_path / "hf"
    export_run(run, folder, ExportConfig(), with_code=with_code)
    expected = evaluate(run, EvaluateConfig(batch_size=3))
    found = evaluate(folder, EvaluateConfig(batch_size=3, data=str(tiny_dataset)))
    assert found.loss.source == expected.loss.source
    assert found.loss.sums_nats == pytest.approx(expected.loss.sums_nats, rel=1e-5)
    assert found.loss.total == pytest.approx(expected.loss.total, rel=1e-5)
    assert (found.run, found.checkpoint) == (str(folder), None)
    assert json.loads((folder / "evaluation/results.json").read_text())["run"] == str(folder)


@needs_transformers
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
@pytest.mark.parametrize("with_code", [False, True], ids=["import", "with_code"])
def test_an_export_has_the_scores_and_texts_of_its_run(run, tasks, tmp_path, with_code):
    pytest.importorskip("lm_eval")
    folder = tmp_path / "hf"
    export_run(run, folder, ExportConfig(), with_code=with_code)
    config = EvaluateConfig(tokens=0, tasks="choice, few, text", include_path=str(tasks))
    results = [evaluate(place, config) for place in (run, folder)]
    ours, theirs = (
        scores_of(one, place / "evaluation")
        for one, place in zip(results, (run, folder), strict=True)
    )
    assert len(ours) == 20 * 3 + 10 + 6 * 3 + 3  # every second question has one choice more
    assert theirs == pytest.approx(ours, rel=1e-5)
    for one, other in zip(*(result.tasks for result in results), strict=True):
        assert other.items == one.items
        assert other.scores.tolist() == one.scores.tolist()


@needs_transformers
def test_runs_and_exports_are_compared_with_each_other(run, tiny_dataset, tmp_path):
    export_run(run, tmp_path / "hf", ExportConfig())
    config = EvaluateConfig(
        data=str(tiny_dataset), compare_with=str(tmp_path / "hf"), out=str(tmp_path / "out")
    )
    found = evaluate(run, config).comparison
    assert found.loss_nats.mean == pytest.approx(0.0, abs=1e-5)
    assert found.theirs.run == str(tmp_path / "hf")


def test_a_model_in_memory_is_measured_as_it_is(run, tiny_dataset, tmp_path):
    model = load_model(run)
    subject = Subject.of(
        model, load_tokenizer("bytes"), context=64, data=str(tiny_dataset), name="mine"
    )
    config = EvaluateConfig(tokens=640, out=str(tmp_path / "out"))
    first = evaluate(subject, config)
    assert first.loss == evaluate(run, EvaluateConfig(tokens=640)).loss
    assert first.run == "mine"
    with torch.no_grad():
        model.lm_head.weight.add_(0.1 * torch.randn_like(model.lm_head.weight))
    assert evaluate(subject, config).loss != first.loss  # not what was kept of the old weights
    with pytest.raises(ValueError, match="out: a model in memory"):
        evaluate(subject, EvaluateConfig())
    with pytest.raises(ValueError, match="measured as it is, got cpu, auto"):
        evaluate(subject, EvaluateConfig(device="cpu", out=str(tmp_path / "out")))


def test_equal_weights_of_another_config_are_measured_anew(run, tiny_dataset, tmp_path):
    model = load_model(run)
    other = CausalLM(replace(model.config, rope_theta=50.0))
    other.load_state_dict(model.state_dict())
    config = EvaluateConfig(tokens=640, out=str(tmp_path))
    losses = [
        evaluate(
            Subject.of(one, load_tokenizer("bytes"), context=64, data=str(tiny_dataset)), config
        ).loss
        for one in (model, other)
    ]
    assert losses[0] != losses[1]


def test_other_document_starts_are_another_source(run, tiny_dataset, tmp_path):
    shutil.copytree(tiny_dataset, tmp_path / "other")
    path = tmp_path / "other/manifest.json"
    content = json.loads(path.read_text())
    content["splits"]["val"]["shards"][0]["idx_sha256"] = "0"
    path.write_text(json.dumps(content))
    config = EvaluateConfig(tokens=64)
    found = [
        evaluate(run, replace(config, data=str(data))).loss.source
        for data in (tiny_dataset, tmp_path / "other")
    ]
    assert found[0] != found[1]


def test_a_model_in_bfloat16_has_results_of_its_own(run, tiny_dataset, tmp_path):
    model = load_model(run).to(torch.bfloat16)
    subject = Subject.of(model, load_tokenizer("bytes"), context=64, data=str(tiny_dataset))
    found = evaluate(subject, EvaluateConfig(tokens=640, out=str(tmp_path))).loss.total.loss_nats
    expected = evaluate(run, EvaluateConfig(tokens=640)).loss.total.loss_nats
    assert found != expected
    assert found == pytest.approx(expected, rel=0.02)


def test_context_and_document_mask_can_be_set(run):
    plain, short, unmasked = (
        evaluate(run, EvaluateConfig(tokens=640, **settings)).loss
        for settings in ({}, {"context": 32}, {"mask_documents": False})
    )
    assert (plain.context, short.context, unmasked.context) == (64, 32, 64)
    assert short.total.tokens == 640
    assert unmasked.sums_nats != plain.sums_nats
    with pytest.raises(ValueError, match="context must be >= 1, or left out for that of training"):
        EvaluateConfig(context=0)


def test_a_folder_that_is_neither_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"neither a run folder.*config\.toml.*config\.json"):
        evaluate(tmp_path, EvaluateConfig())


@needs_transformers
def test_what_an_export_cannot_say_is_asked_for(run, tiny_dataset, tmp_path):
    export_run(run, tmp_path / "hf", ExportConfig())
    with pytest.raises(ValueError, match=r"hf has no dataset of its own.*data=FOLDER.*tokens=0"):
        evaluate(tmp_path / "hf", EvaluateConfig())
    to_hugging_face(tiny_model(VARIANTS["s_lr"], vocab_size=257)).save_pretrained(tmp_path / "bare")
    config = EvaluateConfig(data=str(tiny_dataset), tokens=640)
    with pytest.raises(ValueError, match="bare holds no tokenizer"):
        evaluate(tmp_path / "bare", config)
    (tmp_path / "bare/tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"bare/tokenizer\.json: not a Hugging Face tokenizer"):
        evaluate(tmp_path / "bare", config)
    shutil.copyfile(tmp_path / "hf/tokenizer.json", tmp_path / "bare/tokenizer.json")
    with pytest.raises(ValueError, match=r"bare does not say how many tokens.*context=N"):
        evaluate(tmp_path / "bare", config)
    found = evaluate(
        tmp_path / "bare", EvaluateConfig(data=str(tiny_dataset), tokens=640, context=8)
    )
    assert found.loss.context == 8


@needs_transformers
def test_a_dataset_of_another_tokenizer_is_refused(run, tmp_path):
    export_run(run, tmp_path / "hf", ExportConfig())
    settings = PrepareConfig(source="stdlib", tokenizer="bpe:257", max_documents=5, val_fraction=0)
    prepare(settings, tmp_path / "bpe")
    config = EvaluateConfig(data=str(tmp_path / "bpe"), split="train")
    with pytest.raises(ValueError, match=r"made with the tokenizer huggingface-.* gives other ids"):
        evaluate(tmp_path / "hf", config)
