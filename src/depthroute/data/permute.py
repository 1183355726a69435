"""A pseudo-random permutation that is computed one element at a time."""

import numpy as np

NUM_ROUNDS = 8


class Permutation:
    """A permutation of `0 .. size-1`, given by a seed and an epoch, that is never stored.

    A Feistel network permutes the smallest `4**h >= size` numbers; numbers that land outside
    `[0, size)` are sent through it again until they land inside ("cycle walking"), which is still
    a permutation and takes fewer than 4 turns on average.

    Args:
        size: Number of elements, >= 1.
        seed: >= 0.
        epoch: >= 0; each gives another permutation.

    Source: Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002.
    """

    def __init__(self, size: int, *, seed: int, epoch: int) -> None:
        self.size = size
        half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
        self._half_bits = np.uint64(half_bits)
        self._mask = np.uint64((1 << half_bits) - 1)
        self._keys = np.random.SeedSequence((seed, epoch)).generate_state(NUM_ROUNDS, np.uint64)

    def __call__(self, indices: np.ndarray) -> np.ndarray:
        """Map integers `[n]`, each in `[0, size)`, to int64 `[n]`."""
        out = self._encrypt(indices.astype(np.uint64))
        while (outside := out >= self.size).any():
            out[outside] = self._encrypt(out[outside])
        return out.astype(np.int64)

    def _encrypt(self, x: np.ndarray) -> np.ndarray:
        left, right = x >> self._half_bits, x & self._mask
        for key in self._keys:
            left, right = right, left ^ (_mix(right ^ key) & self._mask)
        return (left << self._half_bits) | right


def _mix(x: np.ndarray) -> np.ndarray:
    """The finalizer of splitmix64: every input bit reaches every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
