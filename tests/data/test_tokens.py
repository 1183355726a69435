import json

import numpy as np
import pytest

from depthroute.data import Manifest, SkipReport, TokenDataset, TokenWriter, load_tokenizer
from helpers import full_disk


def test_document_is_stored_after_its_end_token(make_dataset):
    split = make_dataset(train=[[5, 6, 7], [8]]).split("train")
    shard = split.shards[0]
    assert shard.tokens.tolist() == [0, 5, 6, 7, 0, 8]
    assert shard.starts.tolist() == [0, 4]
    assert (split.num_tokens, split.num_documents, split.num_bytes) == (6, 2, None)


@pytest.mark.parametrize("num_documents", [1, 9])  # the last write fails, or one before it
def test_a_full_disk_names_the_file_and_leaves_nothing(num_documents, tmp_path):
    documents = np.ones((num_documents, 200_000), dtype=int)

    def write() -> None:
        with TokenWriter(tmp_path / "data", vocab_size=9, end_id=0) as writer:
            for document in documents:
                writer.add("train", document)

    with full_disk(), pytest.raises(OSError, match=r"File too large: '.*/train_00000\.bin'"):
        write()
    assert not list(tmp_path.iterdir())


def test_shards_are_closed_by_the_document_that_fills_them(make_dataset):
    dataset = make_dataset(train=[[1, 2], [3], [4, 5, 6, 7], [8]], shard_tokens=5)
    shards = dataset.split("train").shards
    assert [shard.tokens.tolist() for shard in shards] == [[0, 1, 2, 0, 3], [0, 4, 5, 6, 7], [0, 8]]
    assert [shard.starts.tolist() for shard in shards] == [[0, 3], [0], [0]]
    assert dataset.split("train").num_tokens == 12


def test_files_on_disk_are_little_endian_numbers(make_dataset):
    folder = make_dataset(train=[[258]]).folder
    assert (folder / "train_00000.bin").read_bytes() == b"\x00\x00\x02\x01"
    assert np.load(folder / "train_00000.idx.npy").dtype == np.dtype("<i8")


def test_ids_above_65535_are_stored_in_four_bytes(make_dataset):
    dataset = make_dataset(vocab_size=70001, train=[[70000, 65535, 1]])
    tokens = dataset.split("train").shards[0].tokens
    assert tokens.dtype == np.uint32
    assert tokens.tolist() == [0, 70000, 65535, 1]


@pytest.mark.parametrize(
    ("vocab_size", "itemsize"), [(65536, 2), (65537, 4)], ids=["last two-byte", "first four-byte"]
)
def test_largest_id_of_a_vocabulary_survives(make_dataset, vocab_size, itemsize):
    tokens = make_dataset(vocab_size=vocab_size, train=[[vocab_size - 1]]).split("train").shards[0]
    assert tokens.tokens.itemsize == itemsize
    assert tokens.tokens.tolist() == [0, vocab_size - 1]


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([70000], r"\[0, 65536\), got 70000"),
        ([1, -1], r"\[0, 65536\), got -1"),
        ([1, 9, 1], "must not contain the end token 9"),
        ([0.5], "1-D integers"),
        ([[1, 2]], "1-D integers"),
    ],
)
def test_ids_that_cannot_be_stored_raise_and_leave_nothing(tmp_path, ids, message):
    out = tmp_path / "dataset"

    def write() -> None:
        with TokenWriter(out, vocab_size=65536, end_id=9) as writer:
            writer.add("train", [1, 2])
            writer.add("train", ids)

    with pytest.raises(ValueError, match=message):
        write()
    assert list(tmp_path.iterdir()) == []


def test_empty_documents_are_counted(tmp_path):
    report = SkipReport()
    with TokenWriter(tmp_path / "a", vocab_size=9, end_id=0, report=report) as writer:
        writer.add("train", [])
        writer.add("train", [1])
    assert report.counts == {"empty document": 1}
    assert TokenDataset(tmp_path / "a").split("train").num_documents == 1
    assert Manifest.read(tmp_path / "a").skipped["empty document"]["count"] == 1


def test_dataset_appears_only_when_it_is_whole(tmp_path):
    out = tmp_path / "a" / "dataset"
    with TokenWriter(out, vocab_size=9, end_id=0) as writer:
        writer.add("train", [1])
        assert not out.exists()
    assert Manifest.read(out).counts("train") == (2, 1, None)
    assert list(out.parent.iterdir()) == [out]


def test_existing_folder_is_never_touched(tmp_path):
    (tmp_path / "kept").write_text("kept")
    with pytest.raises(FileExistsError, match="delete it or choose another"):
        TokenWriter(tmp_path, vocab_size=9, end_id=0)
    assert (tmp_path / "kept").read_text() == "kept"


