"""The block schedule compiles for each generation of GPU, and fits its registers and memory."""

import importlib.util
import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from aot import Compiled, recorded_launches
from depthroute.ops.block import BlockRead, KeySum, Site
from depthroute.ops.scores import ScoreRule

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="needs triton's compiler"),
]

SITES = {"site_fwd_kernel", "site_bwd_kernel"}
HELD, TILED = {"read_ahead_fwd_kernel"}, {"read_ahead_tiles_kernel"}
STREAMED = {"weights_kernel", "mix_kernel"}
BACKWARD, BACKWARD_OF_ONE = {"grad_logits_kernel", "update_kernel"}, {"read_one_bwd_kernel"}
SCORES = {"scores_fwd_kernel", "scores_bwd_kernel"}
SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}  # that a program may have
# stack that phase 1 of five and of eight sources has on sm_100, for a few addresses
AHEAD_STACK_BYTES = 16


class Shape(NamedTuple):
    sources: int
    queries: int
    width: int
    rank: int
    separate: bool = False
    key_sum: KeySum | None = None  # of separate keys that are emitted
    dtype: torch.dtype = torch.bfloat16
    norm: Any = "tail"
    closes: bool = True
    merge: bool = False  # of a read with sources that closed since
    tokens: int = 256  # more than a decoding step has
    form: str = "held"  # of the forward pass

    @property
    def kernels(self) -> set[str]:
        streamed = STREAMED | ({"norm_kernel", "close_kernel"} if self.closes else set())
        streamed |= set() if self.separate else {"partial_scores_kernel"}
        ahead = {"held": HELD, "tiled": TILED, "streamed": streamed}[self.form]
        backward = BACKWARD_OF_ONE if self.queries == 1 and self.sources <= 9 else BACKWARD
        backward = backward | (set() if self.merge else {"sum_programs_kernel"})
        return ahead | backward | SITES | (SCORES if self.separate else set())


SHAPES = {
    "eight": Shape(8, 6, 1024, 1024, form="tiled"),
    "eight_of_many_tokens": Shape(8, 6, 1024, 1024, tokens=4096, form="tiled"),
    "eight_wide": Shape(8, 4, 2048, 2048),
    "eight_of_few_tokens": Shape(8, 6, 1024, 1024, tokens=128),
    "five": Shape(5, 6, 1024, 1024),
    "low_rank": Shape(8, 6, 1024, 128, form="tiled"),
    "low_rank_wide": Shape(8, 4, 2048, 256, form="streamed"),
    "twelve_queries": Shape(4, 12, 1024, 1024),
    "twelve_queries_of_seven": Shape(7, 12, 1024, 1024, form="tiled"),
    "head": Shape(9, 1, 1024, 1024),
    "head_of_many": Shape(12, 1, 1024, 1024),
    "wide": Shape(8, 6, 2048, 2048),
    "separate": Shape(8, 6, 1024, 32, separate=True, form="tiled"),
    "emitted": Shape(8, 6, 1024, 32, separate=True, key_sum=KeySum(1e-6), form="tiled"),
    "emitted_wide": Shape(4, 6, 2048, 128, separate=True, key_sum=KeySum(1e-6)),
    "sixteen": Shape(16, 6, 1024, 1024, form="tiled"),
    "nineteen": Shape(19, 6, 1024, 1024, form="streamed"),
    "streamed": Shape(43, 6, 1024, 1024, form="streamed"),
    "streamed_low_rank": Shape(43, 6, 1024, 128, form="streamed"),
    "merge": Shape(6, 1, 1024, 1024, merge=True),
}
# every branch at sizes that compile fast, and one that spills a few registers
BRANCHES = {
    "head_wide": Shape(9, 1, 2048, 2048),
    "odd": Shape(3, 2, 37, 37, dtype=torch.float32),
    "tail_full_norm": Shape(2, 9, 48, 7, norm="full", dtype=torch.float16),
    "no_norm": Shape(1, 2, 48, 48, norm="none", closes=False),
    "separate_odd": Shape(3, 3, 37, 50, separate=True, norm="none", closes=False),
    "emitted_odd": Shape(3, 3, 37, 50, separate=True, key_sum=KeySum(None), closes=False),
    "tiled_odd": Shape(7, 9, 37, 7, norm="full", form="tiled"),
    "most_tiled": Shape(16, 2, 64, 5, norm="none", closes=False, form="tiled"),
    "most_held": Shape(16, 2, 64, 64, dtype=torch.float32),
    "most_streamed": Shape(
        64, 9, 64, 7, dtype=torch.float16, norm="full", closes=False, form="streamed"
    ),
    "streamed_separate": Shape(17, 2, 37, 5, separate=True, dtype=torch.float32, form="streamed"),
    "merge_full_norm": Shape(2, 1, 48, 7, norm="full", merge=True),
}


