"""How the M writes of a model are cut into depth blocks."""

import math
from itertools import pairwise


def check_blocks(num_blocks: int, block_ends: tuple[int, ...]) -> None:
    """Check the two settings of a config by themselves; `block_ends` checks them against a model.

    Raises:
        ValueError: `num_blocks` is negative, or `block_ends` does not increase from at least 1.
    """
    if num_blocks < 0:
        raise ValueError(f"num_blocks must be >= 0 (0 is full), got {num_blocks}")
    if any(b <= a for a, b in pairwise((0, *block_ends))):
        raise ValueError(f"block_ends must increase from at least 1, got {block_ends}")


def block_ends(num_blocks: int, block_ends: tuple[int, ...], num_writes: int) -> tuple[int, ...]:
    """Return after which writes a block closes.

    Args:
        num_blocks: N; block j ends after write `ceil(M j / N)`. 0 makes every write a block.
        block_ends: Ends of uneven blocks; if any, they are taken instead and must end with M.
        num_writes: M, the sublayers of the model.

    Raises:
        ValueError: `block_ends` does not end with M, or `num_blocks` exceeds M.
    """
    if block_ends:
        if block_ends[-1] != num_writes:
            raise ValueError(
                f"block_ends must end with the {num_writes} writes of the model, got {block_ends}"
            )
        return block_ends
    if num_blocks > num_writes:
        raise ValueError(
            f"num_blocks must be at most the {num_writes} writes of the model (0 is full), "
            f"got {num_blocks}"
        )
    blocks = num_blocks or num_writes
    return tuple(math.ceil(num_writes * j / blocks) for j in range(1, blocks + 1))


def block_counts(ends: tuple[int, ...]) -> tuple[int, ...]:
    """Return, for t = 0 .. M, which write of its block the last of t writes is; 0 before all.

    Ends `(3, 5)` give `(0, 1, 2, 3, 1, 2)`.
    """
    return (0, *(n for start, end in pairwise((0, *ends)) for n in range(1, end - start + 1)))


def block_stops(ends: tuple[int, ...]) -> tuple[int, ...]:
    """Return, for t = 0 .. M, the end of the block that write t belongs to; M + 1 after all.

    The reads at sites t .. stop - 1 see the same closed blocks. Ends `(3, 5)` give
    `(3, 3, 3, 5, 5, 6)`.
    """
    spans = pairwise((0, *ends))
    num_writes = ends[-1] if ends else 0
    return (*(end for start, end in spans for _ in range(start, end)), num_writes + 1)


def read_groups(ends: tuple[int, ...], most: int) -> tuple[int, ...]:
    """Return the sites where one pass over the closed sources may serve reads to come.

    Whole blocks share a pass up to `most` reads, and longer ones have one of their own. The last
    read, after all writes, joins a pass that serves `most` or fewer: alone it would read all
    sources. Ends `(6, 12)` with at most 6 give `(1, 6)`, ends `(1, 2, 3, 4)` with at most 3 give
    `(1, 3)`, ends `(8,)` with at most 6 give `(1, 8)`.
    """
    groups, last = [1] if ends else [], 0
    for end, following in pairwise((*ends, *ends[-1:])):
        if following - last > most:
            groups.append(end)
            last = end
    return tuple(dict.fromkeys(groups))
