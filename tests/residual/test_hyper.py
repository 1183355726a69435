"""Hyper-Connections against the papers' equations as loops, their starts, and their limits."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from depthroute.account import account
from depthroute.models import CausalLM, ModelConfig
from depthroute.nn import RMSNorm
from depthroute.ops import rms_norm
from depthroute.residual import HyperConfig, PreNormConfig, build_residual
from helpers import ToyModel, assert_close, tiny_config

EPS, DIM = 1e-6, 16
HC, STATIC = HyperConfig(), HyperConfig(coefficients="static")
MHC = HyperConfig(mixing="doubly_stochastic")
MHC_STATIC = dataclasses.replace(STATIC, mixing="doubly_stochastic")
ALL = {"hc": HC, "hc_static": STATIC, "mhc": MHC, "mhc_static": MHC_STATIC}
every_form = pytest.mark.parametrize("config", ALL.values(), ids=ALL)


def rms(x: Tensor) -> Tensor:
    return x / (x.square().mean() + EPS).sqrt()


def literal_hc(toy: ToyModel, x: Tensor, norm: Callable[[Tensor], Tensor]) -> Tensor:
    """Run arXiv 2409.19606 for one token: matrices B [1, n], A_m [n, 1] and A_r [n, n]."""
    scheme, n = toy.residual, toy.residual.config.num_streams
    streams = [x] * n
    for site, f in enumerate(toy.sublayers):
        table = scheme.bias[site].clone()
        if scheme.config.coefficients == "dynamic":
            (s_b, s_a), w = scheme.scale[site], scheme.weight[site]
            for j in range(n):
                table[j, 0] += s_b * torch.tanh(rms(streams[j]) @ w[0])
                for k in range(1, n + 2):
                    table[j, k] += s_a * torch.tanh(rms(streams[j]) @ w[k])
        b, a_m, a_r = table[:, :1].T, table[:, 1:2], table[:, 2:]
        hidden = sum(a_m[j, 0] * streams[j] for j in range(n))
        y = torch.tanh(f @ norm(hidden))
        streams = [b[0, i] * y + sum(a_r[j, i] * streams[j] for j in range(n)) for i in range(n)]
    return norm(sum(streams) / n)


def literal_mhc(toy: ToyModel, x: Tensor, norm: Callable[[Tensor], Tensor]) -> Tensor:
    """Run arXiv 2512.24880 for one token."""
    scheme, n = toy.residual, toy.residual.config.num_streams
    streams = [x] * n
    for site, f in enumerate(toy.sublayers):
        table = scheme.bias[site].clone()
        if scheme.config.coefficients == "dynamic":
            flat = rms(torch.cat(streams))
            a_post, a_pre, a_res = scheme.scale[site]
            for j in range(n):
                for k, a in enumerate([a_post, a_pre] + [a_res] * n):
                    table[j, k] += a * (flat @ scheme.weight[site, j * (n + 2) + k])
        post, pre = 2 / (1 + (-table[:, 0]).exp()), 1 / (1 + (-table[:, 1]).exp())
        res = [[table[j, 2 + i].exp() for j in range(n)] for i in range(n)]
        for _ in range(20):
            columns = [sum(res[i][j] for i in range(n)) for j in range(n)]
            res = [[res[i][j] / columns[j] for j in range(n)] for i in range(n)]
            res = [[entry / sum(row) for entry in row] for row in res]
        y = torch.tanh(f @ norm(sum(pre[j] * streams[j] for j in range(n))))
        streams = [sum(res[i][j] * streams[j] for j in range(n)) + post[i] * y for i in range(n)]
    return norm(sum(streams) / n)


@every_form
@pytest.mark.parametrize("num_streams", [1, 3])
def test_output_and_gradients_equal_the_equations_in_a_loop(config: Any, num_streams: int) -> None:
    config = dataclasses.replace(config, num_streams=num_streams)
    toy = ToyModel(config, num_sublayers=4).double()
    x = torch.randn(2, 3, DIM, dtype=torch.float64)
    *_, last = toy.resume(toy.residual(x), 0, lambda h: rms_norm(h, eps=EPS))
    out = last.inputs[0]
    literal = literal_hc if config.mixing == "free" else literal_mhc
    want = torch.stack([literal(toy, token, rms) for token in x.flatten(0, 1)]).view_as(x)
    assert_close(out, want)
    upstream, parameters = torch.randn_like(out), [*toy.parameters()]
    grads = torch.autograd.grad(out, parameters, upstream)
    wants = torch.autograd.grad(want, parameters, upstream)
    for (name, _), grad, expected in zip(toy.named_parameters(), grads, wants, strict=True):
        assert (grad - expected).abs().max() < 1e-10 * max(1, expected.abs().max()), name


def logits_and_gradients(residual: Any, eps: float) -> tuple[Tensor, dict[str, Tensor]]:
    model = CausalLM(tiny_config(residual, norm_eps=eps)).double()
    ids = torch.arange(18).view(2, 9)
    out = model(ids)
    (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
    names = [*model.named_parameters()]
    return out, {name: p.grad for name, p in names if ".residual." not in name}


@every_form
@pytest.mark.parametrize("num_streams", [1, 2, 4])
def test_training_starts_as_the_plain_sum(config: Any, num_streams: int) -> None:
    config = dataclasses.replace(config, num_streams=num_streams)
    # mHC scales what is read, which the norm removes but for its eps
    eps = 1e-6 if config.mixing == "free" else 1e-14
    out, grads = logits_and_gradients(config, eps)
    want, want_grads = logits_and_gradients(PreNormConfig(), eps)
    assert_close(out, want, rtol=1e-12 if config.mixing == "free" else 1e-9)
    for name, grad in want_grads.items():
        assert_close(grads[name], grad, name, rtol=1e-12 if config.mixing == "free" else 1e-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("config", [HC, STATIC])
def test_hc_starts_as_the_plain_sum_bit_for_bit(config: Any, dtype: torch.dtype) -> None:
    ids, logits = torch.arange(18).view(2, 9), []
    for residual in (config, PreNormConfig()):
        model = CausalLM(tiny_config(residual))
        model.model.compute_dtype = dtype
        logits.append(model(ids))
    assert torch.equal(*logits)


@pytest.mark.parametrize("config", [MHC, MHC_STATIC])
def test_mhc_starts_as_the_plain_sum_only_up_to_eps(config: Any) -> None:
    out, _ = logits_and_gradients(config, 1e-6)
    want, _ = logits_and_gradients(PreNormConfig(), 1e-6)
    assert 1e-6 < (out - want).abs().max() / want.abs().max() < 0.02


@every_form
def test_streams_start_equal_and_part_after_one_step(config: Any) -> None:
    model, ids = CausalLM(tiny_config(config)), torch.arange(18).view(2, 9)

    def spread() -> Tensor:
        x, scheme = model.model.embed_tokens(ids), model.model.residual
        state = scheme(x)
        for site in range(len(scheme.kinds)):
            (h,), state = scheme.read(state, site, RMSNorm(EPS))
            state = scheme.write(state, site, torch.tanh(h))
        return state.streams.std(-2).max()

    assert spread() < 1e-5
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(ids).square().sum().backward()
    optimizer.step()
    assert spread() > 1e-4


def test_mhc_streams_read_alike_would_stay_alike() -> None:
    # why its start reads them unevenly
    spreads = []
    for is_even in (True, False):
        model, ids = CausalLM(tiny_config(MHC_STATIC)).double(), torch.arange(18).view(2, 9)
        bias = model.model.residual.bias
        if is_even:
            with torch.no_grad():
                bias[..., 1] = 0.0
        optimizer = torch.optim.SGD([bias], lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(ids).square().sum().backward()
            optimizer.step()
        spreads.append(bias[..., 0].std(-1).max())
    assert spreads[0] < 1e-12
    assert spreads[1] > 1e-6


def set_matrices(scheme: Any, matrices: list[list[list[float]]]) -> None:
    """Set the paper's matrices `[[0, B], [A_m, A_r]]`, one per site, for two streams."""
    with torch.no_grad():
        for site, matrix in enumerate(matrices):
            top, *rows = matrix
            for j, row in enumerate(rows):
                scheme.bias[site, j] = torch.tensor([top[1 + j], *row])


