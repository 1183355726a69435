"""Role-Decoupled Attention Residuals against their equations, a loop over reads and roles."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from depthroute.account import account
from depthroute.models import CausalLM
from depthroute.ops import block
from depthroute.residual import AttnResConfig, ProjectedKey, Summary, TailKey
from depthroute.residual.attn_res import AttnRes
from depthroute.residual.probe import Probe
from helpers import (
    ToyModel,
    assert_close,
    assert_same_gradients,
    before_phase_1,
    tiny_config,
    tiny_model,
)

DIM, EPS = 16, 1e-6
NUM_ROLES = {"shared": 1, "qk_v": 2, "q_k_v": 3}
KEYS = {
    "full_width": TailKey(),
    "tail": TailKey(rank=6),
    "projected": ProjectedKey(rank=6, block="sum"),
}
every_role = pytest.mark.parametrize("roles", ["qk_v", "q_k_v"])


def rms(v: Tensor) -> Tensor:
    return v / (v.pow(2).sum(-1, keepdim=True) / v.shape[-1] + EPS).sqrt()


def literal_pass(config: AttnResConfig, toy: ToyModel, x: Tensor) -> list[tuple[Tensor, ...]]:
    """Return the inputs that each site reads, the final read last; queries are used up in order."""
    queries = iter(toy.residual.query)
    num_writes, rank = len(toy.sublayers), toy.residual.query.shape[1]
    num_blocks = config.num_blocks or num_writes
    ends = {math.ceil(num_writes * j / num_blocks) for j in range(1, num_blocks + 1)}
    separate = config.key.name == "projected"
    bank = [torch.cat([x, x @ toy.residual.key.weight.T], -1) if separate else x]
    block: list[Tensor] = []
    reads: list[tuple[Tensor, ...]] = []
    for t in range(num_writes + 1):
        sources = torch.stack([*bank, sum(block)] if block else bank)
        keys = rms(sources[..., -rank:])
        attends = t < num_writes and t % 2 == 0
        inputs = []
        for _ in range(NUM_ROLES[config.roles] if attends else 1):
            if t == 0:
                inputs = [x]
                break
            weights = (keys @ next(queries)).softmax(0)
            inputs.append((weights.unsqueeze(-1) * sources[..., :DIM]).sum(0))
        reads.append(tuple(inputs))
        if t < num_writes:
            block.append(toy.sublayer(t, reads[-1]))
        if t + 1 in ends:
            bank.append(sum(block))
            block = []
    assert next(queries, None) is None
    return reads


@pytest.mark.parametrize("key", KEYS.values(), ids=KEYS)
@pytest.mark.parametrize("num_blocks", [0, 1, 3, 5])
@every_role
def test_every_read_equals_the_literal_loop(key: Any, num_blocks: int, roles: Any) -> None:
    config = AttnResConfig(num_blocks=num_blocks, key=key, roles=roles)
    toy, x = ToyModel(config).double(), torch.randn(2, 3, DIM).double()
    reads, steps = literal_pass(config, toy, x), toy.steps(x)
    for step, read in zip(steps, reads, strict=True):
        for role, (got, want) in enumerate(zip(step.inputs, read, strict=True)):
            assert_close(got, want, f"role {role} of site {step.site}")
        weights = toy.residual.weights(step.state, step.site)
        assert weights.shape == (len(read), weights.shape[1], 2, 3, 1)
    (last,) = reads[-1]
    assert_same_gradients(toy, steps[-1].inputs[0], last)


@pytest.mark.parametrize("num_blocks", [0, 3])
def test_heads_and_roles_do_not_touch_each_other(num_blocks: int) -> None:
    """Each role reads as a single-role scheme of as many heads would with the role's query."""
    config = AttnResConfig(num_blocks=num_blocks, roles="q_k_v", heads=2, key=TailKey(rank=8))
    toy = ToyModel(config).double()
    for step in toy.steps(torch.randn(2, 3, DIM).double())[1:]:
        for role, got in enumerate(step.inputs):
            single = ToyModel(dataclasses.replace(config, roles="shared")).double().residual
            with torch.no_grad():
                row = toy.residual.starts[step.site] + role
                single.query[step.site - 1] = toy.residual.query[row]
                state = before_phase_1(single, step.state, step.site)
                (want,), _ = single.read(state, step.site, torch.clone)
                weights = single.weights(state, step.site)[0]
            assert_close(got, want, f"role {role} of site {step.site}")
            assert torch.equal(toy.residual.weights(state, step.site)[role], weights)


