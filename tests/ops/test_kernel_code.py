"""The kernels compile for each generation of GPU, and the shapes of the table fit its registers."""

import importlib.util
import os
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from aot import recorded_launches
from depthroute.ops.kernels import tuning
from depthroute.ops.kernels.layout import Layout
from depthroute.ops.scores import ScoreRule

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="needs triton's compiler"),
]

TOKENS = 64


class Shape(NamedTuple):
    sources: int
    width: int
    rank: int
    queries: int = 1
    heads: int = 1
    dtype: torch.dtype = torch.bfloat16
    out_dtype: torch.dtype = torch.bfloat16


SHAPES = {
    "two": Shape(2, 1024, 1024),
    "five": Shape(5, 1024, 1024),
    "five_low_rank": Shape(5, 1024, 256),
    "nine": Shape(9, 1024, 1024),
    "sixteen": Shape(16, 1024, 1024),
    "full": Shape(49, 1024, 1024),
    "block": Shape(8, 1024, 1024, queries=6, out_dtype=torch.float32),
    "block_low_rank": Shape(8, 1024, 128, queries=6, out_dtype=torch.float32),
    "wide": Shape(5, 4096, 4096),
    "wide_full": Shape(49, 4096, 4096),
    "wide_block": Shape(8, 4096, 4096, queries=6, out_dtype=torch.float32),
    "odd": Shape(5, 1000, 1000),
    "single": Shape(5, 768, 768, dtype=torch.float32),
    "heads": Shape(5, 1024, 1024, heads=8),
}


def launch_all(shape: Shape) -> None:
    """Launch every kernel of a read and of a merge of one more source."""
    from depthroute.ops.kernels.depth_attend_bwd import depth_attend_bwd
    from depthroute.ops.kernels.depth_attend_fwd import depth_attend_fwd
    from depthroute.ops.kernels.depth_merge import depth_merge_bwd, depth_merge_fwd

    rule = ScoreRule(shape.heads, "tail", 1e-6, 1.0)
    values = [torch.empty(TOKENS, shape.width, dtype=shape.dtype) for _ in range(shape.sources)]
    query = torch.empty(shape.queries, shape.rank)
    read = depth_attend_fwd(values, None, query, None, None, rule, shape.out_dtype)
    depth_attend_bwd(read.out, None, values, None, query, None, None, *read[2:], read.lse, rule)
    out, lse, value, query = read.out[:1], read.lse[:1], values[0], query[:1]
    merged = depth_merge_fwd(out, lse, value, query, None, None, rule)
    depth_merge_bwd(merged.out, None, out, lse, value, query, None, None, *merged[2:], rule)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_no_register_spills(shape: Shape, tmp_path: Path) -> None:
    with recorded_launches(90, tmp_path) as kernels:
        launch_all(shape)
    names = {kernel.name for kernel in kernels}
    assert len(names - {"fill_table_kernel"}) == 4
    assert not [kernel for kernel in kernels if kernel.stack_bytes]


@pytest.mark.parametrize("capability", [80, 100])
@pytest.mark.parametrize("name", ["five_low_rank", "full", "nine"])
def test_other_generations_compile(name: str, capability: int, tmp_path: Path) -> None:
    with recorded_launches(capability, tmp_path) as kernels:
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
