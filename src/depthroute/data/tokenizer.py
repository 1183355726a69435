"""Text to token ids and back."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from depthroute.data.tokenizer_common import INFO_FILE, checked_ids, write_info
from depthroute.data.tokenizer_huggingface import JSON_FILE, HuggingFaceTokenizer
from depthroute.data.tokenizer_tiktoken import (
    RANKS_FILE,
    TiktokenTokenizer,
    read_ranks,
    tiktoken_from_spec,
)


class Tokenizer(Protocol):
    """What the library asks of a tokenizer.

    `name` identifies it, `vocab_size` is one more than its largest id, and `end_id` is its
    end-of-document token.
    """

    name: str
    vocab_size: int
    end_id: int

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, never special ones: text that spells a special token is just text."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`encode` of each text, faster; 1-D integer arrays."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`; special tokens vanish, invalid UTF-8 becomes U+FFFD.

        Raises:
            ValueError: If an id is outside `[0, vocab_size)`.
        """
        ...

    def token_bytes(self) -> np.ndarray | None:
        """UTF-8 bytes that each id stands for, uint16 `[vocab_size]`, 0 for special ones.

        None if the tokenizer cannot tell exactly.
        """
        ...

    def save(self, folder: str | Path) -> None:
        """Write what `load_tokenizer(folder)` needs into an existing folder."""
        ...


def load_tokenizer(spec: str | Path) -> Tokenizer:
    """Load a tokenizer.

    Args:
        spec: One of

            - `"bytes"`: every UTF-8 byte is a token;
            - `"tiktoken:NAME"`: an encoding of the tiktoken package, such as `gpt2`;
            - `"tiktoken:FILE"`: a ranks file, and after it `@gpt2` (the default) or
              `@cl100k_base` for the pattern that cuts text; `<|endoftext|>` is the id after the
              last rank;
            - the path of a Hugging Face `tokenizer.json`;
            - a folder with a saved tokenizer or a `tokenizer.json`.

    Raises:
        ValueError: If the spec is none of these, or the file is not a usable tokenizer.
        OSError: If a tiktoken encoding is neither cached nor downloadable.
        ImportError: If the package that the spec needs is not installed.
    """
    spec = str(spec)
    if spec == "bytes":
        return ByteTokenizer()
    if spec.startswith("tiktoken:"):
        return tiktoken_from_spec(spec.removeprefix("tiktoken:"))
    path = Path(spec)
    if path.is_dir():
        return _load_folder(path)
    if path.is_file() and path.suffix == ".json":
        return _from_json(path)
    raise ValueError(
        f'tokenizer must be "bytes", "tiktoken:NAME", "tiktoken:FILE", the path of a '
        f"tokenizer.json, a folder with a saved tokenizer, or where data is prepared "
        f'"bpe:N", which trains one, got "{spec}"'
    )


class ByteTokenizer:
    """Every UTF-8 byte is a token; id 256 ends a document."""

    name = "bytes"
    vocab_size = 257
    end_id = 256

    def encode(self, text: str) -> list[int]:
        """See `Tokenizer`."""
        return list(text.encode("utf-8"))

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """See `Tokenizer`."""
        return [np.frombuffer(text.encode("utf-8"), dtype=np.uint8) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """See `Tokenizer`."""
        known = checked_ids(ids, self.vocab_size)
        return bytes(i for i in known if i != self.end_id).decode("utf-8", errors="replace")

    def token_bytes(self) -> np.ndarray | None:
        """See `Tokenizer`."""
        table = np.ones(self.vocab_size, dtype=np.uint16)
        table[self.end_id] = 0
        return table

    def save(self, folder: str | Path) -> None:
        """See `Tokenizer`."""
        write_info(folder, kind="bytes")


def _from_json(path: Path) -> HuggingFaceTokenizer:
    """Read a `tokenizer.json`.

    Raises:
        ValueError: If it is not a usable tokenizer; the message names the file.
    """
    try:
        return HuggingFaceTokenizer(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _load_folder(folder: Path) -> Tokenizer:
    info_path, json_path = folder / INFO_FILE, folder / JSON_FILE
    info: dict[str, Any] = {"kind": "huggingface"}
    if info_path.is_file():
        info = json.loads(info_path.read_text(encoding="utf-8"))
    elif not json_path.is_file():
        raise ValueError(f"{folder} holds no tokenizer: neither {INFO_FILE} nor {JSON_FILE}")
    match info["kind"]:
        case "bytes":
            return ByteTokenizer()
        case "huggingface":
            return _from_json(json_path)
        case "tiktoken":
            return TiktokenTokenizer(
                info["name"],
                pattern=info["pattern"],
                ranks=read_ranks(folder / RANKS_FILE),
                special_tokens=info["special_tokens"],
            )
        case kind:
            raise ValueError(
                f'{info_path}: kind must be bytes, huggingface or tiktoken, got "{kind}"'
            )
