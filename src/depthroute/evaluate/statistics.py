"""Means of paired results, and how sure they are."""

import math
import zlib
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

_LOW, _HIGH = 0.025, 0.975
_MAX_DRAWS = 1 << 22  # indices in memory at a time


class Difference(NamedTuple):
    """A mean paired difference and the ends of its 95 % bootstrap interval.

    Attributes:
        mean: Over the pairs.
        low: None if there is but one pair, which says nothing about others.
        high: Likewise.
    """

    mean: float
    low: float | None
    high: float | None


def mean_and_error(values: np.ndarray) -> tuple[float, float | None]:
    """Return the mean of `[n]` values and its standard error, `s / sqrt(n)`; None if n is 1.

    s is the sample standard deviation, with n - 1 below.
    """
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return mean, None
    return mean, float(np.std(values, ddof=1)) / math.sqrt(len(values))


def equal_mean_error(errors: list[float | None]) -> float | None:
    """Return the standard error of the plain mean of k independent means, `sqrt(sum e^2) / k`.

    None if an error is not known.
    """
    known = [error for error in errors if error is not None]
    if len(known) < len(errors) or not errors:
        return None
    return math.sqrt(math.fsum(error**2 for error in known)) / len(known)


def paired_differences(
    ours: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray], *, resamples: int
) -> tuple[dict[str, Difference], Difference]:
    """Return the difference of each group of items, and of the mean in which groups weigh equally.

    Items are drawn with replacement, from each group its own number; an item's two results stay
    together. The draws depend on the group's name and size alone, so that a repetition agrees. A
    group of one item has no interval, and the mean has none if a group has none.

    Args:
        ours: Results `[n]` per group.
        theirs: Results of the same items, in the same order.
        resamples: Draws, >= 1.
    """
    found, draws = {}, {}
    for name, values in ours.items():
        differences = np.asarray(values, dtype=float) - theirs[name]
        draws[name] = _resampled_means(differences, resamples, seed=zlib.crc32(name.encode()))
        several = len(differences) > 1
        found[name] = _difference(mean_and_error(differences)[0], draws[name] if several else None)
    mean = math.fsum(difference.mean for difference in found.values()) / len(found)
    known = all(difference.low is not None for difference in found.values())
    return found, _difference(mean, np.mean(list(draws.values()), axis=0) if known else None)


def _difference(mean: float, draws: np.ndarray | None) -> Difference:
    if draws is None:
        return Difference(mean, None, None)
    low, high = np.quantile(draws, (_LOW, _HIGH)).tolist()
    return Difference(mean, low, high)


def _resampled_means(values: np.ndarray, resamples: int, *, seed: int) -> np.ndarray:
    """Return the means `[resamples]` of draws of `[n]` values with replacement."""
    source, n = np.random.default_rng(seed), len(values)
    rows = max(1, _MAX_DRAWS // n)
    parts = [
        values[source.integers(n, size=(min(rows, resamples - first), n))].mean(axis=1)
        for first in range(0, resamples, rows)
    ]
    return np.concatenate(parts)
