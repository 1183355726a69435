"""Reads a dataset folder."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from depthroute.data.manifest import TOKEN_BYTES_FILE, Manifest, Shard, sha256
from depthroute.data.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True, kw_only=True)
class TokenShard:
    """Memory maps of one shard.

    `tokens` is uint16 or uint32 `[n]`; `starts`, int64 `[num_documents]`, are the positions of the
    end tokens that start the documents.
    """

    tokens: np.ndarray
    starts: np.ndarray


@dataclass(frozen=True, kw_only=True)
class TokenSplit:
    """One split of a dataset.

    `num_tokens` includes one end token a document; `num_bytes` (UTF-8 of the text) is None if not
    known; `token_bytes` is uint16 `[vocab_size]` (see `Tokenizer.token_bytes`) or None.
    """

    name: str
    num_tokens: int
    num_documents: int
    num_bytes: int | None
    shards: tuple[TokenShard, ...]
    token_bytes: np.ndarray | None


class TokenDataset:
    """A dataset folder, opened as memory maps.

    Args:
        folder: Made by `TokenWriter`, `prepare` or `import_tokens`.

    Raises:
        ValueError: If the manifest or a file is missing, of another version, or its size differs
            from the manifest.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.manifest = Manifest.read(self.folder)
        self.vocab_size = self.manifest.vocab_size
        self.end_id = self.manifest.end_id
        for name in self.manifest.files:
            self._require(name)
        self.token_bytes = self._load_token_bytes()
        self._splits = {
            name: self._open_split(name, shards) for name, shards in self.manifest.splits.items()
        }

    @property
    def splits(self) -> Mapping[str, TokenSplit]:
        """Split name -> split."""
        return self._splits

    def split(self, name: str) -> TokenSplit:
        """One split.

        Raises:
            ValueError: If there is none of that name.
        """
        if name not in self._splits:
            raise ValueError(
                f'{self.folder} has no split "{name}"; it has {", ".join(self._splits)}'
            )
        return self._splits[name]

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the tokens.

        Raises:
            ValueError: If the dataset was made without one.
        """
        if self.manifest.tokenizer is None:
            raise ValueError(
                f"{self.folder} was made without a tokenizer: it cannot encode or decode"
            )
        return load_tokenizer(self.folder)

    def verify(self) -> None:
        """Compare every file with the sha256 in the manifest; reads all data.

        Raises:
            ValueError: If a file differs.
        """
        expected = dict(self.manifest.files)
        for shard in (shard for shards in self.manifest.splits.values() for shard in shards):
            expected |= {shard.bin_file: shard.bin_sha256, shard.idx_file: shard.idx_sha256}
        for name, digest in expected.items():
            found = sha256(self._require(name))
            if found != digest:
                raise ValueError(
                    f"{self.folder / name} is damaged: sha256 {found}, expected {digest}"
                )

    def _require(self, name: str) -> Path:
        path = self.folder / name
        if not path.is_file():
            raise ValueError(f"{path} is missing")
        return path

    def _load_token_bytes(self) -> np.ndarray | None:
        if TOKEN_BYTES_FILE not in self.manifest.files:
            return None
        path = self.folder / TOKEN_BYTES_FILE
        table = _load_array(path)
        if table.shape != (self.vocab_size,):
            raise ValueError(f"{path}: expected shape ({self.vocab_size},), got {table.shape}")
        return table

    def _open_split(self, name: str, shards: tuple[Shard, ...]) -> TokenSplit:
        return TokenSplit(
            name=name,
            **self.manifest.counts(name)._asdict(),
            shards=tuple(self._open_shard(shard) for shard in shards),
            token_bytes=self.token_bytes,
        )

    def _open_shard(self, shard: Shard) -> TokenShard:
        bin_path, idx_path = self._require(shard.bin_file), self._require(shard.idx_file)
        expected = shard.num_tokens * self.manifest.dtype.itemsize
        size = bin_path.stat().st_size
        if size != expected:
            raise ValueError(
                f"{bin_path} is truncated or from another dataset: "
                f"{shard.num_tokens} tokens need {expected} bytes, got {size}"
            )
        starts = _load_array(idx_path)
        if starts.shape != (shard.num_documents,):
            raise ValueError(
                f"{idx_path}: expected {shard.num_documents} documents, got shape {starts.shape}"
            )
        tokens = np.memmap(bin_path, dtype=self.manifest.dtype, mode="r")
        return TokenShard(tokens=tokens, starts=starts)


def _load_array(path: Path) -> np.ndarray:
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
