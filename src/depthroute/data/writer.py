"""Writes a dataset folder, whole or not at all."""

import hashlib
import os
import re
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from depthroute.data.manifest import TOKEN_BYTES_FILE, Manifest, Shard, sha256, token_dtype
from depthroute.data.report import Progress, SkipReport
from depthroute.data.tokenizer import Tokenizer
from depthroute.files import naming

DEFAULT_SHARD_TOKENS = 100_000_000


class TokenWriter:
    """Writes documents into a new dataset folder; a context manager.

    A document `t1 .. tn` is stored as `[end_id, t1, .., tn]`: the end token starts its segment, so
    the last token of a document predicts the end, and the end token predicts the first token of
    the next one. Documents are never cut: a shard is closed by the document that fills it.

    Everything is written to `<out>.partial`, which becomes `out` when the `with` block ends well
    and is deleted when it raises. `documents` counts what was added to each split.

    Args:
        out: The folder to make; it must not exist.
        vocab_size: Ids must be below it.
        end_id: End-of-document token; no document may contain it.
        tokenizer: Saved with the data, so that the folder can decode itself.
        shard_tokens: Tokens after which a shard is full.
        settings: Kept in the manifest: what the data were made from. Must be JSON.
        report: Receives the empty documents; its content goes into the manifest.

    Raises:
        FileExistsError: If `out` or `<out>.partial` exists.
        ValueError: If the numbers are out of range or do not agree with the tokenizer.
    """

    def __init__(
        self,
        out: str | Path,
        *,
        vocab_size: int,
        end_id: int,
        tokenizer: Tokenizer | None = None,
        shard_tokens: int = DEFAULT_SHARD_TOKENS,
        settings: Mapping[str, Any] | None = None,
        report: SkipReport | None = None,
    ) -> None:
        if not 0 <= end_id < vocab_size <= 1 << 32:
            raise ValueError(
                f"expected 0 <= end_id < vocab_size <= 2**32, got {end_id=}, {vocab_size=}"
            )
        if shard_tokens < 1:
            raise ValueError(f"shard_tokens must be >= 1, got {shard_tokens}")
        if tokenizer and (tokenizer.vocab_size, tokenizer.end_id) != (vocab_size, end_id):
            raise ValueError(
                f"tokenizer {tokenizer.name} has vocab_size={tokenizer.vocab_size} and "
                f"end_id={tokenizer.end_id}, got {vocab_size=}, {end_id=}"
            )
        check_is_free(out)
        self.out = Path(out)
        self.vocab_size = vocab_size
        self.end_id = end_id
        self.documents: Counter[str] = Counter()
        self._num_bytes = 0
        self._num_tokens = 0
        self._tokenizer = tokenizer
        self._token_bytes = tokenizer.token_bytes() if tokenizer else None
        self._shard_tokens = shard_tokens
        self._settings = dict(settings or {})
        self._report = SkipReport() if report is None else report
        self._folder = _partial_folder(self.out)
        self._open: dict[str, _OpenShard] = {}
        self._closed: dict[str, list[Shard]] = {}

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                with naming(self.out):
                    self._commit()
        finally:
            for shard in self._open.values():
                shard.abandon()
            shutil.rmtree(self._folder, ignore_errors=True)

    def add(
        self, split: str, ids: Sequence[int] | np.ndarray, *, num_bytes: int | None = None
    ) -> None:
        """Append one document; an empty one is skipped and reported.

        Args:
            split: Name of the split, such as `"train"`.
            ids: Its tokens, `[n]`, without the end token.
            num_bytes: UTF-8 bytes of its text; None asks the tokenizer, if it knows.

        Raises:
            ValueError: If an id is outside `[0, vocab_size)` or is the end token.
        """
        ids = np.asarray(ids)
        if ids.size == 0:
            self._report.add("empty document", f"split {split}")
            return
        self._check(ids)
        if num_bytes is None and self._token_bytes is not None:
            num_bytes = int(self._token_bytes[ids].sum())
        shard = self._open.get(split) or self._start(split)
        tokens = np.empty(len(ids) + 1, dtype=token_dtype(self.vocab_size))
        tokens[0], tokens[1:] = self.end_id, ids
        shard.add(tokens, num_bytes)
        self.documents[split] += 1
        self._num_bytes += num_bytes or 0
        self._num_tokens += len(tokens)
        if shard.num_tokens >= self._shard_tokens:
            self._finish(split)

    @property
    def progress(self) -> Progress:
        """What was added so far."""
        return Progress("write tokens", self.documents.total(), self._num_bytes, self._num_tokens)

    def _check(self, ids: np.ndarray) -> None:
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise ValueError(f"ids must be 1-D integers, got shape {ids.shape}, {ids.dtype}")
        for i in (int(ids.min()), int(ids.max())):
            if not 0 <= i < self.vocab_size:
                raise ValueError(f"ids must be in [0, {self.vocab_size}), got {i}")
        if (ids == self.end_id).any():
            raise ValueError(f"a document must not contain the end token {self.end_id}")

    def _start(self, split: str) -> "_OpenShard":
        if not re.fullmatch(r"[a-z][a-z0-9_]*", split):
            raise ValueError(f"a split name is lower-case letters, digits and _, got {split!r}")
        name = f"{split}_{len(self._closed.setdefault(split, [])):05d}"
        self._open[split] = _OpenShard(self._folder, name)
        return self._open[split]

    def _finish(self, split: str) -> None:
        self._closed[split].append(self._open.pop(split).close())

    def _commit(self) -> None:
        if not self.documents:
            raise ValueError(f"no document was written to {self.out}")
        for split in list(self._open):
            self._finish(split)
        shard_files = set(self._folder.iterdir())
        if self._tokenizer is not None:
            self._tokenizer.save(self._folder)
        if self._token_bytes is not None:
            np.save(self._folder / TOKEN_BYTES_FILE, self._token_bytes)
        manifest = Manifest(
            tokenizer=self._tokenizer.name if self._tokenizer else None,
            vocab_size=self.vocab_size,
            end_id=self.end_id,
            splits={split: tuple(shards) for split, shards in self._closed.items()},
            files={
                path.name: sha256(path)
                for path in sorted(set(self._folder.iterdir()) - shard_files)
            },
            settings=self._settings,
            skipped=self._report.to_dict(),
        )
        manifest.write(self._folder)
        os.replace(self._folder, self.out)


