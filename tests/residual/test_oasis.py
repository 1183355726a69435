"""OASIS against its equations, written as a loop over sublayers."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from depthroute.models import CausalLM
from depthroute.ops import depth_attend
from depthroute.residual import AttnResConfig, OasisConfig, TailKey, build_residual, oasis
from depthroute.residual.oasis import Oasis, OasisState
from helpers import ToyModel, assert_close, assert_same_gradients, tiny_config, tiny_model

DIM, EPS = 16, 1e-6
LAYERS = ("attention", "mlp") * 4
each_null = pytest.mark.parametrize("depth_null", [False, True], ids=["softmax", "softmax1"])


def double(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def literal_pass(toy: ToyModel, x: Tensor) -> list[Tensor]:
    """Return what each site reads, the final read last."""
    residual, config = toy.residual, toy.residual.config
    rank, num_writes = config.key.rank or DIM, len(toy.sublayers)
    num_blocks = config.num_blocks or num_writes
    ends = {math.ceil(num_writes * j / num_blocks) for j in range(1, num_blocks + 1)}

    def key(v: Tensor) -> Tensor:
        under = v if config.key.norm == "full" else v[..., DIM - rank :]
        return v[..., DIM - rank :] / (under.pow(2).mean(-1, keepdim=True) + EPS).sqrt()

    zero = torch.zeros_like(x[..., 0])
    bank, block, psi, reads = [(x, zero)], [], zero, []
    for t in range(num_writes + 1):
        sources = list(bank)
        if block:
            values, masses = zip(*block, strict=True)
            sources.append((sum(values), sum(masses) / len(masses)))
        h = x
        if t > 0:
            beta = min(math.log1p(math.exp(residual.beta_raw[t - 1].item())), 10.0)
            assert beta < 10  # away from the clamp, where the derivative is 0
            beta = torch.log1p(residual.beta_raw[t - 1].exp())
            mean = sum(p for _, p in sources) / len(sources)
            scores = [
                torch.exp(key(v) @ residual.query[t - 1] - beta * (p - mean)) for v, p in sources
            ]
            total = sum(scores) + (1 if config.depth_null else 0)
            h = sum(
                (s / total).unsqueeze(-1) * v for s, (v, _) in zip(scores, sources, strict=True)
            )
        reads.append(h)
        if t < num_writes:
            y = toy.sublayer(t, (h,))
            if t % 2 == 0:  # attention; the MLP after it keeps its mass
                y, psi = y[..., :DIM], y[..., DIM]
            block.append((y, psi))
        if t + 1 in ends:
            values, masses = zip(*block, strict=True)
            bank.append((sum(values), sum(masses) / len(masses)))
            block = []
    return reads


@each_null
@pytest.mark.parametrize("key", [TailKey(), TailKey(rank=5), TailKey(rank=5, norm="full")], ids=str)
@pytest.mark.parametrize("num_blocks", [0, 1, 3, 5, 8])
def test_every_read_equals_the_literal_loop(num_blocks: int, key: Any, depth_null: bool) -> None:
    config = OasisConfig(num_blocks=num_blocks, key=key, depth_null=depth_null)
    toy, x = ToyModel(config).double(), double(2, 3, DIM)
    reads, steps = literal_pass(toy, x), toy.steps(x)
    for step, read in zip(steps, reads, strict=True):
        assert_close(step.inputs[0], read, f"site {step.site}")
    assert_same_gradients(toy, steps[-1].inputs[0], reads[-1])


def reads_of(scheme: Any, embedding: Tensor, writes: Tensor, masses: Tensor | None) -> list[Tensor]:
    """Return what each site reads if sublayer t writes `writes[t]`, attention with its mass."""
    state, reads = scheme(embedding), []
    for t, write in enumerate(writes):
        (h,), state = scheme.read(state, t, torch.clone)
        reads.append(h)
        has_null = masses is not None and scheme.kinds[t] == "attention"
        y = torch.cat([write, masses[t].unsqueeze(-1)], dim=-1) if has_null else write
        state = scheme.write(state, t, y)
    return [*reads, scheme.finish(state, torch.clone)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_blocks", [0, 3])
@pytest.mark.parametrize("no_op", ["no_null_mass", "no_beta"])
def test_without_null_mass_or_beta_it_is_attn_res_bit_for_bit(
    no_op: str, num_blocks: int, dtype: torch.dtype
) -> None:
    key = TailKey(rank=5)
    ours = build_residual(OasisConfig(num_blocks=num_blocks, key=key), dim=DIM, kinds=LAYERS)
    base = build_residual(AttnResConfig(num_blocks=num_blocks, key=key), dim=DIM, kinds=LAYERS)
    with torch.no_grad():
        ours.query.copy_(torch.randn(8, 5))
        base.query.copy_(ours.query)
        ours.beta_raw.fill_(3.0 if no_op == "no_null_mass" else -1e4)
    if dtype == torch.float64:
        ours, base = ours.double(), base.double()
    embedding, *writes = torch.randn(9, 2, 3, DIM).to(dtype)
    masses = torch.zeros(8, 2, 3) if no_op == "no_null_mass" else torch.rand(8, 2, 3)
    got = reads_of(ours, embedding, writes, masses.to(dtype))
    for a, b in zip(got, reads_of(base, embedding, writes, None), strict=True):
        assert torch.equal(a, b)


def state_of(values: Tensor, masses: list[float]) -> OasisState:
    """Return a state between blocks, all sources closed."""
    nulls = tuple(torch.full_like(values[0, ..., 0], mass) for mass in masses)
    return OasisState(tuple(values), nulls, None, nulls[0], None)


def scheme_of(depth_null: bool, beta_raw: float) -> Oasis:
    config = OasisConfig(num_blocks=0, depth_null=depth_null)
    scheme = build_residual(config, dim=DIM, kinds=LAYERS).double()
    with torch.no_grad():
        scheme.query.copy_(double(8, DIM))
        scheme.beta_raw.fill_(beta_raw)
    return scheme


def read_at(scheme: Oasis, state: OasisState) -> Tensor:
    """Read at the site that sees just the state's sources."""
    (h,), _ = scheme.read(state, len(state.values) - 1, torch.clone)
    return h


