"""Reads that every implementation must get right, and awkward tensors around them."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from depthroute.ops import depth_attend, depth_merge, use_backend
from depthroute.ops.reference import depth_attend_reference, depth_merge_reference
from depthroute.ops.scores import accumulation_dtype
from helpers import RTOL, assert_close, gradients


class Case(NamedTuple):
    """Sizes and options of a read; sizes differ, so that no two axes can be confused."""

    sources: int = 3
    batch: tuple[int, ...] = (2, 4)
    width: int = 12
    rank: int = 12
    queries: int = 1
    heads: int = 1
    key_norm: str = "tail"
    separate: bool = False
    bias: str = ""  # "s" [S], "sb" [S, *b], "qsb" [Q, S, *b]
    null: str = ""  # "h" [H], "qh" [Q, H], "q1" [Q, 1]
    scale: float = 1.0
    out_norm_eps: float | None = None


CASES = {
    "plain": Case(),
    "one_source": Case(sources=1),
    "two_sources": Case(sources=2, rank=5),
    "seven_sources": Case(sources=7, rank=1),
    "thirty_three_sources": Case(sources=33, batch=(3,), rank=4),
    "sources_as_many_as_tokens": Case(sources=4, batch=(4, 4), queries=4),
    "no_batch_axis": Case(batch=()),
    "three_batch_axes": Case(batch=(2, 1, 3)),
    "width_1": Case(width=1, rank=1),
    "width_37": Case(width=37, rank=37, queries=2),
    "width_64": Case(width=64, rank=9),
    "several_queries": Case(queries=5, rank=8, scale=0.3),
    "heads": Case(heads=3, rank=6),
    "heads_are_the_rank": Case(heads=4, rank=4, queries=3),
    "full_norm": Case(key_norm="full", rank=5, queries=2),
    "full_norm_heads": Case(key_norm="full", rank=6, heads=2),
    "no_norm": Case(key_norm="none", rank=5, queries=2, scale=0.5),
    "separate_keys": Case(separate=True, rank=5, queries=2),
    "separate_keys_wider": Case(separate=True, rank=20, heads=4),
    "separate_keys_no_norm": Case(separate=True, rank=5, key_norm="none"),
    "bias_per_source": Case(bias="s", queries=2),
    "bias_per_token": Case(bias="sb", queries=2),
    "bias_per_query": Case(bias="qsb", queries=2, heads=2),
    "null_per_head": Case(null="h", heads=3),
    "null_per_query": Case(null="q1", queries=3, heads=2),
    "out_norm": Case(out_norm_eps=0.1),
    "out_norm_width_37": Case(width=37, rank=5, queries=3, out_norm_eps=0.1),
    "out_norm_heads": Case(heads=3, rank=6, out_norm_eps=0.1),
    "everything": Case(
        sources=7,
        queries=3,
        rank=6,
        heads=2,
        separate=True,
        bias="qsb",
        null="qh",
        scale=0.7,
        out_norm_eps=0.1,
    ),
}
# more sources than a kernel keeps in registers, and the most that one takes
LARGE_CASES = {
    "seventeen_sources": Case(sources=17),
    "seventeen_sources_out_norm": Case(sources=17, heads=2, out_norm_eps=0.1),
    "seventeen_sources_everything": Case(
        sources=17,
        batch=(3,),
        queries=3,
        rank=8,
        heads=4,
        bias="sb",
        null="h",
        key_norm="full",
        out_norm_eps=0.1,
    ),
    "most_sources": Case(sources=129, batch=(2,), rank=4),
    "queries_in_groups": Case(  # more of them than a program holds
        sources=2, batch=(2,), width=8192, rank=64, queries=4, heads=2, scale=0.1, out_norm_eps=0.1
    ),
    "most_queries": Case(sources=5, batch=(3,), queries=16, rank=6, heads=2),
}
CASES |= {f"width_7_rank_{r}": Case(width=7, rank=r, sources=2) for r in range(1, 8)}


def make(case: Case, dtype: torch.dtype = torch.float64, device: str = "cpu") -> dict[str, Tensor]:
    """Return the differentiable arguments of a case."""
    q, s, b = case.queries, case.sources, case.batch
    shapes = {
        "values": (s, *b, case.width),
        "query": (q, case.rank),
        "keys": (s, *b, case.rank) if case.separate else None,
        "bias": {"": None, "s": (s,), "sb": (s, *b), "qsb": (q, s, *b)}[case.bias],
        "null": {"": None, "h": (case.heads,), "qh": (q, case.heads), "q1": (q, 1)}[case.null],
    }
    return {
        name: torch.randn(shape, device=device).to(dtype).requires_grad_()
        for name, shape in shapes.items()
        if shape is not None
    }


def options(case: Case) -> dict[str, Any]:
    return {**weight_options(case), "out_norm_eps": case.out_norm_eps}


def weight_options(case: Case) -> dict[str, Any]:
    """Return the options without those of the output."""
    return {"heads": case.heads, "key_norm": case.key_norm, "scale": case.scale, "eps": 1e-3}


def normed_by_hand(out: Tensor, eps: float | None) -> Tensor:
    """Norm an output over its columns, if it is to be normed."""
    return out if eps is None else out / (out.pow(2).mean(-1, keepdim=True) + eps).sqrt()


def make_merge(
    case: Case, dtype: torch.dtype = torch.float64, device: str = "cpu"
) -> dict[str, Tensor]:
    """Return the differentiable arguments of a merge with the case's shapes and one new source."""
    q, b, wide = case.queries, case.batch, accumulation_dtype(dtype)
    shapes = {
        "out": ((q, *b, case.width), wide),
        "lse": ((q, *b, case.heads), wide),
        "value": ((*b, case.width), dtype),
        "query": ((q, case.rank), dtype),
        "key": ((*b, case.rank), dtype) if case.separate else None,
        "bias": {"": None, "s": ((), wide), "sb": (b, wide), "qsb": ((q, *b), wide)}[case.bias],
    }
    return {
        name: torch.randn(given[0], device=device).to(given[1]).requires_grad_()
        for name, given in shapes.items()
        if given is not None
    }