def check_is_free(out: str | Path) -> None:
    """Check that a dataset can be written to `out`.

    Raises:
        FileExistsError: If it exists, or another run is writing it.
    """
    out = Path(out)
    if out.exists():
        raise FileExistsError(f"{out} exists; delete it or choose another folder for the dataset")
    if _partial_folder(out).exists():
        raise FileExistsError(
            f"{_partial_folder(out)} exists: another run is writing this dataset, or one was "
            f"killed; in that case delete it"
        )


def _partial_folder(out: Path) -> Path:
    return out.with_name(f"{out.name}.partial")


class _OpenShard:
    """A shard while it is being written."""

    def __init__(self, folder: Path, name: str) -> None:
        self.num_tokens = 0
        self._folder = folder
        self._name = name
        self._num_bytes: int | None = 0
        self._starts: list[int] = []
        self._hash = hashlib.sha256()
        self._path = folder / f"{name}.bin"
        self._file = self._path.open("wb", buffering=1 << 20)

    def add(self, tokens: np.ndarray, num_bytes: int | None) -> None:
        data = tokens.tobytes()
        with naming(self._path):
            self._file.write(data)
        self._hash.update(data)
        self._starts.append(self.num_tokens)
        self.num_tokens += len(tokens)
        if self._num_bytes is not None:
            self._num_bytes = None if num_bytes is None else self._num_bytes + num_bytes

    def close(self) -> Shard:
        with naming(self._path):
            self._file.close()
        idx_path = self._folder / f"{self._name}.idx.npy"
        np.save(idx_path, np.asarray(self._starts, dtype="<i8"))
        return Shard(
            name=self._name,
            num_tokens=self.num_tokens,
            num_documents=len(self._starts),
            num_bytes=self._num_bytes,
            bin_sha256=self._hash.hexdigest(),
            idx_sha256=sha256(idx_path),
        )

    def abandon(self) -> None:
        with suppress(OSError):  # closing writes the rest, which a full disk refuses once more
            self._file.close()
