"""Low-rank maps with duplicated latents: formula, copies, fold, dtypes, settings."""

from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from depthroute.config import ConfigError, dump, from_dict, load, to_dict
from depthroute.models import CausalLM, ModelConfig
from depthroute.nn import DuplicatedLatentLinear, LowRankConfig
from depthroute.nn.low_rank import Projection, build_projection
from helpers import assert_close

SIZES = [(5, 12, 4), (5, 12, 8), (7, 13, 3), (6, 4, 4), (9, 5, 3), (3, 8, 1)]  # in, out, r


def filled(*sizes: int, **options: Any) -> DuplicatedLatentLinear:
    in_dim, out_dim, rank = sizes
    module = DuplicatedLatentLinear(in_dim, out_dim, rank=rank, **options).double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    return module


def literal(module: DuplicatedLatentLinear, x: Tensor) -> Tensor:
    """Compute one output after the other, the latents duplicated by counting."""
    (rank, _), out_dim = module.latent_weight.shape, len(module.weight)
    z = module.latent_weight @ x
    if module.activation == "silu":
        z = z / (1 + torch.exp(-z))
    copies = -(-out_dim // rank)
    duplicated = [z[j] for j in range(rank) for _ in range(copies)][:out_dim]
    y = [
        sum(module.weight[o, j] * z[j] for j in range(rank))
        + module.alpha / copies**0.5 * duplicated[o]
        for o in range(out_dim)
    ]
    return torch.stack(y)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("activation", ["silu", "identity"])
@pytest.mark.parametrize("alpha", [1.0, -0.3, 0.0])
def test_output_and_gradients_are_those_of_the_formula(
    sizes: tuple[int, int, int], activation: Any, alpha: float
) -> None:
    module = filled(*sizes, activation=activation, alpha=alpha)
    x = torch.randn(3, sizes[0], dtype=torch.float64, requires_grad=True)
    inputs = (x, *module.parameters())
    y, expected = module(x), torch.stack([literal(module, row) for row in x])
    assert_close(y, expected)
    upstream = torch.randn_like(y)
    for ours, theirs in zip(
        torch.autograd.grad(y, inputs, upstream),
        torch.autograd.grad(expected, inputs, upstream),
        strict=True,
    ):
        assert_close(ours, theirs)


def copied(out_dim: int, rank: int) -> Tensor:
    """Return what each latent adds to each output, `R^T / sqrt(K)`."""
    module = DuplicatedLatentLinear(2, out_dim, rank=rank).double()
    with torch.no_grad():
        module.weight.zero_()
    return module.folded_weight()


def test_copies_are_interleaved_and_the_last_latents_have_none() -> None:
    matrix = copied(12, 8)
    assert (matrix != 0).sum(0).tolist() == [2, 2, 2, 2, 2, 2, 0, 0]
    assert matrix.nonzero()[:, 1].tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert (copied(13, 3) != 0).sum(0).tolist() == [5, 5, 3]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_copies_preserve_the_norm_of_covered_latents(sizes: tuple[int, int, int]) -> None:
    _, out_dim, rank = sizes
    matrix, copies = copied(out_dim, rank), -(-out_dim // rank)
    assert ((matrix != 0).sum(1) == 1).all()  # every output has one latent
    squared_norms, full = (matrix**2).sum(0), (matrix != 0).sum(0) == copies
    assert_close(squared_norms[full], torch.ones(int(full.sum()), dtype=torch.float64))
    assert (squared_norms[~full] < 1).all()
    assert full.sum() == out_dim // copies


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_plain_low_rank_map_with_the_folded_weight_is_the_same_map(
    sizes: tuple[int, int, int],
) -> None:
    module, plain = filled(*sizes, alpha=0.7), filled(*sizes, alpha=0.0)
    state = {**module.state_dict(), "weight": module.folded_weight()}
    plain.load_state_dict(state)
    x = torch.randn(4, sizes[0], dtype=torch.float64)
    assert_close(plain(x), module(x))
    assert plain.folded_weight() is plain.weight


def test_emitted_columns_are_a_full_product_beside_the_output() -> None:
    module = filled(5, 12, 4, emit_dim=3)
    x = torch.randn(2, 5, dtype=torch.float64)
    y = module(x)
    assert y.shape == (2, 15)
    assert_close(y[:, :12], torch.stack([literal(module, row) for row in x]))
    assert_close(y[:, 12:], x @ module.emit_weight.T)


def test_products_run_in_the_dtype_of_the_input() -> None:
    module = filled(16, 12, 8, emit_dim=3).float()
    x = torch.randn(6, 16, dtype=torch.bfloat16)
    y = module(x)
    assert y.dtype == torch.bfloat16
    assert_close(y, module(x.float()), rtol=0.03)  # latents and outputs are rounded once each
    y.sum().backward()
    for parameter in module.parameters():
        assert parameter.dtype == parameter.grad.dtype == torch.float32


@pytest.mark.parametrize("emit_dim", [0, 2])
def test_compiled_map_is_one_graph_with_the_same_gradients(emit_dim: int) -> None:
    module = filled(5, 12, 8, emit_dim=emit_dim)
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    inputs = (x, *module.parameters())
    for ours, theirs in zip(
        torch.autograd.grad(compiled(x).square().sum(), inputs),
        torch.autograd.grad(module(x).square().sum(), inputs),
        strict=True,
    ):
        assert_close(ours, theirs)


# settings


def test_scope_and_ranks_decide_which_projections_are_low_rank() -> None:
    config = LowRankConfig(rank=4, ranks={"down": 6}, scope=("q", "down"), alpha=0.5)
    ranks = {}
    for name in get_args(Projection):
        module = build_projection(name, 10, 12, low_rank=config)
        ranks[name] = module.weight.shape[1] if hasattr(module, "latent_weight") else None
        assert build_projection(name, 10, 12, low_rank=None).weight.shape == (12, 10)
    assert ranks == {**dict.fromkeys(get_args(Projection)), "q": 4, "down": 6}


def test_settings_survive_toml_and_json(tmp_path: Any) -> None:
    low_rank = LowRankConfig(rank=4, ranks={"up": 7}, scope=("gate", "up"), activation="identity")
    config = ModelConfig(
        vocab_size=11,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=1,
        num_attention_heads=2,
        low_rank=low_rank,
    )
    (tmp_path / "model.toml").write_text(dump(config))
    assert load(ModelConfig, tmp_path / "model.toml") == config
    assert from_dict(ModelConfig, to_dict(config)) == config
    CausalLM(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": 0}, "rank must be >= 1, got 0"),
        ({"ranks": {"q": 0}}, "ranks.q must be >= 1, got 0"),
        ({"scope": ("q",), "ranks": {"up": 2}}, r"ranks must name .* in scope, got \['up'\]"),
        ({"ranks": {"query": 2}}, r"ranks must name projections in scope, got \['query'\]"),
        ({"alpha": float("nan")}, "alpha must be finite, got nan"),
    ],
)
def test_settings_out_of_range_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        LowRankConfig(**{"rank": 4, **changes})


def test_an_unknown_projection_is_named_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r'scope\[0\]: unknown "gat"; did you mean "gate"'):
        from_dict(LowRankConfig, {"rank": 4, "scope": ["gat"]})
