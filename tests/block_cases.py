"""The reads of one block, and whole stacks of them, that every schedule must get right."""

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from depthroute.nn import RMSNorm
from depthroute.ops import depth_attend, use_backend
from depthroute.ops.block import KeySum, add_merge_norm, read_ahead
from depthroute.ops.scores import ScoreRule
from depthroute.residual import AttnResConfig, PreNormConfig, ProjectedKey, Summary, TailKey
from helpers import ToyModel, gradients

EPS = 1e-2  # large: it must not be lost anywhere
SUM_OF_NORMED = KeySum(3e-2)
NORM = RMSNorm(EPS)

Norm = Callable[[Tensor], Tensor]


class Case(NamedTuple):
    """A block: its closed sources, and a read after each of its writes."""

    sources: int = 3
    queries: int = 4
    batch: tuple[int, ...] = (2, 3)
    width: int = 12
    rank: int = 12
    key_norm: Any = "tail"
    separate: bool = False
    key_sum: KeySum | None = None  # separate keys of which each write emits its share
    complete: bool = True  # the first read comes before the first write
    closes: bool = False  # the last source lacks a write
    share: float = 1.0
    scale: float = 1.0

    @property
    def rule(self) -> ScoreRule:
        return ScoreRule(1, self.key_norm, EPS, self.scale)


CASES = {
    "plain": Case(),
    "one_source_one_read": Case(sources=1, queries=1),
    "one_source_many_reads": Case(sources=1, queries=12, complete=False, width=20, rank=7),
    "one_source_that_closes": Case(sources=1, complete=False, closes=True, share=0.5),
    "many_reads": Case(sources=5, queries=17, closes=True, share=0.5),
    "first_read_after_a_write": Case(complete=False, queries=3, share=0.5),
    "closes": Case(closes=True),
    "closes_scaled": Case(sources=2, closes=True, share=0.5, scale=0.3),
    "seven_sources": Case(sources=7, width=16, rank=16),
    "nine_sources": Case(sources=9, batch=(5,), closes=True),
    "sixteen_sources": Case(sources=16, batch=(5,), closes=True),
    "width_37": Case(width=37, rank=37, closes=True),
    "width_1": Case(width=1, rank=1, queries=2),
    "tail": Case(width=20, rank=5, closes=True, share=0.7),
    "full_norm": Case(width=20, rank=5, key_norm="full", closes=True, share=0.7),
    "full_norm_whole": Case(width=20, rank=20, key_norm="full", share=0.7),
    "no_norm": Case(width=20, rank=5, key_norm="none", scale=0.3),
    "separate": Case(separate=True, rank=5, closes=True),
    "separate_wider": Case(separate=True, rank=20, queries=9, share=0.5),
    "separate_no_norm": Case(separate=True, rank=5, key_norm="none", scale=0.3),
    "emitted": Case(separate=True, rank=5, key_sum=SUM_OF_NORMED, closes=True, share=0.7),
    "emitted_wider": Case(separate=True, rank=20, key_sum=SUM_OF_NORMED, complete=False),
    "emitted_sum": Case(separate=True, rank=7, key_sum=KeySum(None), width=37, key_norm="none"),
    "no_batch_axis": Case(batch=()),
}


class Leaves(NamedTuple):
    """What the reads of a block are made of, each a list of differentiable tensors."""

    values: list[Tensor]
    keys: list[Tensor]
    pending: list[Tensor]
    query: list[Tensor]
    writes: list[Tensor]
    write_keys: list[Tensor]  # of the open block after each write; or of the write, if emitted

    @property
    def all(self) -> list[Tensor]:
        return [x for tensors in self for x in tensors]

    @property
    def names(self) -> list[str]:
        return [f"{name} {i}" for name in self._fields for i in range(len(getattr(self, name)))]

    def to(self, dtype: torch.dtype) -> "Leaves":
        """Return copies; statistics stay at least float32."""
        wide = torch.promote_types(dtype, torch.float32)
        wides = ("keys", "query", "write_keys")
        return Leaves(
            *(
                [x.detach().to(wide if name in wides else dtype).requires_grad_() for x in tensors]
                for name, tensors in self._asdict().items()
            )
        )


