import lzma
from pathlib import Path

import numpy as np
import pytest

from depthroute.data import (
    PrepareConfig,
    TokenDataset,
    TokenFiles,
    import_tokens,
    load_tokenizer,
    prepare,
)

END = 256


def write_raw(path: Path, ids: list[int], dtype: str = "<u2") -> str:
    data = np.array(ids, dtype=dtype).tobytes()
    path.write_bytes(lzma.compress(data) if path.suffix == ".xz" else data)
    return str(path)


def files(train: list[str], **options) -> TokenFiles:
    return TokenFiles(**{"train": tuple(train), "vocab_size": 257, "end_id": END} | options)


def stored(folder: Path, split: str = "train") -> list[int]:
    return [i for shard in TokenDataset(folder).split(split).shards for i in shard.tokens.tolist()]


@pytest.mark.parametrize("chunk_tokens", [1, 2, 3, 100])
@pytest.mark.parametrize("suffix", [".bin", ".bin.xz"])
@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ([1, 2, END, 3, END], [END, 1, 2, END, 3]),
        ([END, 1, 2, END, 3], [END, 1, 2, END, 3]),
        ([1, 2, END, 3], [END, 1, 2, END, 3]),
        ([1, 2, 3], [END, 1, 2, 3]),
    ],
    ids=["end after", "end before", "end between", "no end"],
)
def test_documents_start_at_end_tokens(tmp_path, monkeypatch, chunk_tokens, suffix, raw, expected):
    monkeypatch.setattr("depthroute.data.raw_tokens.CHUNK_TOKENS", chunk_tokens)
    source = write_raw(tmp_path / f"a{suffix}", raw)
    manifest = import_tokens(files([source]), tmp_path / "out")
    assert stored(tmp_path / "out") == expected
    assert manifest.skipped == {}


@pytest.mark.parametrize("chunk_tokens", [1, 2, 100])
def test_empty_documents_are_counted(tmp_path, monkeypatch, chunk_tokens):
    monkeypatch.setattr("depthroute.data.raw_tokens.CHUNK_TOKENS", chunk_tokens)
    source = write_raw(tmp_path / "a.bin", [1, END, END, END, 2, END])
    manifest = import_tokens(files([source]), tmp_path / "out")
    assert stored(tmp_path / "out") == [END, 1, END, 2]
    assert manifest.skipped["empty document"]["count"] == 2


def test_splits_files_and_bytes_through_prepare(tmp_path):
    encode = load_tokenizer("bytes").encode
    train = [
        write_raw(tmp_path / "a.bin", encode("caf\u00e9")),
        write_raw(tmp_path / "b.bin", [*encode("b"), END]),
    ]
    val = write_raw(tmp_path / "c.bin", encode("c"))
    tokens = files(train, val=(val,), tokenizer="bytes")
    calls = []
    manifest = prepare(PrepareConfig(tokens=tokens), tmp_path / "out", progress=calls.append)
    assert stored(tmp_path / "out") == [END, *encode("caf\u00e9"), END, *encode("b")]
    assert stored(tmp_path / "out", "val") == [END, *encode("c")]
    assert manifest.counts("train") == (8, 2, 6)
    assert calls[-1].num_tokens == 10
    assert TokenDataset(tmp_path / "out").tokenizer().name == "bytes"


def test_four_byte_files_are_read_as_such(tmp_path):
    source = write_raw(tmp_path / "a.bin", [70000, 1], dtype="<u4")
    import_tokens(files([source], dtype="uint32", vocab_size=70001), tmp_path / "out")
    assert stored(tmp_path / "out") == [END, 70000, 1]


@pytest.mark.parametrize(
    ("content", "name", "options", "message"),
    [
        (b"\x01\x00\x02", "a.bin", {}, "whole uint16 numbers"),
        (b"not xz", "a.bin.xz", {}, r"not a whole \.xz file"),
        (lzma.compress(b"\x01\x00" * 99)[:-8], "a.bin.xz", {}, r"not a whole \.xz file"),
        (b"\x01\x02", "a.bin", {}, r"a\.bin: ids must be below vocab_size=257, got 513"),
        (
            b"\x01\x02",
            "a.bin",
            {"tokenizer": "bytes"},
            r"a\.bin: ids must be below vocab_size=257, got 513",
        ),
        (b"", "a.bin", {}, "no document was written"),
        (b"\x01\x00", "a.bin", {"tokenizer": "bytes", "end_id": 0}, "got vocab_size=257, end_id=0"),
    ],
)
def test_bad_file_is_an_error_and_leaves_nothing(tmp_path, content, name, options, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        import_tokens(files([str(path)], **options), tmp_path / "out")
    assert list(tmp_path.iterdir()) == [path]


def test_missing_file_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"missing\.bin does not exist"):
        import_tokens(files([str(tmp_path / "missing.bin")]), tmp_path / "out")


@pytest.mark.parametrize(
    ("options", "message"),
    [({"train": ()}, "at least one file"), ({"dtype": "int32"}, "uint16 or uint32, got 'int32'")],
)
def test_config_rejects_what_cannot_work(options, message):
    with pytest.raises(ValueError, match=message):
        TokenFiles(**{"train": ("a",), "vocab_size": 2, "end_id": 1} | options)
