import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from depthroute.data import Batch, TokenDataset, TokenLoader, TokenWriter
from depthroute.models import CausalLM
from depthroute.nn import Documents
from depthroute.ops import backend
from depthroute.optim import schedule_factor
from depthroute.train import RunConfig, load_model, train, trainer
from depthroute.train.checkpoint import list_checkpoints
from depthroute.train.run import RunFolder, resolve
from helpers import assert_close, full_disk

# makes the first AdamW update proportional to the gradient, where it is nearly its sign
LINEAR_ADAMW = "optim.adamw.eps=1e3"


def metrics(folder: Path) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if "train/loss_nats" in record]


def weights(folder: Path) -> dict[str, Tensor]:
    return load_model(folder).state_dict()


def first_batch(config: RunConfig) -> Batch:
    loader = TokenLoader(
        TokenDataset(config.data.path).split("train"),
        context=config.data.context,
        global_batch=config.train.batch_size,
        seed=config.train.seed,
    )
    return loader.batch(0)


def initial_model(config: RunConfig) -> CausalLM:
    return CausalLM(resolve(config, TokenDataset(config.data.path)).model, seed=config.train.seed)


def objective(model: CausalLM, batch: Batch, *, masked: bool = True) -> tuple[Tensor, Tensor]:
    """Return mean cross-entropy and mean squared log-sum-exp over tokens with a target."""
    documents = Documents(batch.cu_seqlens, batch.max_seqlen) if masked else None
    logits, targets = model(batch.ids, documents=documents).flatten(0, 1), batch.targets.flatten()
    known = targets >= 0
    squares = logits.logsumexp(-1).square()[known].mean()
    return F.cross_entropy(logits, targets, ignore_index=-100), squares


class UnevenTargets(TokenLoader):
    """Batches whose first row has no target at all, and whose second has three."""

    def batch(self, step: int) -> Batch:
        batch = super().batch(step)
        targets = batch.targets.clone()
        targets[0] = -100
        targets[1, 3:] = -100
        return batch._replace(targets=targets)


def write_dataset(folder: Path, *splits: str) -> Path:
    """Write one sentence many times, without a tokenizer."""
    with TokenWriter(folder, vocab_size=257, end_id=256) as writer:
        for split in splits:
            for _ in range(40):
                writer.add(split, list(b"to be or not to be"))
    return folder


def test_model_learns_a_sentence_by_heart(make_run, tmp_path):
    folder = write_dataset(tmp_path / "sentence", "train", "val")
    result = train(
        make_run(
            f"data.path={folder}", "train.steps=60", "train.log_every=60", "optim.adamw.lr=0.02"
        )
    )
    losses = [record["train/loss_nats"] for record in metrics(result.path)]
    assert losses[0] == pytest.approx(math.log(257), abs=0.1)  # nothing known yet
    # windows begin anywhere in the sentence, so that their first tokens stay a guess
    assert losses[-1] < 0.5
    assert result.validation is not None
    assert result.validation.loss_nats < 0.5
    assert result.validation.bits_per_byte is None  # without a tokenizer nobody knows the bytes


def test_dataset_must_have_a_validation_split(make_run, tmp_path):
    folder = write_dataset(tmp_path / "train_only", "train")
    with pytest.raises(ValueError, match='no split "val"'):
        train(make_run(f"data.path={folder}"))


@pytest.mark.parametrize("masked", [True, False])
def test_first_step_reports_the_loss_and_gradient_of_the_initial_model(make_run, masked):
    config = make_run(
        "train.steps=1",
        "train.micro_batch_size=2",
        "optim.z_loss=0.1",
        "optim.clip_norm=1e-3",
        f"data.mask_documents={str(masked).lower()}",
    )
    (record,) = metrics(train(config).path)
    model = initial_model(config)
    cross_entropy, squares = objective(model, first_batch(config), masked=masked)
    (cross_entropy + 0.1 * squares).backward()
    norm = torch.stack([p.grad.square().sum() for p in model.parameters()]).sum().sqrt()
    assert record["train/loss_nats"] == pytest.approx(cross_entropy.item(), rel=1e-6)
    assert record["train/z_loss_nats"] == pytest.approx(0.1 * squares.item(), rel=1e-6)
    assert record["train/grad_norm"] == pytest.approx(norm.item(), rel=1e-5)  # before the clip