def make(case: Case, device: str = "cpu", dtype: torch.dtype = torch.float64) -> Leaves:
    """Return leaves of float64, at numbers that `dtype` has."""

    def draw(count: int, *shape: int) -> list[Tensor]:
        drawn = (torch.randn(shape, device=device).to(dtype).double() for _ in range(count))
        return [x.requires_grad_() for x in drawn]

    value, key = (*case.batch, case.width), (*case.batch, case.rank)
    num_writes = case.queries - case.complete
    return Leaves(
        draw(case.sources, *value),
        draw(case.sources * case.separate, *key),
        draw(int(case.closes), *value),
        draw(1, case.queries, case.rank),
        draw(num_writes, *value),
        draw(num_writes * case.separate, *key),
    )


def scheduled(case: Case, leaves: Leaves, norm: Norm = NORM) -> list[Tensor]:
    """Return the normed reads of a block by the steps of the schedule."""
    rule, share = case.rule, case.share
    ahead, _, _ = read_ahead(
        leaves.values,
        *leaves.query,
        keys=leaves.keys or None,
        pending=leaves.pending[0] if case.closes else None,
        share=share,
        bias=None,
        rule=rule,
        complete=int(case.complete),
        norm=norm,
    )
    outs, total, key = list(ahead.outs[: case.complete]), None, None
    ahead = ahead.without(len(outs))
    for i, write in enumerate(leaves.writes):
        if case.key_sum is not None:
            write = torch.cat([write, leaves.write_keys[i].to(write.dtype)], dim=-1)
        elif case.separate:
            key = leaves.write_keys[i]
        total, key, out = add_merge_norm(
            ahead,
            total,
            write,
            key=key,
            key_sum=case.key_sum,
            share=share,
            bias=None,
            rule=rule,
            norm=norm,
        )
        outs, ahead = [*outs, out], ahead.without(1)
    return outs


def one_by_one(case: Case, leaves: Leaves, norm: Norm = NORM) -> list[Tensor]:
    """Return the same, each read by one pass over all that it sees."""
    values, outs = list(leaves.values), []
    if case.closes:
        values[-1] = case.share * (values[-1] + leaves.pending[0])
    for i, query in enumerate(leaves.query[0]):
        num_writes = i + 1 - case.complete
        block = [case.share * sum(leaves.writes[:num_writes])] if num_writes else []
        keys = [*leaves.keys, *block_key(case, leaves.write_keys[:num_writes])] or None
        out, _ = depth_attend(
            [*values, *block],
            query,
            keys=keys,
            key_norm=case.key_norm,
            eps=EPS,
            scale=case.scale,
        )
        outs.append(norm(out))
    return outs


def block_key(case: Case, write_keys: Sequence[Tensor]) -> list[Tensor]:
    """Return the key of the open block, if it has writes and a separate key."""
    if case.key_sum is None:
        return [*write_keys[-1:]]
    eps = case.key_sum.norm_eps
    if eps is not None:
        write_keys = [k / (k.square().mean(-1, keepdim=True) + eps).sqrt() for k in write_keys]
    return [sum(write_keys)] if write_keys else []


def reads_and_gradients(
    case: Case, leaves: Leaves, upstream: Sequence[Tensor], read: Any = scheduled, norm: Norm = NORM
) -> list[Tensor]:
    """Return all reads and the gradients of all leaves."""
    outs = read(case, leaves, norm)
    return [*outs, *gradients(outs, leaves.all, [u.to(outs[0].dtype) for u in upstream])]


def result_names(case: Case, leaves: Leaves) -> list[str]:
    return [*(f"read {i}" for i in range(case.queries)), *leaves.names]


class Stack(NamedTuple):
    """A scheme over toy sublayers."""

    config: Any
    dim: int = 16
    num_sublayers: int = 8
    norm: Norm = NORM
    settled: tuple[int, ...] = ()  # sites before whose reads the state is settled


