"""The decoder: its size, weights, names, arithmetic, document boundaries and settings."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from depthroute.models import CausalLM, Decoder, ModelConfig
from depthroute.models.compile import compile_model
from depthroute.nn import Documents
from depthroute.residual import AttnResConfig, PreNormConfig, ProjectedKey, TailKey
from helpers import VARIANTS, assert_close, tiny_config, tiny_model

IDS = torch.arange(24).view(2, 12) * 17 % 61

# documents of 5, 1 and 6 tokens, then one that fills its row; the last bound is padding
PACKED = Documents(torch.tensor([0, 5, 6, 12, 24, 24], dtype=torch.int32), 12)
# the same in rows that are too long for a mask; the row's end cuts a document
PACKED_LONG = Documents(torch.tensor([0, 200, 201, 300, 600], dtype=torch.int32), 300)


def packed(length: int) -> tuple[Tensor, Documents]:
    ids = torch.arange(2 * length).view(2, length) * 17 % 61
    return ids, PACKED if length == 12 else PACKED_LONG


# size


PAPER_SHAPE = {
    "vocab_size": 100_277,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
}


@pytest.mark.parametrize(
    ("residual", "extra"),
    [
        (PreNormConfig(), 0),
        (AttnResConfig(num_blocks=8), 49_152),
        (AttnResConfig(num_blocks=8, key=TailKey(rank=32)), 1_536),
        (AttnResConfig(num_blocks=8, key=ProjectedKey(rank=32)), 2_983_424),
    ],
    ids=["prenorm", "attn_res", "s_lr", "p_lr"],
)
def test_parameter_count_is_that_of_the_paper(residual: Any, extra: int) -> None:
    with torch.device("meta"):
        model = CausalLM(ModelConfig(**PAPER_SHAPE, residual=residual), seed=None)
    assert sum(p.numel() for p in model.parameters()) == 513_648_640 + extra


# weights


@pytest.mark.parametrize("name", VARIANTS)
def test_schemes_share_all_other_initial_weights(name: str) -> None:
    plain = CausalLM(tiny_config(PreNormConfig()), seed=3).state_dict()
    torch.rand(7)  # the global generator has no say
    other = CausalLM(tiny_config(VARIANTS[name]), seed=3).state_dict()
    for key, value in plain.items():
        assert torch.equal(other[key], value), key


def test_initial_weights_do_not_depend_on_depth() -> None:
    shallow = CausalLM(tiny_config(PreNormConfig(), num_hidden_layers=1)).state_dict()
    deep = CausalLM(tiny_config(PreNormConfig(), num_hidden_layers=3)).state_dict()
    assert len(deep) > len(shallow)
    for key, value in shallow.items():
        assert torch.equal(deep[key], value), key


def test_initial_weights_are_normal_with_the_given_deviation() -> None:
    model = CausalLM(tiny_config(VARIANTS["p_lr"], init_std=0.1, hidden_size=64))
    for key, value in model.state_dict().items():
        if key.endswith("residual.query"):
            assert not value.any(), key
        else:
            # six standard errors of the mean and of the deviation of n draws
            bound = 6 * 0.1 / value.numel() ** 0.5
            assert abs(value.mean().item()) < bound, key
            assert abs(value.std().item() - 0.1) < bound, key


def test_each_weight_and_each_seed_has_its_own_draw() -> None:
    one, two = (CausalLM(tiny_config(PreNormConfig()), seed=s).state_dict() for s in (1, 2))
    for key, value in one.items():
        assert not torch.equal(value, two[key]), key
    first = [value.flatten()[0].item() for value in one.values()]
    assert len(set(first)) == len(first)


def test_parameter_names_are_those_of_llama() -> None:
    model = CausalLM(tiny_config(PreNormConfig(), num_hidden_layers=2))
    attention = [f"self_attn.{p}_proj.weight" for p in "qkvo"]
    mlp = [f"mlp.{p}_proj.weight" for p in ("gate", "up", "down")]
    layers = [f"model.layers.{i}.{name}" for i in range(2) for name in (*attention, *mlp)]
    assert sorted(model.state_dict()) == sorted(
        ["model.embed_tokens.weight", *layers, "lm_head.weight"]
    )


def test_tied_head_is_the_embedding() -> None:
    model = CausalLM(tiny_config(PreNormConfig(), tie_word_embeddings=True))
    embedding = model.model.embed_tokens.weight
    assert_close(model(IDS), model.model(IDS) @ embedding.T)
    assert "lm_head.weight" not in dict(model.named_parameters())
    model(IDS).sum().backward()
    with torch.no_grad():
        embedding.zero_()
    assert not model(IDS).any()


@pytest.mark.parametrize("name", ["prenorm", "p_lr"])
def test_save_and_load_round_trip(name: str, tmp_path: Path) -> None:
    model = tiny_model(VARIANTS[name])
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    copy = CausalLM(tiny_config(VARIANTS[name]), seed=None)
    copy.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))
    assert torch.equal(copy(IDS), model(IDS))


@pytest.mark.parametrize("mode", ["sublayer", "model"])
def test_compiling_keeps_the_names(mode: Any) -> None:
    model = tiny_model(VARIANTS["p_lr"])
    names = list(model.state_dict())
    compile_model(model, mode)
    assert list(model.state_dict()) == names
    assert [name for name, _ in model.named_parameters()] == names


# arithmetic


def rms(x: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()


def literal_attention(x: Tensor, w: dict[str, Tensor], heads: int) -> Tensor:
    """Attend token by token; RoPE as a product of complex numbers."""
    tokens, dim = x.shape
    width = dim // heads
    frequency = 500_000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)

    def turned(vector: Tensor, position: int) -> Tensor:
        first, second = rms(vector).chunk(2)
        z = torch.complex(first, second) * torch.exp(1j * position * frequency)
        return torch.cat([z.real, z.imag])

    rows = []
    for t in range(tokens):
        outs = []
        for h in range(heads):
            cut = slice(h * width, (h + 1) * width)
            q = turned(w["q_proj"][cut] @ x[t], t)
            keys = torch.stack([turned(w["k_proj"][cut] @ x[s], s) for s in range(t + 1)])
            values = torch.stack([w["v_proj"][cut] @ x[s] for s in range(t + 1)])
            outs.append((keys @ q / width**0.5).softmax(0) @ values)
        rows.append(w["o_proj"] @ torch.cat(outs))
    return torch.stack(rows)


def test_prenorm_equals_its_formula() -> None:
    """`h += attention(norm(h)); h += mlp(norm(h))`, written out."""
    model = tiny_model(PreNormConfig(), num_key_value_heads=4, init_std=0.2, dtype=torch.float64)
    weights = {k: v.double() for k, v in model.state_dict().items()}
    ids = IDS[0, :7]
    h = weights["model.embed_tokens.weight"][ids]
    for i in range(4):
        w = {
            key.split(".")[-2]: value
            for key, value in weights.items()
            if key.startswith(f"model.layers.{i}.")
        }
        h = h + literal_attention(rms(h), w, heads=4)
        x = rms(h)
        gate = x @ w["gate_proj"].T
        h = h + (gate * gate.sigmoid() * (x @ w["up_proj"].T)) @ w["down_proj"].T
    assert_close(model(ids[None])[0], rms(h) @ weights["lm_head.weight"].T)


@pytest.mark.parametrize("name", VARIANTS)
def test_loss_equals_cross_entropy_of_the_logits(name: str) -> None:
    model, targets = tiny_model(VARIANTS[name], dtype=torch.float64), IDS.roll(-1, 1).clone()
    targets[:, -1] = -100
    logits = model(IDS, documents=PACKED)
    sums = model.loss(IDS, targets, documents=PACKED, chunk_tokens=5)
    expected = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), reduction="sum"
    )
    assert_close(sums.cross_entropy, expected)
    assert sums.tokens == 22


def test_grouped_heads_equal_repeated_heads() -> None:
    grouped = tiny_model(PreNormConfig(), num_key_value_heads=2, dtype=torch.float64)
    full = tiny_model(PreNormConfig(), num_key_value_heads=4, dtype=torch.float64)
    weights = grouped.state_dict()
    for key in weights:
        if "k_proj" in key or "v_proj" in key:
            heads = weights[key].unflatten(0, (2, 8))
            weights[key] = torch.stack([heads[0], heads[0], heads[1], heads[1]]).flatten(0, 1)
    full.load_state_dict(weights)
    assert_close(grouped(IDS), full(IDS))


@pytest.mark.parametrize("name", VARIANTS)
def test_bfloat16_compute_keeps_float32_parameters(name: str) -> None:
    model = tiny_model(VARIANTS[name])
    exact = model(IDS)
    model.model.compute_dtype = torch.bfloat16
    logits = model(IDS)
    assert logits.dtype == torch.bfloat16
    # by token, since sharp depth weights of a few amplify the rounding; measured 0.4 to 1.2 %
    error = (logits - exact).norm(dim=-1) / exact.norm(dim=-1)
    assert error.median() < 0.02
    model.loss(IDS, IDS).cross_entropy.backward()
    for key, parameter in model.named_parameters():
        assert parameter.dtype == parameter.grad.dtype == torch.float32, key


# documents


@pytest.mark.parametrize("name", ["prenorm", "attn_res_block3", "p_lr"])
@pytest.mark.parametrize("length", [12, 300], ids=["mask", "each"])
def test_packed_documents_equal_separate_runs(name: str, length: int) -> None:
    model = tiny_model(VARIANTS[name], dtype=torch.float64)
    ids, documents = packed(length)
    flat, bounds = ids.flatten(), documents.cu_seqlens.tolist()
    separate = [model(flat[None, a:b])[0] for a, b in pairwise(bounds) if b > a]
    assert_close(model(ids, documents=documents).flatten(0, 1), torch.cat(separate))


@pytest.mark.parametrize("length", [12, 300], ids=["mask", "each"])
def test_a_document_does_not_see_the_others(length: int) -> None:
    model = tiny_model(VARIANTS["attn_res_block3"])
    ids, documents = packed(length)
    second, third = documents.cu_seqlens[1:3].tolist()
    changed = ids.clone()
    changed[0, :second] = (changed[0, :second] + 1) % 61
    before, after = (model(x, documents=documents).flatten(0, 1) for x in (ids, changed))
    assert torch.equal(before[second:], after[second:])
    assert not torch.equal(before[:second], after[:second])
    changed[0, second:third] = (changed[0, second:third] + 1) % 61  # a document of one token
    assert torch.equal(before[third:], model(changed, documents=documents).flatten(0, 1)[third:])


def test_documents_that_fill_their_rows_change_nothing() -> None:
    model = tiny_model(PreNormConfig(), dtype=torch.float64)
    rows = Documents(torch.tensor([0, 12, 24], dtype=torch.int32), 12)
    assert_close(model(IDS, documents=rows), model(IDS))


# cache


@pytest.mark.parametrize("name", ["prenorm", "p_lr"])
def test_cache_takes_any_split_of_the_tokens(name: str) -> None:
    model = tiny_model(VARIANTS[name], dtype=torch.float64)
    cache = model.new_cache(2, 12)
    parts = [model(part, cache=cache) for part in IDS.split([4, 1, 5, 2], dim=1)]
    assert cache.length == 12
    assert_close(torch.cat(parts, dim=1), model(IDS))


# errors


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 0}, "hidden_size must be >= 1, got 0"),
        ({"intermediate_size": 0}, "intermediate_size must be >= 1"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be >= 1"),
        ({"num_attention_heads": -1}, "num_attention_heads must be >= 1"),
        ({"num_attention_heads": 5}, "num_attention_heads must divide hidden_size=32"),
        ({"num_key_value_heads": 3}, "num_key_value_heads must divide num_attention_heads=4"),
        ({"num_key_value_heads": 0}, "num_key_value_heads must divide"),
        ({"head_dim": 7}, "head_dim must be even for RoPE, got 7"),
        ({"head_dim": 0}, "head_dim must be even"),
        ({"norm_eps": 0.0}, "norm_eps must be > 0"),
        ({"init_std": float("nan")}, "init_std must be > 0"),
        ({"rope_theta": 1.0}, "rope_theta must be > 1"),
        ({"rope_theta": float("nan")}, "rope_theta must be > 1"),
        ({"vocab_size": -1}, "vocab_size must be >= 0"),
    ],
)
def test_config_error_names_the_field(changes: dict[str, Any], message: str) -> None:
    heads = {"num_key_value_heads": None} if "num_attention_heads" in changes else {}
    with pytest.raises(ValueError, match=f"^{message}"):
        tiny_config(PreNormConfig(), **{**heads, **changes})


@pytest.mark.parametrize(
    ("residual", "message"),
    [
        (AttnResConfig(num_blocks=9), "num_blocks must be at most the 8 writes"),
        (AttnResConfig(block_ends=(2, 4)), "block_ends must end with the 8 writes"),
        (AttnResConfig(key=TailKey(rank=33)), "rank must be at most the model width 32"),
    ],
)
def test_a_scheme_that_does_not_fit_is_an_error_of_the_config(residual: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_config(residual)


def test_a_model_needs_a_vocabulary() -> None:
    config = tiny_config(PreNormConfig(), vocab_size=0)
    for build in (Decoder, CausalLM):
        with pytest.raises(ValueError, match="vocab_size must be >= 1"):
            build(config)


@pytest.mark.parametrize("ids", [IDS[0], IDS.float()], ids=["shape", "dtype"])
def test_ids_of_another_form_are_an_error(ids: Tensor) -> None:
    with pytest.raises(ValueError, match="ids must be integers"):
        tiny_model(PreNormConfig())(ids)


def test_a_full_cache_is_an_error() -> None:
    model = tiny_model(PreNormConfig())
    cache = model.new_cache(2, 13)
    model(IDS, cache=cache)
    with pytest.raises(ValueError, match="cache holds 13 tokens, got 12 and 2 more"):
        model(IDS[:, :2], cache=cache)


def test_documents_exclude_a_cache() -> None:
    model = tiny_model(PreNormConfig())
    with pytest.raises(ValueError, match="documents and cache exclude each other"):
        model(IDS, documents=PACKED, cache=model.new_cache(2, 12))


def test_recomputed_layers_cannot_fill_a_cache() -> None:
    model = tiny_model(VARIANTS["s_lr"])
    model.model.checkpointing = "layer"
    ids = torch.tensor([[3, 1, 4]])
    with pytest.raises(ValueError, match="cannot fill a cache"):
        model(ids, cache=model.new_cache(1, 3))
    with torch.no_grad():
        model(ids, cache=model.new_cache(1, 3))


def test_unknown_checkpointing_is_an_error() -> None:
    model = tiny_model(PreNormConfig())
    model.model.checkpointing = "block"  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"checkpointing must be one of .*'block'"):
        model(IDS)