def tied(parent: AttnResConfig, roles: Any, **options: Any) -> tuple[CausalLM, CausalLM, Tensor]:
    """Return a parent, the model with roles that have its queries, and the parent's row of each."""
    models = [
        tiny_model(dataclasses.replace(parent, roles=r), **options) for r in ("shared", roles)
    ]
    rows = torch.arange(8).repeat_interleave(
        torch.tensor([1, *[NUM_ROLES[roles], 1] * 3, 1])  # sites 1 .. 8; 2, 4 and 6 attend
    )
    weights = models[0].state_dict()
    weights["model.residual.query"] = weights["model.residual.query"][rows]
    models[1].load_state_dict(weights)
    return models[0], models[1], rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "parent",
    [
        AttnResConfig(num_blocks=0),
        AttnResConfig(num_blocks=3, key=TailKey(rank=8), heads=4),
        AttnResConfig(num_blocks=3, key=ProjectedKey(rank=8)),
        AttnResConfig(num_blocks=1, summary=Summary(alpha=0.5, beta=0.7)),
    ],
    ids=["full", "low_rank_heads", "projected", "summary"],
)
@every_role
def test_tied_queries_are_the_parent(parent: AttnResConfig, roles: Any, dtype: Any) -> None:
    single, many, rows = tied(parent, roles, dtype=dtype)
    ids = torch.randint(0, 61, (2, 9))
    logits, others = single(ids), many(ids)
    # products over more queries at once may be rounded in another order
    assert_close(others, logits, rtol=1e-6 if dtype == torch.float32 else 1e-13)
    upstream = torch.randn(logits.shape, dtype=dtype)
    logits.backward(upstream)
    others.backward(upstream)
    for (name, a), (_, b) in zip(single.named_parameters(), many.named_parameters(), strict=True):
        grad = b.grad
        assert a.grad is not None
        assert grad is not None
        if name == "model.residual.query":  # a query that is used several times
            grad = torch.zeros_like(a.grad).index_add(0, rows, grad)
        assert_close(grad, a.grad, name, rtol=1e-4 if dtype == torch.float32 else 1e-10)


@every_role
def test_untied_queries_are_another_model(roles: Any) -> None:
    _, many, rows = tied(AttnResConfig(num_blocks=3), roles)
    ids = torch.randint(0, 61, (2, 9))
    before = many(ids)
    for row in range(len(rows)):
        query = many.model.residual.query
        with torch.no_grad():
            old = query[row].clone()
            query[row] += 1.0
            assert (many(ids) - before).abs().max() > 1e-3, f"row {row}"
            query[row] = old


@every_role
@torch.no_grad()
def test_a_query_moves_the_input_of_its_own_projections_alone(roles: Any) -> None:
    model = tiny_model(AttnResConfig(num_blocks=3, roles=roles))
    inputs: dict[str, Tensor] = {}
    for name in ("q_proj", "k_proj", "v_proj"):

        def keep(module: Any, args: tuple[Tensor, ...], name: str = name) -> None:
            inputs[name] = args[0].clone()

        getattr(model.model.layers[2].self_attn, name).register_forward_pre_hook(keep)
    ids = torch.arange(12).view(2, 6)
    first = model.model.residual.starts[4]  # layer 2 attends at site 4
    groups = {
        "qk_v": [{"q_proj", "k_proj"}, {"v_proj"}],
        "q_k_v": [{"q_proj"}, {"k_proj"}, {"v_proj"}],
    }
    model(ids)
    before = dict(inputs)
    for role, moved in enumerate(groups[roles]):
        query = model.model.residual.query[first + role]
        old = query.clone()
        query += 1.0
        model(ids)
        query.copy_(old)
        assert {n for n in inputs if not torch.equal(inputs[n], before[n])} == moved


