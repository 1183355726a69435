"""Latency of routed reads over plain ones in use: `python benchmarks/decode.py`.

A whole decoder in bfloat16, head included. Prefill is one pass over a prompt: launched kernel by
kernel, and replayed from a CUDA graph. A decoding step is `depthroute.models.DecodeStep`, replayed;
before it is timed, its logits must equal launched ones. The variants take turns in every round;
ratios to the first are taken within a round, so that a change of the clock meets all alike.
One JSON object a line. Takes about a minute.
"""

import argparse
import json
import sys
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

import torch
from timing import environment, once_ms, recorded
from variants import VARIANTS, add_sizes, config_of

from depthroute.models import CausalLM, DecodeStep
from depthroute.models.compile import compile_model
from depthroute.nn import JoinedWeights

DEFAULTS = ["prenorm", "attn_res_8", "s_lr_8", "attn_res_full"]
# of logits, relative to the largest one: another order of bfloat16 sums
_TOLERANCE = 0.05


class Case(NamedTuple):
    """What is timed: `tokens` new ones in each row, after `past` others."""

    kind: str  # "prefill", "prefill_replayed" or "decode_replayed"
    batch: int
    past: int
    tokens: int


def build(name: str, options: argparse.Namespace) -> CausalLM:
    """Build a model with weights in bfloat16, routing parameters apart."""
    config = config_of(name, options)
    with torch.device("cuda"):
        model = CausalLM(config, seed=None)
    source = torch.Generator("cuda").manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, config.init_std, generator=source)
    model.to(torch.bfloat16)
    model.model.residual.to(torch.float32)
    compile_model(model, options.compile)
    return model


def prefill(model: CausalLM, case: Case) -> Callable[[], Any]:
    """Return a function that reads the prompts and gives the logits of the next tokens."""
    ids = torch.randint(model.config.vocab_size, (case.batch, case.tokens), device="cuda")
    cache, weights = model.new_cache(case.batch, case.tokens), JoinedWeights(model)

    def run() -> torch.Tensor:
        cache.length = 0
        with weights:  # as `generate` does
            return model.lm_head(model.model(ids, cache=cache)[:, -1])

    return recorded(run) if case.kind == "prefill_replayed" else run


def decode(model: CausalLM, case: Case) -> Callable[[], Any]:
    """Return a function that replays the step after `past` tokens, checked against launches."""
    size = case.batch, case.past
    ids = torch.randint(model.config.vocab_size, size, device="cuda")
    cache = model.new_cache(case.batch, case.past + 8)
    model.model(ids, cache=cache)

    def at_end(step: DecodeStep) -> torch.Tensor:
        cache.length = case.past
        return step(ids[:, :1])

    launched = at_end(DecodeStep(model, cache, cuda_graph=False)).clone()
    cache.length = case.past
    sliced = model.lm_head(model.model(ids[:, :1], cache=cache)[:, -1]).float()
    step = DecodeStep(model, cache)
    for _ in range(4):
        replayed = at_end(step)
    if step.graph is None:
        raise AssertionError("the step was not recorded")
    for logits in (replayed, sliced):  # a recorded product may choose another algorithm
        error = float((logits - launched).abs().max() / launched.abs().max())
        if not error < _TOLERANCE:
            raise AssertionError(f"logits differ by {error:.3f} of the largest: {case}")
    return lambda: at_end(step)


def measure(case: Case, models: dict[str, CausalLM], options: argparse.Namespace) -> None:
    """Time a case for all models by turns, and print a line for each."""
    prepare = decode if case.kind == "decode_replayed" else prefill
    functions = {name: prepare(model, case) for name, model in models.items()}
    for function in functions.values():
        function()
    repeats = max(1, options.repeats // case.batch) if case.past == 0 else options.repeats
    rounds = [
        {name: once_ms(function, repeats) for name, function in functions.items()}
        for _ in range(options.rounds)
    ]
    base = next(iter(models))
    for name in models:
        ratios = sorted(times[name] / times[base] for times in rounds)
        line = case._asdict() | {
            "variant": name,
            "ms": round(median(times[name] for times in rounds), 4),
            "ratio": round(median(ratios), 4),
            "ratio_low": round(ratios[0], 4),
            "ratio_high": round(ratios[-1], 4),
        }
        print(json.dumps(line), file=options.out, flush=True)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=DEFAULTS)
    parser.add_argument("--compile", choices=["none", "sublayer"], default="none")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 32])
    parser.add_argument("--out", type=argparse.FileType("w"), default=sys.stdout)
    add_sizes(parser)
    for name, size in {"prompt": 2048, "context": 1024, "repeats": 10, "rounds": 15}.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    options = parser.parse_args()
    # a graph for each shape: guesses about shapes to come would make slower kernels
    torch._dynamo.config.automatic_dynamic_shapes = False
    torch._dynamo.config.recompile_limit = 64
    given = {name: value for name, value in vars(options).items() if name != "out"}
    print(json.dumps(environment() | given), file=options.out, flush=True)
    models = {name: build(name, options) for name in options.variants}
    sizes = {"prefill": (0, options.prompt), "decode_replayed": (options.context, 1)}
    sizes["prefill_replayed"] = sizes["prefill"]
    cases = [Case(kind, batch, *sizes[kind]) for kind in sizes for batch in options.batches]
    for case in cases:
        measure(case, models, options)


if __name__ == "__main__":
    main()
