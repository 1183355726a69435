"""MUDD connections against the paper's equations as loops, their start, and their limits."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from depthroute.account import account
from depthroute.models import CausalLM
from depthroute.ops import rms_norm
from depthroute.residual import Mudd, MuddConfig, PreNormConfig, ResidualScheme, build_residual
from helpers import assert_close, tiny_config, tiny_model

DIM, EPS, LAYERS = 6, 1e-6, 3
PRE_POST, PLAIN = MuddConfig(), MuddConfig(norm="none")
every_norm = pytest.mark.parametrize("config", [PRE_POST, PLAIN], ids=["pre_post", "none"])

Layers = list[tuple[Tensor, Tensor]]  # W_A [D, 3 D] on queries, keys and values, and W_F [D, D]


def build(config: Any) -> ResidualScheme:
    """Return a scheme in float64 with all its parameters away from their start."""
    kinds = ("attention", "mlp") * LAYERS
    scheme = build_residual(config, dim=DIM, kinds=kinds, eps=EPS).double()
    for parameter in scheme.parameters():
        nn.init.normal_(parameter, std=0.5)
    return scheme


def layers() -> Layers:
    def draw(width: int) -> Tensor:
        return torch.randn(DIM, width, dtype=torch.float64) / DIM**0.5

    return [(draw(3 * DIM), draw(DIM)) for _ in range(LAYERS)]


def run(scheme: ResidualScheme, weights: Layers, x: Tensor) -> Tensor:
    """Run sublayers that tell queries, keys and values apart."""

    def norm(h: Tensor) -> Tensor:
        return rms_norm(h, eps=EPS)

    state = scheme(x)
    for i, (attention, mlp) in enumerate(weights):
        inputs, state = scheme.read(state, 2 * i, norm)
        q, k, v = inputs * 3 if len(inputs) == 1 else inputs
        state = scheme.write(state, 2 * i, torch.tanh(torch.cat([q, k, v], -1) @ attention.T))
        (h,), state = scheme.read(state, 2 * i + 1, norm)
        state = scheme.write(state, 2 * i + 1, torch.tanh(h @ mlp.T))
    return scheme.finish(state, norm)


def rms(x: Tensor) -> Tensor:
    return x / (sum(entry**2 for entry in x) / len(x) + EPS).sqrt()


def gelu(x: Tensor) -> Tensor:
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2


def literal(scheme: Any, weights: Layers, x: Tensor) -> Tensor:
    """Run the paper's equations for one token."""
    normed = scheme.config.norm == "pre_post"
    outputs, streams = [x], [x] * 4
    for i, (attention, mlp) in enumerate(weights):
        q, k, v, r = streams
        a = torch.tanh(attention @ torch.cat([rms(q), rms(k), rms(v)])) + r
        outputs.append(torch.tanh(mlp @ rms(a)) + a)
        newest, sources = outputs[-1], outputs
        if normed:
            sources = [scheme.source_gain[j] * rms(o) for j, o in enumerate(outputs)]
        w1, w2, static = scheme.hidden_weight[i], scheme.out_weight[i], scheme.static_weight[i]
        made = w2 @ gelu(w1 @ rms(newest))
        streams = []
        for c in range(1 if i == LAYERS - 1 else 4):
            mix = torch.zeros_like(x)
            for j, source in enumerate(sources):
                mix = mix + (made[c * len(sources) + j] + static[c, j]) * source
            if normed:
                is_stream = c == len(static) - 1
                mix = newest + (scheme.post_gain[i] * rms(mix) if is_stream else mix)
            streams.append(mix)
    return rms(streams[0])


@every_norm
def test_output_and_gradients_equal_the_equations_in_a_loop(config: MuddConfig) -> None:
    scheme, weights = build(config), layers()
    x = torch.randn(2, 3, DIM, dtype=torch.float64, requires_grad=True)
    out = run(scheme, weights, x)
    want = torch.stack([literal(scheme, weights, token) for token in x.flatten(0, 1)])
    assert_close(out, want.view_as(x))
    names, parameters = zip(*scheme.named_parameters(), strict=True)
    upstream = torch.randn_like(x)
    got = torch.autograd.grad(out, (x, *parameters), upstream)
    expected = torch.autograd.grad(want.view_as(x), (x, *parameters), upstream)
    for a, b, name in zip(got, expected, ("x", *names), strict=True):
        assert_close(a, b, name, rtol=1e-8)


