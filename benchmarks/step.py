"""Time of a training step with routed reads over one without: `python benchmarks/step.py`.

Forward and backward pass of a whole compiled decoder in bfloat16, head and loss included. A variant
and PreNorm take turns; ratios are taken within a turn, so that a change of the clock meets both
alike. Launched, a step is the device's work or the host's, whichever is longer; with `--replay` it
is also recorded in a CUDA graph, which leaves the device's alone. Variants run in one process, so
later ones find the compiled code of sublayers that they share with earlier ones. One JSON object a
line.
"""

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

import torch
from timing import environment, kernels_us, once_ms, recorded
from variants import VARIANTS, add_sizes, config_of

from depthroute.models import CausalLM
from depthroute.models.compile import compile_model
from depthroute.ops import use_backend


class Variant(NamedTuple):
    """A model that is ready to be timed."""

    steps: dict[str, Callable[[], Any]]  # "launched", "replayed"
    seconds_to_first: float
    peak_gib: float


def build(name: str, options: argparse.Namespace) -> Variant:
    """Build and compile one variant, and record its step."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    config = config_of(name.removesuffix("_reference"), options)
    model = CausalLM(config).cuda()
    model.model.compute_dtype = torch.bfloat16
    compile_model(model, options.compile)
    ids = torch.randint(options.vocab, (options.batch, options.context), device="cuda")
    backend: Any = "reference" if name.endswith("_reference") else "auto"

    def step() -> None:
        with use_backend(backend):
            sums = model.loss(ids, ids.roll(-1, 1))
            (sums.cross_entropy / sums.tokens).backward()
        model.zero_grad(set_to_none=True)

    started = time.perf_counter()
    step()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    gc.collect()  # nodes of the first graph belong to this stream, which no capture may touch
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()  # of other variants' weights and graphs
    parameters = sum(p.nbytes for p in model.parameters())
    step()
    peak = torch.cuda.max_memory_allocated() - before + parameters
    steps = {"launched": step} | ({"replayed": recorded(step)} if options.replay else {})
    return Variant(steps, round(seconds, 1), round(peak / 2**30, 2))


def compare(plain: Variant, variant: Variant, options: argparse.Namespace) -> dict[str, Any]:
    """Time a variant and PreNorm in turns."""
    row: dict[str, Any] = {}
    for kind in variant.steps:
        times = [
            [once_ms(one.steps[kind], options.repeats) for one in (plain, variant)]
            for _ in range(options.rounds)
        ]
        ratios = sorted(routed / alone for alone, routed in times)
        row[kind] = {
            "plain_ms": round(median(alone for alone, _ in times), 2),
            "ms": round(median(routed for _, routed in times), 2),
            "over_plain": round(median(ratios), 4),
            "spread": [round(ratios[0], 4), round(ratios[-1], 4)],
        }
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    names = [*VARIANTS, *(f"{name}_reference" for name in VARIANTS)]
    parser.add_argument("--variants", nargs="+", choices=names, default=list(VARIANTS)[1:3])
    parser.add_argument("--compile", choices=["none", "sublayer", "model"], default="sublayer")
    parser.add_argument("--replay", action="store_true", help="also replayed from a CUDA graph")
    parser.add_argument("--profile", action="store_true", help="also the time of each kernel")
    parser.add_argument("--out", type=argparse.FileType("w"), default=sys.stdout)
    add_sizes(parser)
    for name, size in {"batch": 8, "context": 2048, "rounds": 7, "repeats": 3}.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    options = parser.parse_args()
    given = {name: value for name, value in vars(options).items() if name != "out"}
    print(json.dumps(environment() | given), file=options.out, flush=True)
    plain = build("prenorm", options)
    tokens = options.batch * options.context
    for name in options.variants:
        variant = plain if name == "prenorm" else build(name, options)
        row = {"variant": name, **compare(plain, variant, options)}
        row["tokens_per_s"] = round(tokens / row["launched"]["ms"] * 1e3)
        for part in ("peak_gib", "seconds_to_first"):
            row[part] = {"plain": getattr(plain, part), "routed": getattr(variant, part)}
        if options.profile:
            row["kernels_us"] = {
                k: v for k, v in kernels_us(variant.steps["launched"], 2).items() if v > 99
            }
        print(json.dumps(row), file=options.out, flush=True)
        del variant
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
