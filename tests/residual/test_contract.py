"""The promises of every residual scheme, one test each.

A new scheme adds rows to `helpers.VARIANTS`; one with depth weights says in `depth_sources` what
they mix.
"""

import copy
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._pytree import tree_leaves, tree_map_only

from depth_sources import sources_of
from depthroute.config import from_dict, to_dict
from depthroute.models import CausalLM, ModelConfig
from depthroute.residual import SCHEMES, ResidualScheme, build_residual
from depthroute.residual.probe import Probe
from helpers import (
    VARIANTS,
    ToyModel,
    assert_all_close,
    assert_close,
    ignore_dynamo_warnings,
    tiny_config,
    tiny_model,
)

every_variant = pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)


def tokens(batch: int = 2, length: int = 9) -> Tensor:
    return torch.randint(0, 61, (batch, length))


def loss_gradients(model: torch.nn.Module, *inputs: Tensor) -> dict[str, Tensor]:
    """Return the gradient of every parameter, of a loss that weighs each output differently."""
    model.zero_grad()
    out = model(*inputs)
    source = torch.Generator().manual_seed(2)
    out.backward(torch.randn(out.shape, generator=source).to(out.dtype))
    grads = {name: p.grad for name, p in model.named_parameters()}
    assert all(grad is not None for grad in grads.values()), grads.keys()
    return {name: grad.clone() for name, grad in grads.items() if grad is not None}


def test_every_scheme_has_a_variant() -> None:
    assert {config.name for config in VARIANTS.values()} == set(SCHEMES)
    for name, scheme in SCHEMES.items():
        assert scheme.Config.__dataclass_fields__["name"].default == name


def test_a_config_of_no_registered_scheme_is_refused() -> None:
    with pytest.raises(TypeError, match="config must be a residual config, one of prenorm"):
        build_residual({"name": "attn_res"}, dim=8, kinds=())


@every_variant
def test_without_sublayers_the_embedding_comes_back(config: Any) -> None:
    if hasattr(config, "num_blocks"):
        config = dataclasses.replace(config, num_blocks=0, block_ends=())
    scheme = build_residual(config, dim=16, kinds=())
    x = torch.randn(2, 3, 16)
    assert torch.equal(scheme.finish(scheme(x), torch.clone), x)


@every_variant
def test_decoding_with_a_cache_equals_one_full_pass(config: Any) -> None:
    model = tiny_model(config, dtype=torch.float64)
    ids = tokens()
    with torch.no_grad():
        full = model(ids)
        cache = model.new_cache(batch=2, capacity=9)
        parts = [model(part, cache=cache) for part in ids.split([3, 2, 1, 1, 1, 1], dim=1)]
    assert_close(torch.cat(parts, dim=1), full)


@every_variant
@pytest.mark.parametrize("checkpointing", ["layer", "depth_block"])
def test_checkpointing_recomputes_and_keeps_gradients_bitwise(
    config: Any, checkpointing: Any
) -> None:
    model, ids = tiny_model(config), tokens()
    plain = loss_gradients(model, ids)
    model.model.checkpointing = checkpointing
    calls: list[int] = []
    hook = model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    with hook:
        recomputed = loss_gradients(model, ids)
    assert len(calls) == 2
    for name, grad in plain.items():
        assert torch.equal(recomputed[name], grad), name


@every_variant
def test_reads_and_writes_change_no_earlier_tensor(config: Any) -> None:
    toy = ToyModel(config)
    kept: list[tuple[Tensor, Tensor]] = []
    with torch.no_grad():
        x = torch.randn(2, 3, 16)
        kept.append((x, x.clone()))
        for step in toy.resume(toy.residual(x), 0):
            seen = [*tree_leaves(step.state), *step.inputs, step.written]
            kept += [(t, t.clone()) for t in seen if isinstance(t, Tensor)]
            toy.residual.weights(step.state, step.site)
    for now, then in kept:
        assert torch.equal(now, then)


@every_variant
def test_a_pass_may_continue_in_another_object_from_any_site(config: Any) -> None:
    toy, x = ToyModel(config), torch.randn(2, 3, 16)
    other = copy.deepcopy(toy)
    steps = toy.steps(x)
    for step in steps:
        *_, last = other.resume(step.state, step.site)
        assert torch.equal(last.inputs[0], steps[-1].inputs[0]), f"from site {step.site}"


