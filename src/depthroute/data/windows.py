"""Cuts a split into windows and makes batches of them."""

from typing import NamedTuple, Self

import numpy as np
import torch

from depthroute.data.tokens import TokenSplit

# B rows (windows) of T tokens


class Batch(NamedTuple):
    """B windows of T tokens.

    Attributes:
        ids: int64 `[B, T]`.
        targets: int64 `[B, T]`, the token after each.
        cu_seqlens: int32 `[n + 1]`, from 0 to `B * T`: where the n segments of the flattened batch
            start and end. A segment ends at a document's end and at a row's end.
        max_seqlen: Longest segment.
        row_bytes: UTF-8 bytes that the targets of each row stand for, B numbers; None if not known.
    """

    ids: torch.Tensor
    targets: torch.Tensor
    cu_seqlens: torch.Tensor
    max_seqlen: int
    row_bytes: tuple[int, ...] | None

    @property
    def num_bytes(self) -> int | None:
        """UTF-8 bytes that the targets stand for; None if not known."""
        return None if self.row_bytes is None else sum(self.row_bytes)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Self:
        """The batch with its tensors on `device`."""
        return self._replace(
            ids=self.ids.to(device, non_blocking=non_blocking),
            targets=self.targets.to(device, non_blocking=non_blocking),
            cu_seqlens=self.cu_seqlens.to(device, non_blocking=non_blocking),
        )


def micro(batch: Batch, i: int, n: int) -> Batch:
    """The i-th of n equal parts of a batch on the CPU, `B / n` rows each.

    Raises:
        ValueError: If n does not divide B, or i is not in `[0, n)`.
    """
    num_rows, context = batch.ids.shape
    if n < 1 or num_rows % n:
        raise ValueError(f"n must divide the rows of the batch, got n={n}, rows={num_rows}")
    if not 0 <= i < n:
        raise ValueError(f"i must be in [0, {n}), got {i}")
    rows = slice(i * num_rows // n, (i + 1) * num_rows // n)
    first, last = rows.start * context, rows.stop * context
    inside = (batch.cu_seqlens >= first) & (batch.cu_seqlens <= last)
    cu_seqlens = batch.cu_seqlens[inside] - first
    return Batch(
        ids=batch.ids[rows],
        targets=batch.targets[rows],
        cu_seqlens=cu_seqlens,
        max_seqlen=int(cu_seqlens.diff().max()),
        row_bytes=None if batch.row_bytes is None else batch.row_bytes[rows],
    )


class Windows:
    """All windows of a split: T tokens and the one after, at stride T within each shard.

    Args:
        split: Where the tokens are.
        context: T, >= 1.

    Raises:
        ValueError: If the split has no whole window.

    Attributes:
        num_windows: How many there are.
        dropped_tokens: Tokens at the ends of shards that are in no window.
    """

    def __init__(self, split: TokenSplit, context: int) -> None:
        if context < 1:
            raise ValueError(f"context must be >= 1, got {context}")
        counts = [max(0, len(shard.tokens) - 1) // context for shard in split.shards]
        self.split = split
        self.context = context
        self.num_windows = sum(counts)
        self.dropped_tokens = split.num_tokens - sum(n * context + 1 for n in counts if n)
        self._first = np.cumsum([0, *counts])  # first window of each shard
        if self.num_windows == 0:
            longest = max(len(shard.tokens) for shard in split.shards)
            raise ValueError(
                f'split "{split.name}" has no window: one of context={context} needs '
                f"{context + 1} tokens in one shard, the longest shard has {longest}"
            )

    def batch(self, indices: np.ndarray) -> Batch:
        """Read windows.

        Args:
            indices: `[B]`, each in `[0, num_windows)`.
        """
        B, T = len(indices), self.context
        rows = np.empty((B, T + 1), dtype=np.int64)
        bounds = [np.zeros(1, dtype=np.int64)]
        shard_indices = np.searchsorted(self._first, indices, side="right") - 1
        for row, (index, shard_index) in enumerate(zip(indices, shard_indices, strict=True)):
            shard = self.split.shards[shard_index]
            start = int(index - self._first[shard_index]) * T
            rows[row] = shard.tokens[start : start + T + 1]
            # a document that starts at `start` needs no mark of its own: the row starts there too
            low, high = np.searchsorted(shard.starts, (start + 1, start + T))
            bounds += [shard.starts[low:high] - start + row * T, np.array([(row + 1) * T])]
        cu_seqlens = np.concatenate(bounds).astype(np.int32)
        targets = rows[:, 1:]
        table = self.split.token_bytes
        return Batch(
            ids=torch.from_numpy(rows[:, :-1].copy()),
            targets=torch.from_numpy(targets.copy()),
            cu_seqlens=torch.from_numpy(cu_seqlens),
            max_seqlen=int(np.diff(cu_seqlens).max()),
            row_bytes=None if table is None else tuple(table[targets].sum(axis=1).tolist()),
        )