def test_the_papers_matrices_give_sequential_and_parallel_sublayers() -> None:
    config = dataclasses.replace(STATIC, num_streams=2)
    scheme = build_residual(config, dim=DIM, kinds=("attention", "mlp") * 2, eps=EPS).double()
    sublayers = [torch.randn(DIM, DIM, dtype=torch.float64) for _ in range(4)]
    x = torch.randn(2, 3, DIM, dtype=torch.float64)

    def run() -> Tensor:
        state = scheme(x)
        for site, f in enumerate(sublayers):
            (h,), state = scheme.read(state, site, torch.clone)
            state = scheme.write(state, site, torch.tanh(h @ f))
        return 2 * scheme.finish(state, torch.clone)  # the papers sum the streams

    set_matrices(scheme, [[[0, 1, 1], [1, 1, 0], [0, 0, 1]]] * 4)
    want = x
    for f in sublayers:
        want = want + torch.tanh(want @ f)
    assert_close(run(), 2 * want)

    odd, even = [[0, 1, 0], [1, 1, 1], [1, 1, 1]], [[0, 0, 1], [0, 1, 0], [1, 0, 1]]
    set_matrices(scheme, [odd, even] * 2)
    total = 2 * x
    for f, g in (sublayers[:2], sublayers[2:]):
        total = 2 * total + torch.tanh(total @ f) + torch.tanh(total @ g)
    assert_close(run(), total)


