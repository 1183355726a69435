"""A probe shows the weights of every read and changes nothing."""

from typing import Any

import pytest
import torch
from torch import Tensor

from depthroute.residual import DeltaConfig, ResidualScheme
from depthroute.residual.probe import Probe
from helpers import VARIANTS, tiny_model

variants = pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS.keys())
NUM_WRITES = 8


def _ids() -> Tensor:
    return torch.arange(14).view(2, 7)


@variants
def test_outputs_and_gradients_are_bit_identical(config: Any) -> None:
    model = tiny_model(config)

    def run(residual: Probe | None) -> tuple[Tensor, ...]:
        logits = model(_ids(), residual=residual)
        gradients = torch.autograd.grad(logits.square().sum(), list(model.parameters()))
        return (logits, *gradients)

    plain = run(None)
    probed = run(Probe(model.model.residual, lambda site, weights: None))
    for name, a, b in zip(("logits", *dict(model.named_parameters())), probed, plain, strict=True):
        assert torch.equal(a, b), name


@variants
def test_sink_sees_every_read_once_and_in_order(config: Any) -> None:
    model = tiny_model(config)
    sites: list[int] = []
    model(_ids(), residual=Probe(model.model.residual, lambda site, weights: sites.append(site)))
    has_weights = type(model.model.residual).weights is not ResidualScheme.weights
    expected = list(range(NUM_WRITES + 1)) if has_weights else []
    if isinstance(config, DeltaConfig):  # the head and reads without a choice have no weights
        expected = expected[model.model.residual.first : -1]
    assert sites == expected


@pytest.mark.parametrize("name", ["attn_res_full", "p_lr"])
def test_sink_gets_weights_of_one_without_gradient(name: str) -> None:
    model = tiny_model(VARIANTS[name])
    seen: list[Tensor] = []
    model(_ids(), residual=Probe(model.model.residual, lambda site, weights: seen.append(weights)))
    for site, weights in enumerate(seen):
        expected = site + 1 if name == "attn_res_full" else 1 + -(-site // 3)  # blocks of 3, 3, 2
        assert weights.shape == (1, expected, 2, 7, 1)
        assert not weights.requires_grad
        torch.testing.assert_close(weights.sum(1), torch.ones(1, 2, 7, 1))


def test_a_read_is_seen_before_it_happens() -> None:
    model = tiny_model(VARIANTS["attn_res_block3"])
    events: list[str] = []
    probe = Probe(model.model.residual, lambda site, weights: events.append(f"weights {site}"))
    state = probe(torch.randn(1, 3, 32))

    def norm(x: Tensor) -> Tensor:
        events.append("norm")
        return x

    probe.read(state, 0, norm)
    for site in range(NUM_WRITES):
        state = probe.write(state, site, torch.randn(1, 3, 32))
    probe.finish(state, norm)
    assert events == ["weights 0", "norm", f"weights {NUM_WRITES}", "norm"]


@variants
def test_reads_are_shown_as_the_sublayers_get_them(config: Any) -> None:
    model = tiny_model(config)
    got: list[tuple[Tensor, ...]] = []
    for layer in model.model.layers:
        for sublayer in (layer.self_attn, layer.mlp):
            sublayer.register_forward_pre_hook(lambda _, inputs: got.append(inputs))
    shown: dict[int, Any] = {}
    hidden = model.model(_ids(), residual=Probe(model.model.residual, reads=shown.__setitem__))
    assert list(shown) == list(range(NUM_WRITES + 1))
    for site, inputs in enumerate([*got, (hidden,)]):
        assert all(a is b for a, b in zip(shown[site], inputs, strict=True)), site


@variants
def test_everything_else_is_the_schemes(config: Any) -> None:
    model = tiny_model(config)
    scheme = model.model.residual
    probe = Probe(scheme, lambda site, weights: None)
    for name in ("config", "dim", "kinds", "eps", "emit_dim", "token_null", "depth_block_ends"):
        assert getattr(probe, name) == getattr(scheme, name), name
    assert probe.cost() == scheme.cost()
    state = probe(torch.randn(1, 3, 32))
    a, b = probe.weights(state, 0), scheme.weights(state, 0)
    assert (a is None and b is None) or torch.equal(a, b)
    drawn: list[Any] = []
    by_scheme: list[Any] = []
    scheme.init_weights(by_scheme.append)
    probe.init_weights(drawn.append)
    assert [id(p) for p in drawn] == [id(p) for p in by_scheme]
    assert torch.count_nonzero(getattr(scheme, "query", torch.zeros(1))) == 0


@variants
def test_state_dict_is_unchanged(config: Any) -> None:
    model = tiny_model(config)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model(_ids(), residual=Probe(model.model.residual, lambda site, weights: None))
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)
