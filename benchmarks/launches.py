"""Time other launches of a read than the rule's: `python benchmarks/launches.py`.

For new hardware or kernels: shows by how much `ops/kernels/tuning.py` misses the best launch of
each pass. Candidates are compiled by many processes first. One JSON object a line, best first.
"""

import argparse
import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from multiprocessing import get_context
from typing import Any
from unittest.mock import patch

import torch
from reads import SHAPES, Shape, arguments
from timing import copy_header, environment, floor_ms, graph_ms

from depthroute.ops import checks
from depthroute.ops.kernels import tuning
from depthroute.ops.kernels.layout import Layout
from depthroute.ops.kernels.tuning import REGISTERS, Launch


@dataclass
class Case:
    """Both passes of one read, launched directly."""

    shape: Shape

    def __post_init__(self) -> None:
        from depthroute.ops.kernels.depth_attend_bwd import depth_attend_bwd
        from depthroute.ops.kernels.depth_attend_fwd import depth_attend_fwd

        torch.manual_seed(0)
        given, _ = arguments(self.shape)
        rule: dict[str, Any] = {"heads": 1, "key_norm": "tail", "eps": 1e-6, "scale": 1.0}
        read = checks.read(given["values"], given["query"], keys=None, bias=None, null=None, **rule)
        values = [value.detach() for value in read.values]
        query, dtype = read.query.detach(), self.shape.out_dtype
        self.layout = Layout.of(values, None, query, read.rule)
        saved = depth_attend_fwd(values, None, query, None, None, read.rule, dtype)
        grad = torch.randn_like(saved.out)

        def forward() -> Any:
            return depth_attend_fwd(values, None, query, None, None, read.rule, dtype)

        def backward() -> Any:
            return depth_attend_bwd(grad, None, values, None, query, None, None, saved, read.rule)

        self.passes: dict[str, Callable[[], Any]] = {"forward": forward, "backward": backward}
        one, both = self.shape.least_bytes
        self.least_bytes = {"forward": one, "backward": both - one}


def candidates(which: str, at: Layout) -> Iterator[Launch]:
    """Return the rule's launch, and others that fill a processor's registers."""
    yield getattr(tuning, which)(at)
    resident = (True, False) if at.S <= 20 and (at.Q == 1 or which == "forward") else (False,)
    chunks = {True: (at.S,), False: (2, 4, 8)}
    shapes = [(w, c, r) for w, r in product((1, 2, 4, 8), resident) for c in chunks[r]]
    if which == "forward":
        yield from (Launch(*shape) for shape in shapes)
        return
    queries = tuning.backward(at).queries
    for (num_warps, chunk, held), programs in product(shapes, PROGRAMS):
        registers = min(255, REGISTERS // (programs * num_warps * 32) // 8 * 8)
        per_number = registers * num_warps * 32 / (at.value_tile * (3 * queries + chunk / 2))
        if registers < 64 or per_number < 0.9 or programs * num_warps < (4 if held else 8):
            continue
        for stages in (1, 2, 3) if held else (1,):
            yield Launch(num_warps, chunk, held, programs, registers, queries, stages)


PROGRAMS = (1, 2, 3, 4, 6, 8, 10, 12, 16)  # to a processor


def run(index: int, which: str, launch: Launch) -> None:
    """Compile a candidate in another process; triton keeps the result on disk."""
    with patch.object(tuning, which, lambda at: launch):
        Case(SHAPES[index]._replace(tokens=64)).passes[which]()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", type=int, nargs="+", default=[0, 2, 4, 6, 7])
    parser.add_argument("--processes", type=int, default=min(14, os.cpu_count() or 1))
    parser.add_argument("--best", type=int, default=6, help="candidates to print for each pass")
    options = parser.parse_args()
    print(json.dumps(environment() | copy_header()), flush=True)
    jobs = []
    for index in options.shapes:
        at = Case(SHAPES[index]._replace(tokens=64)).layout
        for which in ("forward", "backward"):
            jobs += [(index, which, launch) for launch in dict.fromkeys(candidates(which, at))]
    with ProcessPoolExecutor(options.processes, get_context("spawn")) as pool:
        futures = [pool.submit(run, *job) for job in jobs]
    for job, future in zip(jobs, futures, strict=True):
        if failure := future.exception():
            print(json.dumps({"job": str(job), "failed": repr(failure)[:200]}), flush=True)
    jobs = [job for job, future in zip(jobs, futures, strict=True) if not future.exception()]
    for index in options.shapes:
        case = Case(SHAPES[index])
        for which, launch_pass in case.passes.items():
            floor, rows = floor_ms(case.least_bytes[which]), []
            rule = getattr(tuning, which)(case.layout)
            for launch in [job[2] for job in jobs if job[:2] == (index, which)]:
                with patch.object(tuning, which, lambda at, launch=launch: launch):
                    milliseconds = graph_ms(launch_pass, repeats=10, rounds=3)
                rows.append((milliseconds, launch))
            best = sorted(rows)[: options.best]
            for milliseconds, launch in best + [row for row in rows if row[1] == rule]:
                row = {"shape": case.shape._asdict(), "pass": which, "launch": launch._asdict()}
                row |= {"ms": round(milliseconds, 4), "over_floor": round(milliseconds / floor, 3)}
                print(json.dumps(row | {"is_rule": launch == rule}), flush=True)
        del case
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
