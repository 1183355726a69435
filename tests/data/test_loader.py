import numpy as np
import pytest
import torch

from depthroute.data import (
    Batch,
    TokenDataset,
    TokenLoader,
    TokenWriter,
    load_tokenizer,
    micro,
    validation_windows,
)
from depthroute.data.permute import Permutation
from depthroute.data.tokens import TokenShard, TokenSplit
from depthroute.data.windows import Windows

END = 0


def random_documents(seed: int, num_documents: int, max_length: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [
        rng.integers(1, 300, size=rng.integers(1, max_length + 1)).tolist()
        for _ in range(num_documents)
    ]


@pytest.fixture
def split(make_dataset):
    """Several shards, document lengths from 1 to 20."""
    return make_dataset(train=random_documents(0, 60, 20), shard_tokens=150).split("train")


def scanned_boundaries(ids: torch.Tensor) -> list[int]:
    """Segment boundaries by looking at every token."""
    num_rows, context = ids.shape
    bounds = [0]
    for row in range(num_rows):
        bounds += [row * context + i for i in range(1, context) if ids[row, i] == END]
        bounds.append((row + 1) * context)
    return bounds


def joined(batches: list[Batch]) -> tuple[list, list]:
    return (
        torch.cat([batch.ids for batch in batches]).tolist(),
        torch.cat([batch.targets for batch in batches]).tolist(),
    )


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16, 17, 1000])
def test_permutation_holds_every_number_once(size):
    order = Permutation(size, seed=3, epoch=1)(np.arange(size))
    assert sorted(order.tolist()) == list(range(size))


def test_permutation_of_a_large_range_stays_inside_without_being_stored():
    size = 10**12 + 7
    order = Permutation(size, seed=0, epoch=0)(np.array([0, 1, 2**31, 2**40 - 3, size - 1]))
    assert len(set(order.tolist())) == 5
    assert order.min() >= 0
    assert order.max() < size


def test_permutation_sends_an_element_everywhere_equally_often():
    counts = np.zeros((7, 7))
    for seed in range(2000):
        counts[np.arange(7), Permutation(7, seed=seed, epoch=0)(np.arange(7))] += 1
    expected = 2000 / 7
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert chi_square < 80  # 36 degrees of freedom: the mean is 36, 80 is beyond p = 4e-5


def test_targets_are_the_next_tokens_in_the_shard(make_dataset):
    split = make_dataset(train=[[1, 2, 3], [4, 5, 6, 7]]).split("train")
    batch = Windows(split, 4).batch(np.array([1, 0]))
    assert batch.ids.tolist() == [[0, 4, 5, 6], [0, 1, 2, 3]]
    assert batch.targets.tolist() == [[4, 5, 6, 7], [1, 2, 3, 0]]
    assert batch.ids.dtype == batch.targets.dtype == torch.int64
    assert batch.cu_seqlens.dtype == torch.int32


@pytest.mark.parametrize(("length", "num_windows", "dropped"), [(7, 1, 3), (8, 2, 0), (9, 2, 1)])
def test_window_at_the_end_of_a_shard_needs_its_target(make_dataset, length, num_windows, dropped):
    split = make_dataset(train=[list(range(1, length + 1))]).split("train")
    windows = Windows(split, 4)  # the shard has length + 1 tokens
    assert (windows.num_windows, windows.dropped_tokens) == (num_windows, dropped)


def test_no_window_spans_two_shards(split):
    windows = Windows(split, 7)
    batch = windows.batch(np.arange(windows.num_windows))
    expected = []
    for shard in split.shards:
        tokens = shard.tokens.tolist()
        expected += [tokens[i : i + 7] for i in range(0, len(tokens) - 7, 7)]
    assert len(split.shards) > 2
    assert batch.ids.tolist() == expected


@pytest.mark.parametrize("context", [1, 2, 7, 20, 64])
def test_boundaries_equal_a_scan_for_the_end_token(split, context):
    windows = Windows(split, context)
    batch = windows.batch(np.arange(windows.num_windows))
    assert batch.cu_seqlens.tolist() == scanned_boundaries(batch.ids)
    assert batch.max_seqlen == max(np.diff(scanned_boundaries(batch.ids)))