@every_variant
def test_changed_parameters_are_used_at_once(config: Any) -> None:
    toy, x = ToyModel(config), torch.randn(2, 3, 16)
    before = toy(x)
    changed = {name: 0.7 * value for name, value in toy.state_dict().items()}
    fresh = ToyModel(config)
    fresh.load_state_dict(changed)
    want = fresh(x)
    assert not torch.equal(before, want)
    assert torch.equal(torch.func.functional_call(toy, changed, (x,)), want)
    assert torch.equal(toy(x), before)
    with torch.no_grad():
        for name, parameter in toy.named_parameters():
            parameter.copy_(changed[name])
    assert torch.equal(toy(x), want)
    assert torch.equal(copy.deepcopy(toy)(x), want)


@every_variant
def test_every_parameter_gets_a_gradient(config: Any) -> None:
    model = tiny_model(config)
    for name, grad in loss_gradients(model, tokens()).items():
        assert grad.any(), name
    for name, parameter in model.model.residual.named_parameters():
        assert parameter.grad is not None
        assert parameter.grad.flatten(1).any(1).all(), f"a row of {name}"
    loss_gradients(CausalLM(tiny_config(config)), tokens())  # zero queries: none may be None


@every_variant
def test_routing_stays_float32_under_bfloat16_compute(config: Any) -> None:
    model, ids = tiny_model(config, noise=0.05), tokens()
    full = model(ids)
    model.model.compute_dtype = torch.bfloat16
    dtypes = set()
    probe = Probe(model.model.residual, lambda site, weights: dtypes.add(weights.dtype))
    error = (model(ids, residual=probe).float() - full).norm(dim=-1) / full.norm(dim=-1)
    # of a few tokens weights of any sign leave only roundings, as MUDD's do: hence the median
    assert error.median() < 0.02  # measured: at most 0.009, MUDD 0.014
    assert dtypes <= {torch.float32}
    for name, parameter in model.model.residual.named_parameters():
        assert parameter.dtype == torch.float32, name
    for name, grad in loss_gradients(model, ids).items():
        assert grad.dtype == torch.float32, name


@every_variant
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_sum_to_one_and_reproduce_the_read(config: Any, dtype: torch.dtype) -> None:
    toy, x = ToyModel(config), torch.randn(2, 3, 16, dtype=dtype)
    exact = copy.deepcopy(toy.residual).double()
    steps = toy.steps(x)
    for step in steps:
        weights = toy.residual.weights(step.state, step.site)
        if type(toy.residual).weights is ResidualScheme.weights:
            assert weights is None
            continue
        sources, _ = sources_of(toy.residual, steps, step.site)
        if not sources:
            assert weights is None
            continue
        assert weights.dtype == torch.float32
        assert_close(weights.sum(1), torch.ones_like(weights[:, 0]), rtol=1e-6)
        # from the same state, float64 statistics differ by float32 roundings only, unless the
        # partial sum is scaled first: that is a value, and rounds to the values' dtype
        wide = tree_map_only(Tensor, Tensor.double, step.state)
        off = (weights - exact.weights(wide, step.site)).abs().max()
        is_scaled = hasattr(config, "summary") and config.summary.alpha
        assert off < (1e-5 if dtype == torch.float32 or not is_scaled else 2**-8)
        split = torch.stack(sources).double().unflatten(-1, (weights.shape[-1], -1))
        read = torch.einsum("osbth,sbthd->obthd", weights.double(), split).flatten(-2)
        names = [f"role {i} of site {step.site}" for i in range(len(read))]
        ulp = {torch.float32: 1e-5, torch.bfloat16: 2**-8}[dtype]  # half a unit: rounded once
        assert_all_close(step.inputs, [*read], names, rtol=1.01 * ulp)


def shorten(config: Any) -> Any:
    """Return the config for 4 sublayers; variants that differ in their blocks become equal."""
    if hasattr(config, "num_blocks"):
        return dataclasses.replace(config, num_blocks=2 if config.num_blocks else 0, block_ends=())
    return config


SHORT = {shorten(config): name for name, config in reversed(VARIANTS.items())}


@pytest.mark.parametrize("config", SHORT, ids=SHORT.values())
@ignore_dynamo_warnings
def test_the_whole_pass_compiles_to_one_graph(config: Any) -> None:
    torch.compiler.reset()
    toy, x = ToyModel(config, num_sublayers=4), torch.randn(2, 3, 16)
    out, grads = toy(x), loss_gradients(toy, x)
    counter = CompileCounterWithBackend("aot_eager")
    toy.compile(backend=counter, fullgraph=True)
    assert_close(toy(x), out)
    assert_all_close([*loss_gradients(toy, x).values()], [*grads.values()], [*grads], rtol=1e-4)
    assert counter.frame_count == 1