def test_step_takes_the_clipped_gradient(make_run):
    settings = ("train.steps=1", "optim.clip_norm=0.01", "optim.schedule.warmup_steps=0")
    config = make_run(*settings, LINEAR_ADAMW, "optim.adamw.lr=1e4", "optim.z_loss=0")
    model = initial_model(config)
    objective(model, first_batch(config))[0].backward()
    norm = torch.stack([p.grad.square().sum() for p in model.parameters()]).sum().sqrt()
    trained = weights(train(config).path)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        parameter = model.get_parameter(name)
        clipped = parameter.grad * (0.01 / norm)
        moved = trained[name] - parameter.detach()
        assert_close(moved, -1e4 * clipped / (clipped.abs() + 1e3), name, rtol=1e-3)


@pytest.mark.parametrize("loader", [TokenLoader, UnevenTargets])
def test_step_does_not_depend_on_the_micro_batch(make_run, tmp_path, monkeypatch, loader):
    monkeypatch.setattr(trainer, "TokenLoader", loader)
    results = {}
    for size in (1, 2, 4):
        settings = ("train.steps=1", f"train.micro_batch_size={size}", LINEAR_ADAMW)
        path = train(make_run(*settings, f"out={tmp_path / str(size)}")).path
        results[size] = metrics(path)[0], weights(path)
    record, expected = results[4]
    for size in (1, 2):
        for name in ("train/loss_nats", "train/z_loss_nats", "train/grad_norm"):
            assert results[size][0][name] == pytest.approx(record[name], rel=1e-5), name
        for name, weight in results[size][1].items():
            assert (weight - expected[name]).abs().max() < 1e-6, name


def test_rows_without_targets_count_for_nothing(make_run, monkeypatch):
    monkeypatch.setattr(trainer, "TokenLoader", UnevenTargets)
    config = make_run("train.steps=1", "train.micro_batch_size=1", "optim.z_loss=0")
    (record,) = metrics(train(config).path)
    batch = first_batch(config)
    targets = batch.targets.clone()
    targets[0], targets[1, 3:] = -100, -100
    model = initial_model(config)
    cross_entropy, _ = objective(model, batch._replace(targets=targets))
    cross_entropy.backward()
    norm = torch.stack([p.grad.square().sum() for p in model.parameters()]).sum().sqrt()
    assert record["train/loss_nats"] == pytest.approx(cross_entropy.item(), rel=1e-6)
    assert record["train/grad_norm"] == pytest.approx(norm.item(), rel=1e-5)


def test_metrics_have_one_record_a_step_in_named_units(make_run):
    config = make_run("train.log_every=4", "train.val_every=3", "optim.schedule.floor=0.25")
    path = train(config).path
    records = metrics(path)
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]
    assert [record["train/tokens"] for record in records] == [64 * n for n in range(1, 7)]
    for record in records:
        factor = schedule_factor(record["step"] - 1, 6, config.optim.schedule)
        assert record["lr/muon"] == pytest.approx(factor * 0.02)
        assert record["lr/adamw"] == pytest.approx(factor * 0.003)
        assert record["perf/step_s"] > 0
        assert record["perf/tokens_per_s"] == pytest.approx(64 / record["perf/step_s"])
    every = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    validations = [record for record in every if "val/loss_nats" in record]
    assert [record["step"] for record in validations] == [3, 6]
    for record in validations:
        assert record["val/perplexity"] == pytest.approx(math.exp(record["val/loss_nats"]))
        assert record["val/tokens"] == 160


def test_divergence_stops_the_run_and_leaves_the_last_checkpoint(make_run):
    config = make_run("optim.adamw.lr=1e30", "optim.schedule.warmup_steps=0", "train.save_every=1")
    with pytest.raises(FloatingPointError, match=r"^step 2: loss nan.*lower the learning rates"):
        train(config)
    path = Path(config.out)
    assert [found.name for found in list_checkpoints(path / "checkpoints")] == ["step_00000001"]
    assert [record["step"] for record in metrics(path)] == [1]


def test_bfloat16_computes_in_it_and_keeps_float32_weights(make_run, tmp_path):
    losses = {}
    for dtype in ("float32", "bfloat16"):
        settings = (f"train.compute_dtype={dtype}", f"out={tmp_path / dtype}")
        result = train(make_run(*settings))
        losses[dtype] = [record["train/loss_nats"] for record in metrics(result.path)]
        for name, weight in weights(result.path).items():
            assert weight.dtype == torch.float32, name
            assert weight.isfinite().all(), name
    assert losses["bfloat16"] != losses["float32"]
    assert losses["bfloat16"] == pytest.approx(losses["float32"], rel=0.01)


