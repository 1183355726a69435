"""The model against outputs of the authors' code; see tests/golden/README.md."""

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from depthroute.models import CausalLM, ModelConfig
from depthroute.nn import Documents, LossSums
from depthroute.residual import AttnResConfig, PreNormConfig, ProjectedKey, Summary, TailKey
from depthroute.residual.probe import Probe

FILES = sorted((Path(__file__).parents[1] / "golden").glob("*.npz"))


class Run(NamedTuple):
    """What the authors' model gave, and what ours gives with the same weights."""

    golden: dict[str, np.ndarray]
    model: CausalLM  # with gradients
    logits: Tensor
    sums: LossSums
    weights: dict[int, Tensor]  # by site
    read_rms: list[Tensor]  # by site


@pytest.fixture(scope="module", params=FILES, ids=lambda path: path.stem)
def run(request: pytest.FixtureRequest) -> Run:
    with np.load(request.param) as file:
        golden = dict(file)
    meta = json.loads(str(golden["meta"]))
    model = CausalLM(_model_config(meta), seed=None)
    _load_weights(model, golden, meta["scale"])
    ids, targets = (torch.from_numpy(golden[name]).long() for name in ("tokens", "targets"))
    documents = None
    if "cu_seqlens" in golden:
        documents = Documents(torch.from_numpy(golden["cu_seqlens"]), int(golden["max_seqlen"]))

    weights: dict[int, Tensor] = {}
    probe = Probe(model.model.residual, weights.__setitem__)
    read_rms: list[Tensor] = []

    def record(_: nn.Module, inputs: tuple[Tensor]) -> None:
        read_rms.append(inputs[0].square().mean(-1).sqrt())

    hooks = [norm.register_forward_pre_hook(record) for norm in _norms(model)]
    with torch.no_grad():
        logits = model(ids, documents=documents, residual=probe)
    for hook in hooks:
        hook.remove()

    sums = model.loss(ids, targets, documents=documents)
    ((sums.cross_entropy + 1e-5 * sums.squared_lse) / sums.tokens).backward()
    return Run(golden, model, logits, sums, weights, read_rms)


def test_all_nine_files_are_here() -> None:
    assert len(FILES) >= 9


def test_logits(run: Run) -> None:
    assert _error(run.logits, run.golden["logits"]) < 1e-4


def test_depth_weights(run: Run) -> None:
    names = [name for name in run.golden if name.startswith("alpha/")]
    assert len(names) == max(0, len(run.weights) - 1)  # none for the plain sum, none at site 0
    for name in names:
        ours = run.weights[int(name.removeprefix("alpha/"))]
        assert _error(ours[0, ..., 0], run.golden[name]) < 1e-5, name


def test_read_rms(run: Run) -> None:
    names = [name for name in run.golden if name.startswith("read_rms/")]
    assert names
    for name in names:
        ours, theirs = run.read_rms[int(name.removeprefix("read_rms/"))], run.golden[name]
        assert _error(ours, theirs) < 1e-5 * theirs.max(), name


def test_loss(run: Run) -> None:
    assert run.sums.tokens == run.golden["targets"].size
    cross_entropy = (run.sums.cross_entropy / run.sums.tokens).item()
    squared_lse = (run.sums.squared_lse / run.sums.tokens).item()
    assert cross_entropy == pytest.approx(run.golden["cross_entropy"].item(), abs=1e-5)
    assert squared_lse == pytest.approx(run.golden["mean_squared_lse"].item(), rel=1e-5)


def test_gradient_norms(run: Run) -> None:
    for key in _keys(run.golden):
        squares = [part.square().sum() for part in _parts(run.model, key, lambda p: p.grad)]
        ours, theirs = torch.stack(squares).sum().sqrt().item(), run.golden[f"gradnorm/{key}"]
        assert ours == pytest.approx(theirs.item(), rel=1e-4), key


def _error(ours: Tensor, theirs: np.ndarray) -> float:
    assert ours.shape == theirs.shape
    return float(np.abs(ours.numpy() - theirs).max())


def _norms(model: CausalLM) -> list[nn.Module]:
    """List the norm after each read, in order."""
    layers = model.model.layers
    inner = [n for layer in layers for n in (layer.input_layernorm, layer.post_attention_layernorm)]
    return [*inner, model.model.norm]