@pytest.mark.parametrize("name", ["prenorm", "attn_res_full", "p_lr"])
@ignore_dynamo_warnings
def test_sublayers_of_any_depth_compile_to_two_graphs(name: str) -> None:
    torch.compiler.reset()
    model, ids = tiny_model(VARIANTS[name], num_hidden_layers=6), tokens()
    out, grads = model(ids), loss_gradients(model, ids)
    counter = CompileCounterWithBackend("aot_eager")
    for layer in model.model.layers:
        layer.self_attn.compile(backend=counter, fullgraph=True)
        layer.mlp.compile(backend=counter, fullgraph=True)
    assert_close(model(ids), out)
    assert_all_close([*loss_gradients(model, ids).values()], [*grads.values()], [*grads], rtol=1e-4)
    assert counter.frame_count <= 2


@every_variant
def test_a_token_sees_no_later_token_and_no_other_row(config: Any) -> None:
    model, ids = tiny_model(config), tokens(batch=3)
    changed = ids.clone()
    changed[1, 5:] = (ids[1, 5:] + 7) % 61
    changed[2] = (ids[2] + 11) % 61
    with torch.no_grad():
        before, after = model(ids), model(changed)
    assert torch.equal(after[0], before[0])
    assert torch.equal(after[1, :5], before[1, :5])
    assert (after[1, 5:] != before[1, 5:]).any(-1).all()


@every_variant
def test_config_survives_json(config: Any) -> None:
    model = tiny_config(config)
    assert from_dict(ModelConfig, json.loads(json.dumps(to_dict(model)))) == model


@every_variant
def test_building_on_the_meta_device_equals_building_directly(config: Any) -> None:
    direct = CausalLM(tiny_config(config), seed=3)
    with torch.device("meta"):
        model = CausalLM(tiny_config(config), seed=None)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(torch.nan)
    model.init_weights(3)
    for (name, a), (_, b) in zip(
        model.state_dict().items(), direct.state_dict().items(), strict=True
    ):
        assert torch.equal(a, b), name
    ids = tokens()
    assert torch.equal(model(ids), direct(ids))


@every_variant
def test_before_training_each_source_weighs_the_same(config: Any) -> None:
    toy = ToyModel(config)
    toy.residual.init_weights(torch.nn.init.normal_)
    steps = toy.steps(torch.randn(2, 3, 16))
    for step in steps:
        weights = toy.residual.weights(step.state, step.site)
        if type(toy.residual).weights is ResidualScheme.weights:
            assert weights is None
            continue
        _, shares = sources_of(toy.residual, steps, step.site)
        if not shares:
            assert weights is None
            continue
        prior = torch.tensor(shares, dtype=torch.float64)
        share = (prior / prior.sum()).view(1, -1, 1, 1, 1).expand(weights.shape)
        # two float32 roundings; OASIS starts at beta = softplus(-5) = 0.0067, on masses below 1
        rtol = 7e-3 if toy.residual.token_null else 3e-7
        assert_close(weights, share, f"site {step.site}", rtol=rtol)


@every_variant
def test_every_routing_parameter_leaves_its_start_within_three_steps(config: Any) -> None:
    model, ids = CausalLM(tiny_config(config)), tokens()
    start = {name: p.detach().clone() for name, p in model.model.residual.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    for _ in range(3):
        loss_gradients(model, ids)
        optimizer.step()
    for name, parameter in model.model.residual.named_parameters():
        assert (parameter != start[name]).flatten(1).any(1).all(), f"a row of {name}"


@every_variant
def test_training_on_text_in_bfloat16_lowers_the_loss(config: Any) -> None:
    model = CausalLM(tiny_config(config, vocab_size=256))
    model.model.compute_dtype = torch.bfloat16
    text = torch.tensor(list(Path(__file__).read_bytes()[:1024])).view(16, 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    losses = []
    for _ in range(12):
        sums = model.loss(text[:, :-1], text[:, 1:])
        loss = sums.cross_entropy / sums.tokens
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
        optimizer.step()
    assert losses[0] == pytest.approx(math.log(256), abs=0.2)
    assert losses[-1] < losses[0] - 1.5


@every_variant
def test_every_row_of_a_routing_parameter_changes_the_output(config: Any) -> None:
    toy, x = ToyModel(config), torch.randn(2, 3, 16)
    with torch.no_grad():
        before = toy(x)
        for name, parameter in toy.residual.named_parameters():
            for i in range(len(parameter)):
                old = parameter[i].clone()
                parameter[i] += 1.0
                assert not torch.equal(toy(x), before), f"{name}[{i}]"
                parameter[i] = old
        assert torch.equal(toy(x), before)
