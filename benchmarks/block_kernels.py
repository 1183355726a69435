"""Time of each kernel of the block schedule over its floor: `python benchmarks/block_kernels.py`.

The floor is the time of a copy, in the same run, that moves the fewest bytes that the step must.
Before they are timed, phase 1 and a site are compared with plain PyTorch, gradients included, on
few tokens. One JSON object a line, replayed from a CUDA graph; takes about two minutes.
"""

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from timing import copy_header, environment, floor_ms, graph_ms, kernels_us
from torch import Tensor

from depthroute.nn import RMSNorm
from depthroute.ops import use_backend
from depthroute.ops.block import Ahead, BlockRead, Site, add_merge_norm, read_ahead
from depthroute.ops.kernels.add_merge_norm import site_bwd, site_fwd
from depthroute.ops.kernels.block_layout import site_programs
from depthroute.ops.kernels.read_ahead_bwd import read_ahead_bwd
from depthroute.ops.kernels.read_ahead_fwd import read_ahead_fwd
from depthroute.ops.scores import ScoreRule

EPS = 1e-6
RULE = ScoreRule(1, "tail", EPS, 1.0)
DEVICE = "cuda"
_TOLERANCE = 0.03  # of a tensor's norm, in bfloat16


class Shape(NamedTuple):
    """A block of Q reads over S closed sources."""

    sources: int
    queries: int
    rank: int = 1024
    width: int = 1024
    tokens: int = 16384


SHAPES = [
    *(Shape(sources, 6) for sources in (1, 2, 3, 4, 5, 6, 7, 8)),
    Shape(8, 6, 128),
    Shape(3, 1),
    Shape(5, 1),
    Shape(9, 1),
    Shape(16, 6),
    Shape(43, 6),
    Shape(3, 12),
    Shape(8, 4, 2048, 2048),
]


def draw(*size: int, dtype: torch.dtype = torch.bfloat16, std: float = 1.0) -> Tensor:
    """Draw a tensor."""
    return torch.randn(size, device=DEVICE).mul_(std).to(dtype)


def check(shape: Shape) -> float:
    """Return the largest difference to plain PyTorch in float32, relative to a result's norm."""
    tokens, norm = 259, RMSNorm(EPS)  # more than a decoding step has
    sources, queries, rank, width, _ = shape
    given = [draw(tokens, width) for _ in range(sources + 2)]
    query = draw(queries, rank, dtype=torch.float32, std=rank**-0.5)
    upstream = [draw(tokens, width, dtype=torch.float32) for _ in range(queries)]

    def run(dtype: torch.dtype, backend: Any) -> list[Tensor]:
        leaves = [x.to(dtype, copy=True).requires_grad_() for x in given]
        rows = query.clone().requires_grad_()
        *values, closing, write = leaves
        with use_backend(backend):
            options: dict[str, Any] = {"share": 1.0, "bias": None, "rule": RULE, "norm": norm}
            ahead, _, _ = read_ahead(
                values, rows, keys=None, pending=closing, complete=1, **options
            )
            outs, ahead = [ahead.outs[0]], ahead.without(1)
            for _ in range(queries - 1):
                outs.append(_site(ahead, write, options))
                ahead = ahead.without(1)
            loss = sum((out.float() * u).sum() for out, u in zip(outs, upstream, strict=True))
        used = leaves if queries > 1 else leaves[:-1]
        return [*outs, *torch.autograd.grad(loss, [*used, rows])]

    got, want = run(torch.bfloat16, "triton"), run(torch.float32, "reference")
    return max(
        float((a.float() - b).norm() / b.norm().clamp_min(1e-6))
        for a, b in zip(got, want, strict=True)
    )


def _site(ahead: Ahead, write: Tensor, options: dict[str, Any]) -> Tensor:
    return add_merge_norm(ahead, None, write, key=None, key_sum=None, **options)[-1]


def steps(shape: Shape) -> dict[str, tuple[Callable[[], Any], int]]:
    """Return both passes of phase 1 and of a site, and the vectors that each must move a token."""
    sources, queries, rank, width, tokens = shape
    wide = torch.float32
    rows = site_programs(tokens, width, torch.device(DEVICE))
    query = draw(queries, rank, dtype=wide, std=rank**-0.5)
    values = tuple(draw(tokens, width) for _ in range(sources))
    pending = draw(tokens, width)
    given = BlockRead(values, None, pending, query, RULE, 1.0, EPS)
    read = read_ahead_fwd(given)
    complete = given._replace(values=(*values[:-1], read.closed))
    saved = (read.first, read.weights, read.logits, read.rstds, read.norm_rstds)
    outs = [draw(tokens, width) for _ in range(queries)]
    lses = [draw(tokens, dtype=wide, std=0.1) for _ in range(queries)]
    later = [draw(tokens, width) for _ in range(sources)]
    slots = [draw(rows, rank, dtype=wide) for _ in range(queries - 1)]

    def backward() -> Any:
        return read_ahead_bwd(complete, *saved, outs, lses, later, None, slots)

    x, y, grad = (draw(tokens, width) for _ in range(3))
    site = Site(x, lses[0], draw(rows, rank, dtype=wide), x, y, None, RULE, 1.0, EPS)
    plain = site._replace(old=None, lse=None, query=None)
    passes: dict[str, tuple[Callable[[], Any], int]] = {
        "phase 1, forward": (lambda: read_ahead_fwd(given), sources + 2 + queries),
        "phase 1, backward": (backward, 3 * sources + queries + 1),
    }
    for name, one, vectors in (("site", site, (5, 6)), ("add and norm", plain, (4, 4))):
        result = site_fwd(one)
        after = one._replace(total=None)
        arguments = (result.key, result.out, result.numbers, grad, grad, None)
        passes[f"{name}, forward"] = (lambda one=one: site_fwd(one), vectors[0])
        passes[f"{name}, backward"] = (
            lambda after=after, arguments=arguments: site_bwd(after, *arguments),
            vectors[1],
        )
    return passes


def rows_of(shape: Shape) -> list[dict[str, Any]]:
    """Check a shape, and time its steps."""
    error = check(shape)
    if not error < _TOLERANCE:
        raise AssertionError(f"{shape}: {error:.3f} away from plain PyTorch")
    rows = []
    for name, (function, vectors) in steps(shape).items():
        if not name.startswith("phase 1") and shape not in (SHAPES[-1], Shape(8, 6)):
            continue  # the same for all with a width
        floor, time = floor_ms(2 * vectors * shape.tokens * shape.width), graph_ms(function)
        row = {"step": name, **shape._asdict(), "error": round(error, 4)}
        row |= {"us": round(1e3 * time, 1), "floor_us": round(1e3 * floor, 1)}
        rows.append(row | {"over_floor": round(time / floor, 3), "kernels": kernels_us(function)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", type=int, nargs="+", help="indices; all by default")
    parser.add_argument("--out", type=argparse.FileType("w"), default=sys.stdout)
    options = parser.parse_args()
    print(json.dumps(environment() | copy_header()), file=options.out, flush=True)
    for i, shape in enumerate(SHAPES):
        if options.shapes is None or i in options.shapes:
            torch.manual_seed(0)
            for row in rows_of(shape):
                print(json.dumps(row), file=options.out, flush=True)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