def _model_config(meta: dict[str, Any]) -> ModelConfig:
    theirs = meta["config"]
    return ModelConfig(
        vocab_size=theirs["vocab_size"],
        hidden_size=theirs["n_embd"],
        intermediate_size=theirs["mlp_hidden_dim"],
        num_hidden_layers=theirs["n_layer"],
        num_attention_heads=theirs["n_head"],
        rope_theta=theirs["rope_theta"],
        qk_norm=theirs["qk_norm"],
        norm_eps=2.0**-23,
        tie_word_embeddings=theirs["weight_tying"],
        residual=_residual_config(meta),
    )


def _residual_config(meta: dict[str, Any]) -> PreNormConfig | AttnResConfig:
    if meta["kind"] == "baseline":
        return PreNormConfig()
    keys = {
        "attnres": TailKey(),
        "slr": TailKey(rank=meta["rank"]),
        "plr": ProjectedKey(rank=meta["rank"]),
    }
    theirs = meta["config"]
    return AttnResConfig(
        num_blocks=meta["blocks"] or 0,
        key=keys[meta["kind"]],
        summary=Summary(
            alpha=float(theirs["attnres_block_average"]),
            beta=float(theirs["attnres_block_count_prior"]),
        ),
    )


def _keys(golden: dict[str, np.ndarray]) -> list[str]:
    """List the names of the authors' weights."""
    return [name.removeprefix("gradnorm/") for name in golden if name.startswith("gradnorm/")]


def _parts(model: CausalLM, key: str, get: Callable[[nn.Parameter], Tensor]) -> list[Tensor]:
    """Return the parts of our model that, stacked by rows, are the authors' weight `key`."""
    body = model.model
    match key.removeprefix("transformer.").split("."):
        case ["wte", "weight"]:
            return [get(body.embed_tokens.weight)]
        case ["lm_head", "weight"]:
            return [get(model.lm_head.weight)]
        case ["layers", i, "attn", "c_attn", "weight"]:
            attn = body.layers[int(i)].self_attn
            return [get(proj.weight) for proj in (attn.q_proj, attn.k_proj, attn.v_proj)]
        case ["layers", i, "attn", "c_proj", *_]:
            return [get(p) for p in body.layers[int(i)].self_attn.o_proj.parameters()]
        case ["layers", i, "mlp", "fc1", "weight"]:
            mlp = body.layers[int(i)].mlp
            return [get(mlp.up_proj.weight), get(mlp.gate_proj.weight)]
        case ["layers", i, "mlp", "fc2", *_]:
            return [get(p) for p in body.layers[int(i)].mlp.down_proj.parameters()]
        case ["attn_residuals", j, "query"] | ["lrid_queries", j]:
            return [get(body.residual.query)[int(j)].unsqueeze(0)]
        case ["lrid_embedding_key", "proj", "weight"]:
            return [get(body.residual.key.weight)]
    raise KeyError(key)


@torch.no_grad()
def _load_weights(model: CausalLM, golden: dict[str, np.ndarray], scale: str) -> None:
    """Rebuild the authors' weights from their names and copy them into our model."""
    loaded = 0
    for key in _keys(golden):
        parts = _parts(model, key, lambda p: p.data)
        heights, width = [len(part) for part in parts], parts[0].shape[1]
        source = np.random.RandomState(zlib.crc32(key.encode()))
        values = _std(key, width, scale) * source.standard_normal((sum(heights), width))
        for part, rows in zip(
            parts, torch.from_numpy(values.astype(np.float32)).split(heights), strict=True
        ):
            part.copy_(rows)
        loaded += values.size
    assert loaded == sum(p.numel() for p in model.parameters())
    for layer in model.model.layers:
        for proj in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            proj.weight.copy_(_half_rotation(proj.weight, layer.self_attn.head_dim))


def _std(key: str, width: int, scale: str) -> float:
    if "quer" in key:
        return 1.5 / width**0.5
    if scale == "init":
        return 0.02
    return 1.0 if "wte" in key else width**-0.5


def _half_rotation(weight: Tensor, head_dim: int) -> Tensor:
    """Reorder the rows of each head, even ones first: pairs (2k, 2k+1) become (k, k + half)."""
    heads = weight.unflatten(0, (-1, head_dim))
    return torch.cat([heads[:, 0::2], heads[:, 1::2]], dim=1).flatten(0, 1)