@pytest.mark.parametrize("key", ["tail", "projected"])
def test_checkpointing_modes_give_the_same_weights_bit_for_bit(make_run, tmp_path, key):
    results = {}
    for mode in ("none", "layer", "depth_block"):
        settings = (f"train.checkpointing={mode}", f"out={tmp_path / mode}")
        table = f'model.residual.key={{name="{key}", rank=4}}'
        results[mode] = weights(train(make_run(*settings, table)).path)
    for mode in ("layer", "depth_block"):
        for name, weight in results[mode].items():
            assert torch.equal(weight, results["none"][name]), (mode, name)


def test_seed_decides_weights_and_order(make_run, tmp_path):
    first, again, other = (
        metrics(train(make_run(f"train.seed={seed}", f"out={tmp_path / name}")).path)
        for name, seed in (("first", 5), ("again", 5), ("other", 6))
    )
    losses = [[record["train/loss_nats"] for record in run] for run in (first, again, other)]
    assert losses[0] == losses[1]
    assert losses[0] != losses[2]


def test_vocabulary_comes_from_the_dataset_and_may_be_larger(make_run, tmp_path):
    with pytest.raises(ValueError, match=r"model\.vocab_size must be at least .* 257, got 256"):
        train(make_run("model.vocab_size=256"))
    path = train(make_run("train.steps=1", f"out={tmp_path / 'exact'}")).path
    assert load_model(path).config.vocab_size == 257
    path = train(make_run("train.steps=1", "model.vocab_size=300", f"out={tmp_path / 'more'}")).path
    assert load_model(path).lm_head.weight.shape == (300, 16)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_missing_cuda_is_an_error(make_run):
    with pytest.raises(ValueError, match="torch sees no CUDA device"):
        train(make_run("train.device=cuda"))


def test_complete_run_is_read_from_its_folder(make_run, monkeypatch):
    first = train(make_run())
    folder = first.path
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    monkeypatch.setattr(trainer, "CausalLM", None)  # building a model again would fail
    assert train(make_run()) == first
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("lost", ["all", "the last line", "the end of the last line"])
def test_complete_run_that_lost_its_result_is_validated_again(make_run, lost):
    first = train(make_run())
    file = first.path / "metrics.jsonl"
    if lost == "all":
        file.unlink()
    elif lost == "the last line":
        file.write_text("".join(file.read_text().splitlines(keepends=True)[:-1]))
    else:
        file.write_text(file.read_text()[:-20])
    assert train(make_run()) == first
    assert json.loads(file.read_text().splitlines()[-1])["val/loss_nats"] > 0
    assert train(make_run()) == first


@pytest.mark.parametrize("scheme", ["attn_res", "prenorm"])
def test_report_says_once_what_runs_the_reads(scheme, make_run, monkeypatch, capsys):
    monkeypatch.setattr(backend, "_said", set())
    logger = logging.getLogger("depthroute.ops")
    before = logger.level, list(logger.handlers)
    train(make_run("train.device=cpu", f"model.residual.name={scheme}"))
    lines = [line for line in capsys.readouterr().out.splitlines() if " runs in " in line]
    assert all(line.endswith("runs in plain PyTorch: the tensors are on cpu") for line in lines)
    routed = ["depth_attend", "depth_merge"] if scheme == "attn_res" else []
    names = [line.partition(" runs in ")[0] for line in lines]
    assert sorted(names) == [*routed, "the block schedule"]
    assert (logger.level, logger.handlers) == before


@pytest.mark.parametrize("wanted", [True, False])
def test_deterministic_asks_torch_and_leaves_it_as_it_was(wanted, make_run, monkeypatch):
    seen = []
    step = trainer._Trainer.step

    def note(self, number):
        seen.append(torch.are_deterministic_algorithms_enabled())
        step(self, number)

    monkeypatch.setattr(trainer._Trainer, "step", note)
    train(make_run("train.steps=2", f"train.deterministic={str(wanted).lower()}"))
    assert seen == [wanted] * 2
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_full_disk_names_the_metrics(make_run):
    folder = RunFolder(make_run())
    folder.start(0)
    with full_disk(), pytest.raises(OSError, match=r"File too large: '.*/run/metrics\.jsonl'"):
        folder.log([{"step": 1}])
