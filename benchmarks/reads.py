"""Time of reads over the time to copy their bytes: `python benchmarks/reads.py`.

A read must move each source once, and its output; the backward pass each source, each source's
gradient and the output's. Every row is checked against the oracle before it is timed.
One JSON object a line; `floor` is the time of the least bytes at the best rate of a copy.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from peers import PEERS, SingleRead, installed
from timing import copy_header, eager_ms, environment, floor_ms, graph_ms, kernels_us
from torch import Tensor

from depthroute.ops import depth_attend, depth_merge, use_backend
from depthroute.ops.reference import depth_attend_reference, depth_merge_reference

Op = Callable[..., tuple[Tensor, Tensor]]


class Shape(NamedTuple):
    """One read, or a merge of one source (`sources=0`), of bfloat16 sources."""

    sources: int
    rank: int
    queries: int = 1
    tokens: int = 16384
    width: int = 1024

    @property
    def out_dtype(self) -> torch.dtype:
        return torch.float32 if self.queries > 1 else torch.bfloat16

    @property
    def least_bytes(self) -> tuple[int, int]:
        """Bytes of the forward pass, and of both."""
        vector = 2 * self.tokens * self.width
        outs = self.queries * self.out_dtype.itemsize // 2
        if not self.sources:  # the old read is float32, the new one bfloat16
            return (2 + 1 + 1) * vector, (4 + 1 + 2 + 1 + 2 + 1) * vector
        return (self.sources + outs) * vector, (3 * self.sources + 2 * outs) * vector


SHAPES = [
    *(Shape(sources, rank) for sources in (5, 17, 49) for rank in (1024, 256)),
    Shape(9, 1024),
    Shape(8, 1024, queries=6),
    Shape(8, 128, queries=6),
    Shape(0, 1024),
    Shape(9, 4096, tokens=8192, width=4096),
    Shape(9, 1024, tokens=2048),
]


def arguments(shape: Shape) -> tuple[dict[str, Any], list[Tensor]]:
    """Return the arguments of a read or merge, and those of them that get gradients."""

    def draw(*size: int, std: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return (std * torch.randn(size, device="cuda")).to(dtype).requires_grad_()

    query = draw(shape.queries, shape.rank, std=1.5 * shape.rank**-0.5, dtype=torch.float32)
    row = (shape.tokens, shape.width)
    if not shape.sources:
        out, lse = (draw(1, shape.tokens, n, dtype=torch.float32) for n in (shape.width, 1))
        value = draw(*row)
        return {"out": out, "lse": lse, "value": value, "query": query}, [out, lse, value, query]
    # sources grow with depth, as in a model
    values = [draw(*row, std=0.5 * 8 ** (i / shape.sources)) for i in range(shape.sources)]
    given = {"values": values, "query": query, "out_dtype": shape.out_dtype}
    return given, [*values, query]


def error(op: Op, oracle: Op, given: dict[str, Any], leaves: list[Tensor], grad: Tensor) -> float:
    """Return the largest error of output and gradients, relative to the largest true value."""
    wide = {name: _float(value) for name, value in given.items() if name != "out_dtype"}
    wide_leaves = [x for value in wide.values() for x in _as_list(value)]
    out, true = op(**given)[0], oracle(**wide)[0]
    got = [out, *torch.autograd.grad(out, leaves, grad)]
    want = [true, *torch.autograd.grad(true, wide_leaves, grad.float())]
    return max(
        ((a.float() - b).abs().max() / b.abs().max()).item() for a, b in zip(got, want, strict=True)
    )


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _float(value: Any) -> Any:
    wide = [x.detach().float().requires_grad_() for x in _as_list(value)]
    return wide if isinstance(value, list) else wide[0]


def as_read(peer: SingleRead) -> Op:
    """Give a peer the form of `depth_attend`, for one query."""

    def read(values: list[Tensor], query: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        out = peer(values, query[0], options.get("eps", 1e-6)).unsqueeze(0)
        return out, out  # no log-sum-exp: nothing here asks for it

    return read


def rows(
    shape: Shape, implementations: list[str], profile: bool = False
) -> Iterator[dict[str, Any]]:
    """Check and time the implementations of one read."""
    torch.manual_seed(0)
    given, leaves = arguments(shape)
    read, oracle = (
        (depth_attend, depth_attend_reference)
        if shape.sources
        else (depth_merge, depth_merge_reference)
    )
    out_shape = (shape.queries, shape.tokens, shape.width)
    out_dtype = shape.out_dtype if shape.sources else torch.bfloat16
    grad = torch.randn(out_shape, device="cuda").to(out_dtype)
    floors = [floor_ms(num_bytes) for num_bytes in shape.least_bytes]
    for name in implementations:
        started = time.perf_counter()
        op: Any = torch.compile(read, fullgraph=True) if "compiled" in name else read
        if name in PEERS:
            op = as_read(PEERS[name][0])
        backend: Any = "triton" if "triton" in name else "reference"

        def forward(op: Any = op) -> Any:
            with torch.no_grad():
                return op(**given)

        def both(op: Any = op) -> Any:
            return torch.autograd.grad(op(**given)[0], leaves, grad)

        with use_backend(backend):
            both()
            torch.cuda.synchronize()
            row = {"implementation": name, **shape._asdict()}
            row["seconds_to_first"] = round(time.perf_counter() - started, 1)
            row["error"] = round(error(op, oracle, given, leaves, grad), 5)
            for part, run, floor in zip(("forward", "both"), (forward, both), floors, strict=True):
                graph, eager = graph_ms(run), eager_ms(run)
                row[part] = {
                    "floor_ms": round(floor, 4),
                    "graph_ms": round(graph, 4),
                    "eager_ms": round(eager, 4),
                    "graph_over_floor": round(graph / floor, 3),
                }
            with torch.autograd.set_multithreading_enabled(False):  # the backward pass in no other
                row["both"]["eager_one_thread_ms"] = round(eager_ms(both), 4)
            if profile:
                row["kernels_us"] = kernels_us(both)
        # peers round the query, which moves logits
        assert row["error"] < (5e-2 if name in PEERS else 2e-2), row
        yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=argparse.FileType("w"), default=sys.stdout)
    parser.add_argument(
        "--only",
        nargs="+",
        help=f"triton, reference, compiled, triton_compiled, {', '.join(PEERS)}",
    )
    parser.add_argument("--shapes", type=int, nargs="+", help="indices; all by default")
    parser.add_argument("--profile", action="store_true", help="also the time of each kernel")
    options = parser.parse_args()
    print(json.dumps(environment() | copy_header()), file=options.out, flush=True)
    for i, shape in enumerate(SHAPES):
        if options.shapes and i not in options.shapes:
            continue
        names = options.only or ["triton", "reference"]
        if not options.only and shape in (SHAPES[0], SHAPES[2]):  # a minute of compilation
            names += ["compiled"]
        if not options.only and shape.queries == 1 and shape.sources:
            names += installed(low_rank=shape.rank < shape.width)
        for row in rows(shape, names, options.profile):
            print(json.dumps(row), file=options.out, flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
