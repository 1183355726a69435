"""The rotation theorem of full-width norms: R >= rank of the queries loses nothing.

One orthogonal matrix turns the residual basis so that all queries lie in the last R columns. With
keys normed over the full width every logit of the model stays; normed over the tail it does not.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from depthroute.models import CausalLM
from depthroute.residual import AttnResConfig, TailKey
from depthroute.residual.probe import Probe
from helpers import assert_close, tiny_config, tiny_model

DIM, QUERIES = 32, 8  # 4 layers: 8 reads with a query, of rank 8


def orthogonal(size: int, seed: int = 5) -> Tensor:
    source = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(size, size, generator=source, dtype=torch.float64)).Q


def to_the_tail(queries: Tensor) -> Tensor:
    """Return the rotation whose last rows span the queries, by their singular vectors."""
    _, _, right = torch.linalg.svd(queries, full_matrices=True)  # rows; the first ones span them
    return right.flip(0)


@torch.no_grad()
def rotate_(model: CausalLM, rotation: Tensor) -> None:
    """Turn the residual basis: writers by R, readers by its transpose; the norms have no gains."""
    model.model.embed_tokens.weight.copy_(model.model.embed_tokens.weight @ rotation.T)
    readers = [model.lm_head]
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        readers += [attention.q_proj, attention.k_proj, attention.v_proj]
        readers += [mlp.gate_proj, mlp.up_proj]
        for writer in (attention.o_proj, mlp.down_proj):
            writer.weight.copy_(rotation @ writer.weight)
    for reader in readers:
        reader.weight.copy_(reader.weight @ rotation.T)


def outputs(model: CausalLM) -> tuple[Tensor, list[Tensor]]:
    """Return logits and the depth weights of every read."""
    weights: list[Tensor] = []
    probe = Probe(model.model.residual, lambda site, w: weights.append(w))
    with torch.no_grad():
        logits = model(torch.arange(22).view(2, 11), residual=probe)
    return logits, weights


def with_key(config: AttnResConfig, key: TailKey, source: CausalLM, queries: Tensor) -> CausalLM:
    """Return the same model with another key, and the last columns of the queries."""
    model = tiny_model(AttnResConfig(num_blocks=config.num_blocks, key=key), dtype=torch.float64)
    state = source.state_dict()
    state["model.residual.query"] = queries[:, -model.model.residual.key.rank :]
    model.load_state_dict(state)
    return model


def turned(config: AttnResConfig, key: TailKey, rotation: Any = to_the_tail) -> tuple[Any, Any]:
    """Return the outputs of a full-width model, and of the rotated one with another key."""
    whole = tiny_model(config, dtype=torch.float64)
    queries = whole.model.residual.query.detach()
    turn = rotation(queries)
    other = with_key(config, key, whole, queries @ turn.T)
    rotate_(other, turn)
    return outputs(whole), outputs(other)


@pytest.mark.parametrize("num_blocks", [0, 3])
@pytest.mark.parametrize("rank", [QUERIES, QUERIES + 5, DIM])
def test_low_rank_keys_of_full_width_norm_are_the_full_width_model(num_blocks, rank):
    config = AttnResConfig(num_blocks=num_blocks)
    expected, actual = turned(config, TailKey(rank=rank, norm="full"))
    assert_close(actual[0], expected[0], "logits")
    for site, (a, b) in enumerate(zip(actual[1], expected[1], strict=True)):
        assert_close(a, b, f"weights of site {site}")


def test_any_rotation_keeps_the_full_width_model():
    expected, actual = turned(AttnResConfig(num_blocks=3), TailKey(), lambda _: orthogonal(DIM))
    assert_close(actual[0], expected[0])


@pytest.mark.parametrize(
    "key",
    [TailKey(rank=QUERIES - 1, norm="full"), TailKey(rank=QUERIES, norm="tail")],
    ids=["rank too small", "norm of the tail"],
)
def test_what_the_theorem_does_not_cover_is_another_function(key):
    expected, actual = turned(AttnResConfig(num_blocks=3), key)
    assert (actual[0] - expected[0]).norm() > 1e-2 * expected[0].norm()


def test_a_norm_of_the_tail_allows_rotations_of_tail_and_rest_apart():
    key = TailKey(rank=QUERIES)
    apart = torch.block_diag(orthogonal(DIM - QUERIES), orthogonal(QUERIES, seed=6))
    whole = tiny_model(AttnResConfig(num_blocks=3, key=key), dtype=torch.float64)
    queries = whole.model.residual.query.detach() @ apart[-QUERIES:, -QUERIES:].T
    other = with_key(AttnResConfig(num_blocks=3), key, whole, queries)
    rotate_(other, apart)
    assert_close(outputs(other)[0], outputs(whole)[0])


def test_gradients_turn_with_the_basis():
    config = AttnResConfig(num_blocks=3)
    whole = tiny_model(config, dtype=torch.float64)
    queries, turn = whole.model.residual.query.detach(), orthogonal(DIM)
    other = with_key(config, TailKey(), whole, queries @ turn.T)
    rotate_(other, turn)
    for model in (whole, other):
        model(torch.arange(22).view(2, 11)).square().sum().backward()
    for name, turned_by in (
        ("model.layers.1.mlp.up_proj.weight", lambda g: g @ turn.T),
        ("model.layers.1.mlp.down_proj.weight", lambda g: turn @ g),
        ("model.residual.query", lambda g: g @ turn.T),
    ):
        expected = turned_by(whole.get_parameter(name).grad)
        assert_close(other.get_parameter(name).grad, expected, name, rtol=1e-9)


def test_the_queries_have_the_rank_that_the_tests_assume():
    assert torch.linalg.matrix_rank(tiny_model(AttnResConfig()).model.residual.query) == QUERIES
    assert tiny_config(AttnResConfig()).hidden_size == DIM