def test_document_at_a_window_start_and_documents_of_one_token(make_dataset):
    split = make_dataset(train=[[1, 2, 3], [4], [5], [6, 7, 8, 9, 10]]).split("train")
    batch = Windows(split, 4).batch(np.array([0, 1, 2]))
    assert batch.ids.tolist() == [[0, 1, 2, 3], [0, 4, 0, 5], [0, 6, 7, 8]]
    assert batch.cu_seqlens.tolist() == [0, 4, 6, 8, 12]
    assert batch.max_seqlen == 4


def test_positions_above_two_to_the_31_are_reached():
    size = 2**31 + 100
    tokens = np.broadcast_to(np.uint16(5), size)  # one number in memory
    start = (size - 1) // 9 * 9 - 9  # of the last window
    shard = TokenShard(tokens=tokens, starts=np.array([0, start, start + 4]))
    split = TokenSplit(
        name="train",
        num_tokens=size,
        num_documents=3,
        num_bytes=None,
        shards=(shard,),
        token_bytes=None,
    )
    windows = Windows(split, 9)
    batch = windows.batch(np.array([windows.num_windows - 1]))
    assert start > 2**31
    assert batch.ids.tolist() == [[5] * 9]
    assert batch.cu_seqlens.tolist() == [0, 4, 9]


def test_bytes_of_a_batch_are_those_of_its_targets(tmp_path):
    tokenizer = load_tokenizer("bytes")
    with TokenWriter(tmp_path / "a", vocab_size=257, end_id=256, tokenizer=tokenizer) as writer:
        writer.add("train", tokenizer.encode("abc"))
        writer.add("train", tokenizer.encode("defgh"))
    batch = Windows(TokenDataset(tmp_path / "a").split("train"), 4).batch(np.array([0, 1]))
    # the targets are a b c <end> and d e f g
    assert batch.row_bytes == (3, 4)
    assert batch.num_bytes == 7


def test_bytes_of_a_batch_are_unknown_without_a_tokenizer(split):
    assert Windows(split, 4).batch(np.array([0])).num_bytes is None


@pytest.mark.parametrize("world", [2, 4])
def test_global_batch_is_the_same_at_any_world_size(split, world):
    options = {"context": 7, "global_batch": 8, "seed": 5}
    alone = TokenLoader(split, **options)
    ranks = [TokenLoader(split, **options, rank=rank, world=world) for rank in range(world)]
    for step in (0, 1, 17):
        assert joined([rank.batch(step) for rank in ranks]) == joined([alone.batch(step)])


def test_every_window_comes_once_an_epoch_in_a_new_order(split):
    loader = TokenLoader(split, context=7, global_batch=5, seed=1)
    n = loader.num_windows
    assert n % 5  # epochs end within a batch
    rows = [tuple(row) for step in range(3 * n) for row in loader.batch(step).ids.tolist()]
    everything = Windows(split, 7).batch(np.arange(n)).ids.tolist()
    epochs = [rows[i * n : (i + 1) * n] for i in range(5 * 3)]
    assert all(sorted(epoch) == sorted(map(tuple, everything)) for epoch in epochs)
    assert len(set(map(tuple, epochs))) == len(epochs)


def test_seed_changes_the_order(split):
    first, second = (
        TokenLoader(split, context=7, global_batch=20, seed=seed).batch(0) for seed in (0, 1)
    )
    assert first.ids.tolist() != second.ids.tolist()


def test_new_loader_continues_from_the_step_number_alone(split):
    options = {"context": 7, "global_batch": 6, "seed": 2}
    loader = TokenLoader(split, **options)
    straight = [loader.batch(step) for step in range(40)]
    resumed = TokenLoader(split, **options).batch(33)
    assert joined([resumed]) == joined([straight[33]])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"global_batch": 6, "world": 4}, "multiple of world, got global_batch=6, world=4"),
        ({"global_batch": 0}, "global_batch"),
        ({"world": 2, "rank": 2}, "rank=2, world=2"),
        ({"seed": -1}, "seed"),
        ({"context": 0}, "context must be >= 1"),
        ({"context": 500}, "needs 501 tokens in one shard, the longest shard has 1"),
    ],
)
def test_loader_rejects_what_cannot_work(split, options, message):
    with pytest.raises(ValueError, match=message):
        TokenLoader(split, **{"context": 7, "global_batch": 8, "seed": 0} | options)


