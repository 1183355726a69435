"""Turns text, or token files of other tools, into a dataset folder."""

import hashlib
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from depthroute.config import config_dataclass
from depthroute.data.manifest import Manifest
from depthroute.data.raw_tokens import TokenFiles, import_tokens
from depthroute.data.report import Progress, ProgressCallback, SkipReport
from depthroute.data.sources import iter_documents
from depthroute.data.tokenizer import Tokenizer, load_tokenizer
from depthroute.data.tokenizer_huggingface import train_bpe
from depthroute.data.writer import DEFAULT_SHARD_TOKENS, TokenWriter, check_is_free

BATCH_CHARACTERS = 1 << 21


@config_dataclass
class PrepareConfig:
    """What a dataset is made of: either `source` (text) or `tokens` (ready token files).

    All fields but `shard_tokens` and `strict` are about text.

    Attributes:
        source: `"stdlib"`, or files, folders and glob patterns; see `iter_documents`.
        tokens: Token files of other tools; see `TokenFiles`.
        tokenizer: A spec for `load_tokenizer`, or `"bpe:N"` to train a byte-level BPE of N tokens
            on the training split.
        text_column: JSON key or parquet column of the text.
        separator: Splits `.txt` files into documents; None makes each file one document.
        val_fraction: Chance of a document to go to the validation split, in `[0, 1)`. A hash of
            its text and the seed decides, so the order of documents does not matter and equal
            documents go to the same split.
        seed: >= 0; chooses the validation documents.
        shard_tokens: Tokens after which a shard is full.
        max_documents: Stop after so many documents; None reads all.
        max_bytes: Stop after the document that reaches so many UTF-8 bytes; None reads all.
        strict: Make every skip an error.
    """

    source: str | tuple[str, ...] = ()
    tokens: TokenFiles | None = None
    tokenizer: str = "bytes"
    text_column: str = "text"
    separator: str | None = None
    val_fraction: float = 0.01
    seed: int = 0
    shard_tokens: int = DEFAULT_SHARD_TOKENS
    max_documents: int | None = None
    max_bytes: int | None = None
    strict: bool = False

    def __post_init__(self) -> None:
        if bool(self.source) == (self.tokens is not None):
            raise ValueError(
                f"give either source or tokens, got source={self.source!r}, tokens={self.tokens!r}"
            )
        if not 0 <= self.val_fraction < 1:
            raise ValueError(f"val_fraction must be in [0, 1), got {self.val_fraction}")
        if not 0 <= self.seed < 1 << 64:
            raise ValueError(f"seed must be in [0, 2**64), got {self.seed}")
        for name in ("shard_tokens", "max_documents", "max_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be >= 1, got {value}")
        _bpe_vocab_size(self.tokenizer)


def prepare(
    config: PrepareConfig, out: str | Path, *, progress: ProgressCallback | None = None
) -> Manifest:
    """Make a dataset folder with the splits `train` and, if `val_fraction > 0`, `val`.

    Documents keep the order of the source; the same config and files give the same bytes.

    Args:
        config: What to read and how to cut it into tokens.
        out: The folder to make; it must not exist.
        progress: Called after each batch of documents.

    Returns:
        What was written: counts of each split, and what was skipped.

    Raises:
        FileExistsError: If `out` exists.
        ValueError: If the source or the tokenizer cannot be used, or a split would be empty.
    """
    if config.tokens is not None:
        return import_tokens(
            config.tokens,
            out,
            shard_tokens=config.shard_tokens,
            strict=config.strict,
            progress=progress,
        )
    check_is_free(out)
    notify = progress if progress is not None else _ignore
    tokenizer = _make_tokenizer(config, notify)
    report = SkipReport(strict=config.strict)
    writer = TokenWriter(
        out,
        vocab_size=tokenizer.vocab_size,
        end_id=tokenizer.end_id,
        tokenizer=tokenizer,
        shard_tokens=config.shard_tokens,
        settings=asdict(config),
        report=report,
    )
    with writer:
        for texts in _batches(_documents(config, report)):
            for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
                writer.add(split_of(text, config), ids, num_bytes=len(text.encode()))
            notify(writer.progress)
        _check_splits(writer, config)
    return Manifest.read(writer.out)


def split_of(text: str, config: PrepareConfig) -> str:
    """The split of a document, `"train"` or `"val"`, by a hash of its text and the seed."""
    key = config.seed.to_bytes(8, "little")
    digest = hashlib.blake2b(text.encode(), digest_size=8, key=key).digest()
    share = int.from_bytes(digest, "little") / 2**64
    return "val" if share < config.val_fraction else "train"


def _make_tokenizer(config: PrepareConfig, notify: ProgressCallback) -> Tokenizer:
    vocab_size = _bpe_vocab_size(config.tokenizer)
    if vocab_size is None:
        return load_tokenizer(config.tokenizer)

    def training_texts() -> Iterator[str]:
        num_documents = num_bytes = 0
        for texts in _batches(_documents(config, SkipReport(strict=config.strict))):
            chosen = [text for text in texts if split_of(text, config) == "train"]
            num_documents += len(chosen)
            num_bytes += sum(len(text.encode()) for text in chosen)
            notify(Progress("read text for the tokenizer", num_documents, num_bytes, 0))
            yield from chosen

    return train_bpe(training_texts(), vocab_size)


def _bpe_vocab_size(spec: str) -> int | None:
    """N of `"bpe:N"`; None for other specs."""
    kind, _, number = spec.partition(":")
    if kind != "bpe":
        return None
    if not (number.isascii() and number.isdecimal() and int(number) >= 257):
        raise ValueError(f'tokenizer "bpe:N" needs a number N >= 257, got "{spec}"')
    return int(number)


def _documents(config: PrepareConfig, report: SkipReport) -> Iterator[str]:
    documents = iter_documents(
        config.source,
        text_column=config.text_column,
        separator=config.separator,
        report=report,
    )
    num_bytes = 0
    for number, text in enumerate(documents, start=1):
        yield text
        num_bytes += len(text.encode())
        if number == config.max_documents:
            return
        if config.max_bytes is not None and num_bytes >= config.max_bytes:
            return


def _batches(documents: Iterator[str]) -> Iterator[list[str]]:
    """Group documents, so that a tokenizer can work on several at once."""
    texts: list[str] = []
    size = 0
    for text in documents:
        texts.append(text)
        size += len(text)
        if size >= BATCH_CHARACTERS:
            yield texts
            texts, size = [], 0
    if texts:
        yield texts


def _check_splits(writer: TokenWriter, config: PrepareConfig) -> None:
    wanted = ("train", "val") if config.val_fraction else ("train",)
    for split in wanted:
        if not writer.documents[split]:
            raise ValueError(
                f"no document fell into the {split} split: {writer.documents.total()} documents, "
                f"val_fraction={config.val_fraction}; change val_fraction (0 makes no validation "
                f"split), or give separator to cut text files into more documents"
            )


def _ignore(progress: Progress) -> None:
    """The progress callback of those who want none."""
