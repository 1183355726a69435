import math

import numpy as np
import pytest

from depthroute.evaluate.statistics import equal_mean_error, mean_and_error, paired_differences


def test_mean_and_standard_error_by_hand():
    mean, error = mean_and_error(np.array([1.0, 0.0, 0.0, 1.0]))
    assert mean == 0.5
    assert error == pytest.approx(math.sqrt((4 * 0.25 / 3) / 4))
    assert mean_and_error(np.array([3.0])) == (3.0, None)


def test_error_of_a_mean_of_means_by_hand():
    assert equal_mean_error([0.03, 0.04]) == pytest.approx(0.025)
    assert equal_mean_error([0.03, None]) is None
    assert equal_mean_error([]) is None


def test_interval_of_many_items_is_that_of_the_normal_distribution():
    source = np.random.default_rng(1)
    theirs = {"a": source.normal(size=900), "b": source.normal(size=400)}
    ours = {name: values + source.normal(0.1, 0.5, len(values)) for name, values in theirs.items()}
    found, mean = paired_differences(ours, theirs, resamples=4000)
    errors = []
    for name, (value, low, high) in found.items():
        differences = ours[name] - theirs[name]
        error = differences.std(ddof=1) / math.sqrt(len(differences))
        assert value == pytest.approx(differences.mean())
        assert low == pytest.approx(value - 1.96 * error, abs=0.15 * error)
        assert high == pytest.approx(value + 1.96 * error, abs=0.15 * error)
        errors.append(error)
    assert mean.mean == pytest.approx((found["a"].mean + found["b"].mean) / 2)
    half = 1.96 * math.hypot(*errors) / 2
    assert mean.high - mean.low == pytest.approx(2 * half, rel=0.1)


def test_pairs_stay_together():
    theirs = {"a": np.arange(50.0)}
    ours = {"a": np.arange(50.0) + 0.25}
    found, _ = paired_differences(ours, theirs, resamples=100)
    assert found["a"] == (0.25, 0.25, 0.25)  # however the items are drawn


def test_one_pair_has_no_interval():
    ours = {"a": np.arange(9.0) ** 2, "b": np.array([2.0])}
    theirs = {"a": np.arange(9.0), "b": np.array([1.0])}
    found, mean = paired_differences(ours, theirs, resamples=100)
    assert found["b"] == (1.0, None, None)
    assert found["a"].low < found["a"].high
    assert mean == ((found["a"].mean + 1.0) / 2, None, None)


def test_the_same_call_gives_the_same_interval():
    ours, theirs = {"a": np.arange(30.0)}, {"a": np.arange(30.0) ** 1.1}
    first = paired_differences(ours, theirs, resamples=200)
    assert paired_differences(ours, theirs, resamples=200) == first
    _, low, high = first[1]
    assert low < high


def test_resamples_in_parts_are_the_same(monkeypatch):
    ours, theirs = {"a": np.arange(30.0)}, {"a": np.zeros(30)}
    whole = paired_differences(ours, theirs, resamples=500)
    monkeypatch.setattr("depthroute.evaluate.statistics._MAX_DRAWS", 30 * 7)
    assert paired_differences(ours, theirs, resamples=500) == whole