@every_norm
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_starts_as_the_plain_sum_bit_for_bit(
    config: MuddConfig, dtype: torch.dtype
) -> None:
    ids = torch.randint(0, 61, (2, 9))
    routed, plain = CausalLM(tiny_config(config)), CausalLM(tiny_config(PreNormConfig()))
    for model in (routed, plain):
        model.model.compute_dtype = dtype
    out, want = routed(ids), plain(ids)
    assert torch.equal(out, want)
    upstream = torch.randn_like(out)
    out.backward(upstream)
    want.backward(upstream)
    if dtype == torch.float32:  # in bfloat16 a sum of gradients rounds in its own order
        shared = dict(routed.named_parameters())
        for name, parameter in plain.named_parameters():
            assert_close(shared[name].grad, parameter.grad, name)


def densely_weighted(weights: Layers, alpha: list[Tensor], x: Tensor) -> Tensor:
    """Run DenseFormer (arXiv 2402.02622): every layer reads a fixed mix of layer outputs."""
    outputs, y = [x], x
    for row, (attention, mlp) in zip(alpha, weights, strict=True):
        h = rms_norm(y, eps=EPS)
        a = y + torch.tanh(torch.cat([h, h, h], -1) @ attention.T)
        outputs.append(a + torch.tanh(rms_norm(a, eps=EPS) @ mlp.T))
        y = sum(weight * output for weight, output in zip(row, outputs, strict=True))
    return rms_norm(y, eps=EPS)


def test_without_a_dynamic_part_and_with_equal_ways_it_is_denseformer() -> None:
    scheme, weights = build(PLAIN), layers()
    with torch.no_grad():
        for out, static in zip(scheme.out_weight, scheme.static_weight, strict=True):
            out.zero_()
            static.copy_(static[:1].clone().expand_as(static))
    x = torch.randn(2, 3, DIM, dtype=torch.float64)
    alpha = [static[0] for static in scheme.static_weight]
    assert_close(run(scheme, weights, x), densely_weighted(weights, alpha, x))


def test_one_hot_weights_hand_one_earlier_output_to_one_way() -> None:
    scheme = build(PLAIN)
    scheme.init_weights(nn.init.normal_)
    x, y, z = (torch.randn(2, 3, DIM, dtype=torch.float64) for _ in range(3))
    with torch.no_grad():
        for way, source in enumerate((1, 0, 1, 0)):  # q, k, v, r
            scheme.static_weight[0][way] = torch.eye(2)[source]
    state = scheme(x)
    for site, write in enumerate((y, z)):
        _, state = scheme.read(state, site, torch.clone)
        state = scheme.write(state, site, write)
    inputs, state = scheme.read(state, 2, torch.clone)
    for value, source in zip((*inputs, state.stream), (x + y + z, x, x + y + z, x), strict=True):
        assert torch.equal(value, source)


@every_norm
def test_first_step_moves_the_second_matrix_and_then_the_ways_part(config: MuddConfig) -> None:
    model, ids = CausalLM(tiny_config(config)), torch.randint(0, 61, (2, 9))
    scheme: Any = model.model.residual
    x = torch.randn(5, 32)
    start = scheme.coefficients(x, 1)
    assert torch.equal(start, start[:1, :1].expand_as(start))  # no way and no token is special
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(ids).square().sum().backward()
    assert not any(weight.grad.any() for weight in scheme.hidden_weight)
    for kind in (scheme.out_weight, scheme.static_weight):
        assert all(weight.grad.any() for weight in kind[:-1])
    optimizer.step()
    ways = scheme.coefficients(x, 1)
    for a in range(4):
        for b in range(a):
            assert not torch.equal(ways[a], ways[b])
    assert (ways.std(1) > 0).all()  # over tokens


def test_first_matrix_starts_with_unit_rows_whatever_the_draw() -> None:
    scheme = Mudd(PLAIN, dim=64, kinds=("attention", "mlp") * 4, eps=EPS)
    for std in (0.02, 3.0):

        def draw(parameter: nn.Parameter, std: float = std) -> None:
            nn.init.normal_(parameter, std=std)

        scheme.init_weights(draw)
        for weight in scheme.hidden_weight:
            assert weight.std().item() == pytest.approx(64**-0.5, rel=0.01)


