"""How the kernels are launched: a rule by shape, no search at run time."""

import math
from functools import lru_cache
from typing import NamedTuple

from depthroute.ops.kernels.layout import Layout, power_of_two

# up to here a program is compiled for the number of sources, and loads all of a token's at once
FORWARD_RESIDENT, FORWARD_RESIDENT_OF_SEVERAL, BACKWARD_RESIDENT = 6, 16, 9
# numbers that a warp holds in registers beside addresses and scalars, of 32 * 255: fewer with many
# sources, which have scalars each
WARP_NUMBERS = {"sources": 6 * 1024, "queries": 7 * 1024}
# numbers that a program holds at most, and that all programs of a processor hold with OTHERS each,
# of 65536 registers
PROGRAM_NUMBERS, PROCESSOR_NUMBERS, OTHERS, REGISTERS = 54 * 1024, 55 * 1024, 1280, 65536
# widest source that is loaded ahead, through shared memory, and bytes of that on a processor
AHEAD_TILE, SHARED_BYTES = 1024, 220 * 1024
# for up to so many vectors of that width a token: programs and stages. About 24 vectors, 48 KiB,
# are on their way to a processor, and few programs have registers to spare
AHEAD = ((3, 4, 3), (5, 3, 3), (10, 2, 3), (math.inf, 3, 2))


class Launch(NamedTuple):
    """How a kernel is compiled and how many programs of it run."""

    num_warps: int
    chunk: int  # sources whose loads are in flight together
    resident: bool  # the chunk is all of the sources
    # for programs that loop over tokens: so many to a processor, with registers for all of them
    programs: int = 1
    max_registers: int | None = None
    queries: int = 1  # those of one launch
    # how far loads are ahead. 2: the next token's are issued once this one's are used, for other
    # programs to work meanwhile; 3: while they are used
    stages: int = 1

    def stages_of(self, itemsize: int) -> int:
        """Return the stages for sources of so many bytes a number: shared memory holds them all."""
        return self.stages if itemsize == 2 else min(self.stages, 2)


@lru_cache
def forward(at: Layout) -> Launch:
    """Choose the launch of the forward pass."""
    if at.Q == 1:
        resident, few = at.S <= FORWARD_RESIDENT, 2
    else:
        resident, few = at.S <= FORWARD_RESIDENT_OF_SEVERAL, 4
    chunk = at.S if resident else few
    held = chunk * _source(at) + at.value_tile + at.key_tile
    return Launch(_warps(held, 7 * 1024), chunk, resident)


@lru_cache
def backward(at: Layout) -> Launch:
    """Choose the launch of the backward pass: queries in groups that fit, most often one."""
    # a query comes with its gradient and that of the output
    one = at.value_tile + at.key_tile + max(at.value_tile * (at.keys != "separate"), at.key_tile)
    if at.Q > 1:
        queries = power_of_two(at.Q)
        while queries > 1 and 2 * _source(at) + queries * one > PROGRAM_NUMBERS:
            queries //= 2
        launch = _looping(2 * _source(at) + queries * one, 2, False, "queries")
        return launch._replace(queries=queries)
    # heads may pass numbers through memory, where a load ahead would come too early
    rows = at.S + 1 if at.keys == "value" and at.H == 1 else None
    if held := resident_backward(at.S, at.S * _source(at) + one, at.value_tile, rows):
        return held
    chunk = 4 if 4 * _source(at) + one <= PROGRAM_NUMBERS else 2
    return _looping(chunk * _source(at) + one, chunk, False, "sources")


def resident_backward(num_sources: int, numbers: int, tile: int, rows: int | None) -> Launch | None:
    """Choose the launch of programs that hold all sources of a token; None if they cannot.

    Args:
        num_sources: How many.
        numbers: All that a program holds.
        tile: Numbers of a source.
        rows: Vectors that it loads for a token; None if not ahead.
    """
    if num_sources > BACKWARD_RESIDENT or numbers > PROGRAM_NUMBERS:
        return None
    if rows is None or tile > AHEAD_TILE:
        return _looping(numbers, num_sources, True, "sources")
    programs, stages = next(way for most, *way in AHEAD if rows <= most)
    narrower = AHEAD_TILE // tile
    # two tokens of 16-bit numbers, or one of 32-bit ones
    most = min(programs * narrower, SHARED_BYTES // (4 * rows * tile))
    num_warps = max(_warps(numbers, WARP_NUMBERS["sources"]), 4 // narrower)
    return _filling(numbers, num_warps, most, num_sources, True)._replace(stages=stages)


@lru_cache
def merge_forward(at: Layout) -> Launch:
    """Choose the launch of a merge."""
    held = (power_of_two(at.Q) + 1) * at.value_tile + at.key_tile
    return Launch(_warps(held, 4 * 1024), 1, True, max_registers=128)


@lru_cache
def merge_backward(at: Layout) -> Launch:
    """Choose the launch of a merge's backward pass."""
    queries = power_of_two(at.Q)
    held = (3 * queries + 1) * at.value_tile + queries * at.key_tile
    return _looping(held, 1, True, "queries")


def _source(at: Layout) -> int:
    """Return how many numbers of a source a program holds: its value, and its key if apart."""
    return at.value_tile + (0 if at.keys == "value" else at.key_tile)


def _warps(numbers: int, of_a_warp: int) -> int:
    return min(16, power_of_two(-(-numbers // of_a_warp)))


def _looping(numbers: int, chunk: int, resident: bool, kind: str) -> Launch:
    """Choose the launch of programs that need no warps but for their numbers."""
    return _filling(numbers, _warps(numbers, WARP_NUMBERS[kind]), 16, chunk, resident)


def _filling(numbers: int, num_warps: int, most: int, chunk: int, resident: bool) -> Launch:
    """Fill a processor: a program too many would start when the others end."""
    programs = max(1, min(PROCESSOR_NUMBERS // (numbers + OTHERS), 16 // num_warps, most))
    registers = min(255, REGISTERS // (programs * num_warps * 32) // 8 * 8)
    return Launch(num_warps, chunk, resident, programs, registers)