LOW_RANK, FULL_NORM = TailKey(rank=5), TailKey(rank=5, norm="full")
SUM = ProjectedKey(rank=4, block="sum")
STACKS = {
    "prenorm": Stack(PreNormConfig()),
    "prenorm_odd": Stack(PreNormConfig(), dim=37),
    "prenorm_settled": Stack(PreNormConfig(), settled=(3, 4)),
    "block3": Stack(AttnResConfig(num_blocks=3)),
    "block3_odd": Stack(AttnResConfig(num_blocks=3), dim=37),
    "block3_settled_inside": Stack(AttnResConfig(num_blocks=3), settled=(2, 5)),
    "block3_settled_at_ends": Stack(AttnResConfig(num_blocks=3), settled=(3, 6, 7)),
    "block1": Stack(AttnResConfig(num_blocks=1)),
    "block1_of_12": Stack(AttnResConfig(num_blocks=1, key=LOW_RANK), num_sublayers=12),
    "uneven": Stack(AttnResConfig(block_ends=(1, 6, 8))),
    "full": Stack(AttnResConfig(num_blocks=0)),
    "last_read_joins": Stack(AttnResConfig(num_blocks=0), num_sublayers=14),
    "last_read_joins_block": Stack(AttnResConfig(num_blocks=2), num_sublayers=14),
    "seventeen_sources": Stack(AttnResConfig(num_blocks=0), num_sublayers=16),
    "streamed_low_rank": Stack(AttnResConfig(num_blocks=0, key=LOW_RANK), 20, num_sublayers=20),
    "streamed_full_norm": Stack(AttnResConfig(num_blocks=0, key=FULL_NORM), num_sublayers=18),
    "streamed_projected": Stack(
        AttnResConfig(num_blocks=0, key=ProjectedKey(rank=4)), num_sublayers=18
    ),
    "pairs": Stack(AttnResConfig(num_blocks=4), num_sublayers=8, settled=(3, 4)),
    "short_and_long": Stack(AttnResConfig(block_ends=(1, 2, 5, 6, 14, 16)), num_sublayers=16),
    "pairs_mean": Stack(AttnResConfig(num_blocks=4, summary=Summary(alpha=0.5)), dim=20),
    "low_rank": Stack(AttnResConfig(num_blocks=3, key=LOW_RANK), dim=20),
    "full_norm": Stack(AttnResConfig(num_blocks=3, key=FULL_NORM)),
    "full_norm_whole": Stack(AttnResConfig(num_blocks=2, key=TailKey(norm="full"))),
    "projected": Stack(AttnResConfig(num_blocks=3, key=ProjectedKey(rank=4))),
    "projected_sum": Stack(AttnResConfig(num_blocks=3, key=SUM), dim=20, settled=(1, 3, 5)),
    "projected_full": Stack(AttnResConfig(num_blocks=0, key=ProjectedKey(rank=4))),
    "mean": Stack(AttnResConfig(num_blocks=3, key=LOW_RANK, summary=Summary(alpha=0.5))),
    "mean_settled": Stack(
        AttnResConfig(num_blocks=3, summary=Summary(alpha=0.5)), settled=(2, 3, 6)
    ),
}
# some or all of whose reads run one by one
OTHER_STACKS = {
    "prenorm_other_norm": Stack(PreNormConfig(), norm=torch.clone),
    "block3_other_norm": Stack(AttnResConfig(num_blocks=3), dim=20, norm=torch.clone),
    "full_other_norm": Stack(AttnResConfig(num_blocks=0), norm=torch.clone),
    "heads": Stack(AttnResConfig(num_blocks=3, heads=2)),
    "beta": Stack(AttnResConfig(num_blocks=3, summary=Summary(alpha=0.5, beta=0.7))),
    "roles": Stack(AttnResConfig(num_blocks=3, roles="q_k_v")),
    "roles_projected": Stack(AttnResConfig(num_blocks=3, roles="q_k_v", key=ProjectedKey(rank=4))),
    "roles_other_norm": Stack(AttnResConfig(num_blocks=2, roles="qk_v"), norm=torch.clone),
}


