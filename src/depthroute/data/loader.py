"""Which windows a step reads: shuffled for training, in order for validation."""

from collections.abc import Iterator, Sequence

import numpy as np

from depthroute.data.permute import Permutation
from depthroute.data.tokens import TokenSplit
from depthroute.data.windows import Batch, Windows


class TokenLoader:
    """Shuffled training batches, each a pure function of the step.

    The rows of all steps form one endless sequence; each `num_windows` of it hold every window
    once, in an order given by the seed and the epoch. A step takes the next `global_batch` rows and
    a rank its equal share of them, in rank order. So the global batch is the same at any world
    size, and resuming needs the step number alone.

    Args:
        split: Where the tokens are.
        context: Tokens a window, T.
        global_batch: Windows a step, over all ranks.
        seed: >= 0.
        rank: This process, in `[0, world)`.
        world: Number of processes; divides `global_batch`.

    Raises:
        ValueError: If an argument is out of range, or the split has no whole window.
    """

    def __init__(
        self,
        split: TokenSplit,
        *,
        context: int,
        global_batch: int,
        seed: int,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        if seed < 0:
            raise ValueError(f"seed must be >= 0, got {seed}")
        if world < 1 or not 0 <= rank < world:
            raise ValueError(f"expected 0 <= rank < world, got {rank=}, {world=}")
        if global_batch < 1 or global_batch % world:
            raise ValueError(
                f"global_batch must be a positive multiple of world, got {global_batch=}, {world=}"
            )
        self._windows = Windows(split, context)
        self._seed = seed
        self._global_batch = global_batch
        self._num_rows = global_batch // world
        self._rank = rank

    @property
    def num_windows(self) -> int:
        """Windows an epoch."""
        return self._windows.num_windows

    @property
    def dropped_tokens(self) -> int:
        """Tokens that no window holds."""
        return self._windows.dropped_tokens

    def batch(self, step: int) -> Batch:
        """This rank's rows of a step, `global_batch / world` of them; `step` counts from 0."""
        if step < 0:
            raise ValueError(f"step must be >= 0, got {step}")
        first = step * self._global_batch + self._rank * self._num_rows
        epochs, positions = np.divmod(first + np.arange(self._num_rows), self.num_windows)
        indices = np.empty(self._num_rows, dtype=np.int64)
        for epoch in np.unique(epochs):
            order = Permutation(self.num_windows, seed=self._seed, epoch=int(epoch))
            indices[epochs == epoch] = order(positions[epochs == epoch])
        return self._windows.batch(indices)


class ValidationWindows:
    """A fixed set of windows; made by `validation_windows`.

    Attributes:
        num_windows: How many there are.
        context: Tokens per window.
        num_tokens: Targets in all.
        token_bytes: UTF-8 bytes of each id, uint16 `[vocab_size]`; None if not known.
    """

    def __init__(self, windows: Windows, num_windows: int) -> None:
        self.num_windows = num_windows
        self.context = windows.context
        self.num_tokens = num_windows * windows.context
        self.token_bytes = windows.split.token_bytes
        self._windows = windows

    def batch(self, indices: Sequence[int]) -> Batch:
        """Read some of the windows, each given by its place in the set.

        Raises:
            ValueError: If a window is outside the set.
        """
        if any(not 0 <= i < self.num_windows for i in indices):
            raise ValueError(f"indices must be in [0, {self.num_windows}), got {list(indices)}")
        return self._windows.batch(np.asarray(indices))

    def batches(self, batch_size: int, *, rank: int = 0, world: int = 1) -> Iterator[Batch]:
        """Go through the set once, in order; the last batch may be smaller.

        Args:
            batch_size: Windows a batch.
            rank: This process, in `[0, world)`; the ranks read equal, consecutive parts.
            world: Number of processes; divides `num_windows`.

        Raises:
            ValueError: If an argument is out of range.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size must be >= 1, got {batch_size}")
        if world < 1 or not 0 <= rank < world:
            raise ValueError(f"expected 0 <= rank < world, got {rank=}, {world=}")
        if self.num_windows % world:
            usable = (self.num_windows - self.num_windows % world) * self.context
            raise ValueError(
                f"{self.num_windows} validation windows do not divide by {world} processes; "
                f"set max_tokens to {usable}"
            )
        share = self.num_windows // world
        return self._batches(range(rank * share, (rank + 1) * share), batch_size)

    def _batches(self, indices: range, batch_size: int) -> Iterator[Batch]:
        for first in range(0, len(indices), batch_size):
            yield self.batch(indices[first : first + batch_size])


def validation_windows(
    split: TokenSplit, *, context: int, max_tokens: int | None = None
) -> ValidationWindows:
    """The first windows of a split, as many as fit into `max_tokens`; None takes all.

    Raises:
        ValueError: If the split has no whole window, or `max_tokens` is below `context`.
    """
    windows = Windows(split, context)
    if max_tokens is None:
        return ValidationWindows(windows, windows.num_windows)
    if max_tokens < context:
        raise ValueError(f"max_tokens must be >= context, got {max_tokens=}, {context=}")
    return ValidationWindows(windows, min(windows.num_windows, max_tokens // context))