def empty(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(size, dtype=dtype)


def launch_all(shape: Shape) -> None:
    """Launch phase 1, a site and a step of the plain sum, each with its backward pass."""
    from depthroute.ops.kernels.add_merge_norm import site_bwd, site_fwd
    from depthroute.ops.kernels.read_ahead_bwd import read_ahead_bwd
    from depthroute.ops.kernels.read_ahead_fwd import read_ahead_fwd

    num_queries, rank = shape.queries, shape.rank
    rule = ScoreRule(1, shape.norm, 1e-6, 1.0)

    def values(count: int) -> tuple[Tensor, ...]:
        return tuple(empty(shape.tokens, shape.width, dtype=shape.dtype) for _ in range(count))

    def numbers(count: int, *columns: int) -> list[Tensor]:
        return [empty(shape.tokens, *columns) for _ in range(count)]

    x, y, pending = values(3)
    keys = tuple(numbers(shape.sources, rank)) if shape.separate else None
    given = BlockRead(
        values(shape.sources),
        keys,
        pending if shape.closes and not shape.merge else None,
        empty(num_queries, rank),
        rule,
        1.0,
        1e-6 if shape.closes else None,
        empty(shape.tokens) if shape.merge else None,
    )
    read = read_ahead_fwd(given)
    read_ahead_bwd(
        given,
        *(read.first, read.weights, read.logits, read.rstds, read.norm_rstds),
        values(num_queries),
        numbers(num_queries),
        values(shape.sources - shape.merge),
        keys,
        [empty(8, rank)] * (num_queries - shape.closes + shape.merge),
    )
    key, key_sum = keys[0] if keys else None, shape.key_sum
    write = y if key_sum is None else empty(shape.tokens, shape.width + rank, dtype=shape.dtype)
    routed = Site(x, empty(shape.tokens), empty(8, rank), x, write, key, rule, 1.0, 1e-6, key_sum)
    first = routed._replace(total=None, key=None if key_sum is not None else key)
    plain = Site(None, None, None, x, y, None, rule, 1.0, 1e-6)
    for site in (routed, first, plain):
        _, *saved = site_fwd(site)
        after = site._replace(old=None, lse=None, total=None, pending=y)
        site_bwd(after, *saved, x, y, saved[0])


def compiled_for(capability: int, shape: Shape, folder: Path) -> list[Compiled]:
    with recorded_launches(capability, folder) as kernels:
        launch_all(shape)
    assert {kernel.name for kernel in kernels} == shape.kernels
    assert max(kernel.shared_bytes for kernel in kernels) <= SHARED_BYTES[capability]
    return kernels


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_no_register_spills(shape: Shape, compiled: Path) -> None:
    kernels = compiled_for(90, shape, compiled)
    assert not [kernel for kernel in kernels if kernel.stack_bytes]


@pytest.mark.parametrize("capability", [80, 100])
@pytest.mark.parametrize("name", ["eight", "five", "sixteen", "separate", "emitted", "streamed"])
def test_other_generations_compile(name: str, capability: int, compiled: Path) -> None:
    for kernel in compiled_for(capability, SHAPES[name], compiled):
        is_ahead = kernel.name == "read_ahead_fwd_kernel"
        assert kernel.stack_bytes <= (AHEAD_STACK_BYTES if is_ahead else 0), kernel


@pytest.mark.parametrize("shape", BRANCHES.values(), ids=BRANCHES)
def test_every_branch_compiles(shape: Shape, compiled: Path) -> None:
    compiled_for(90, shape, compiled)
