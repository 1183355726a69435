"""Delta Attention Residuals against the paper's equations, written as a loop over sublayers."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from depthroute.models import CausalLM
from depthroute.residual import (
    DeltaConfig,
    FromValueKey,
    PreNormConfig,
    TailKey,
    build_residual,
    delta,
)
from helpers import ToyModel, assert_close, assert_same_gradients, tiny_config, tiny_model

DIM, EPS = 16, 1e-6
FORMS: dict[str, dict[str, Any]] = {
    "full": {"num_blocks": 0},
    "block2": {"num_blocks": 2},
    "block3": {"num_blocks": 3},
    "block8": {"num_blocks": 8},
    "uneven": {"block_ends": (1, 6, 8)},
    "previous": {"num_blocks": 4, "recurrence": "previous_entry"},
    "full_previous": {"num_blocks": 0, "recurrence": "previous_entry"},
}
KEYS = {
    "key": TailKey(),
    "tail": TailKey(rank=5),
    "tail_full_norm": TailKey(rank=5, norm="full"),
    "from_value": FromValueKey(rank=5),
}
EXTRAS = [{"gate": g, "null": n} for g, n in product(("none", "scalar", "sigmoid"), (False, True))]
each_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


def first_query_site(config: DeltaConfig) -> int:
    """Return the first site whose softmax has two sources or more, the null included."""
    if config.null or not (config.num_blocks or config.block_ends):
        return 1
    return (config.block_ends or (-(-8 // config.num_blocks),))[0]


def literal_pass(toy: ToyModel, x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Return what each of the 8 sublayers and the head read, and the final bank of sources."""
    residual, config = toy.residual, toy.residual.config
    ends = config.block_ends or [-(-8 * j // (config.num_blocks or 8)) for j in range(1, 9)]
    rank = config.key.rank or DIM

    def rms(v: Tensor) -> Tensor:
        return v / (v.pow(2).sum(-1, keepdim=True) / v.shape[-1] + EPS).sqrt()

    def key(v: Tensor) -> Tensor:
        if isinstance(config.key, FromValueKey):
            return rms(v @ residual.key.weight.T)
        return rms(v)[..., -rank:] if config.key.norm == "full" else rms(v[..., -rank:])

    stream, start, bank, reads = x, x, [x], []
    for t in range(8):
        h = stream
        if t > 0:
            row = t - first_query_site(config)
            query = residual.query[row] if row >= 0 else torch.zeros(rank, dtype=x.dtype)
            exps = [(key(v) @ query).exp() for v in bank]
            total = sum(exps) + (residual.null[row, 0].exp() if config.null else 0)
            mix = sum((e / total)[..., None] * v for e, v in zip(exps, bank, strict=True))
            if config.gate == "scalar":
                mix = residual.gate[t - 1, 0] * mix
            if config.gate == "sigmoid":
                mix = mix / (1 + (-residual.gate[t - 1, 0]).exp())
            h = stream + mix
        reads.append(h)
        y = toy.sublayer(t, (h,))
        stream = stream + y
        if not (config.num_blocks or config.block_ends):
            bank.append(y)
        elif t + 1 in ends:
            bank.append(stream - (bank[-1] if config.recurrence == "previous_entry" else start))
            start = stream
    return [*reads, stream], bank


def compare_with_loop(config: DeltaConfig) -> None:
    toy, x = ToyModel(config).double(), torch.randn(2, 3, DIM, dtype=torch.float64)
    reads, _ = literal_pass(toy, x)
    steps = toy.steps(x)
    for step, read in zip(steps, reads, strict=True):
        assert_close(step.inputs[0], read, f"site {step.site}")
    assert_same_gradients(toy, steps[-1].inputs[0], reads[-1])


@each_form
@pytest.mark.parametrize("extra", EXTRAS, ids=lambda extra: "-".join(map(str, extra.values())))
def test_every_read_equals_the_literal_loop(form: dict[str, Any], extra: dict[str, Any]) -> None:
    compare_with_loop(DeltaConfig(**form, **extra))


@pytest.mark.parametrize("key", KEYS.values(), ids=KEYS)
@pytest.mark.parametrize("null", [False, True])
@pytest.mark.parametrize("num_blocks", [0, 3])
def test_low_rank_keys_equal_the_literal_loop(key: Any, null: bool, num_blocks: int) -> None:
    compare_with_loop(DeltaConfig(num_blocks=num_blocks, key=key, null=null))


def test_what_is_routed_never_enters_the_stream() -> None:
    for config in (DeltaConfig(num_blocks=0), DeltaConfig(num_blocks=3, null=True)):
        toy, x = ToyModel(config).double(), torch.randn(2, 3, DIM, dtype=torch.float64)
        steps = toy.steps(x)
        stream = x
        for step in steps:
            assert_close(step.state.stream, stream, f"site {step.site}")
            if step.written is not None:
                stream = stream + step.written
        assert torch.equal(steps[-1].inputs[0], steps[-1].state.stream)  # no final read
        assert torch.equal(steps[0].inputs[0], x)  # nor a first one


@pytest.mark.parametrize("num_blocks", [0, 2, 3, 8])
def test_the_sources_add_up_to_the_stream_after_the_last_block_but_one(num_blocks: int) -> None:
    toy, x = ToyModel(DeltaConfig(num_blocks=num_blocks)), torch.randn(2, 3, DIM)
    steps = toy.double().steps(x.double())
    last_start = -(-8 * (num_blocks - 1) // num_blocks) if num_blocks else 7
    values = steps[-1].state.values
    assert len(values) == (num_blocks or 8)
    assert_close(torch.stack(values).sum(0), steps[last_start].state.stream)
    assert torch.equal(values[0], x.double())


def test_as_many_blocks_as_writes_are_the_full_form() -> None:
    x = torch.randn(2, 3, DIM, dtype=torch.float64)
    full, block = (ToyModel(DeltaConfig(num_blocks=n)).double() for n in (0, 8))
    block.load_state_dict(full.state_dict())
    assert_close(block(x), full(x))


def test_the_previous_entry_leaves_older_sources_in_a_delta() -> None:
    config = DeltaConfig(num_blocks=4, recurrence="previous_entry")
    toy, x = ToyModel(config).double(), torch.randn(2, 3, DIM, dtype=torch.float64)
    steps = toy.steps(x)
    true = [steps[t + 2].state.stream - steps[t].state.stream for t in (0, 2, 4)]
    expected = [x, true[0], true[1] + x, true[2] + true[0]]  # D_n = Delta_n + D_{n-2}
    for i, (value, want) in enumerate(zip(steps[-1].state.values, expected, strict=True)):
        assert_close(value, want, f"entry {i}")


def test_with_two_blocks_both_recurrences_agree() -> None:
    x = torch.randn(2, 3, DIM)
    a, b = (
        ToyModel(DeltaConfig(num_blocks=2, recurrence=r)) for r in ("block_start", "previous_entry")
    )
    b.load_state_dict(a.state_dict())
    assert torch.equal(a(x), b(x))


def test_one_pass_serves_a_whole_block() -> None:
    toy = ToyModel(DeltaConfig(num_blocks=2))  # blocks of 4 writes
    ahead = [step.state.ahead for step in toy.steps(torch.randn(1, 1, DIM))]
    assert [None if a is None else len(a) for a in ahead] == [None, None, 2, 1, None, 3, 2, 1, 0]


def test_a_null_takes_its_share() -> None:
    toy, x = ToyModel(DeltaConfig(num_blocks=0, null=True)), torch.randn(2, 3, DIM)
    torch.nn.init.zeros_(toy.residual.query)
    with torch.no_grad():
        toy.residual.null[0] = torch.tensor(2.0).log()
    step = toy.steps(x)[1]
    weights = toy.residual.weights(step.state, 1)
    # logits 0, 0 and log 2: embedding, first write, null
    expected = torch.tensor([0.25, 0.25, 0.5]).view(1, 3, 1, 1, 1).expand(1, 3, 2, 3, 1)
    torch.testing.assert_close(weights, expected)
    mix = 0.25 * (step.state.values[0] + step.state.values[1])
    torch.testing.assert_close(step.inputs[0], step.state.stream + mix)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("null", [False, True])
@each_form
def test_a_scalar_gate_starts_as_the_plain_sum_bit_for_bit(
    form: dict[str, Any], null: bool, dtype: torch.dtype
) -> None:
    ids = torch.arange(18).view(2, 9)
    config = DeltaConfig(**form, gate="scalar", null=null)
    routed, plain = (CausalLM(tiny_config(c)) for c in (config, PreNormConfig()))
    routed.model.compute_dtype = plain.model.compute_dtype = dtype
    assert torch.equal(routed(ids), plain(ids))
    with torch.no_grad():
        routed.model.residual.query.normal_()  # whatever the queries are
    assert torch.equal(routed(ids), plain(ids))


def distance_to_plain(config: DeltaConfig, norm_eps: float) -> float:
    ids = torch.arange(18).view(2, 9)
    models = (CausalLM(tiny_config(c, norm_eps=norm_eps)) for c in (config, PreNormConfig()))
    routed, plain = (model.double()(ids) for model in models)
    return ((routed - plain).abs().max() / plain.abs().max()).item()


@pytest.mark.parametrize("gate", ["none", "sigmoid"])
@pytest.mark.parametrize("null", [False, True])
def test_every_write_a_source_starts_parallel_to_the_stream(gate: Any, null: bool) -> None:
    # the mean of S sources that add up to the stream is s / S, or s / (S + 1) with a null
    assert distance_to_plain(DeltaConfig(num_blocks=0, gate=gate, null=null), 1e-14) < 1e-8


@pytest.mark.parametrize("gate", ["none", "sigmoid"])
def test_blocks_do_not_start_as_the_plain_sum_without_a_scalar_gate(gate: Any) -> None:
    assert distance_to_plain(DeltaConfig(num_blocks=3, gate=gate), 1e-14) > 1e-2


def test_a_scalar_gate_moves_before_the_queries() -> None:
    model = CausalLM(tiny_config(DeltaConfig(num_blocks=3, gate="scalar", null=True)))
    residual = model.model.residual
    optimizer = torch.optim.SGD(residual.parameters(), lr=1.0)
    ids = torch.arange(18).view(2, 9)
    has_gradient: list[dict[str, set[bool]]] = []  # over the rows of each parameter
    for _ in range(2):
        optimizer.zero_grad()
        model(ids).square().sum().backward()
        rows = {name: p.grad.ne(0).any(1) for name, p in residual.named_parameters()}
        has_gradient.append({name: set(row.tolist()) for name, row in rows.items()})
        optimizer.step()
    assert has_gradient == [
        {"query": {False}, "null": {False}, "gate": {True}},
        {"query": {True}, "null": {True}, "gate": {True}},
    ]


def test_gates_have_their_start_before_and_after_init_weights() -> None:
    for gate, start in (("scalar", 0.0), ("sigmoid", -2.0)):
        residual = build_residual(DeltaConfig(gate=gate), dim=8, kinds=("attention", "mlp") * 4)
        for _ in range(2):
            assert residual.gate.tolist() == [[start]] * 7
            torch.nn.init.ones_(residual.gate)
            residual.init_weights(lambda _: None)


def test_what_a_bfloat16_sublayer_reads_is_rounded_once() -> None:
    kinds = ("attention", "mlp")
    residual = build_residual(DeltaConfig(num_blocks=0, gate="scalar"), dim=1, kinds=kinds)
    torch.nn.init.constant_(residual.gate, -1.0)
    one = torch.ones(1, 1, 1, dtype=torch.bfloat16)
    state = residual.write(residual(one), 0, one * 2**-8)
    (x,), _ = residual.read(state, 1, torch.clone)
    # the stream is 1, since 1 + 2^-8 is not a bfloat16; nor is the mean of the sources
    assert x.item() == 1 - (1 + 2**-8) / 2


@pytest.mark.parametrize(
    ("config", "queries", "sources"),
    [
        # 24 layers: reads at sites 1 .. 47 over 2 .. 48 sources
        (DeltaConfig(num_blocks=0), 47, 1175),
        # blocks of 12: sites 12 .. 47, over 2, 3 and 4 sources, twelve each
        (DeltaConfig(num_blocks=4), 36, 108),
        # a null gives the first block's 11 reads a query over the embedding
        (DeltaConfig(num_blocks=4, null=True), 47, 119),
        (DeltaConfig(num_blocks=4, key=TailKey(rank=64)), 36, 108),
        (DeltaConfig(block_ends=(2, 46, 48)), 46, 44 * 2 + 2 * 3),
        (DeltaConfig(num_blocks=4, gate="scalar"), 36, 108),
        (DeltaConfig(num_blocks=4, gate="sigmoid", key=FromValueKey(rank=64)), 36, 108),
    ],
)
def test_cost_of_24_layers(
    config: DeltaConfig, queries: int, sources: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    residual = build_residual(config, dim=256, kinds=("attention", "mlp") * 24)
    rank = config.key.rank or 256
    seen: list[int] = []
    attend = delta.depth_attend

    def count(values: Any, query: Tensor, **options: Any) -> Any:
        seen.append(len(values) * len(query))
        return attend(values, query, **options)

    monkeypatch.setattr(delta, "depth_attend", count)
    state = residual(torch.zeros(1, 1, 256))
    for site in range(48):
        _, state = residual.read(state, site, torch.clone)
        state = residual.write(state, site, torch.zeros(1, 1, 256))
    assert sum(seen) == sources
    gates = 0 if config.gate == "none" else 47
    weight = rank * 256 if isinstance(config.key, FromValueKey) else 0
    assert residual.cost().parameters == queries * (rank + config.null) + gates + weight
    products = (256 + rank) * sources + 256 * gates + weight * len(state.values)
    assert residual.cost().multiply_adds == products
    assert residual.cost().cached == sum(t.numel() for t in (*state.values, *state.keys))
    assert sum(p.numel() for p in residual.parameters()) == residual.cost().parameters


def test_routing_is_another_function_than_the_plain_sum() -> None:
    ids = torch.arange(18).view(2, 9)
    plain, routed = (tiny_model(c) for c in (PreNormConfig(), DeltaConfig(num_blocks=3)))
    assert (routed(ids) - plain(ids)).abs().max() > 1e-2 * plain(ids).abs().max()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_blocks": 1}, "num_blocks must be 0 or >= 2: the last block is no source, got 1"),
        ({"block_ends": (4,)}, "the last block is no source, got 1"),
        ({"num_blocks": -1}, "num_blocks must be >= 0"),
        ({"num_blocks": 5}, "num_blocks must be at most the 4 writes of the model"),
        ({"block_ends": (2, 3)}, "block_ends must end with the 4 writes of the model"),
        ({"num_blocks": 2, "key": TailKey(rank=9)}, "rank must be at most the model width 8"),
    ],
)
def test_wrong_settings_are_refused(changes: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_residual(DeltaConfig(**changes), dim=8, kinds=("attention", "mlp") * 2)
