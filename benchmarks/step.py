"""Time of a training step with routed reads over one without: `python benchmarks/step.py`.

Forward and backward pass of a whole compiled decoder, head and loss included. One JSON object a
line. Compiling 24 layers takes about a minute for each variant.
"""

import argparse
import json
import sys
import time
from typing import Any

import torch
from timing import eager_ms, environment

from depthroute.models import CausalLM, ModelConfig
from depthroute.models.compile import compile_model
from depthroute.ops import use_backend
from depthroute.residual import AttnResConfig, PreNormConfig, TailKey

RANK = TailKey(rank=128)
VARIANTS: dict[str, tuple[Any, Any]] = {
    "prenorm": (PreNormConfig(), "auto"),
    "attn_res_8_triton": (AttnResConfig(num_blocks=8), "triton"),
    "attn_res_8_reference": (AttnResConfig(num_blocks=8), "reference"),
    "s_lr_8_triton": (AttnResConfig(num_blocks=8, key=RANK), "triton"),
    "attn_res_full_triton": (AttnResConfig(num_blocks=0), "triton"),
}


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Build, compile and time one variant."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    residual, backend = VARIANTS[name]
    width = options.width
    config = ModelConfig(
        vocab_size=options.vocab,
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=options.layers,
        num_attention_heads=width // 64,
        residual=residual,
    )
    model = CausalLM(config).cuda()
    model.model.compute_dtype = torch.bfloat16
    compile_model(model, options.compile)
    ids = torch.randint(options.vocab, (options.batch, options.context), device="cuda")

    def step() -> None:
        sums = model.loss(ids, ids.roll(-1, 1))
        (sums.cross_entropy / sums.tokens).backward()
        model.zero_grad(set_to_none=True)

    started = time.perf_counter()
    with use_backend(backend):
        step()
        torch.cuda.synchronize()
        first = time.perf_counter() - started
        torch.cuda.reset_peak_memory_stats()
        step_ms = eager_ms(step, repeats=5)
    return {
        "variant": name,
        "step_ms": round(step_ms, 2),
        "tokens_per_s": round(ids.numel() / step_ms * 1e3),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "seconds_to_first": round(first, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS)[:3])
    parser.add_argument("--compile", choices=["none", "sublayer", "model"], default="model")
    parser.add_argument("--out", type=argparse.FileType("w"), default=sys.stdout)
    sizes = {"layers": 24, "width": 1024, "batch": 8, "context": 2048, "vocab": 100277}
    for name, size in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    options = parser.parse_args()
    shape = {name: getattr(options, name) for name in (*sizes, "compile")}
    print(json.dumps(environment() | shape), file=options.out, flush=True)
    for name in options.variants:
        print(json.dumps(measure(name, options)), file=options.out, flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