def forward_stack(stack: Stack, toy: ToyModel, x: Tensor) -> Tensor:
    """Return the last read."""
    residual, state = toy.residual, toy.residual(x)
    for site in range(stack.num_sublayers):
        if site in stack.settled:
            state = residual.settle(state)
        inputs, state = residual.read(state, site, stack.norm)
        state = residual.write(state, site, toy.sublayer(site, inputs))
    return residual.finish(state, stack.norm)


def run_stack(stack: Stack, toy: ToyModel, x: Tensor, upstream: Tensor) -> list[Tensor]:
    """Return the last read, and the gradients of the input and of all parameters."""
    x = x.detach().requires_grad_()
    out = forward_stack(stack, toy, x)
    leaves = [x, *toy.parameters()]
    return [out, *gradients([out], leaves, [upstream.to(out.dtype)])]


def count_launches(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the launches of each step from here on."""
    from depthroute.ops.kernels import add_merge_norm, read_ahead_bwd, read_ahead_fwd

    counts: Counter[str] = Counter()
    for module, name in (
        (read_ahead_fwd, "read_ahead_fwd"),
        (read_ahead_bwd, "read_ahead_bwd"),
        (add_merge_norm, "site_fwd"),
        (add_merge_norm, "site_bwd"),
    ):
        launch = getattr(module, name)

        def counted(*args: Any, name: str = name, launch: Any = launch) -> Any:
            counts[name] += 1
            return launch(*args)

        monkeypatch.setattr(module, name, counted)
    return counts


def expected_launches(stack: Stack) -> tuple[int, int]:
    """Return how often sources are read for one or more queries, and blocks merged at sites."""
    if isinstance(stack.config, PreNormConfig):
        return 0, stack.num_sublayers - len(stack.settled)
    scheme = ToyModel(stack.config, num_sublayers=stack.num_sublayers).residual
    separate = isinstance(stack.config.key, ProjectedKey)
    groups = {1, *scheme.ends} if separate else {*scheme.groups}
    reads = sites = new = 0
    for site in range(1, stack.num_sublayers + 1):
        is_open = site not in scheme.ends
        new = 0 if site in groups else new + (not is_open)
        reads += (site in groups) + (new > 0)
        sites += is_open and not new
    return reads, sites


class StackRuns(NamedTuple):
    """One stack run three times: by what is to be tested, by plain PyTorch, and in float64."""

    names: list[str]
    tested: list[Tensor]
    plain: list[Tensor]
    exact: list[Tensor]


def make_stack(
    stack: Stack, dtype: torch.dtype, device: str = "cpu", batch: tuple[int, ...] = (2, 3)
) -> tuple[ToyModel, Tensor, Tensor]:
    """Return the model, an input and an upstream gradient."""
    toy = ToyModel(stack.config, dim=stack.dim, num_sublayers=stack.num_sublayers).to(device)
    shape = (*batch, stack.dim)
    return toy, *(torch.randn(shape, device=device).to(dtype) for _ in range(2))


def run_thrice(
    stack: Stack, dtype: torch.dtype, device: str = "cpu", batch: tuple[int, ...] = (2, 3)
) -> StackRuns:
    """Run a stack with the kernels and twice without."""
    toy, x, upstream = make_stack(stack, dtype, device, batch)
    wide = copy.deepcopy(toy).double()
    with use_backend("triton"):
        tested = run_stack(stack, toy, x, upstream)
    with use_backend("reference"):
        plain = run_stack(stack, toy, x, upstream)
        exact = run_stack(stack, wide, x.double(), upstream.double())
    names = ["out", "input", *(name for name, _ in toy.named_parameters())]
    return StackRuns(names, tested, plain, exact)


def mean_error(actual: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """Return the root mean square over tensors of each one's relative error."""
    errors = [(a.double() - e).norm() / e.norm() for a, e in zip(actual, exact, strict=True)]
    return torch.stack(errors).square().mean().sqrt().item()
