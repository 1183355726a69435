"""Depth blocks, worked out by hand."""

import pytest

from depthroute.residual.depth_blocks import block_counts, block_ends, block_stops, read_groups


@pytest.mark.parametrize(
    ("num_blocks", "given", "num_writes", "ends"),
    [
        (0, (), 4, (1, 2, 3, 4)),  # full: every write is a block
        (1, (), 4, (4,)),
        (2, (), 8, (4, 8)),
        (3, (), 8, (3, 6, 8)),
        (5, (), 8, (2, 4, 5, 7, 8)),
        (8, (), 8, (1, 2, 3, 4, 5, 6, 7, 8)),
        (3, (1, 6, 8), 8, (1, 6, 8)),  # ends by hand win
        (0, (), 0, ()),
    ],
)
def test_ends(
    num_blocks: int, given: tuple[int, ...], num_writes: int, ends: tuple[int, ...]
) -> None:
    assert block_ends(num_blocks, given, num_writes) == ends


@pytest.mark.parametrize(
    ("ends", "counts", "stops"),
    [
        ((), (0,), (1,)),
        ((4,), (0, 1, 2, 3, 4), (4, 4, 4, 4, 5)),
        ((1, 2, 3), (0, 1, 1, 1), (1, 2, 3, 4)),
        ((3, 5), (0, 1, 2, 3, 1, 2), (3, 3, 3, 5, 5, 6)),
        ((1, 4), (0, 1, 1, 2, 3), (1, 4, 4, 4, 5)),
    ],
)
def test_counts_and_stops(
    ends: tuple[int, ...], counts: tuple[int, ...], stops: tuple[int, ...]
) -> None:
    assert block_counts(ends) == counts
    assert block_stops(ends) == stops


@pytest.mark.parametrize(
    ("ends", "most", "groups"),
    [
        ((6, 12), 6, (1, 6)),
        ((1, 2, 3, 4), 3, (1, 3)),
        ((1, 2, 3, 4, 5, 6), 3, (1, 3)),
        ((1, 2, 3, 4, 5, 6, 7), 3, (1, 3, 6)),
        ((4, 11), 6, (1, 4, 11)),
        ((1, 2, 3, 4, 5, 6, 7, 8), 6, (1, 6)),
        ((3, 6, 9), 6, (1, 6)),
        ((1, 9), 6, (1, 9)),
        ((8,), 6, (1, 8)),
        ((), 6, ()),
    ],
)
def test_short_blocks_share_a_pass(
    ends: tuple[int, ...], most: int, groups: tuple[int, ...]
) -> None:
    assert read_groups(ends, most) == groups
