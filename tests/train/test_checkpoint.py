import copy
import logging
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.optim import Optimizer

from depthroute.models import CausalLM
from depthroute.models.compile import compile_model
from depthroute.optim import OptimConfig, build_optimizers, parameter_groups
from depthroute.train.checkpoint import (
    list_checkpoints,
    load_checkpoint,
    load_weights,
    save_checkpoint,
)
from helpers import VARIANTS, full_disk, tiny_model


def read(path: Path) -> dict[str, Any]:
    """Read a checkpoint with torch's own converter."""
    dcp_to_torch_save(path, path.parent / "whole.pt")
    return torch.load(path.parent / "whole.pt", weights_only=False)


def setting(
    variant: str = "p_lr", *, steps: int = 0, **changes
) -> tuple[CausalLM, list[Optimizer]]:
    """Return a model and its optimisers after some steps of random gradients."""
    model = tiny_model(VARIANTS[variant], **changes)
    optimizers = build_optimizers(parameter_groups(model), OptimConfig())
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        for optimizer in optimizers:
            optimizer.step()
    return model, optimizers


def averages(model: nn.Module, optimizers: list[Optimizer]) -> dict[tuple[str, str], Tensor]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {
        (names[parameter], key): value
        for optimizer in optimizers
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
    }


def test_loading_restores_weights_averages_step_and_random_states(tmp_path):
    model, optimizers = setting(steps=3)
    path = save_checkpoint(tmp_path, 3, model, optimizers, keep=1)
    expected = torch.rand(4), random.random()

    other, other_optimizers = setting()
    assert load_checkpoint(path, other, other_optimizers) == 3
    assert torch.equal(torch.rand(4), expected[0])
    assert random.random() == expected[1]
    for name, weight in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], weight), name
    wanted, found = averages(model, optimizers), averages(other, other_optimizers)
    keys = {key for _, key in wanted}
    assert keys == {"momentum_buffer", "exp_avg", "exp_avg_sq", "step"}
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        assert torch.equal(found[key], value), key


def test_weights_alone_can_be_loaded(tmp_path):
    model, optimizers = setting("s_lr", steps=1, tie_word_embeddings=True)
    path = save_checkpoint(tmp_path, 1, model, optimizers, keep=1)
    other = CausalLM(model.config, seed=None)
    load_weights(path, other)
    for name, weight in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], weight), name
    assert other.lm_head.weight is other.model.embed_tokens.weight


def test_checkpoints_are_ordered_by_the_number_of_their_step(tmp_path):
    for step in (999_999_999, 9, 10, 100_000_000, 99_999_999, 1_000_000_000):
        (tmp_path / f"step_{step:08d}").mkdir()
    for other in (".writing_step_00000011", "step_", "step_12x", "latest"):
        (tmp_path / other).mkdir()
    names = [path.name for path in list_checkpoints(tmp_path)]
    assert names == [
        "step_00000009",
        "step_00000010",
        "step_99999999",
        "step_100000000",
        "step_999999999",
        "step_1000000000",
    ]


def test_folder_that_does_not_exist_has_no_checkpoints(tmp_path):
    assert list_checkpoints(tmp_path / "none") == []


