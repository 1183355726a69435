"""Folders: saved, loaded, sharded, cast, damaged."""

import json
from dataclasses import replace

import accelerate
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from depthroute.models.hf import DepthRouteConfig, DepthRouteForCausalLM, DepthRouteModel
from depthroute.nn.low_rank import LowRankConfig
from helpers import VARIANTS, assert_close, tiny_config

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2], [6, 5, 3, 5, 8, 9, 7]])


def load(folder, **settings):
    """Load, and expect every tensor to be in its place."""
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **settings)
    assert {kind: list(found) for kind, found in info.items() if found} == {}
    return model


@pytest.mark.parametrize("name", VARIANTS)
def test_a_saved_model_comes_back_bit_for_bit(pair, tmp_path, name):
    model, shell = pair(name, dtype=torch.float32)
    shell.save_pretrained(tmp_path)
    back = load(tmp_path)
    assert isinstance(back, DepthRouteForCausalLM)
    assert back.config.model_config() == replace(model.config, head_dim=8)
    assert {key: value.tolist() for key, value in back.state_dict().items()} == {
        key: value.tolist() for key, value in model.state_dict().items()
    }
    assert_close(back(IDS).logits, shell(IDS).logits)


@pytest.mark.parametrize("name", VARIANTS)
def test_loading_in_bfloat16_keeps_routing_in_float32(pair, tmp_path, name):
    _, shell = pair(name, dtype=torch.float32, noise=0.1)
    shell.save_pretrained(tmp_path)
    back = load(tmp_path, dtype="bfloat16")
    saved = load_file(tmp_path / "model.safetensors")
    for key, value in back.state_dict().items():
        routing = key.startswith("model.residual.")
        expected = saved[key] if routing else saved[key].bfloat16()
        assert value.dtype == expected.dtype, key
        assert torch.equal(value, expected), key
    assert back.dtype == torch.bfloat16  # also what a folder of it says
    back.save_pretrained(tmp_path / "again")
    assert load(tmp_path / "again").lm_head.weight.dtype == torch.bfloat16
    with torch.no_grad():
        logits, wide = back(IDS).logits, shell(IDS).logits
    assert logits.dtype == torch.bfloat16
    assert (logits.float() - wide).abs().max() < 0.1 * wide.abs().max()


def test_low_rank_maps_are_saved_too(pair, tmp_path):
    low_rank = LowRankConfig(rank=4, scope=("q", "down"), alpha=0.5)
    model, shell = pair("p_lr", dtype=torch.float32, low_rank=low_rank)
    shell.save_pretrained(tmp_path)
    back = load(tmp_path)
    assert back.config.model_config().low_rank == low_rank
    assert_close(back(IDS).logits, model(IDS))
    fresh = AutoModelForCausalLM.from_config(back.config).model.layers[0].self_attn.q_proj
    assert fresh.weight.std().item() == pytest.approx((4 * (32 + 32)) ** -0.25, rel=0.2)


def test_tools_that_look_for_shared_memory_save_all(pair, tmp_path):
    _, shell = pair("p_lr", dtype=torch.float32)
    accelerate.Accelerator(cpu=True).save_model(shell, tmp_path)
    assert load_file(tmp_path / "model.safetensors").keys() == shell.state_dict().keys()


def test_a_field_set_later_is_checked_on_saving(pair, tmp_path):
    _, shell = pair(fields={"eos_token_id": 60})
    shell.resize_token_embeddings(50)
    with pytest.raises(ValueError, match=r"eos_token_id must be in \[0, 50\), got 60"):
        shell.save_pretrained(tmp_path)
    shell.config.eos_token_id = shell.generation_config.eos_token_id = 0
    shell.config.pretraining_tp = 1
    with pytest.raises(ValueError, match='unknown config field "pretraining_tp"'):
        shell.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


def test_routing_that_has_no_memory_is_named(pair):
    _, shell = pair()
    shell.model.residual.to("meta")
    with pytest.raises(ValueError, match="routing parameters are on the meta device"):
        shell(IDS)


def test_shards_add_up(pair, tmp_path):
    _, shell = pair("p_lr", dtype=torch.float32)
    shell.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert_close(load(tmp_path)(IDS).logits, shell(IDS).logits)


def test_a_tied_head_is_saved_once_and_comes_back_tied(pair, tmp_path):
    _, shell = pair(dtype=torch.float32, tie_word_embeddings=True)
    assert shell.lm_head.weight is shell.model.embed_tokens.weight
    shell.save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    back = load(tmp_path)
    assert back.lm_head.weight is back.model.embed_tokens.weight
    assert_close(back(IDS).logits, shell(IDS).logits)


DAMAGE = [
    ("p_lr", "model.residual.query"),
    ("p_lr", "model.residual.key.weight"),
    ("p_lr", "model.layers.1.mlp.down_proj.emit_weight"),
    ("s_lr", "model.layers.2.self_attn.q_proj.weight"),
    ("s_lr", "model.embed_tokens.weight"),
    ("s_lr", "lm_head.weight"),
    ("denseformer", "model.residual.weight.1"),
    ("laurel_all", "model.residual.up"),
    ("laurel_all", "model.residual.gain"),
]