def test_mhc_keeps_the_mean_of_the_streams_when_columns_sum_to_one() -> None:
    scheme = build_residual(MHC_STATIC, dim=DIM, kinds=("mlp",), eps=EPS).double()
    circulant = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64).log()
    with torch.no_grad():
        scheme.bias.normal_()
        for j in range(4):
            scheme.bias[0, j, 2:] = circulant.roll(j)
    streams = torch.randn(3, 4, DIM, dtype=torch.float64)
    state = scheme(streams[:, 0])._replace(streams=streams)
    _, state = scheme.read(state, 0, torch.clone)
    y = torch.randn(3, DIM, dtype=torch.float64)
    post = scheme.coefficients(streams, 0).post
    want = streams.sum(1) + post.sum() * y
    assert_close(scheme.write(state, 0, y).streams.sum(1), want)


def test_mhc_coefficients_keep_their_ranges() -> None:
    toy = ToyModel(MHC)
    with torch.no_grad():
        toy.residual.weight.mul_(10)
    for step in toy.steps(torch.randn(2, 3, DIM))[:-1]:
        pre, res, post = toy.residual.coefficients(step.state.streams, step.site)
        assert pre.shape == post.shape == (2, 3, 4)
        assert (pre >= 0).all()
        assert (pre <= 1).all()
        assert (post >= 0).all()
        assert (post <= 2).all()
        assert (res >= 0).all()
        assert_close(res.sum(-1), torch.ones(2, 3, 4), rtol=1e-6)


@every_form
def test_coefficients_are_float32_for_bfloat16_streams(config: Any) -> None:
    toy = ToyModel(config)
    streams = torch.randn(3, 4, DIM, dtype=torch.bfloat16)
    exact = toy.residual.coefficients(streams.float(), 2)
    for ours, want in zip(toy.residual.coefficients(streams, 2), exact, strict=True):
        assert ours.dtype == torch.float32
        assert torch.equal(ours, want)


@pytest.mark.parametrize(
    ("config", "parameters", "mflop"),
    [(STATIC, 1_152, 2.36), (HC, 296_160, 4.72), (MHC, 4_719_888, 11.80)],
)
def test_cost_of_a_model_of_24_layers(config: Any, parameters: int, mflop: float) -> None:
    model = ModelConfig(
        vocab_size=100_277,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=24,
        num_attention_heads=16,
        residual=config,
    )
    cost = account(model)
    assert cost.parameters.routing == parameters
    assert round(2 * cost.multiply_adds.routing / 1e6, 2) == mflop
    assert cost.cached_elements == 3 * 1024  # streams beyond the first


@every_form
@pytest.mark.parametrize("num_streams", [2, 3])
def test_multiply_adds_equal_those_of_a_forward(config: Any, num_streams: int) -> None:
    config = dataclasses.replace(config, num_streams=num_streams)
    scheme = build_residual(config, dim=DIM, kinds=("mlp",) * 3, eps=EPS)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        state = scheme(torch.randn(1, 1, DIM))
        for site in range(3):
            (h,), state = scheme.read(state, site, torch.clone)
            state = scheme.write(state, site, h)
    added = 3 * num_streams * DIM  # `post * y`, a product element by element
    assert scheme.cost().multiply_adds == counter.get_total_flops() // 2 + added


def test_the_published_count_of_olmo_1b() -> None:
    # arXiv 2409.19606: 768 static and 394,048 dynamic parameters for 16 layers of width 2048
    kinds = ("attention", "mlp") * 16
    for config, count in ((STATIC, 768), (HC, 394_048)):
        assert build_residual(config, dim=2048, kinds=kinds).cost().parameters == count


def test_no_streams_are_refused() -> None:
    with pytest.raises(ValueError, match="num_streams must be >= 1, got 0"):
        HyperConfig(num_streams=0)
