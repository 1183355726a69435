"""Tokenizers given by tiktoken ranks."""

import base64
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from depthroute.data.tokenizer_common import END_TOKEN, checked_ids, write_info

RANKS_FILE = "tokenizer.tiktoken"
# how text is cut before merging; a ranks file does not say it
PATTERNS = {
    "gpt2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "cl100k_base": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}


class TiktokenTokenizer:
    """A BPE given by tiktoken ranks.

    Args:
        name: What to call it.
        pattern: Regular expression that cuts text before merging.
        ranks: Bytes of each token -> id; must hold all 256 single bytes.
        special_tokens: Text -> id; must hold `<|endoftext|>`.

    Raises:
        ValueError: If the ranks lack a single byte or the special tokens lack the end token.
    """

    def __init__(
        self,
        name: str,
        *,
        pattern: str,
        ranks: Mapping[bytes, int],
        special_tokens: Mapping[str, int],
    ) -> None:
        tiktoken = _import_tiktoken()
        if END_TOKEN not in special_tokens:
            raise ValueError(
                f"{name}: no {END_TOKEN} among the special tokens {sorted(special_tokens)}"
            )
        missing = sum(bytes([i]) not in ranks for i in range(256))
        if missing:
            raise ValueError(f"{name}: {missing} of the 256 single bytes have no rank")
        self.name = name
        self.pattern, self.ranks, self.special_tokens = pattern, dict(ranks), dict(special_tokens)
        self._bytes = {rank: token for token, rank in ranks.items()}
        self._encoding = tiktoken.Encoding(
            name, pat_str=pattern, mergeable_ranks=self.ranks, special_tokens=self.special_tokens
        )
        self.vocab_size = max(*ranks.values(), *special_tokens.values()) + 1
        self.end_id = special_tokens[END_TOKEN]

    def encode(self, text: str) -> list[int]:
        """See `Tokenizer`."""
        return self._encoding.encode_ordinary(text)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """See `Tokenizer`."""
        return [
            np.asarray(ids, dtype=np.int64)
            for ids in self._encoding.encode_ordinary_batch(list(texts))
        ]

    def decode(self, ids: Iterable[int]) -> str:
        """See `Tokenizer`."""
        known = checked_ids(ids, self.vocab_size)
        return b"".join(self._bytes.get(i, b"") for i in known).decode("utf-8", errors="replace")

    def token_bytes(self) -> np.ndarray | None:
        """See `Tokenizer`."""
        table = np.zeros(self.vocab_size, dtype=np.uint16)
        for token, rank in self.ranks.items():
            table[rank] = len(token)
        return table

    def save(self, folder: str | Path) -> None:
        """See `Tokenizer`."""
        lines = [
            base64.b64encode(token) + b" %d\n" % rank
            for token, rank in sorted(self.ranks.items(), key=lambda item: item[1])
        ]
        (Path(folder) / RANKS_FILE).write_bytes(b"".join(lines))
        write_info(
            folder,
            kind="tiktoken",
            name=self.name,
            pattern=self.pattern,
            special_tokens=self.special_tokens,
        )


def tiktoken_from_spec(spec: str) -> TiktokenTokenizer:
    """Load `NAME`, `FILE` or `FILE@PATTERN`; see `load_tokenizer`."""
    path, _, pattern = spec.rpartition("@")
    if pattern not in PATTERNS:
        path, pattern = spec, "gpt2"
    if Path(path).is_file():
        return _tiktoken_from_ranks(Path(path), pattern)
    if spec.endswith(".tiktoken") or "/" in spec or "@" in spec:
        raise ValueError(
            f'no ranks file "{spec}"; write "tiktoken:FILE", or "tiktoken:FILE@PATTERN" '
            f"with one of the patterns {', '.join(PATTERNS)}"
        )
    return _tiktoken_from_name(spec)


def _tiktoken_from_ranks(path: Path, pattern: str) -> TiktokenTokenizer:
    ranks = read_ranks(path)
    return TiktokenTokenizer(
        f"tiktoken:{path.name}@{pattern}",
        pattern=PATTERNS[pattern],
        ranks=ranks,
        special_tokens={END_TOKEN: max(ranks.values()) + 1},
    )


def _tiktoken_from_name(name: str) -> TiktokenTokenizer:
    tiktoken = _import_tiktoken()
    known = tiktoken.list_encoding_names()
    if name not in known:
        raise ValueError(f'unknown tiktoken encoding "{name}"; known: {", ".join(known)}')
    try:
        encoding = tiktoken.get_encoding(name)
    except OSError as error:
        raise OSError(
            f'tiktoken could not download the ranks of "{name}" ({error}); give a ranks file '
            f'instead, "tiktoken:/path/{name}.tiktoken", or point TIKTOKEN_CACHE_DIR to a cache '
            f"that holds them"
        ) from error
    # tiktoken documents these three as the way to build on an encoding
    return TiktokenTokenizer(
        f"tiktoken:{name}",
        pattern=encoding._pat_str,
        ranks=encoding._mergeable_ranks,
        special_tokens=encoding._special_tokens,
    )


def read_ranks(path: Path) -> dict[bytes, int]:
    """Read lines of a base64 token and its rank; ValueError if a line or the whole is malformed."""
    # not tiktoken's own reader: it caches by path, so a changed file would give the old ranks
    ranks = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError as error:
            raise ValueError(
                f"{path}:{number}: expected a base64 token and its rank, got {line[:60]!r}"
            ) from error
    if len(set(ranks.values())) != len(ranks) or not ranks:
        raise ValueError(
            f"{path}: expected distinct ranks, got {len(ranks)} tokens that share or lack ranks"
        )
    return ranks


def _import_tiktoken() -> Any:
    try:
        import tiktoken
    except ImportError as error:
        raise ImportError(
            'this tokenizer needs tiktoken: pip install "depthroute[data]"'
        ) from error
    return tiktoken