@pytest.mark.parametrize(("name", "key"), DAMAGE)
def test_a_lost_tensor_is_reported_and_no_other_changes(pair, tmp_path, name, key):
    _, shell = pair(name, dtype=torch.float32)
    shell.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    lost = saved.pop(key)
    save_file(saved, tmp_path / "model.safetensors", metadata={"format": "pt"})
    back, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert set(info["missing_keys"]) == {key}
    assert not info["unexpected_keys"]
    state = back.state_dict()
    for other, value in saved.items():
        assert torch.equal(state[other], value), other
    assert state[key].isfinite().all()
    assert not torch.equal(state[key], lost)


def test_initial_weights_are_the_schemes_own():
    config = DepthRouteConfig.from_model_config(tiny_config(VARIANTS["laurel_all"]))
    model = AutoModelForCausalLM.from_config(config)
    assert model.model.residual.gain.eq(1).all()
    assert model.model.residual.up.eq(0).all()
    matrix = model.model.layers[0].mlp.up_proj.weight
    assert matrix.std().item() == pytest.approx(0.02, rel=0.1)
    query = AutoModelForCausalLM.from_config(
        DepthRouteConfig.from_model_config(tiny_config(VARIANTS["p_lr"]))
    ).model.residual
    assert query.query.eq(0).all()
    assert query.key.weight.std().item() == pytest.approx(0.02, rel=0.2)


def test_a_model_can_be_built_without_memory():
    config = DepthRouteConfig.from_model_config(tiny_config(VARIANTS["p_lr"]))
    with torch.device("meta"):
        model = DepthRouteForCausalLM(config)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert not list(model.buffers())


def test_the_body_leaves_the_head_behind(pair, tmp_path):
    _, shell = pair(dtype=torch.float32)
    shell.save_pretrained(tmp_path)
    body, info = AutoModel.from_pretrained(tmp_path, output_loading_info=True)
    assert isinstance(body, DepthRouteModel)
    assert not info["missing_keys"]
    assert_close(body(IDS).last_hidden_state, shell.model(IDS))


def test_every_field_is_written_and_required(pair, tmp_path):
    _, shell = pair("attn_res_uneven", fields={"max_position_embeddings": 16, "eos_token_id": 3})
    shell.config.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    written = json.loads(path.read_text())
    assert written["residual"]["block_ends"] == [1, 6, 8]
    assert written["tie_word_embeddings"] is False  # a default, written all the same
    back = AutoConfig.from_pretrained(tmp_path)
    assert back.to_json_string() == shell.config.to_json_string()
    for key in ("residual", "hidden_size", "vocab_size"):
        path.write_text(json.dumps({k: v for k, v in written.items() if k != key}))
        with pytest.raises(ValueError, match=f"lacks {key}"):
            AutoConfig.from_pretrained(tmp_path)
    path.write_text(json.dumps(written | {"hiden_size": 64}))
    with pytest.raises(ValueError, match='unknown config field "hiden_size", did you mean "hidden'):
        AutoConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"residual": {"name": "attn_res", "num_blok": 3}}, "residual.num_blok: unknown key"),
        ({"residual": {"num_blocks": 3}}, "residual.name: required key"),
        ({"residual": {"name": "attn_res", "num_blocks": 9}}, "at most the 8 writes"),
        ({"num_key_value_heads": 3}, "must divide num_attention_heads=4, got 3"),
        ({"hidden_size": "32"}, "hidden_size: expected int, got string"),
        ({"vocab_size": 0}, "vocab_size must be >= 1, got 0"),
        ({"eos_token_id": 61}, r"eos_token_id must be in \[0, 61\), got 61"),
        ({"eos_token_id": [3, -1]}, r"eos_token_id must be in \[0, 61\), got -1"),
        ({"eos_token_id": "3"}, r"eos_token_id must be in \[0, 61\), got '3'"),
        ({"pad_token_id": True}, r"pad_token_id must be in \[0, 61\), got True"),
        ({"pad_token_id": [1]}, r"pad_token_id must be in \[0, 61\), got \[1\]"),
        ({"use_cache": "no"}, "use_cache must be true or false, got 'no'"),
        ({"max_position_embeddings": 0}, "max_position_embeddings must be null or >= 1, got 0"),
        ({"model_type": "llama"}, 'model_type must be "depthroute"'),
        ({"rms_norm_eps": 1e-5}, 'unknown config field "rms_norm_eps", did you mean "norm_eps"'),
    ],
)
def test_a_wrong_field_is_an_error(fields, message):
    shape = DepthRouteConfig.from_model_config(tiny_config(VARIANTS["s_lr"])).model_config()
    values = {
        key: getattr(shape, key) for key in shape.__dataclass_fields__ if key != "residual"
    } | {"residual": {"name": "prenorm"}}
    DepthRouteConfig(**values)
    with pytest.raises(ValueError, match=message):
        DepthRouteConfig(**(values | fields))
