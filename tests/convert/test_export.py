"""A run as a folder that other programs load, and back."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils.hub import HF_MODULES_CACHE

from depthroute.config import load
from depthroute.convert import ExportConfig, export_run, import_model, to_hugging_face
from depthroute.convert.hugging_face import from_hugging_face
from depthroute.data import load_tokenizer
from depthroute.evaluate import EvaluateConfig, evaluate
from depthroute.models import CausalLM, generate
from depthroute.train import RunConfig, load_model, train
from depthroute.train.checkpoint import load_weights, newest_checkpoint
from depthroute.train.run import RunFolder
from helpers import VARIANTS, assert_close, tiny_model

# what a run needs beside its model
REST = ["out=o", "data.path=d", "data.context=8", "train.steps=1", "train.batch_size=1"]
PROMPT = "ab \u00e9"
ELSEWHERE = """
import json, sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if {hide} and name.partition(".")[0] == "depthroute":
            raise ModuleNotFoundError(f"No module named {{name!r}}")

sys.meta_path.insert(0, Hidden())
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

folder, again, prompt = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
ids = tokenizer(prompt, return_tensors="pt").input_ids
logits = []
for place in (folder, again):
    model = AutoModelForCausalLM.from_pretrained(place, trust_remote_code=True)
    logits.append(model(ids).logits.tolist())
    model.save_pretrained(again)
