"""Host time of an eager read, by part: `python benchmarks/host.py`.

So few tokens that the device never makes the host wait: what is left is Python, torch's dispatcher
and autograd, Triton's launches and the driver. `null` is an autograd function of the same tensors
that launches nothing, so no read can take less. One JSON object a line, microseconds.
"""

import json
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from reads import Shape, arguments
from timing import environment
from torch import Tensor
from torch.autograd.function import once_differentiable

from depthroute.ops import checks, depth_attend
from depthroute.ops.kernels.depth_attend_bwd import depth_attend_bwd
from depthroute.ops.kernels.depth_attend_fwd import depth_attend_fwd


class Null(torch.autograd.Function):
    """Takes and returns what a read does, and keeps nothing but tensors made before."""

    @staticmethod
    def forward(ctx: Any, results: list[Tensor], grads: list[Tensor], *leaves: Tensor) -> Any:
        ctx.save_for_backward(*leaves)
        ctx.grads = grads
        return tuple(x.view_as(x) for x in results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        return None, None, *ctx.grads


def host_us(function: Callable[[], Any], calls: int = 100, rounds: int = 9) -> float:
    """Return the host's time for one call."""
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            function()
        times.append((time.perf_counter() - start) / calls)
    return round(median(times) * 1e6, 1)


def parts(shape: Shape) -> dict[str, Callable[[], Any]]:
    """Return the parts of a read as functions without arguments."""
    given, leaves = arguments(shape)
    options: dict[str, Any] = {"heads": 1, "key_norm": "tail", "eps": 1e-6, "scale": 1.0}
    options |= {"keys": None, "bias": None, "null": None}
    read = checks.read(given["values"], given["query"], **options)
    sources = ([x.detach() for x in read.values], None, read.query.detach(), None, None)
    saved = depth_attend_fwd(*sources, read.rule, shape.out_dtype)
    upstream, grads = torch.ones_like(saved.out), [torch.zeros_like(x) for x in leaves]
    back = (upstream, None, *sources, saved.dots, saved.rstds, saved.lse, read.rule)

    def forward() -> Any:
        with torch.no_grad():
            return depth_attend(**given)

    def gradients(out: Tensor) -> Any:
        return torch.autograd.grad(out, leaves, upstream)

    return {
        "checks": lambda: checks.read(given["values"], given["query"], **options),
        "forward_launch": lambda: depth_attend_fwd(*sources, read.rule, shape.out_dtype),
        "backward_launch": lambda: depth_attend_bwd(*back),
        "null": lambda: gradients(Null.apply(saved[:2], grads, *leaves)[0]),
        "forward": forward,
        "forward_with_graph": lambda: depth_attend(**given),
        "both": lambda: gradients(depth_attend(**given)[0]),
    }


def main() -> None:
    print(json.dumps(environment()), flush=True)
    for num_sources in (5, 9, 17):
        shape = Shape(num_sources, 1024, tokens=64)
        times = {name: host_us(part) for name, part in parts(shape).items()}
        print(json.dumps({"sources": num_sources} | times), flush=True)


if __name__ == "__main__":
    main()
