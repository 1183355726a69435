import math

import pytest
import torch
from torch import nn

from depthroute.account import account
from depthroute.models import CausalLM
from depthroute.optim import (
    AdamWConfig,
    Group,
    MuonConfig,
    OptimConfig,
    build_optimizers,
    format_groups,
    parameter_groups,
)
from helpers import VARIANTS, tiny_config, tiny_model

EMITTING = {"p_lr_full", "p_lr", "p_lr_sum"}

each_variant = pytest.mark.parametrize("variant", VARIANTS)


def by_name(groups: list[Group]) -> dict[str, Group]:
    return {group.name: group for group in groups}


def step(model: nn.Module, config: OptimConfig) -> None:
    for optimizer in build_optimizers(parameter_groups(model), config):
        optimizer.step()


@each_variant
def test_every_parameter_is_in_exactly_one_group(variant):
    model = tiny_model(VARIANTS[variant])
    grouped = [id(p) for group in parameter_groups(model) for p in group.parameters.values()]
    assert sorted(grouped) == sorted(id(p) for p in model.parameters())


@each_variant
def test_parameters_keep_their_full_names(variant):
    model = tiny_model(VARIANTS[variant])
    names = {name: p for group in parameter_groups(model) for name, p in group.parameters.items()}
    assert names.keys() == dict(model.named_parameters()).keys()
    assert all(model.get_parameter(name) is p for name, p in names.items())


@each_variant
def test_routing_parameters_are_in_adamw_without_decay_whatever_their_shape(variant):
    model = tiny_model(VARIANTS[variant])
    owned = {f"model.residual.{name}" for name, _ in model.model.residual.named_parameters()}
    routing = by_name(parameter_groups(model)).get("routing")
    if variant == "prenorm":
        assert routing is None
        return
    assert routing is not None
    assert routing.parameters.keys() == owned
    assert (routing.optimizer, routing.decays) == ("adamw", False)
    assert any(p.ndim >= 2 for p in routing.parameters.values())  # matrices, or stacks of them


@each_variant
def test_emitted_rows_are_matrices_apart(variant):
    model = tiny_model(VARIANTS[variant])
    emitted = by_name(parameter_groups(model)).get("emitted key rows")
    if variant not in EMITTING:
        assert emitted is None
        return
    assert emitted is not None
    assert (emitted.optimizer, emitted.decays) == ("muon", True)
    shapes = [tuple(p.shape) for p in emitted.parameters.values()]
    assert sorted(shapes) == sorted([(8, 32), (8, 48)] * 4)  # attention and MLP of 4 layers


def test_the_rest_goes_by_its_place():
    groups = by_name(parameter_groups(tiny_model(VARIANTS["s_lr"])))
    assert groups["embedding"].parameters.keys() == {"model.embed_tokens.weight"}
    assert groups["head"].parameters.keys() == {"lm_head.weight"}
    projections = [f"self_attn.{x}_proj.weight" for x in "qkvo"]
    projections += [f"mlp.{x}_proj.weight" for x in ("gate", "up", "down")]
    assert groups["sublayer matrices"].parameters.keys() == {
        f"model.layers.{i}.{projection}" for i in range(4) for projection in projections
    }
    kinds = {name: (group.optimizer, group.decays) for name, group in groups.items()}
    assert kinds["embedding"] == kinds["head"] == ("adamw", True)
    assert kinds["sublayer matrices"] == ("muon", True)


def test_tied_matrix_is_one_parameter_of_the_embedding():
    model = tiny_model(VARIANTS["s_lr"], tie_word_embeddings=True)
    groups = by_name(parameter_groups(model))
    assert groups["embedding"].parameters.keys() == {"model.embed_tokens.weight"}
    assert "head" not in groups


def test_vectors_are_in_adamw_without_decay():
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    vectors = by_name(parameter_groups(model))["vectors"]
    assert vectors.parameters.keys() == {"0.bias", "1.weight", "1.bias"}
    assert (vectors.optimizer, vectors.decays) == ("adamw", False)


@each_variant
def test_decay_spares_routing_and_shrinks_everything_else(variant):
    model = tiny_model(VARIANTS[variant])
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    muon, adamw = MuonConfig(lr=0.5, weight_decay=0.2), AdamWConfig(lr=0.25, weight_decay=0.4)
    step(model, OptimConfig(muon=muon, adamw=adamw))
    for name, parameter in model.named_parameters():
        if name.startswith("model.residual."):
            assert torch.equal(parameter, before[name]), name
        else:  # 1 - lr * decay is 0.9 for both
            torch.testing.assert_close(parameter.detach(), 0.9 * before[name], msg=name)


def test_adamw_steps_as_its_formula():
    weight = nn.Parameter(torch.randn(5, 3, dtype=torch.float64))
    expected = weight.detach().clone()
    config = AdamWConfig(lr=0.01, beta1=0.8, beta2=0.9, eps=1e-3, weight_decay=0.5)
    groups = [Group("embedding", "adamw", True, {"w": weight})]
    (optimizer,) = build_optimizers(groups, OptimConfig(adamw=config))
    mean, square = torch.zeros_like(expected), torch.zeros_like(expected)
    for t in (1, 2, 3):
        weight.grad = torch.randn_like(expected)
        mean = 0.8 * mean + 0.2 * weight.grad
        square = 0.9 * square + 0.1 * weight.grad**2
        root = (square / (1 - 0.9**t)).sqrt()
        expected = expected * (1 - 0.01 * 0.5) - 0.01 * mean / (1 - 0.8**t) / (root + 1e-3)
        optimizer.step()
    torch.testing.assert_close(weight.detach(), expected)


@pytest.mark.parametrize("variant", ["prenorm", "attn_res_full", "p_lr", "from_value"])
def test_table_lists_every_group_and_adds_up_to_the_model(variant):
    config = tiny_config(VARIANTS[variant], vocab_size=1000)
    groups = parameter_groups(CausalLM(config))
    head, *lines = format_groups(groups).splitlines()
    assert head.split() == ["group", "optimiser", "decay", "tensors", "parameters"]
    assert [line.split("  ")[0] for line in lines] == [group.name for group in groups]
    counts = [int(line.split()[-1].replace(",", "")) for line in lines]
    assert sum(counts) == account(config).parameters.total


@pytest.mark.parametrize(
    ("cls", "field", "value"),
    [
        (MuonConfig, "lr", -1e-3),
        (MuonConfig, "momentum", 1.0),
        (MuonConfig, "ns_steps", 0),
        (MuonConfig, "weight_decay", math.nan),
        (AdamWConfig, "beta1", 1.0),
        (AdamWConfig, "beta2", -0.1),
        (AdamWConfig, "eps", 0.0),
        (OptimConfig, "clip_norm", 0.0),
        (OptimConfig, "z_loss", -1.0),
    ],
)
def test_settings_out_of_range_are_named(cls, field, value):
    with pytest.raises(ValueError, match=f"^{field} must be .* got {value}$"):
        cls(**{field: value})
