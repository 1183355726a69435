import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from depthroute.data import TokenDataset, validation_windows
from depthroute.evaluate import Processes, Work, window_losses
from depthroute.train.validate import validate

CONTEXT, NUM_WINDOWS = 16, 13


@pytest.fixture
def windows(tiny_dataset):
    split = TokenDataset(tiny_dataset).split("train")
    return validation_windows(split, context=CONTEXT, max_tokens=NUM_WINDOWS * CONTEXT + 5)


@pytest.fixture
def measure(model, windows, tmp_path):
    """Measure the losses, with progress kept in a folder of the given name."""

    def run(name="progress", *, processes=None, **changes):
        settings = {"shards": ("a",), "batch_size": 3, "mask_documents": True, **changes}
        work = Work(tmp_path / name, {"weights": "w"}, processes=processes)
        return window_losses(model, windows, work, **settings)

    return run


@torch.no_grad()
def literal(model, folder, i, *, masked):
    """Sum the loss of one window from the files, each document on its own if masked."""
    (shard,) = TokenDataset(folder).split("train").shards
    start, end = i * CONTEXT, (i + 1) * CONTEXT
    tokens = torch.from_numpy(np.array(shard.tokens[start : end + 1], dtype=np.int64))
    cuts = [n - start for n in shard.starts if start < n < end] if masked else []
    total = 0.0
    for low, high in zip([0, *cuts], [*cuts, CONTEXT], strict=True):
        logits = model(tokens[None, low:high])[0]
        total += F.cross_entropy(logits.double(), tokens[low + 1 : high + 1], reduction="sum")
    num_bytes = int((tokens[1:] != 256).sum())  # of the bytes tokenizer, 256 ends a document
    return float(total), num_bytes


@pytest.mark.parametrize("masked", [True, False])
def test_every_window_has_its_literal_loss(measure, model, tiny_dataset, masked):
    found = measure(mask_documents=masked)
    expected = [literal(model, tiny_dataset, i, masked=masked) for i in range(NUM_WINDOWS)]
    sums, num_bytes = zip(*expected, strict=True)
    assert found.sums_nats == pytest.approx(sums, rel=1e-5)
    loss, bits, tokens = found.total
    assert tokens == NUM_WINDOWS * CONTEXT
    assert loss == pytest.approx(sum(sums) / tokens, rel=1e-6)
    assert bits == pytest.approx(sum(sums) / math.log(2) / sum(num_bytes), rel=1e-6)
    means = [nats / CONTEXT for nats in sums]
    spread = sum((m - loss) ** 2 for m in means) / (NUM_WINDOWS - 1)
    assert found.standard_error_nats == pytest.approx(math.sqrt(spread / NUM_WINDOWS), rel=1e-5)


def test_the_loss_is_that_of_validation_in_training(measure, model, windows):
    trained = validate(model, windows, batch_size=5, mask_documents=True)
    assert measure().total == pytest.approx(trained, rel=1e-6)


def test_the_loss_does_not_depend_on_batch_or_chunk_size(measure):
    expected = measure().total
    for batch_size, chunk_tokens in ((1, 4096), (13, 7), (50, 16)):
        found = measure(batch_size=batch_size, chunk_tokens=chunk_tokens).total
        assert found == pytest.approx(expected, rel=1e-6)


def test_bytes_that_become_known_are_measured_anew(measure, windows, monkeypatch):
    split = windows._windows.split
    table = split.token_bytes
    for known in (None, table, 2 * table):
        monkeypatch.setattr(windows, "token_bytes", known)
        monkeypatch.setattr(windows._windows, "split", replace(split, token_bytes=known))
        found = measure().num_bytes
        expected = [batch.num_bytes for batch in windows.batches(100)]
        assert [found] == expected


def test_windows_are_added_without_rounding(measure):
    found = measure()._replace(sums_nats=(1e16, 1.0, -1e16, 1.0), num_bytes=None)
    assert found.total.loss_nats == 2 / (4 * CONTEXT)
    assert found.total.bits_per_byte is None


@pytest.mark.parametrize("world", [2, 3])
def test_shares_of_several_processes_add_up_to_the_bit(measure, world):
    alone = measure("alone")
    for rank in range(world):  # one after the other, so that each leaves a part of what it found
        with pytest.raises(ValueError, match="batches are left to other processes"):
            measure("shared", processes=Processes(rank, world))
    assert measure("shared") == alone


def test_a_loss_that_is_not_finite_is_an_error(measure, model):
    with torch.no_grad():
        model.lm_head.weight[0] = float("nan")
    with pytest.raises(FloatingPointError, match="window 0 is nan"):
        measure()
