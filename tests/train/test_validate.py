import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from depthroute.data import TokenDataset, validation_windows
from depthroute.models import CausalLM
from depthroute.nn import Documents
from depthroute.train.validate import documents_of, validate
from helpers import VARIANTS, tiny_model

CONTEXT, NUM_WINDOWS = 16, 13


@pytest.fixture
def model() -> CausalLM:
    return tiny_model(VARIANTS["s_lr"], vocab_size=257, init_std=0.2)


@pytest.fixture
def windows(tiny_dataset):
    split = TokenDataset(tiny_dataset).split("val")
    return validation_windows(split, context=CONTEXT, max_tokens=NUM_WINDOWS * CONTEXT + 5)


@torch.no_grad()
def literal(model: CausalLM, folder, *, masked: bool) -> tuple[float, int]:
    """Sum the loss window by window from the files, each document on its own if masked."""
    (shard,) = TokenDataset(folder).split("val").shards
    total, num_bytes = 0.0, 0
    for i in range(NUM_WINDOWS):
        start, end = i * CONTEXT, (i + 1) * CONTEXT
        tokens = torch.from_numpy(np.array(shard.tokens[start : end + 1], dtype=np.int64))
        cuts = [n - start for n in shard.starts if start < n < end] if masked else []
        for low, high in zip([0, *cuts], [*cuts, CONTEXT], strict=True):
            logits = model(tokens[None, low:high])[0]
            targets = tokens[low + 1 : high + 1]
            total += F.cross_entropy(logits.double(), targets, reduction="sum").item()
        num_bytes += int((tokens[1:] != 256).sum())  # of the bytes tokenizer, 256 ends a document
    return total, num_bytes


@pytest.mark.parametrize("masked", [True, False])
def test_loss_and_bits_per_byte_are_literal_sums_over_windows(model, windows, tiny_dataset, masked):
    result = validate(model, windows, batch_size=5, mask_documents=masked)
    total, num_bytes = literal(model, tiny_dataset, masked=masked)
    assert result.tokens == NUM_WINDOWS * CONTEXT
    assert result.loss_nats == pytest.approx(total / result.tokens, rel=1e-6)
    assert result.bits_per_byte == pytest.approx(total / math.log(2) / num_bytes, rel=1e-6)
    assert result.perplexity == pytest.approx(math.exp(total / result.tokens), rel=1e-5)


def test_masking_documents_changes_the_loss(model, windows):
    masked, open_ = (
        validate(model, windows, batch_size=4, mask_documents=mask).loss_nats
        for mask in (True, False)
    )
    assert abs(masked - open_) > 1e-3


@pytest.mark.parametrize("masked", [True, False])
def test_loss_does_not_depend_on_batch_or_chunk_size(model, windows, masked):
    expected = validate(model, windows, batch_size=NUM_WINDOWS, mask_documents=masked)
    for batch_size, chunk_tokens in ((1, 4096), (3, 7), (8, 16)):
        found = validate(
            model, windows, batch_size=batch_size, mask_documents=masked, chunk_tokens=chunk_tokens
        )
        assert found.tokens == expected.tokens
        assert found.loss_nats == pytest.approx(expected.loss_nats, abs=1e-6)
        assert found.bits_per_byte == pytest.approx(expected.bits_per_byte, abs=1e-6)


def test_validation_leaves_no_gradients_and_draws_no_random_numbers(model, windows):
    before = torch.get_rng_state()
    validate(model, windows, batch_size=4, mask_documents=True)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_padded_boundaries_have_few_shapes_and_mean_the_same(windows):
    for batch in windows.batches(4):
        documents = documents_of(batch, torch.device("cpu"))
        assert len(documents.cu_seqlens) % 64 == 0
        assert documents.max_seqlen == CONTEXT
        exact = Documents(batch.cu_seqlens, batch.max_seqlen)
        num_tokens = batch.ids.numel()
        assert torch.equal(documents.ids(num_tokens), exact.ids(num_tokens))
        assert documents.lengths() == batch.cu_seqlens.diff().tolist()
