"""A run folder whose model was not trained, but is far from uniform; tasks of local files."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from depthroute.models import CausalLM
from depthroute.train.checkpoint import save_checkpoint
from depthroute.train.run import RunFolder, open_dataset, resolve

WORDS = ("ab", "cad", "bb a", "d", "dada c", "ca", "bad", "acab d")
_TASK = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: {kind}
doc_to_text: "{{{{question}}}}"
{rest}
"""
_CHOICE = """
doc_to_choice: choices
doc_to_target: answer
metric_list:
  - metric: acc
  - metric: acc_norm
"""
_GROUP = """
group: pair
task: [choice, few]
"""
_TEXT = """
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["a"], max_gen_toks: 6, do_sample: false}
metric_list:
  - metric: exact_match
"""
_ROLLING = """
doc_to_target: "{{question}}"
metric_list:
  - metric: byte_perplexity
"""

MakeFolder = Callable[..., Path]


@pytest.fixture
def make_folder(make_run, tmp_path) -> MakeFolder:
    """Make a run folder with a checkpoint of step 1, with `key=value` over the tiny run."""

    def make(name: str = "run", *overrides: str, seed: int = 0) -> Path:
        config = make_run(f"out={tmp_path / name}", "model.init_std=0.4", *overrides)
        config = resolve(config, open_dataset(config.data.path))
        model = CausalLM(config.model, seed=seed)
        source = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.model.residual.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=source))
        folder = RunFolder(config)
        folder.start(1)
        save_checkpoint(folder.checkpoints, 1, model, [], keep=1)
        return folder.path

    return make


@pytest.fixture
def model(make_folder) -> CausalLM:
    from depthroute.train import load_model

    return load_model(make_folder())


@pytest.fixture
def questions() -> list[dict]:
    draw = random.Random(3)
    return [
        {
            "question": " ".join(draw.choices(WORDS, k=4)) + "?",
            "choices": draw.sample(WORDS, k=3 + i % 2),
            "answer": draw.randrange(3),
        }
        for i in range(20)
    ]


@pytest.fixture
def tasks(tmp_path, questions, monkeypatch) -> Path:
    """Write tasks of local files, and a cache folder that is the test's own."""
    datasets = pytest.importorskip("datasets")

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()
    folder = tmp_path / "tasks"
    folder.mkdir()
    kinds = {
        "choice": (20, "multiple_choice", _CHOICE),
        "few": (6, "multiple_choice", _CHOICE),
        "text": (8, "generate_until", _TEXT),
        "rolling": (5, "loglikelihood_rolling", _ROLLING),
    }
    for name, (count, kind, rest) in kinds.items():
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(one) + "\n" for one in questions[:count]))
        text = _TASK.format(name=name, data=data, kind=kind, rest=rest)
        (folder / f"{name}.yaml").write_text(text)
    (folder / "pair.yaml").write_text(_GROUP)
    (folder / "far.yaml").write_text("task: far\ndataset_path: nobody/nothing\n")
    return folder
