"""Host time of an eager read, by part: `python benchmarks/host.py`.

So few tokens that the device never makes the host wait: what is left is Python, torch's dispatcher
and autograd, Triton's launches and the driver. `null` is an autograd function of the same tensors
that launches nothing, so no read can take less. One JSON object a line, microseconds.

`steps` splits a forward and backward pass where it passes from one stage to the next. Autograd runs
the backward pass of CUDA tensors in a thread of its own; `one_thread` is without it.
"""

import gc
import json
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from reads import Shape, arguments
from timing import environment
from torch import Tensor
from torch.autograd.function import once_differentiable

from depthroute.ops import checks, depth_attend, fused
from depthroute.ops.kernels import depth_attend_bwd as backward_module
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


def one_thread() -> AbstractContextManager[Any]:
    return torch.autograd.set_multithreading_enabled(False)


@contextmanager
def no_collector() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


WAYS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "both": nullcontext,
    "one_thread": one_thread,
    "no_collector": no_collector,
}


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
    back = (upstream, None, *sources, saved, read.rule)

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


class Clock:
    """Notes when a call of the passes gets from one step to the next."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.times: list[float] = []

    def ends(self, step: str) -> None:
        self.names.append(step)
        self.times.append(time.perf_counter())

    def around(self, function: Callable[..., Any], before: str, within: str) -> Callable[..., Any]:
        """Note when a function is called and, unless its own steps are noted, when it returns."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            self.ends(before)
            result = function(*args, **kwargs)
            if within:
                self.ends(within)
            return result

        return timed


class TimedKernel:
    """A kernel whose launches a clock notes."""

    def __init__(self, kernel: Any, clock: Clock, before: str, within: str) -> None:
        self.kernel, self.clock, self.steps = kernel, clock, (before, within)

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return self.clock.around(self.kernel[grid], *self.steps)


def steps(shape: Shape, calls: int = 500) -> dict[str, float]:
    """Return the median time of each step of both passes, in order."""
    given, leaves = arguments(shape)
    upstream = torch.ones_like(depth_attend(**given)[0])
    clock = Clock()
    function = clock.around(fused._Attend.backward, "enter", "return_gradients")
    launcher = clock.around(depth_attend_bwd, "unpack", "")
    kernel = backward_module.depth_attend_bwd_kernel
    timed = TimedKernel(kernel, clock, "prepare", "launch")
    rows = []
    with ExitStack() as patches:
        enter = patches.enter_context
        enter(patch.object(fused._Attend, "backward", staticmethod(function)))
        enter(patch.object(backward_module, "depth_attend_bwd", launcher))
        enter(patch.object(backward_module, "depth_attend_bwd_kernel", timed))
        for i in range(calls + 20):
            clock.__init__()  # type: ignore[misc]
            clock.ends("start")
            out = depth_attend(**given)[0]
            clock.ends("forward")
            torch.autograd.grad(out, leaves, upstream)
            clock.ends("leave")
            if i >= 20:
                rows.append([b - a for a, b in zip(clock.times, clock.times[1:], strict=False)])
    torch.cuda.synchronize()
    columns = zip(clock.names[1:], zip(*rows, strict=True), strict=True)
    return {name: round(median(column) * 1e6, 1) for name, column in columns}


def main() -> None:
    print(json.dumps(environment()), flush=True)
    for num_sources in (5, 9, 17):
        shape = Shape(num_sources, 1024, tokens=64)
        times = {name: host_us(part) for name, part in parts(shape).items()}
        print(json.dumps({"sources": num_sources} | times), flush=True)
        for name, way in WAYS.items():
            with way():
                both = host_us(parts(shape)["both"])
                print(json.dumps({"way": name, "both": both, "steps": steps(shape)}), flush=True)


if __name__ == "__main__":
    main()