def test_second_writer_of_the_same_dataset_is_refused(tmp_path):
    with TokenWriter(tmp_path / "a", vocab_size=9, end_id=0) as writer:
        with pytest.raises(FileExistsError, match="another run is writing"):
            TokenWriter(tmp_path / "a", vocab_size=9, end_id=0)
        writer.add("train", [1])
    assert TokenDataset(tmp_path / "a").split("train").num_tokens == 2


def test_dataset_without_documents_is_an_error(tmp_path):
    with (
        pytest.raises(ValueError, match="no document was written"),
        TokenWriter(tmp_path / "a", vocab_size=9, end_id=0),
    ):
        pass


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocab_size": 9, "end_id": 9}, "end_id < vocab_size"),
        ({"vocab_size": 9, "end_id": 0, "shard_tokens": 0}, "shard_tokens"),
        (
            {"vocab_size": 300, "end_id": 256, "tokenizer": load_tokenizer("bytes")},
            "vocab_size=257 and end_id=256, got vocab_size=300",
        ),
    ],
)
def test_writer_rejects_numbers_that_do_not_fit(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        TokenWriter(tmp_path / "a", **options)


def test_dataset_carries_its_tokenizer_and_counts_bytes(tmp_path):
    tokenizer = load_tokenizer("bytes")
    with TokenWriter(tmp_path / "a", vocab_size=257, end_id=256, tokenizer=tokenizer) as writer:
        writer.add("train", tokenizer.encode("caf\u00e9"))
        writer.add("train", tokenizer.encode("x"), num_bytes=1)
    dataset = TokenDataset(tmp_path / "a")
    tokens = dataset.split("train").shards[0].tokens
    assert dataset.tokenizer().decode(tokens) == "caf\u00e9x"
    assert dataset.split("train").num_bytes == 6
    assert dataset.token_bytes.tolist() == [1] * 256 + [0]


def test_dataset_without_tokenizer_says_so(make_dataset):
    with pytest.raises(ValueError, match="made without a tokenizer"):
        make_dataset(train=[[1]]).tokenizer()


def test_unknown_split_names_the_known_ones(make_dataset):
    with pytest.raises(ValueError, match='no split "test"; it has train, val'):
        make_dataset(train=[[1]], val=[[2]]).split("test")


@pytest.mark.parametrize("name", ["train_00000.bin", "train_00000.idx.npy", "val_00000.bin"])
def test_missing_file_is_named(make_dataset, name):
    folder = make_dataset(train=[[1]], val=[[2]]).folder
    (folder / name).unlink()
    with pytest.raises(ValueError, match=f"{name} is missing"):
        TokenDataset(folder)


def test_missing_tokenizer_file_is_named(tmp_path):
    tokenizer = load_tokenizer("bytes")
    with TokenWriter(tmp_path / "a", vocab_size=257, end_id=256, tokenizer=tokenizer) as writer:
        writer.add("train", [1])
    (tmp_path / "a" / "token_bytes.npy").unlink()
    with pytest.raises(ValueError, match=r"token_bytes\.npy is missing"):
        TokenDataset(tmp_path / "a")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("train_00000.bin", "4 tokens need 8 bytes, got 6"),
        ("train_00000.idx.npy", "is damaged"),
        ("manifest.json", "cannot be used"),
    ],
)
def test_truncated_file_is_named(make_dataset, name, message):
    folder = make_dataset(train=[[1, 2, 3]]).folder
    (folder / name).write_bytes((folder / name).read_bytes()[:-2])
    with pytest.raises(ValueError, match=message):
        TokenDataset(folder)


def test_folder_without_manifest_is_no_dataset(tmp_path):
    with pytest.raises(ValueError, match="not a dataset folder"):
        TokenDataset(tmp_path)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda content: content.update(format_version=99), "expected format_version 1, got 99"),
        (lambda content: content.pop("end_id"), "end_id"),
        (lambda content: content.update(dtype="uint32"), "stored as uint16, got dtype uint32"),
        (lambda content: content["splits"]["train"].update(num_tokens=5), "add up to"),
        (lambda content: content["splits"]["train"].pop("shards"), "shards"),
    ],
)
def test_manifest_that_does_not_fit_is_rejected(make_dataset, edit, message):
    path = make_dataset(train=[[1, 2, 3]]).folder / "manifest.json"
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message):
        TokenDataset(path.parent)


@pytest.mark.parametrize("name", ["train_00000.bin", "train_00000.idx.npy", "token_bytes.npy"])
def test_verify_finds_a_changed_byte(tmp_path, name):
    tokenizer = load_tokenizer("bytes")
    with TokenWriter(tmp_path / "a", vocab_size=257, end_id=256, tokenizer=tokenizer) as writer:
        writer.add("train", [1, 2, 3])
    TokenDataset(tmp_path / "a").verify()
    path = tmp_path / "a" / name
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match=f"{name} is damaged"):
        TokenDataset(tmp_path / "a").verify()
