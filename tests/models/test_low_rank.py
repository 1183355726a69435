"""Decoders with low-rank maps: the fold, initial weights, training, names, groups."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from depthroute.models import CausalLM, fold
from depthroute.nn import DuplicatedLatentLinear, LowRankConfig
from depthroute.optim import OptimConfig, build_optimizers, parameter_groups
from depthroute.residual import PreNormConfig
from helpers import VARIANTS, assert_close, tiny_config, tiny_model

IDS = torch.arange(24).view(2, 12) * 17 % 61

# neither 5 nor 12 divides the widths 32 and 48; k and v have width 16
SETTINGS = {
    "all": LowRankConfig(rank=12),
    "mlp": LowRankConfig(rank=5, scope=("gate", "up", "down"), activation="identity"),
    "mixed": LowRankConfig(rank=7, ranks={"k": 3, "down": 20}, scope=("k", "o", "down"), alpha=0.6),
}


def plain(low_rank: LowRankConfig) -> LowRankConfig:
    return replace(low_rank, alpha=0.0)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("variant", ["prenorm", "attn_res_block3", "p_lr"])
def test_fold_keeps_the_logits(variant: str, settings: str) -> None:
    model = tiny_model(VARIANTS[variant], dtype=torch.float64, low_rank=SETTINGS[settings])
    logits = model(IDS)
    assert_close(fold(model)(IDS), logits, rtol=1e-10)
    assert_close(model(IDS), logits)  # the model itself is as it was


@pytest.mark.parametrize("settings", SETTINGS)
def test_folded_model_is_the_plain_low_rank_model(settings: str) -> None:
    low_rank = SETTINGS[settings]
    model = tiny_model(VARIANTS["p_lr"], low_rank=low_rank, tie_word_embeddings=True)
    model.model.compute_dtype = torch.bfloat16
    folded = fold(model)
    assert folded.config == replace(model.config, low_rank=plain(low_rank))
    backbone = CausalLM(folded.config, seed=None)
    backbone.load_state_dict(folded.state_dict())  # strict: names and shapes
    backbone.model.compute_dtype = torch.bfloat16
    assert torch.equal(backbone(IDS), model(IDS))  # B* is what the model multiplied by
    assert torch.equal(folded(IDS), model(IDS))
    assert folded.lm_head.weight is folded.model.embed_tokens.weight


def test_fold_moves_only_the_copies_into_b() -> None:
    model = tiny_model(PreNormConfig(), low_rank=SETTINGS["mixed"])
    before, after = model.state_dict(), fold(model).state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    names = [f"model.layers.{i}" for i in range(4)]
    parts = ["self_attn.k_proj", "self_attn.o_proj", "mlp.down_proj"]
    assert changed == {f"{name}.{part}.weight" for name in names for part in parts}
    step = (
        after["model.layers.0.mlp.down_proj.weight"] - before["model.layers.0.mlp.down_proj.weight"]
    )
    expected = torch.zeros(32, 20)
    for o in range(32):
        expected[o, o // 2] = 0.6 / 2**0.5  # 32 outputs, 20 latents: 2 copies each
    assert_close(step, expected)


@pytest.mark.parametrize("low_rank", [None, SETTINGS["all"]], ids=["full", "low_rank"])
def test_folding_again_changes_nothing(low_rank: LowRankConfig | None) -> None:
    once = fold(tiny_model(PreNormConfig(), low_rank=low_rank))
    twice = fold(once)
    assert twice is not once
    assert twice.config == once.config
    for name, value in once.state_dict().items():
        assert torch.equal(twice.state_dict()[name], value), name


def test_alpha_of_zero_has_the_parameters_of_the_duplicated_model() -> None:
    with_copies = CausalLM(tiny_config(PreNormConfig(), low_rank=SETTINGS["all"]))
    without = CausalLM(tiny_config(PreNormConfig(), low_rank=plain(SETTINGS["all"])))
    assert not torch.equal(with_copies(IDS), without(IDS))
    for name, value in without.state_dict().items():
        assert torch.equal(with_copies.state_dict()[name], value), name


# initial weights


def test_low_rank_maps_start_with_their_own_deviation() -> None:
    residual = VARIANTS["p_lr"]
    model = CausalLM(tiny_config(residual, hidden_size=128, low_rank=LowRankConfig(rank=8)))
    for name, module in model.named_modules():
        if isinstance(module, DuplicatedLatentLinear):
            (rank, in_dim), out_dim = module.latent_weight.shape, len(module.weight)
            expected = rank**-0.25 * ((in_dim + out_dim) ** -0.5) ** 0.5
            for weight in (module.latent_weight, module.weight):
                bound = 6 * expected / weight.numel() ** 0.5
                assert abs(weight.std().item() - expected) < bound, name


def test_everything_out_of_scope_starts_as_without_low_rank_maps() -> None:
    residual = VARIANTS["p_lr"]
    full = CausalLM(tiny_config(residual)).state_dict()
    low = CausalLM(tiny_config(residual, low_rank=SETTINGS["mixed"])).state_dict()
    replaced = tuple(f"{name}_proj.weight" for name in SETTINGS["mixed"].scope)
    for name, value in full.items():  # emitted rows included
        assert torch.equal(low[name], value) != name.endswith(replaced), name


def test_a_model_from_the_meta_device_is_the_same() -> None:
    config = tiny_config(VARIANTS["p_lr"], low_rank=SETTINGS["all"])
    with torch.device("meta"):
        model = CausalLM(config, seed=None)
    model.to_empty(device="cpu").init_weights(3)
    assert torch.equal(model(IDS), CausalLM(config, seed=3)(IDS))


# training


@pytest.mark.parametrize("variant", ["prenorm", "p_lr"])
def test_steps_lower_the_loss_and_move_every_parameter(variant: str) -> None:
    model = tiny_model(VARIANTS[variant], low_rank=SETTINGS["all"])
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizers = build_optimizers(parameter_groups(model), OptimConfig())
    losses = []
    for _ in range(5):
        loss = model.loss(IDS, IDS.roll(-1, 1)).cross_entropy
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)
    for name, parameter in model.named_parameters():
        assert not torch.equal(parameter, before[name]), name


def test_muon_takes_both_matrices_and_emitted_rows_stay_apart() -> None:
    model = tiny_model(VARIANTS["p_lr"], low_rank=SETTINGS["mixed"])
    groups = {group.name: group for group in parameter_groups(model)}
    layer = {
        name.removeprefix("model.layers.0.")
        for name in groups["sublayer matrices"].parameters
        if name.startswith("model.layers.0.")
    }
    low = {"self_attn.k_proj", "self_attn.o_proj", "mlp.down_proj"}
    full = {"self_attn.q_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"}
    assert layer == {f"{name}.weight" for name in low | full} | {
        f"{name}.latent_weight" for name in low
    }
    assert groups["emitted key rows"].parameters.keys() == {
        f"model.layers.{i}.{name}.emit_weight"
        for i in range(4)
        for name in ("self_attn.o_proj", "mlp.down_proj")
    }


@pytest.mark.parametrize(
    ("low_rank", "message"),
    [
        (LowRankConfig(rank=17), "low_rank: the rank of k must be at most 16, .* got 17"),
        (LowRankConfig(rank=8, ranks={"down": 33}), "rank of down must be at most 32"),
    ],
)
def test_a_rank_above_its_matrix_is_an_error_of_the_config(low_rank: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_config(PreNormConfig(), low_rank=low_rank)
