"""Timing on a CUDA device, and what every result says about where it was measured."""

import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import torch
import triton
from torch import Tensor

PADS = (0, 4, 12, 68, 516)  # KiB between source and target
COPIES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "driver": lambda source, target: target.copy_(source),
    "kernel": lambda source, target: torch.neg(source, out=target),
}


def environment() -> dict[str, Any]:
    """Return the hardware, the versions and the commit."""
    folder = Path(__file__).parent
    try:
        command = ["git", "describe", "--always", "--dirty"]
        git = subprocess.run(command, cwd=folder, capture_output=True, text=True).stdout.strip()
    except OSError:  # no git here
        git = ""
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "commit": git or "unknown",
    }


def graph_ms(function: Callable[[], Any], repeats: int = 20, rounds: int = 5) -> float:
    """Return the time of one call replayed from a CUDA graph: the device's work alone."""
    return _median_ms(recorded(function), repeats, rounds)


def recorded(function: Callable[[], Any]) -> Callable[[], Any]:
    """Return a call replayed from a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


def eager_ms(function: Callable[[], Any], repeats: int = 20, rounds: int = 5) -> float:
    """Return the time of one call in a loop: the device's work or Python, whichever is longer."""
    for _ in range(3):
        function()
    return _median_ms(function, repeats, rounds)


@cache
def copy_rates() -> dict[str, list[float]]:
    """Return the bytes that copies of some sizes move in a second, in TB, one for each of PADS.

    By the driver and by an elementwise kernel, with several distances between source and target:
    single copies of one device differed by half.
    """
    rates = {}
    for mebibytes in (96, 192, 288, 480):  # of the source
        size, pads = mebibytes * 2**20, [pad * 1024 for pad in PADS]
        memory = torch.ones(2 * size + max(pads), dtype=torch.uint8, device="cuda")
        numbers = memory.view(torch.bfloat16)
        for way, write in COPIES.items():
            times = []
            for pad in pads:
                source, target = numbers[: size // 2], numbers[(size + pad) // 2 :][: size // 2]
                times.append(graph_ms(lambda s=source, t=target, w=write: w(s, t), repeats=10))
            rates[f"{way}, {mebibytes} MiB"] = [round(2 * size / t / 1e9, 3) for t in times]
    return rates


def copy_header() -> dict[str, Any]:
    """Return what the floors rest on, for the first line of a result."""
    return {"copy_tb_per_s": _best_rate(), "copy_rates": copy_rates()}


def floor_ms(num_bytes: int) -> float:
    """Return the time to move so many bytes, read or written, at the best rate of a copy."""
    return num_bytes / _best_rate() / 1e9


def _best_rate() -> float:
    return max(rate for row in copy_rates().values() for rate in row)


def kernels_us(function: Callable[[], Any], calls: int = 5) -> dict[str, float]:
    """Return the time of each kernel of one call, largest first."""
    function()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(calls):
            function()
        torch.cuda.synchronize()
    times = {event.key[:60]: event.self_device_time_total for event in profile.key_averages()}
    return {
        name: round(time / calls, 1)
        for name, time in sorted(times.items(), key=lambda item: -item[1])
        if time
    }


def once_ms(function: Callable[[], Any], repeats: int) -> float:
    """Return the time of a call, the mean over `repeats` in a row."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        function()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / repeats


def _median_ms(function: Callable[[], Any], repeats: int, rounds: int) -> float:
    return median(once_ms(function, repeats) for _ in range(rounds))