def assert_equals_oracle(
    op: Any, oracle: Any, leaves: dict[str, Tensor], rule: dict[str, Any], rtol: float = 0.0
) -> None:
    """Compare out, lse and every gradient of an op with its oracle in float64, normed by hand."""
    wide = {name: x.detach().double().requires_grad_() for name, x in leaves.items()}
    actual = op(**leaves, **rule)
    out, lse = oracle(**wide, **{k: v for k, v in rule.items() if k != "out_norm_eps"})
    expected = normed_by_hand(out, rule.get("out_norm_eps")), lse
    upstream = [torch.randn(x.shape, device=x.device).to(x.dtype) for x in actual]
    got = gradients(actual, list(leaves.values()), upstream)
    want = gradients(expected, list(wide.values()), [x.double() for x in upstream])
    names = ["out", *(f"gradient of {name}" for name in leaves)]
    for a, b, name in zip([actual[0], *got], [expected[0], *want], names, strict=True):
        # where all terms of a sum cancel, as for keys of width 1, only their roundings are left
        assert_close(a, b, name, rtol, least=0.05)
    # a log-sum-exp may be near zero, but never means more than the logits in it
    scale = expected[1].abs().amax().clamp_min(1.0)
    assert (actual[1] - expected[1]).abs().amax() < 1e-5 * scale


def assert_read_equals_oracle(
    case: Case, dtype: torch.dtype, device: str = "cpu", op: Any = depth_attend
) -> None:
    """Run a read of a case in the kernels and compare it with the oracle."""
    with use_backend("triton"):
        leaves = make(case, dtype, device)
        assert_equals_oracle(op, depth_attend_reference, leaves, options(case), RTOL[dtype])


def assert_merge_equals_oracle(
    case: Case, dtype: torch.dtype, device: str = "cpu", op: Any = depth_merge
) -> None:
    """Run a merge of a case in the kernels and compare it with the oracle."""
    rule = {name: value for name, value in options(case).items() if name != "heads"}
    with use_backend("triton"):
        leaves = make_merge(case, dtype, device)
        assert_equals_oracle(op, depth_merge_reference, leaves, rule, RTOL[dtype])


VIEWS = {
    "columns": ((2, 5, 11), lambda base: base[..., 2:8]),
    "every_other_column": ((2, 5, 12), lambda base: base[..., ::2]),
    "transposed": ((5, 2, 6), lambda base: base.transpose(0, 1)),
    "width_first": ((6, 2, 5), lambda base: base.movedim(0, -1)),
    "expanded_batch": ((1, 5, 6), lambda base: base.expand(2, 5, 6)),
    "expanded_width": ((2, 5, 1), lambda base: base.expand(2, 5, 6)),
}

CONSUMERS = {
    "sum": lambda out: out.sum(),  # an upstream gradient of strides 0
    "cat": lambda out: torch.cat([out, out.detach()], -1).square().sum(),  # rows apart
    "transpose": lambda out: out.transpose(1, 2).reshape(-1, 2).pow(3).sum(),
    "permute": lambda out: (out.permute(3, 1, 0, 2).contiguous().flatten() ** 3).sum(),
}