@every_role
def test_routes_start_equal_and_part_in_training(roles: Any) -> None:
    model = CausalLM(tiny_config(AttnResConfig(num_blocks=3, roles=roles)))
    ids = torch.randint(0, 61, (4, 9))

    def divergences() -> list[float]:
        """Return the Jensen-Shannon divergence of the first and the last role, by site."""
        found = []

        def measure(site: int, weights: Tensor) -> None:
            a, b = weights[0].double(), weights[-1].double()
            mean = (a + b) / 2
            both = (a * (a / mean).log() + b * (b / mean).log()).sum(0) / 2
            found.append(both.mean().item())

        model(ids, residual=Probe(model.model.residual, measure))
        return found

    assert divergences() == [0.0] * 9
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        optimizer.zero_grad()
        model.loss(ids[:, :-1], ids[:, 1:]).cross_entropy.backward()
        if step == 0:
            grad = model.model.residual.query.grad
            assert grad is not None
            for site in (2, 4, 6):
                start = model.model.residual.starts[site]
                assert (grad[start] - grad[start + 1]).abs().max() > 1e-3 * grad[start].abs().max()
        optimizer.step()
    after = divergences()
    assert [js > 1e-6 for js in after] == [site in (2, 4, 6) for site in range(9)]
    assert min(after) >= 0


@pytest.mark.parametrize("roles", NUM_ROLES)
@pytest.mark.parametrize("num_blocks", [0, 1, 3])
@pytest.mark.parametrize("key", KEYS.values(), ids=KEYS)
def test_cost_grows_by_a_query_per_attention_read(roles: Any, num_blocks: int, key: Any) -> None:
    shared = AttnResConfig(num_blocks=num_blocks, key=key)
    base, ours = (
        account(tiny_config(dataclasses.replace(shared, roles=r))) for r in ("shared", roles)
    )
    rank, extra = key.rank or 32, NUM_ROLES[roles] - 1
    # layers 1 to 3 attend at sites 2, 4 and 6; layer 0 sees the embedding alone
    assert ours.parameters.routing - base.parameters.routing == 3 * extra * rank
    num_sources = {0: 3 + 5 + 7, 1: 2 + 2 + 2, 3: 2 + 3 + 3}[num_blocks]
    added = ours.multiply_adds.routing - base.multiply_adds.routing
    assert added == extra * (32 + rank) * num_sources
    assert ours.cached_elements == base.cached_elements


@every_role
def test_one_pass_over_the_sources_serves_all_roles(
    roles: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: dict[str, list[int]] = {"depth_attend": [], "depth_merge": []}
    for name, numbers in calls.items():
        op = getattr(block, name)

        def counting(*args: Any, op: Any = op, numbers: list[int] = numbers, **options: Any) -> Any:
            numbers.append(args[1].shape[0] if len(args) == 2 else args[3].ndim)
            return op(*args, **options)

        monkeypatch.setattr(block, name, counting)
    ToyModel(AttnResConfig(num_blocks=2, roles=roles)).steps(torch.randn(1, 1, DIM))
    n = NUM_ROLES[roles]
    # blocks of 4 writes; phase 1 of sites 1 to 3, 4 to 7, and 8, then a merge per read of an open
    # block, each by one query
    assert calls["depth_attend"] == [2 + n, 2 * n + 2, 1]
    assert calls["depth_merge"] == [1] * (2 * n + 4)


@torch.no_grad()
def test_the_first_read_the_mlp_and_the_head_get_one_input() -> None:
    toy = ToyModel(AttnResConfig(num_blocks=0, roles="q_k_v"))
    x = torch.randn(2, 3, DIM)
    steps = toy.steps(x)
    assert [len(step.inputs) for step in steps] == [1, 1, 3, 1, 3, 1, 3, 1, 1]
    assert torch.equal(steps[0].inputs[0], x)


def test_roles_follow_the_kind_of_the_sublayer() -> None:
    config = AttnResConfig(num_blocks=0, roles="qk_v")
    scheme = AttnRes(config, dim=4, kinds=("mlp", "mlp", "attention", "mlp"), eps=EPS)
    state, inputs = scheme(torch.randn(1, 1, 4)), []
    for site in range(4):
        read, state = scheme.read(state, site, torch.clone)
        inputs.append(len(read))
        state = scheme.write(state, site, torch.randn(1, 1, 4))
    assert inputs == [1, 1, 2, 1]
    assert scheme.query.shape == (5, 4)


@pytest.mark.parametrize("roles", ["qkv", "q_kv", ""])
def test_unknown_roles_are_refused(roles: Any) -> None:
    with pytest.raises(ValueError, match=r"roles must be one of .*'qk_v', 'q_k_v'\), got '"):
        AttnResConfig(roles=roles)