@pytest.mark.parametrize(("eps", "slope"), [(1e-6, 1.0), (1e-5, 0.316), (2**-23, 2.896)])
def test_slope_of_the_post_norm_at_its_start_depends_on_eps(eps: float, slope: float) -> None:
    scheme = Mudd(PRE_POST, dim=DIM, kinds=("attention", "mlp") * 2, eps=eps).double()
    state = scheme(torch.randn(1, DIM, dtype=torch.float64))
    for site in range(2):
        state = scheme.write(state, site, torch.zeros(1, DIM, dtype=torch.float64))
    with torch.no_grad():
        scheme.static_weight[0][3, 0] = 1e-7
    _, after = scheme.read(state, 2, torch.clone)
    moved = (after.stream - state.stream) / (1e-7 * state.sources[0])
    assert_close(moved, torch.full_like(moved, slope), rtol=2e-3)


# `K = 64 (4 S // 64 + 1)`; the last mix is as wide as if it had four ways
@pytest.mark.parametrize(
    ("num_layers", "widths"),
    [(1, [64]), (4, [64] * 4), (16, [64] * 14 + [128] * 2), (24, [64] * 14 + [128] * 10)],
)
def test_widths_of_the_hidden_layers(num_layers: int, widths: list[int]) -> None:
    scheme = Mudd(PLAIN, dim=8, kinds=("attention", "mlp") * num_layers, eps=EPS)
    assert [len(weight) for weight in scheme.hidden_weight] == widths
    ways = [4] * (num_layers - 1) + [1]
    shapes = [tuple(static.shape) for static in scheme.static_weight]
    assert shapes == [(c, i + 2) for i, c in enumerate(ways)]


@pytest.mark.parametrize(
    ("config", "gains"), [(PLAIN, 0), (PRE_POST, 25 + 24)], ids=["none", "pre_post"]
)
def test_parameters_of_24_layers_of_width_1024(config: MuddConfig, gains: int) -> None:
    with torch.device("meta"):
        scheme = Mudd(config, dim=1024, kinds=("attention", "mlp") * 24, eps=EPS)
    # counted apart; with the gains of norms of q, k and v, which are none here, 2,402,373
    assert scheme.cost().parameters == 2_402_373 - 2 * 23 * 1024 + gains * 1024


@every_norm
def test_multiply_adds_are_those_of_the_products_and_the_mixes(config: MuddConfig) -> None:
    batch, tokens = 2, 7

    def products(residual: Any) -> int:
        model = CausalLM(tiny_config(residual))
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            model(torch.zeros((batch, tokens), dtype=torch.int64))
        counts = counter.get_flop_counts()["Global"]
        ours = sum(n for op, n in counts.items() if str(op) in ("aten.mm", "aten.bmm"))
        return ours // (2 * batch * tokens)

    mixes = 32 * sum(ways * sources for ways, sources in ((4, 2), (4, 3), (4, 4), (1, 5)))
    added = account(tiny_config(config)).multiply_adds.added
    assert added == products(config) - products(PreNormConfig()) + mixes


def test_sources_are_kept_once_whatever_the_number_of_mixes() -> None:
    # in bfloat16 a cast of each source would keep a copy of it per mix
    def saved(num_layers: int) -> int:
        model = tiny_model(PLAIN, num_hidden_layers=num_layers, hidden_size=512, head_dim=8)
        model.model.compute_dtype = torch.bfloat16
        storages: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        ids = torch.zeros((1, 64), dtype=torch.int64)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model(ids)
        weights = sum(p.untyped_storage().nbytes() for p in model.parameters())
        return sum(storages.values()) - weights

    few, more, most = saved(4), saved(8), saved(12)
    assert most - more < 1.2 * (more - few)  # linear in depth but for the small weights


@pytest.mark.parametrize("kinds", [("attention",), ("mlp", "attention"), ("attention",) * 2])
def test_other_orders_of_sublayers_are_refused(kinds: Any) -> None:
    with pytest.raises(ValueError, match="kinds must be attention and mlp in turn, got"):
        build_residual(PLAIN, dim=8, kinds=kinds)


def test_every_read_of_an_mlp_is_the_plain_stream() -> None:
    scheme = build(PRE_POST)
    x, y = torch.randn(1, DIM, dtype=torch.float64), torch.randn(1, DIM, dtype=torch.float64)
    state = scheme.write(scheme(x), 0, y)
    (hidden,), _ = scheme.read(state, 1, torch.clone)
    assert torch.equal(hidden, x + y)
