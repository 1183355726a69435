"""Sizes of a block's reads, and how its kernels are launched."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from depthroute.ops.block import MAX_RESIDENT, BlockRead
from depthroute.ops.kernels.layout import power_of_two
from depthroute.ops.kernels.sources import num_programs
from depthroute.ops.kernels.split import on_tensor_cores
from depthroute.ops.kernels.tuning import Launch, resident_backward

_PACKED = torch.contiguous_format
# queries that a streamed forward pass, and a backward pass, take at once
READS_AT_ONCE, GRADIENTS_AT_ONCE = 8, 12
# of one decoding step
FEW_TOKENS = 128
# sources of several queries of many tokens that a program of `read_ahead` holds. Tensor cores
# multiply more: up to a width as rows of tiles, else streamed, sooner if scores take few columns
HELD, HELD_WIDE, TILED_WIDTH = 6, 8, 1024


class BlockLayout(NamedTuple):
    """S closed sources of T tokens and width D, read by Q queries of rank R."""

    S: int
    T: int
    Q: int
    D: int
    R: int
    norm: str
    separate: bool  # keys, from the values

    @classmethod
    def of(cls, given: BlockRead) -> "BlockLayout":
        """Read the sizes off the arguments."""
        (num_queries, rank), value = given.query.shape, given.values[0]
        width, sources = value.shape[-1], len(given.values)
        tokens, separate = value.numel() // width, given.keys is not None
        return cls(sources, tokens, num_queries, width, rank, given.rule.key_norm, separate)

    @property
    def constants(self) -> dict[str, int | str | bool]:
        """Compile-time constants of both passes."""
        names = ("S", "D", "R", "NORM", "SEPARATE")
        values = (self.S, self.D, self.R, self.norm, self.separate)
        return dict(zip(names, values, strict=True))

    @property
    def score_columns(self) -> int:
        """Return how many columns scores are made of, the last ones: keys, or what a norm takes."""
        return self.D if self.norm == "full" else self.R


def group_size(num_queries: int, most: int) -> int:
    """Return the size of as few, equal groups of queries as can be; the last may be smaller."""
    return -(-num_queries // -(-num_queries // most))


class Rows(NamedTuple):
    """The launch of a kernel whose programs hold whole rows of a token."""

    num_warps: int
    programs: int = 1  # for each token, which share its queries; or on each processor, in a loop
    max_registers: int | None = None


def ahead_form(at: BlockLayout, dtype: torch.dtype) -> Literal["held", "tiled", "streamed"]:
    """Choose the kernels of `read_ahead`: what a program has of a token's sources.

    All, in registers; all, as rows of tiles of columns; or some at a time.
    """
    if at.S > MAX_RESIDENT:
        return "streamed"
    if at.T <= FEW_TOKENS or at.Q == 1 or not on_tensor_cores(dtype):
        return "held"
    is_wide, is_low = at.D > TILED_WIDTH, at.separate or 4 * at.score_columns <= at.D
    most_held = HELD_WIDE if is_wide and not is_low else HELD
    if most_held >= at.S:
        return "held"
    return "streamed" if is_wide else "tiled"


def ahead_forward(at: BlockLayout) -> Rows:
    """Choose the launch of `read_ahead`; its programs share the queries of a token."""
    if at.T <= FEW_TOKENS:  # less than fills a device: what counts is how long a program takes
        return Rows(_warps(at.D, 256), at.Q)
    num_warps = _warps((at.S + 2) * power_of_two(at.D), 8192)  # a query and a read beside them
    # so few that six programs of two warps fit a processor, or three of four
    return Rows(num_warps, max_registers=168 if at.S == 8 and num_warps > 1 else None)


class Columns(NamedTuple):
    """The launch of a kernel that goes by columns."""

    columns: int  # of a tile
    num_warps: int
    stages: int = 1  # loads in flight, of a loop's coming steps
    programs: int = 1  # on each processor, in a loop over tokens
    max_registers: int | None = None


def ahead_tiles(at: BlockLayout) -> Columns:
    """Choose the launch of a tiled `read_ahead`."""
    # with more than one wave few programs at a time, by the memory they take: many would push the
    # sources out of the cache before they are read again. More rows of results take more registers
    if at.T > 2048 and at.S <= 8 and at.Q <= 8:
        return Columns(_columns(at.D), 1, 3)
    return Columns(_columns(at.D, 128), 1, 4)


def ahead_dots(at: BlockLayout) -> Columns:
    """Choose the launch of the first part of its backward pass."""
    return Columns(128, 1, 4) if at.S <= MAX_RESIDENT else Columns(64, 4, 3)


def ahead_scores(at: BlockLayout, dtype: torch.dtype) -> Columns:
    """Choose the launch of the scores of a streamed `read_ahead`."""
    most = 256 if on_tensor_cores(dtype) else 64
    return Columns(_columns(at.score_columns, most), 4, 3, 2)


def ahead_reads(at: BlockLayout, dtype: torch.dtype) -> Columns:
    """Choose the launch of its reads, in tiles of 16 sources."""
    # as many registers as there are: left alone, the compiler spills a few to use still fewer
    registers = 128 if on_tensor_cores(dtype) else None
    return Columns(_columns(at.D), 4, 3, 4 if at.S <= 16 else 2, registers)


def ahead_updates(at: BlockLayout) -> Columns:
    """Choose the launch of the second part of its backward pass."""
    if group_size(at.Q, GRADIENTS_AT_ONCE) > 8:  # tiles twice as high
        return Columns(_columns(at.D), 8, 3)
    return Columns(_columns(at.D), 4, 3, programs=2)


def _columns(width: int, most: int = 256) -> int:
    return max(16, min(most, power_of_two(width)))


def ahead_parts(at: BlockLayout, device: torch.device) -> tuple[int, int]:
    """Return the groups of sources of the second part, and the programs for each."""
    return len(source_groups(at.S)), column_grid(ahead_updates(at), at, device)[1]


def one_query_backward(at: BlockLayout, adds: bool) -> Launch | None:
    """Choose the launch of a single read's backward pass, if a program can hold the sources.

    Args:
        at: Sizes.
        adds: Whether it adds to gradients of the sources.
    """
    if at.Q > 1:
        return None
    width = power_of_two(at.D)  # beside them: a gradient, the query and its gradient
    return resident_backward(at.S, (at.S + 3) * width, width, at.S * (1 + adds) + 2)


def source_groups(num_sources: int) -> list[slice]:
    """Cut sources into those that the second part of the backward pass takes at once: 8 or 16."""
    cuts = [0]
    while cuts[-1] < num_sources:
        left = num_sources - cuts[-1]
        cuts.append(cuts[-1] + min(left, 16 if left > 12 else 8))
    return [slice(*cut) for cut in pairwise(cuts)]


def column_grid(
    launch: Columns, at: BlockLayout, device: torch.device, width: int | None = None
) -> tuple[int, int]:
    """Return the blocks of columns, of a width or all, and the programs for each of them."""
    columns = -(-(width or at.D) // launch.columns)
    return columns, max(1, num_programs(at.T, launch.programs, device) // columns)


def site_forward(width: int) -> Rows:
    """Choose the launch of a site."""
    return Rows(_warps(width, 1024))


def site_backward(width: int) -> Rows:
    """Choose the launch of its backward pass."""
    num_warps = _warps(width, 512)
    return Rows(num_warps, max(1, 16 // num_warps), 128)  # all registers of a processor


def _warps(numbers: int, of_a_warp: int) -> int:
    return max(1, min(16, power_of_two(numbers) // of_a_warp))


def contiguous_rows(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return tensors whose rows follow each other from an address that is a multiple of 16.

    Without a copy of those that are so.
    """
    return tuple(
        x if x.is_contiguous() and x.data_ptr() % 16 == 0 else x.clone(memory_format=_PACKED)
        for x in tensors
    )


def site_programs(tokens: int, width: int, device: torch.device) -> int:
    """Return the rows that the gradient of a site's query comes in."""
    return max(1, num_programs(tokens, site_backward(width).programs, device))