@each_null
def test_equal_null_masses_change_nothing(depth_null: bool) -> None:
    scheme, values = scheme_of(depth_null, 2.0), double(4, 2, 3, DIM)
    expected = read_at(scheme, state_of(values, [0.0] * 4))
    assert_close(read_at(scheme, state_of(values, [0.7] * 4)), expected)
    assert (read_at(scheme, state_of(values, [0.7, 0.7, 0.7, 0.0])) - expected).abs().max() > 1e-2


def test_the_mean_matters_with_a_depth_null_alone() -> None:
    values, masses = double(4, 2, 3, DIM), torch.tensor([0.1, 0.9, 0.8, 0.3])
    for depth_null in (False, True):
        scheme = scheme_of(depth_null, 2.0)
        state = state_of(values, masses.tolist())
        beta, query = F.softplus(torch.tensor(2.0)), scheme.query[2]
        null = 0.0 if depth_null else None
        centred, _ = depth_attend(values, query, bias=-beta * (masses - masses.mean()), null=null)
        plain, _ = depth_attend(values, query, bias=-beta * masses, null=null)
        assert_close(read_at(scheme, state), centred, rtol=1e-6)  # a float32 bias
        assert ((plain - centred).abs().max() > 1e-2) == depth_null


@each_null
def test_a_large_beta_picks_the_source_with_the_least_null_mass(depth_null: bool) -> None:
    scheme = scheme_of(depth_null, 50.0)
    scheme.query.data.zero_()
    state = state_of(double(4, 2, 3, DIM), [0.9, 0.8, 0.1, 1.0])
    weights = scheme.weights(state, 3)
    assert (weights[0, 2] > 0.99).all()
    # beta stops at 10, in logits
    ratio = weights[0, 1] / weights[0, 2]
    assert_close(ratio, torch.full_like(ratio, math.exp(-7.0)))


@each_null
def test_weights_are_the_softmax_over_the_sources_and_the_null(depth_null: bool) -> None:
    scheme, state = scheme_of(depth_null, 1.0), state_of(double(3, 1, 1, DIM), [0.0, 0.5, 0.25])
    query = scheme.query[1].detach()
    weights = scheme.weights(state, 2).flatten()
    beta = math.log1p(math.e)
    logits = []
    for value, mass in zip(state.values, (0.0, 0.5, 0.25), strict=True):
        v = value.flatten()
        rms = math.sqrt(float(v @ v) / DIM + EPS)
        logits.append(float(v @ query) / rms - beta * (mass - 0.25))
    scores = [math.exp(z) for z in [*logits, *[0.0] * depth_null]]
    expected = torch.tensor([s / sum(scores) for s in scores], dtype=torch.float64)
    assert_close(weights, expected)


def test_a_depth_null_scales_each_read_which_the_norm_after_it_removes() -> None:
    ids = torch.randint(0, 61, (2, 9))
    plain = OasisConfig(num_blocks=3)
    models = [
        tiny_model(
            dataclasses.replace(plain, depth_null=depth_null), norm_eps=1e-14, dtype=torch.float64
        )
        for depth_null in (False, True)
    ]
    assert_close(models[1](ids), models[0](ids), rtol=1e-6)
    schemes = [scheme_of(depth_null, 2.0) for depth_null in (False, True)]
    schemes[1].load_state_dict(schemes[0].state_dict())
    state = state_of(double(4, 2, 3, DIM), [0.1, 0.9, 0.8, 0.3])
    whole, scaled = (read_at(scheme, state) for scheme in schemes)
    kept = 1 - schemes[1].weights(state, 3)[0, -1]
    assert_close(scaled, kept * whole)
    assert (kept < 0.98).any()