def test_negative_step_is_rejected(split):
    with pytest.raises(ValueError, match="step must be >= 0, got -1"):
        TokenLoader(split, context=7, global_batch=8, seed=0).batch(-1)


@pytest.mark.parametrize("n", [1, 2, 3, 6])
def test_micro_batches_are_whole_batches_of_their_rows(tmp_path, n):
    tokenizer = load_tokenizer("bytes")
    with TokenWriter(tmp_path / "a", vocab_size=257, end_id=256, tokenizer=tokenizer) as writer:
        for ids in random_documents(1, 30, 9):
            writer.add("train", [i % 256 for i in ids])
    windows = Windows(TokenDataset(tmp_path / "a").split("train"), 7)
    batch = windows.batch(np.arange(6))
    for i in range(n):
        part = micro(batch, i, n)
        expected = windows.batch(np.arange(i * 6 // n, (i + 1) * 6 // n))
        assert joined([part]) == joined([expected])
        assert part.cu_seqlens.tolist() == expected.cu_seqlens.tolist()
        assert (part.max_seqlen, part.row_bytes) == (expected.max_seqlen, expected.row_bytes)


@pytest.mark.parametrize(("i", "n", "message"), [(0, 4, "n=4, rows=6"), (2, 2, r"\[0, 2\), got 2")])
def test_uneven_micro_batches_are_rejected(split, i, n, message):
    batch = Windows(split, 7).batch(np.arange(6))
    with pytest.raises(ValueError, match=message):
        micro(batch, i, n)


def test_batch_moves_with_its_tensors(split):
    batch = Windows(split, 7).batch(np.arange(2)).to("meta")
    assert {batch.ids.device.type, batch.targets.device.type, batch.cu_seqlens.device.type} == {
        "meta"
    }


@pytest.mark.parametrize("batch_size", [1, 3, 4, 100])
@pytest.mark.parametrize(("max_tokens", "num_windows"), [(7, 1), (70, 10), (76, 10)])
def test_validation_set_is_the_first_windows_at_any_batch_size(
    split, batch_size, max_tokens, num_windows
):
    windows = validation_windows(split, context=7, max_tokens=max_tokens)
    expected = Windows(split, 7).batch(np.arange(num_windows))
    assert (windows.num_windows, windows.num_tokens) == (num_windows, 7 * num_windows)
    assert joined(list(windows.batches(batch_size))) == joined([expected])


def test_validation_set_is_the_whole_split_by_default(split):
    expected = Windows(split, 7).num_windows
    assert validation_windows(split, context=7).num_windows == expected
    assert validation_windows(split, context=7, max_tokens=10**9).num_windows == expected


def test_windows_of_the_validation_set_are_read_by_their_place(split):
    windows = validation_windows(split, context=7, max_tokens=70)
    in_order = torch.cat([batch.ids for batch in windows.batches(4)])
    assert torch.equal(windows.batch([9, 2]).ids, in_order[[9, 2]])
    for outside in (-1, 10):
        with pytest.raises(ValueError, match=r"indices must be in \[0, 10\)"):
            windows.batch([0, outside])


def test_ranks_share_the_validation_set(split):
    windows = validation_windows(split, context=7, max_tokens=84)
    parts = [batch for rank in range(4) for batch in windows.batches(2, rank=rank, world=4)]
    assert joined(parts) == joined(list(windows.batches(5)))


def test_validation_set_that_ranks_cannot_share_is_an_error(split):
    windows = validation_windows(split, context=7, max_tokens=70)
    with pytest.raises(ValueError, match=r"10 validation windows .* 4 processes; .* to 56"):
        windows.batches(2, rank=0, world=4)


def test_validation_of_less_than_a_window_is_an_error(split):
    with pytest.raises(ValueError, match="max_tokens=6, context=7"):
        validation_windows(split, context=7, max_tokens=6)
    with pytest.raises(ValueError, match="needs 1001 tokens"):
        validation_windows(split, context=1000, max_tokens=10**6)
