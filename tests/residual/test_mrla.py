"""MRLA-light against its equations, one token, head and column at a time."""

import math

import pytest
import torch
from torch import Tensor

from depthroute.models import CausalLM
from depthroute.residual import Mrla, MrlaConfig, PreNormConfig, build_residual
from helpers import ToyModel, assert_close, assert_same_gradients, tiny_config, tiny_model

DIM, HEAD = 16, 4
CONFIG = MrlaConfig(head_dim=HEAD)


def literal_token(toy: ToyModel, x: Tensor) -> tuple[list[Tensor], int]:
    """Return what each site reads for one token `[D]`, and the multiply-adds of the scheme."""
    residual, reads, carried, count = toy.residual, [x], x, 0
    for site in range(len(toy.sublayers)):
        x = x + toy.sublayer(site, (x,))
        if site % 2:
            layer = site // 2
            n = x / ((x**2).sum() / DIM + residual.eps).sqrt()
            sides = []
            for taps in (residual.query_filter[layer], residual.key_filter[layer]):
                columns = [torch.zeros((), dtype=x.dtype) for _ in range(DIM)]
                for column in range(DIM):
                    for j in (-1, 0, 1):
                        count += 1
                        if 0 <= column + j < DIM:
                            columns[column] = columns[column] + taps[j + 1] * n[column + j]
                sides.append(columns)
            out = []
            for column in range(DIM):
                head = range(column // HEAD * HEAD, column // HEAD * HEAD + HEAD)
                logit = sum(sides[0][c] * sides[1][c] for c in head) / math.sqrt(HEAD)
                weight = 1 / (1 + torch.exp(-logit))
                value = residual.value_gain[layer, column] * n[column]
                out.append(weight * value + residual.carry_gain[layer, column] * carried[column])
            carried = torch.stack(out)
            x = x + residual.out_gain[layer] * carried
            count += 5 * DIM  # scores, once per head; weighing; three gains
        reads.append(x)
    return reads, count


def test_every_read_equals_the_literal_loop() -> None:
    toy, x = ToyModel(CONFIG).double(), torch.randn(2, 3, DIM, dtype=torch.float64)
    passes = [literal_token(toy, token) for token in x.flatten(0, 1)]
    reads = [torch.stack(tokens).view_as(x) for tokens in zip(*(r for r, _ in passes), strict=True)]
    steps = toy.steps(x)
    for step, read in zip(steps, reads, strict=True):
        assert_close(step.inputs[0], read, f"site {step.site}")
    assert_same_gradients(toy, steps[-1].inputs[0], reads[-1])
    assert toy.residual.cost().multiply_adds == passes[0][1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_untrained_model_is_the_plain_sum_bit_for_bit(dtype: torch.dtype) -> None:
    ids = torch.arange(18).view(2, 9)
    routed, plain = (CausalLM(tiny_config(c)) for c in (MrlaConfig(), PreNormConfig()))
    for model in (routed, plain):
        model.model.compute_dtype = dtype
    out, want = routed(ids), plain(ids)
    assert torch.equal(out, want)
    upstream = torch.randn_like(out)
    out.backward(upstream)
    want.backward(upstream)
    shared = dict(routed.named_parameters())
    for name, parameter in plain.named_parameters():
        assert torch.equal(shared[name].grad, parameter.grad), name


def test_other_weights_are_another_function() -> None:
    ids = torch.arange(18).view(2, 9)
    plain, routed = tiny_model(PreNormConfig()), tiny_model(MrlaConfig())
    assert (routed(ids) - plain(ids)).abs().max() > 1e-2 * plain(ids).abs().max()


def test_a_scheme_built_alone_weighs_every_layer_by_one_half_at_first() -> None:
    residual = build_residual(CONFIG, dim=DIM, kinds=("attention", "mlp")).double()
    x, y, z = torch.randn(3, 5, DIM, dtype=torch.float64)
    state = residual.write(residual.write(residual(x), 0, y), 1, z)
    total = x + y + z
    assert torch.equal(state.stream, total)
    rms = (total.square().mean(-1, keepdim=True) + residual.eps).sqrt()
    assert_close(state.carried, 0.5 * total / rms)


def test_a_carry_gain_of_one_hands_the_embedding_to_the_last_layer() -> None:
    toy, x = ToyModel(CONFIG), torch.randn(2, 3, DIM)
    with torch.no_grad():
        toy.residual.value_gain.zero_()
        toy.residual.carry_gain.fill_(1.0)
    *_, last = toy.steps(x)
    assert torch.equal(last.state.carried, x)


def test_the_first_step_moves_the_output_gain_then_all_but_the_key() -> None:
    model, ids = CausalLM(tiny_config(MrlaConfig())), torch.arange(18).view(2, 9)
    residual = model.model.residual
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    moved = []
    for _ in range(3):
        optimizer.zero_grad()
        model(ids).square().sum().backward()
        moved.append({name for name, p in residual.named_parameters() if p.grad.any()})
        optimizer.step()
    late = {"out_gain", "value_gain", "carry_gain", "query_filter"}
    assert moved == [{"out_gain"}, late, late | {"key_filter"}]


@pytest.mark.parametrize("dim", [4, 8, 16, 32, 96, 128, 255, 256, 512, 1024, 4096])
def test_filters_are_as_wide_as_in_the_papers_code(dim: int) -> None:
    rounded = int((math.log2(dim) + 1) / 2)
    taps = rounded if rounded % 2 else rounded + 1
    residual = Mrla(MrlaConfig(head_dim=1), dim=dim, kinds=("mlp",), eps=1e-6)
    assert residual.query_filter.shape == residual.key_filter.shape == (1, taps)


def test_cost_of_24_layers_of_width_1024() -> None:
    residual = build_residual(MrlaConfig(), dim=1024, kinds=("attention", "mlp") * 24)
    assert residual.cost() == (24 * (2 * 5 + 3 * 1024), 24 * 15 * 1024, 1024, 0)


@pytest.mark.parametrize("head_dim", [0, -4, 5, 32])
def test_heads_that_do_not_divide_the_width_are_refused(head_dim: int) -> None:
    with pytest.raises(ValueError, match=f"divide the model width 16, got {head_dim}"):
        build_residual(MrlaConfig(head_dim=head_dim), dim=DIM, kinds=("attention", "mlp"))