def test_an_mlp_before_any_attention_has_no_null_mass() -> None:
    scheme = build_residual(OasisConfig(num_blocks=0), dim=2, kinds=("mlp", "attention", "mlp"))
    state = scheme(torch.zeros(1, 1, 2))
    for site, y in enumerate(
        [torch.ones(1, 1, 2), torch.full((1, 1, 3), 0.5), torch.ones(1, 1, 2)]
    ):
        state = scheme.write(state, site, y)
    assert [mass.item() for mass in state.nulls] == [0.0, 0.0, 0.5, 0.5]


def test_null_masses_of_a_bfloat16_model_are_kept_in_float32() -> None:
    scheme = build_residual(OasisConfig(num_blocks=1), dim=2, kinds=("attention", "mlp") * 2)
    state = scheme(torch.zeros(1, 1, 2, dtype=torch.bfloat16))
    for site, mass in enumerate([1.0, None, 2**-7, None]):
        y = [0.0, 0.0] if mass is None else [0.0, 0.0, mass]
        state = scheme.write(state, site, torch.tensor([[y]], dtype=torch.bfloat16))
    assert state.nulls[1].item() == 0.5 + 2**-8  # not a bfloat16


def test_parameters_and_their_start() -> None:
    model = CausalLM(tiny_config(OasisConfig(num_blocks=3, key=TailKey(rank=5))))
    scheme = model.model.residual
    assert scheme.query.shape == (8, 5)
    assert not scheme.query.any()
    assert scheme.beta_raw.shape == (8, 1)  # one per read after the first
    assert (scheme.beta_raw == -5).all()
    assert {p.dtype for p in scheme.parameters()} == {torch.float32}
    # widths of the projections are those of any scheme: the null mass is no column of them
    plain = CausalLM(tiny_config(AttnResConfig(num_blocks=3, key=TailKey(rank=5))))
    shapes = [{n: p.shape for n, p in m.named_parameters()} for m in (model, plain)]
    assert shapes[0].items() - shapes[1].items() == {("model.residual.beta_raw", (8, 1))}


def test_attention_of_the_decoder_gets_a_gradient_through_its_null_mass() -> None:
    """With the values of attention at zero, its query projection acts by the mass alone."""
    model = tiny_model(OasisConfig(num_blocks=0))
    ids = torch.randint(0, 61, (2, 9))
    with torch.no_grad():
        model.model.residual.beta_raw.fill_(1.0)
        for layer in model.model.layers:
            layer.self_attn.v_proj.weight.zero_()
    model(ids).square().sum().backward()
    for layer in model.model.layers:
        assert layer.self_attn.q_proj.weight.grad.abs().max() > 1e-6


@each_null
@pytest.mark.parametrize("num_blocks", [0, 1, 3])
def test_cost_equals_a_count_of_the_reads_that_run(
    num_blocks: int, depth_null: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = OasisConfig(num_blocks=num_blocks, key=TailKey(rank=5), depth_null=depth_null)
    toy, counts = ToyModel(config), []
    attend, merge = oasis.depth_attend, oasis.depth_merge

    def counted_attend(values: Any, query: Tensor, **options: Any) -> Any:
        counts.extend(q.numel() + v.shape[-1] + 1 for q in query for v in values)
        return attend(values, query, **options)

    def counted_merge(
        out: Tensor, lse: Tensor, value: Tensor, query: Tensor, **options: Any
    ) -> Any:
        counts.append(query.numel() + value.shape[-1] + 1)
        return merge(out, lse, value, query, **options)

    monkeypatch.setattr(oasis, "depth_attend", counted_attend)
    monkeypatch.setattr(oasis, "depth_merge", counted_merge)
    *_, last = toy.steps(torch.randn(1, 1, DIM))
    scaled = 8 * DIM if depth_null else 0
    held = sum(x.numel() for x in (*last.state.values, *last.state.nulls))
    wide = sum(null.numel() for null in last.state.nulls)
    assert toy.residual.cost() == (8 * (5 + 1), sum(counts) + scaled, held, wide)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: OasisConfig(num_blocks=-1), r"num_blocks must be >= 0 \(0 is full\), got -1"),
        (lambda: OasisConfig(num_blocks=9), "num_blocks must be at most the 8 writes .* got 9"),
        (lambda: OasisConfig(block_ends=(3, 6)), r"block_ends must end with the 8 .*\(3, 6\)"),
        (lambda: OasisConfig(key=TailKey(rank=17)), "rank .* the model width 16, got 17"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    make: Callable[[], OasisConfig], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ToyModel(make())
