"""The kernels compile for each generation of GPU, and the shapes of the table fit its registers."""

import importlib.util
import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from aot import recorded_launches
from depthroute.ops.kernels import tuning
from depthroute.ops.kernels.layout import Layout
from depthroute.ops.scores import ScoreRule

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="needs triton's compiler"),
]

TOKENS = 64
HELPERS = {"fill_table_kernel"}


class Shape(NamedTuple):
    sources: int
    width: int
    rank: int
    queries: int = 1
    heads: int = 1
    dtype: torch.dtype = torch.bfloat16
    out_dtype: torch.dtype = torch.bfloat16
    norm: Any = "tail"
    separate: bool = False
    extras: bool = False  # bias, null logit and the gradient of lse
    out_norm_eps: float | None = None


SHAPES = {
    "two": Shape(2, 1024, 1024),
    "five": Shape(5, 1024, 1024),
    "five_low_rank": Shape(5, 1024, 256),
    "nine": Shape(9, 1024, 1024),
    "seventeen": Shape(17, 1024, 1024),
    "full": Shape(49, 1024, 1024),
    "block": Shape(8, 1024, 1024, queries=6, out_dtype=torch.float32),
    "block_low_rank": Shape(8, 1024, 128, queries=6, out_dtype=torch.float32),
    "wide": Shape(9, 4096, 4096),
    "wide_full": Shape(49, 4096, 4096),
    "wide_block": Shape(8, 4096, 4096, queries=6, out_dtype=torch.float32),
    "odd": Shape(5, 1000, 1000),
    "single": Shape(5, 768, 768, dtype=torch.float32),
    "heads": Shape(5, 1024, 1024, heads=8),
}


# every branch of the kernels at sizes that compile fast
BRANCHES = {
    "separate": Shape(3, 48, 20, separate=True, extras=True),
    "separate_heads": Shape(3, 48, 32, queries=2, heads=4, separate=True, norm="none"),
    "tail_heads": Shape(3, 48, 24, queries=3, heads=3, extras=True),
    "full_norm": Shape(1, 48, 7, norm="full", extras=True),
    "full_norm_heads": Shape(17, 64, 16, queries=2, heads=4, norm="full", extras=True),
    "separate_many": Shape(17, 37, 5, separate=True, dtype=torch.float16),
    "groups": Shape(3, 8192, 8192, queries=4),
    "groups_out_norm": Shape(3, 8192, 8192, queries=4, out_norm_eps=1e-6),
    "out_norm_heads": Shape(3, 48, 24, queries=3, heads=3, extras=True, out_norm_eps=1e-6),
}


def launch_all(shape: Shape) -> None:
    """Launch every kernel of a read and of a merge of one more source."""
    from depthroute.ops.kernels.depth_attend_bwd import depth_attend_bwd
    from depthroute.ops.kernels.depth_attend_fwd import depth_attend_fwd
    from depthroute.ops.kernels.depth_merge import depth_merge_bwd, depth_merge_fwd

    def empty(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(size, dtype=dtype)

    rule = ScoreRule(shape.heads, shape.norm, 1e-6, 1.0)
    values = [empty(TOKENS, shape.width, dtype=shape.dtype) for _ in range(shape.sources)]
    keys = [empty(TOKENS, shape.rank) for _ in values] if shape.separate else None
    query = empty(shape.queries, shape.rank)
    bias = empty(1, shape.sources, TOKENS) if shape.extras else None
    null = empty(shape.queries, shape.heads) if shape.extras else None

    given = (values, keys, query, bias, null)
    read = depth_attend_fwd(*given, rule, shape.out_dtype, shape.out_norm_eps)
    grad_lse = read.lse if shape.extras else None
    depth_attend_bwd(read.out, grad_lse, *given, read, rule)
    key, bias = None if keys is None else keys[0], None if bias is None else bias[:, :1]
    one = (read.out[:1], read.lse[:1], values[0], query[:1], key, bias)
    merged = depth_merge_fwd(*one, rule, shape.out_norm_eps)
    grad_lse = merged.lse if shape.extras else None
    depth_merge_bwd(merged.out, grad_lse, *one, *merged[2:], merged.normed, rule)


@pytest.mark.parametrize("out_norm_eps", [None, 1e-6])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_no_register_spills(shape: Shape, out_norm_eps: float | None, compiled: Path) -> None:
    with recorded_launches(90, compiled) as kernels:
        launch_all(shape._replace(out_norm_eps=out_norm_eps))
    assert len({kernel.name for kernel in kernels} - HELPERS) == 4
    assert not [kernel for kernel in kernels if kernel.stack_bytes]


@pytest.mark.parametrize("shape", BRANCHES.values(), ids=BRANCHES)
def test_every_branch_compiles(shape: Shape, compiled: Path) -> None:
    with recorded_launches(90, compiled) as kernels:
        launch_all(shape)
    assert len({kernel.name for kernel in kernels} - HELPERS) == 4


@pytest.mark.parametrize("capability", [80, 100])
@pytest.mark.parametrize("name", ["five_low_rank", "full", "nine"])
def test_other_generations_compile(name: str, capability: int, compiled: Path) -> None:
    with recorded_launches(capability, compiled) as kernels:
        launch_all(SHAPES[name])
    assert not [kernel for kernel in kernels if kernel.stack_bytes]


@pytest.mark.parametrize("width", [64, 1000, 1024, 4096, 8192])
@pytest.mark.parametrize("queries", [1, 3, 16])
def test_programs_that_loop_over_tokens_run_at_once(width: int, queries: int) -> None:
    for sources in (1, 5, 9, 17, 129):
        values = [torch.empty(0, width)] * sources
        at = Layout.of(values, None, torch.empty(queries, width), ScoreRule(1, "tail", 1e-6, 1.0))
        for launch in (tuning.backward(at), tuning.merge_backward(at)):
            assert launch.max_registers is not None
            assert launch.programs * launch.num_warps * 32 * launch.max_registers <= 65536
            assert launch.programs * launch.num_warps <= 64