def test_newest_checkpoints_are_kept_and_leftovers_removed(tmp_path):
    model, optimizers = setting("prenorm")
    (tmp_path / ".writing_step_00000001").mkdir()
    for step in (9, 10, 11):
        save_checkpoint(tmp_path, step, model, optimizers, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000010", "step_00000011"]


def test_saving_a_step_again_replaces_it(tmp_path):
    model, optimizers = setting("prenorm")
    save_checkpoint(tmp_path, 5, model, optimizers, keep=2)
    with torch.no_grad():
        model.lm_head.weight.fill_(7.0)
    save_checkpoint(tmp_path, 5, model, optimizers, keep=2)
    load_weights(tmp_path / "step_00000005", other := setting("prenorm")[0])
    assert (other.lm_head.weight == 7.0).all()


def test_failed_write_leaves_the_checkpoints_before_it(tmp_path, monkeypatch):
    model, optimizers = setting("prenorm")
    save_checkpoint(tmp_path, 1, model, optimizers, keep=1)

    def fail(*args: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("depthroute.train.checkpoint.os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        save_checkpoint(tmp_path, 2, model, optimizers, keep=1)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_00000001"]


def test_a_full_disk_names_the_checkpoint(tmp_path):
    model, optimizers = setting("prenorm")
    with full_disk(), pytest.raises(OSError, match="File too large") as raised:
        save_checkpoint(tmp_path, 2, model, optimizers, keep=1)
    (line,) = str(raised.value).splitlines()
    assert line.startswith(f"{tmp_path / 'step_00000002'} cannot be written: ")
    assert list_checkpoints(tmp_path) == []


def assert_refused(
    path: Path, model: CausalLM, optimizers: list[Optimizer], *, reason: str
) -> None:
    """Expect one line that names the checkpoint and the reason, from both ways to load it."""
    for load in (
        lambda: load_checkpoint(path, model, optimizers),
        lambda: load_weights(path, model),
    ):
        with pytest.raises(ValueError, match=reason) as raised:
            load()
        lines = str(raised.value).splitlines()
        assert len(lines) == 1
        assert lines[0].startswith(f"{path} cannot be loaded into this model: ")
        assert raised.value.__cause__ is not None


DAMAGE = {
    "missing": Path.unlink,
    "empty": lambda file: file.write_bytes(b""),
    "cut": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
    "zeros": lambda file: file.write_bytes(bytes(file.stat().st_size)),
    "text": lambda file: file.write_bytes(b"hello world"),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_damaged_checkpoint_is_refused_in_one_line(tmp_path, caplog, name, damage):
    model, optimizers = setting("prenorm", steps=1)
    path = save_checkpoint(tmp_path, 1, model, optimizers, keep=1)
    DAMAGE[damage](path / name)
    assert_refused(path, model, optimizers, reason=r": [\w.]*Error")
    shown = [one for one in caplog.records if "NullHandler" not in one.name]
    assert [one for one in shown if one.levelno >= logging.WARNING] == []


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"variant": "attn_res_full"}, r"Missing key .*model\.residual\.query"),
        ({"hidden_size": 64}, r"Size mismatch .*\[61, 32\].*\[61, 64\].*embed_tokens\.weight"),
    ],
)
def test_checkpoint_of_another_model_is_refused(tmp_path, other, reason):
    model, optimizers = setting("prenorm", steps=1)
    path = save_checkpoint(tmp_path, 1, model, optimizers, keep=1)
    assert_refused(path, *setting(**{"variant": "prenorm", **other}), reason=reason)


def test_weights_that_a_model_has_no_place_for_are_refused(tmp_path):
    model, optimizers = setting("attn_res_full", steps=1)
    path = save_checkpoint(tmp_path, 1, model, optimizers, keep=1)
    other, _ = setting("prenorm")
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(ValueError, match=r"the model lacks model\.model\.residual\.query"):
        load_weights(path, other)
    assert all(torch.equal(x, before[name]) for name, x in other.state_dict().items())


@pytest.mark.parametrize("mode", ["sublayer", "model"])
def test_compiled_and_checkpointed_models_save_the_same_names(tmp_path, mode):
    plain, plain_optimizers = setting(steps=1)
    expected = read(save_checkpoint(tmp_path / "plain", 1, plain, plain_optimizers, keep=1))
    assert expected["model"].keys() == dict(plain.named_parameters()).keys()

    model, optimizers = setting(steps=1)
    compile_model(model, mode)
    model.model.checkpointing = "layer"
    path = save_checkpoint(tmp_path / "compiled", 1, model, optimizers, keep=1)
    found = read(path)
    assert found["model"].keys() == expected["model"].keys()
    assert found["optimizers"].keys() == expected["optimizers"].keys()
    assert found["optimizers"]["state"].keys() == expected["optimizers"]["state"].keys()
    load_checkpoint(path, plain, plain_optimizers)
    for name, weight in model.state_dict().items():
        assert torch.equal(plain.state_dict()[name], weight), name
