"""Imports token files that other tools made: raw numbers, the end token after each document."""

import lzma
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Literal

import numpy as np

from depthroute.config import config_dataclass
from depthroute.data.manifest import Manifest
from depthroute.data.report import ProgressCallback, SkipReport
from depthroute.data.tokenizer import load_tokenizer
from depthroute.data.writer import DEFAULT_SHARD_TOKENS, TokenWriter

CHUNK_TOKENS = 1 << 22


@config_dataclass
class TokenFiles:
    """Raw little-endian token files, as nanoGPT's scripts write them; `.xz` ones are unpacked.

    Attributes:
        train: Files of the training split, in order.
        val: Files of the validation split.
        dtype: `"uint16"` or `"uint32"`.
        vocab_size: Ids must be below it.
        end_id: The token between documents.
        tokenizer: Spec of the tokenizer that made them (see `load_tokenizer`); None if unknown,
            then bytes are not counted and nothing can be decoded.
    """

    train: tuple[str, ...]
    val: tuple[str, ...] = ()
    dtype: Literal["uint16", "uint32"] = "uint16"
    vocab_size: int
    end_id: int
    tokenizer: str | None = None

    def __post_init__(self) -> None:
        if not self.train:
            raise ValueError("train must name at least one file, got none")
        if self.dtype not in ("uint16", "uint32"):
            raise ValueError(f"dtype must be uint16 or uint32, got {self.dtype!r}")


def import_tokens(
    files: TokenFiles,
    out: str | Path,
    *,
    shard_tokens: int = DEFAULT_SHARD_TOKENS,
    strict: bool = False,
    progress: ProgressCallback | None = None,
) -> Manifest:
    """Make a dataset folder of raw token files.

    The end tokens are taken as the borders of documents, before or after them alike, and a
    document ends with its file. Documents without tokens are skipped and counted.

    Args:
        files: What to read.
        out: The folder to make; it must not exist.
        shard_tokens: Tokens after which a shard is full.
        strict: Make an empty document an error.
        progress: Called as data are written.

    Raises:
        FileExistsError: If `out` exists.
        ValueError: If a file is missing, cut off or damaged, an id is out of range, or the
            tokenizer does not agree with `vocab_size` and `end_id`.
    """
    for name in files.train + files.val:
        if not Path(name).is_file():
            raise ValueError(f"token file {name} does not exist")
    tokenizer = None if files.tokenizer is None else load_tokenizer(files.tokenizer)
    writer = TokenWriter(
        out,
        vocab_size=files.vocab_size,
        end_id=files.end_id,
        tokenizer=tokenizer,
        shard_tokens=shard_tokens,
        settings={"tokens": asdict(files)},
        report=SkipReport(strict=strict),
    )
    with writer:
        for split, names in (("train", files.train), ("val", files.val)):
            for name in names:
                for chunk in _read_documents(Path(name), files):
                    for ids in chunk:
                        writer.add(split, ids)
                    if progress is not None:
                        progress(writer.progress)
    return Manifest.read(writer.out)


def _read_documents(path: Path, files: TokenFiles) -> Iterator[list[np.ndarray]]:
    """Yield the documents of a file, those of one chunk at a time."""
    rest = np.empty(0, dtype=files.dtype)
    is_first = True
    for chunk in _read_chunks(path, np.dtype(files.dtype).newbyteorder("<")):
        if chunk.max() >= files.vocab_size:
            raise ValueError(
                f"{path}: ids must be below vocab_size={files.vocab_size}, got {chunk.max()}; "
                f"is it a file of {files.dtype}?"
            )
        tokens = np.concatenate((rest, chunk))
        *documents, rest = _split(tokens, files.end_id)
        if is_first and documents:
            # an end token at the start of the file closes no document
            documents = documents if documents[0].size else documents[1:]
            is_first = False
        yield documents
    if rest.size:
        yield [rest]


def _split(tokens: np.ndarray, end_id: int) -> list[np.ndarray]:
    ends = np.flatnonzero(tokens == end_id)
    starts = np.concatenate(([0], ends + 1))
    return [tokens[i:j] for i, j in zip(starts, np.append(ends, len(tokens)), strict=True)]


def _read_chunks(path: Path, dtype: np.dtype) -> Iterator[np.ndarray]:
    opener = lzma.open if path.suffix == ".xz" else open
    try:
        with opener(path, "rb") as file:
            while data := file.read(CHUNK_TOKENS * dtype.itemsize):
                if len(data) % dtype.itemsize:
                    raise ValueError(f"{path} does not hold whole {dtype.name} numbers")
                yield np.frombuffer(data, dtype=dtype)
    except (EOFError, lzma.LZMAError) as error:
        raise ValueError(f"{path} is not a whole .xz file: {error}") from error
