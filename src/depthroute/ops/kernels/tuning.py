"""How the kernels are launched: a rule by shape, no search at run time."""

from typing import NamedTuple

from depthroute.ops.kernels.layout import Layout, power_of_two

# up to here a program holds all sources of a token in registers, compiled for their number
FORWARD_RESIDENT, BACKWARD_RESIDENT = 16, 10
# float32 bytes of sources and accumulators in a warp's registers (255 of 128 bytes)
FORWARD_BYTES, BACKWARD_BYTES = 28 * 1024, 24 * 1024


class Launch(NamedTuple):
    """Compile-time shape of a program."""

    num_warps: int
    chunk: int  # sources whose loads are in flight together
    resident: bool  # the chunk is all of the sources
    keep: bool = True
    programs_per_processor: int = 1  # for kernels whose programs loop over tokens


def forward(at: Layout) -> Launch:
    """Choose the launch of the forward pass."""
    resident = at.S <= FORWARD_RESIDENT
    chunk = at.S if resident else 4
    held = chunk * _source(at) + at.value_tile + at.key_tile
    return Launch(_warps(held, FORWARD_BYTES), chunk, resident)


def backward(at: Layout) -> Launch:
    """Choose the launch of the backward pass; with several queries sources do not stay."""
    resident = at.S <= BACKWARD_RESIDENT and at.Q == 1
    chunk = at.S if resident else 2
    queries = power_of_two(at.Q)
    held = chunk * _source(at) + (queries + 1) * at.value_tile + queries * at.key_tile
    num_warps = _warps(held, BACKWARD_BYTES)
    return Launch(num_warps, chunk, resident, True, max(1, 8 // num_warps))


def merge(at: Layout) -> Launch:
    """Choose the launch of both passes of a merge."""
    queries = power_of_two(at.Q)
    num_warps = _warps(2 * queries * at.value_tile + at.value_tile + at.key_tile, BACKWARD_BYTES)
    return Launch(num_warps, 1, True, True, max(1, 8 // num_warps))


def _source(at: Layout) -> int:
    """Return how many numbers of a source a program holds: its value, and its key if apart."""
    return at.value_tile + (0 if at.keys == "value" else at.key_tile)


def _warps(numbers: int, bytes_per_warp: int) -> int:
    return min(32, power_of_two(-(-4 * numbers // bytes_per_warp)))
