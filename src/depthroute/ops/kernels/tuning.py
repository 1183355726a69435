"""Limits of the kernels, and how they are launched: a table by shape, no search at run time."""

from typing import NamedTuple

from depthroute.ops.kernels.layout import Layout, power_of_two

MAX_SOURCES, MAX_QUERIES, MAX_WIDTH = 129, 16, 8192
# up to here a program holds all sources of its token in registers and is compiled for their number
MAX_RESIDENT = 16
# bytes of sources and accumulators that a warp's registers hold without spilling
FORWARD_BYTES_PER_WARP = 20 * 1024
BACKWARD_BYTES_PER_WARP = 18 * 1024


class Launch(NamedTuple):
    """Compile-time shape of a program."""

    num_warps: int
    chunk: int  # sources whose loads are in flight together
    resident: bool  # the chunk is all of the sources
    programs_per_processor: int = 1  # for kernels whose programs loop over tokens


def forward(at: Layout, value_bytes: int, key_bytes: int) -> Launch:
    """Choose the forward launch; bytes are those of one number of a value and of a key."""
    resident = at.S <= MAX_RESIDENT
    chunk = at.S if resident else 4
    held = chunk * _source_bytes(at, value_bytes, key_bytes) + 4 * at.width
    return Launch(_warps(held, FORWARD_BYTES_PER_WARP), chunk, resident)


def backward(at: Layout, value_bytes: int, key_bytes: int, grad_bytes: int) -> Launch:
    """Choose the backward launch; several queries leave no registers for all sources."""
    resident = at.S <= MAX_RESIDENT and at.Q == 1
    chunk = at.S if resident else 2
    queries = power_of_two(at.Q)
    held = chunk * _source_bytes(at, value_bytes, key_bytes)
    held += (4 + queries * grad_bytes) * at.width + 4 * queries * at.rank
    num_warps = _warps(held, BACKWARD_BYTES_PER_WARP)
    return Launch(num_warps, chunk, resident, max(1, 8 // num_warps))


def _source_bytes(at: Layout, value_bytes: int, key_bytes: int) -> int:
    return value_bytes * at.width + (0 if at.keys == "value" else key_bytes * at.rank)


def _warps(num_bytes: int, per_warp: int) -> int:
    return min(32, power_of_two(-(-num_bytes // per_warp)))
