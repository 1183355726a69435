import itertools
import json
from pathlib import Path

import pytest

from depthroute.data import PrepareConfig, Progress, TokenDataset, TokenFiles, prepare


def write_texts(path: Path, texts: list[str]) -> str:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def texts_of(folder: Path, split: str) -> list[str]:
    """Documents of a split, cut at their starts and decoded."""
    dataset = TokenDataset(folder)
    tokenizer = dataset.tokenizer()
    texts = []
    for shard in dataset.split(split).shards:
        bounds = [*shard.starts, len(shard.tokens)]
        for start, stop in itertools.pairwise(bounds):
            assert shard.tokens[start] == dataset.end_id
            texts.append(tokenizer.decode(shard.tokens[start + 1 : stop]))
    return texts


@pytest.fixture
def texts() -> list[str]:
    return [f"document {i}: <|endoftext|> caf\u00e9 {'x' * (i % 7)}" for i in range(200)]


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300"])
@pytest.mark.parametrize("shard_tokens", [500, 10**6])
def test_prepared_documents_are_the_source_documents(tmp_path, texts, tokenizer, shard_tokens):
    source = write_texts(tmp_path / "a.jsonl", texts)
    config = PrepareConfig(
        source=source, tokenizer=tokenizer, val_fraction=0.2, shard_tokens=shard_tokens
    )
    manifest = prepare(config, tmp_path / "out")
    train, val = texts_of(tmp_path / "out", "train"), texts_of(tmp_path / "out", "val")
    assert sorted(train + val) == sorted(texts)
    assert train == [text for text in texts if text in train]  # source order
    assert 20 <= len(val) <= 60
    counts = manifest.counts("train")
    assert counts.num_documents == len(train)
    assert counts.num_bytes == sum(len(text.encode()) for text in train)
    TokenDataset(tmp_path / "out").verify()


def test_same_config_gives_the_same_files(tmp_path, texts):
    source = write_texts(tmp_path / "a.jsonl", texts)
    config = PrepareConfig(source=(source,), tokenizer="bpe:300", val_fraction=0.2)
    for name in ("one", "two"):
        prepare(config, tmp_path / name)
    first, second = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}
        for name in ("one", "two")
    )
    assert first == second
    assert "token_bytes.npy" in first


def test_equal_documents_never_straddle_the_split(tmp_path, texts):
    source = write_texts(tmp_path / "a.jsonl", texts + texts[::-1])
    prepare(PrepareConfig(source=source, val_fraction=0.5), tmp_path / "out")
    train, val = texts_of(tmp_path / "out", "train"), texts_of(tmp_path / "out", "val")
    assert not set(train) & set(val)
    assert len(train) == 2 * len(set(train))


def test_split_depends_on_the_seed_and_not_on_the_order(tmp_path, texts):
    sources = {
        "straight": write_texts(tmp_path / "a.jsonl", texts),
        "reversed": write_texts(tmp_path / "b.jsonl", texts[::-1]),
    }
    for name, source in sources.items():
        prepare(PrepareConfig(source=source, val_fraction=0.3), tmp_path / name)
    prepare(PrepareConfig(source=source, val_fraction=0.3, seed=1), tmp_path / "seed")
    straight, backwards, reseeded = (
        set(texts_of(tmp_path / name, "val")) for name in ("straight", "reversed", "seed")
    )
    assert straight == backwards
    assert straight != reseeded


def test_bpe_is_trained_on_the_training_split_alone(tmp_path, texts):
    config = {"val_fraction": 0.3, "tokenizer": "bpe:300"}
    source = write_texts(tmp_path / "a.jsonl", texts)
    whole = prepare(PrepareConfig(source=source, **config), tmp_path / "whole")
    source = write_texts(tmp_path / "b.jsonl", texts_of(tmp_path / "whole", "train"))
    train = prepare(
        PrepareConfig(source=source, tokenizer="bpe:300", val_fraction=0), tmp_path / "b"
    )
    everything = prepare(
        PrepareConfig(source=str(tmp_path / "a.jsonl"), tokenizer="bpe:300", val_fraction=0),
        tmp_path / "c",
    )
    assert train.tokenizer == whole.tokenizer != everything.tokenizer


def test_limits_keep_the_first_documents(tmp_path):
    source = write_texts(tmp_path / "a.jsonl", ["aaaa", "bbbb", "cccc", "dddd"])
    for name, limit in {"a": {"max_documents": 2}, "b": {"max_bytes": 5}}.items():
        prepare(PrepareConfig(source=source, val_fraction=0, **limit), tmp_path / name)
        assert texts_of(tmp_path / name, "train") == ["aaaa", "bbbb"]
        assert list(TokenDataset(tmp_path / name).splits) == ["train"]


def test_skips_and_settings_are_kept_in_the_manifest(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n{\n')
    config = PrepareConfig(source=str(path), val_fraction=0)
    manifest = prepare(config, tmp_path / "out")
    assert manifest.skipped["malformed JSON line"] == {"count": 1, "examples": [f"{path}:2"]}
    assert manifest.settings["source"] == str(path)


def test_strict_turns_skips_into_errors_and_leaves_nothing(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n{\n')
    config = PrepareConfig(source=str(path), val_fraction=0, strict=True)
    with pytest.raises(ValueError, match=r"a\.jsonl:2: malformed JSON line"):
        prepare(config, tmp_path / "out")
    assert list(tmp_path.iterdir()) == [path]


def test_empty_validation_split_is_an_error(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one long book")
    with pytest.raises(ValueError, match=r"val split: 1 documents.*separator"):
        prepare(PrepareConfig(source=str(path)), tmp_path / "out")


def test_existing_dataset_is_refused_before_any_work(tmp_path):
    calls = []
    with pytest.raises(FileExistsError):
        prepare(PrepareConfig(source="stdlib"), tmp_path, progress=calls.append)
    assert calls == []


def test_progress_counts_what_was_written(tmp_path, texts):
    source = write_texts(tmp_path / "a.jsonl", texts)
    calls: list[Progress] = []
    config = PrepareConfig(source=source, tokenizer="bpe:300", val_fraction=0.2)
    manifest = prepare(config, tmp_path / "out", progress=calls.append)
    assert calls[0].stage == "read text for the tokenizer"
    train, val = manifest.counts("train"), manifest.counts("val")
    assert calls[0].num_documents == train.num_documents
    assert calls[-1] == Progress(
        "write tokens",
        *(
            a + b
            for a, b in zip(
                (train.num_documents, train.num_bytes, train.num_tokens),
                (val.num_documents, val.num_bytes, val.num_tokens),
                strict=True,
            )
        ),
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "either source or tokens"),
        (
            {"source": "a.txt", "tokens": TokenFiles(train=("b",), vocab_size=2, end_id=1)},
            "either source or tokens",
        ),
        ({"source": "a.txt", "val_fraction": 1.0}, r"val_fraction must be in \[0, 1\), got 1.0"),
        ({"source": "a.txt", "seed": -1}, "seed"),
        ({"source": "a.txt", "max_bytes": 0}, "max_bytes must be >= 1, got 0"),
        ({"source": "a.txt", "shard_tokens": 0}, "shard_tokens must be >= 1, got 0"),
        ({"source": "a.txt", "tokenizer": "bpe:many"}, "needs a number N >= 257"),
        ({"source": "a.txt", "tokenizer": "bpe:12"}, "needs a number N >= 257"),
    ],
)
def test_config_rejects_what_cannot_work(options, message):
    with pytest.raises(ValueError, match=message):
        PrepareConfig(**options)