assert "depthroute" not in sys.modules or not {hide}
generator = pipeline("text-generation", model=folder, trust_remote_code=True)
text = generator(prompt, max_new_tokens=8, do_sample=False)[0]["generated_text"]
print(json.dumps({{"ids": ids.tolist(), "logits": logits, "text": text}}))
"""


@pytest.fixture
def run(make_run) -> Path:
    """Train long enough for clear preferences."""
    return train(make_run("train.steps=30", "model.residual.key={name='projected', rank=4}")).path


def elsewhere(folder: Path, tmp_path: Path, *, hide: bool) -> dict:
    """Load a folder in a process that has not imported depthroute, or cannot."""
    for name in ("HF_HOME", "HF_MODULES_CACHE"):
        (tmp_path / name).mkdir()
    places = {name: str(tmp_path / name) for name in ("HF_HOME", "HF_MODULES_CACHE")}
    # relative ones too; without the modules of the user's cache, which some libraries add
    paths = [os.path.abspath(path) for path in sys.path]
    paths = [path for path in paths if path != os.path.abspath(HF_MODULES_CACHE)]
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE.format(hide=hide), folder, tmp_path / "again", PROMPT],
        capture_output=True,
        stdin=subprocess.DEVNULL,
        text=True,
        env={
            **os.environ,
            **places,
            "PYTHONPATH": os.pathsep.join(paths),
            "HF_HUB_OFFLINE": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        },
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("with_code", [False, True], ids=["import", "with_code"])
def test_an_exported_run_works_in_another_process(run, tmp_path, with_code):
    folder = tmp_path / "my.model-1"
    export_run(run, folder, ExportConfig(), with_code=with_code)
    found = elsewhere(folder, tmp_path, hide=with_code)
    model = load_model(run)
    ids = torch.tensor([[256, *PROMPT.encode()]])
    assert found["ids"] == ids.tolist()
    for logits in found["logits"]:  # of the folder, and of what that process saved again
        torch.testing.assert_close(torch.tensor(logits), model(ids).detach())
    out = generate(model, ids, max_new_tokens=8, temperature=0, stop_id=256)
    expected = load_tokenizer("bytes").decode(out[0].tolist())
    assert found["text"] == expected
    assert len(expected) > len(PROMPT)


def test_a_folder_says_what_it_holds(run, tmp_path):
    export_run(run, tmp_path / "out", ExportConfig(license="apache-2.0"))
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"config.json", "model.safetensors", "modeling_depthroute.py", "README.md"} <= files
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["residual"]["key"] == {"name": "projected", "rank": 4, "block": "sum_of_normed"}
    assert (config["dtype"], config["max_position_embeddings"]) == ("float32", 16)
    assert GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == 256
    card = (tmp_path / "out/README.md").read_text()
    assert card.startswith("---\nlicense: apache-2.0\n")
    loss = [r["val/loss_nats"] for r in RunFolder.read(run) if "val/loss_nats" in r][-1]
    for text in (f"| val/loss_nats | {loss} |", "30 of 30 steps", "tokenizer bytes", "rank = 4\n"):
        assert text in card, text


def test_a_failed_export_leaves_nothing(run, tmp_path):
    (tmp_path / "taken").mkdir()
    with pytest.raises(FileExistsError, match="taken exists"):
        export_run(run, tmp_path / "taken", ExportConfig())
    with pytest.raises(ValueError, match='got "a: b"'):
        ExportConfig(license="a: b")
    before = {path.name for path in tmp_path.iterdir()}
    settings = (run / "config.toml").read_text()
    (run / "config.toml").write_text(
        settings.replace("intermediate_size = 24", "intermediate_size = 8")
    )
    with pytest.raises(ValueError, match="cannot be loaded into this model"):
        export_run(run, tmp_path / "out", ExportConfig())
    assert {path.name for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("name", ["prenorm", "p_lr", "denseformer", "oasis_depth_null"])
def test_a_model_survives_the_round_trip(tmp_path, name):
    model = tiny_model(VARIANTS[name])
    to_hugging_face(model).save_pretrained(tmp_path / "hf")
    import_model(tmp_path / "hf", tmp_path / "start")
    back = load(RunConfig, tmp_path / "start/start.toml", REST).model
    assert back.residual == model.config.residual
    ids = torch.arange(12).view(2, 6)
    copy = CausalLM(back, seed=None)
    load_weights(newest_checkpoint(tmp_path / "start"), copy)
    assert_close(copy(ids), model(ids))


def test_an_imported_model_trains_on(run, tmp_path, make_run):
    export_run(run, tmp_path / "hf", ExportConfig())
    import_model(tmp_path / "hf", tmp_path / "start")
    settings = (
        "train.steps=2",
        "model.residual.key={name='projected', rank=4}",
        "optim.schedule.warmup_steps=1000000",  # so slow that the loss stays
    )
    places = {"imported": tmp_path / "start", "own": run}
    losses = [
        train(make_run(*settings, f"train.init_from={place}", f"out={tmp_path / name}")).validation
        for name, place in places.items()
    ]
    assert losses[0] == losses[1]
    expected = [r["val/loss_nats"] for r in RunFolder.read(run) if "val/loss_nats" in r][-1]
    assert losses[0].loss_nats == pytest.approx(expected, abs=1e-4)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"^train\.init_from: .*empty has no checkpoint yet"):
        train(make_run(f"train.init_from={tmp_path / 'empty'}", f"out={tmp_path / 'no'}"))


def test_text_is_tokenised_alike_after_the_import(run, tmp_path):
    export_run(run, tmp_path / "hf", ExportConfig())
    import_model(tmp_path / "hf", tmp_path / "start")
    tokenizer = load_tokenizer(tmp_path / "start")
    assert tokenizer.encode(PROMPT) == list(PROMPT.encode())
    assert tokenizer.end_id == 256
    assert AutoTokenizer.from_pretrained(tmp_path / "hf")(PROMPT).input_ids[1:] == list(
        PROMPT.encode()
    )


def test_a_folder_that_does_not_fit_is_refused(tmp_path):
    to_hugging_face(tiny_model(VARIANTS["s_lr"])).save_pretrained(tmp_path / "hf")
    path = tmp_path / "hf/model.safetensors"
    tensors = load_file(path)
    query = tensors.pop("model.residual.query")
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"missing_keys.*model\.residual\.query"):
        import_model(tmp_path / "hf", tmp_path / "start")
    save_file(tensors | {"model.residual.query": query, "more": query + 1}, path, {"format": "pt"})
    with pytest.raises(ValueError, match=r"unexpected_keys.*more"):
        import_model(tmp_path / "hf", tmp_path / "start")
    with pytest.raises(ValueError, match="no Hugging Face folder"):
        import_model(tmp_path, tmp_path / "start")
    assert not (tmp_path / "start").exists()


DAMAGE = {
    "cut": ("model.safetensors", lambda file: file.write_bytes(file.read_bytes()[:-10])),
    "empty": ("model.safetensors", lambda file: file.write_bytes(b"")),
    "missing": ("model.safetensors", Path.unlink),
    "no_json": ("config.json", lambda file: file.write_text("{")),
    "no_table": ("config.json", lambda file: file.write_text("[]")),
    "no_dtype": (
        "config.json",
        lambda file: file.write_text(file.read_text().replace('"float32"', '"bf17"')),
    ),
    "other_kind": ("config.json", lambda file: file.write_text('{"model_type": "llama"}')),
    "other_shape": (
        "config.json",
        lambda file: file.write_text(
            file.read_text().replace('"vocab_size": 61', '"vocab_size": 60')
        ),
    ),
}


@pytest.mark.parametrize(("name", "damage"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_folder_is_named(tmp_path, name, damage):
    to_hugging_face(tiny_model(VARIANTS["s_lr"])).save_pretrained(tmp_path / "hf")
    damage(tmp_path / "hf" / name)
    with pytest.raises(ValueError, match=re.escape(str(tmp_path / "hf"))):
        import_model(tmp_path / "hf", tmp_path / "start")
    with pytest.raises(ValueError, match=re.escape(str(tmp_path / "hf"))):
        evaluate(tmp_path / "hf", EvaluateConfig())
    assert not (tmp_path / "start").exists()


def test_low_rank_maps_are_folded(make_run, tmp_path):
    run = train(make_run("model.low_rank={rank=5, scope=['gate', 'o']}")).path
    export_run(run, tmp_path / "folder", ExportConfig())
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "folder", trust_remote_code=True)
    assert model.config.low_rank["alpha"] == 0.0
    ids = torch.arange(6).unsqueeze(0)
    assert torch.equal(model(ids).logits, load_model(run)(ids))


def test_a_folder_of_another_kind_of_model_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match=r'model_type must be "depthroute", .*, got "llama"'):
        import_model(tmp_path, tmp_path / "start")


def test_another_kind_of_model_is_refused():
    model = tiny_model(VARIANTS["s_lr"])
    with pytest.raises(TypeError, match="model must be a CausalLM, got DepthRouteForCausalLM"):
        to_hugging_face(to_hugging_face(model))
    with pytest.raises(TypeError, match="shell must be a DepthRouteForCausalLM, got CausalLM"):
        from_hugging_face(model)
    shell = to_hugging_face(model)
    shell.__class__ = type("Mine", (type(shell),), {})
    assert from_hugging_face(shell).lm_head.weight is not None
