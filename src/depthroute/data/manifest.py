"""`manifest.json`: what a dataset folder holds."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

FORMAT_VERSION = 1
MANIFEST_FILE = "manifest.json"
TOKEN_BYTES_FILE = "token_bytes.npy"


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One pair of files, `<name>.bin` (tokens) and `<name>.idx.npy` (document starts).

    `num_bytes` counts the UTF-8 bytes of the documents; None if not known.
    """

    name: str
    num_tokens: int
    num_documents: int
    num_bytes: int | None
    bin_sha256: str
    idx_sha256: str

    @property
    def bin_file(self) -> str:
        """Name of the token file."""
        return f"{self.name}.bin"

    @property
    def idx_file(self) -> str:
        """Name of the file of document starts."""
        return f"{self.name}.idx.npy"


class Counts(NamedTuple):
    """Size of a split.

    `num_tokens` includes one end token a document; `num_bytes` (UTF-8) is None if not known.
    """

    num_tokens: int
    num_documents: int
    num_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a dataset folder holds, and how it was made.

    Attributes:
        tokenizer: Name of the tokenizer; None if the dataset was made without one.
        vocab_size: All ids are below it.
        end_id: The token that starts every document.
        splits: Split name -> shards, in order.
        files: Further files (tokenizer, bytes per token) -> sha256.
        settings: What the dataset was made from.
        skipped: Reason -> `{"count", "examples"}` of what was left out.
    """

    tokenizer: str | None
    vocab_size: int
    end_id: int
    splits: Mapping[str, tuple[Shard, ...]]
    files: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    skipped: Mapping[str, Any] = field(default_factory=dict)

    @property
    def dtype(self) -> np.dtype:
        """Type of the stored tokens."""
        return token_dtype(self.vocab_size)

    def counts(self, split: str) -> Counts:
        """Size of one split."""
        return _counts(self.splits[split])

    def write(self, folder: Path) -> None:
        """Write `manifest.json`."""
        content = {
            "format_version": FORMAT_VERSION,
            "dtype": self.dtype.name,
            **dataclasses.asdict(self),
            "splits": {
                name: {
                    **_counts(shards)._asdict(),
                    "shards": [dataclasses.asdict(shard) for shard in shards],
                }
                for name, shards in self.splits.items()
            },
        }
        text = json.dumps(content, indent=2) + "\n"
        (folder / MANIFEST_FILE).write_text(text, encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Read `manifest.json`.

        Raises:
            ValueError: If it is missing, of another version, or not a whole manifest.
        """
        path = folder / MANIFEST_FILE
        if not path.is_file():
            raise ValueError(f"{folder} is not a dataset folder: it has no {MANIFEST_FILE}")
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            version = content.pop("format_version")
            if version != FORMAT_VERSION:
                raise ValueError(f"expected format_version {FORMAT_VERSION}, got {version}")
            dtype, splits = content.pop("dtype"), content.pop("splits")
            shards = {name: _read_split(name, split) for name, split in splits.items()}
            manifest = cls(**content, splits=shards)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} cannot be used: {type(error).__name__}: {error}") from error
        if dtype != manifest.dtype.name:
            raise ValueError(
                f"{path}: vocab_size {manifest.vocab_size} is stored as {manifest.dtype.name}, "
                f"got dtype {dtype}"
            )
        return manifest


def token_dtype(vocab_size: int) -> np.dtype:
    """Little-endian uint16 if every id below `vocab_size` fits, else uint32."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def sha256(path: Path) -> str:
    """Hex digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _counts(shards: Sequence[Shard]) -> Counts:
    sizes = [shard.num_bytes for shard in shards if shard.num_bytes is not None]
    return Counts(
        num_tokens=sum(shard.num_tokens for shard in shards),
        num_documents=sum(shard.num_documents for shard in shards),
        num_bytes=sum(sizes) if len(sizes) == len(shards) else None,
    )


def _read_split(name: str, content: Mapping[str, Any]) -> tuple[Shard, ...]:
    shards = tuple(Shard(**shard) for shard in content["shards"])
    counts = _counts(shards)._asdict()
    stated = {key: content[key] for key in counts}
    if stated != counts:
        raise ValueError(f"split {name} states {stated}, its shards add up to {counts}")
    return shards
