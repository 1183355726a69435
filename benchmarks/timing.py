"""Timing on a CUDA device, and what every result says about where it was measured."""

import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import torch
import triton


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
def copy_ms(num_bytes: int) -> float:
    """Return the time to move so many bytes by a copy, half of them read and half written."""
    source = torch.empty(num_bytes // 4, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source)
    return graph_ms(lambda: target.copy_(source))


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
