"""Tokenizers of the `tokenizers` package, and training one."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from depthroute.data.tokenizer_common import END_TOKEN, checked_ids, write_info

JSON_FILE = "tokenizer.json"
# in order of preference; the first one in the vocabulary is the end of a document
KNOWN_END_TOKENS = (END_TOKEN, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<EOS>")


class HuggingFaceTokenizer:
    """A tokenizer of the `tokenizers` package.

    Args:
        text: Content of its `tokenizer.json`. Truncation and padding in it are switched off.

    Raises:
        ValueError: If it is not a tokenizer, has no known end token, or turns text that spells
            the end token into it.
    """

    def __init__(self, text: str) -> None:
        tokenizers = _import_tokenizers()
        try:
            tokenizer = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the package raises plain Exception for every fault
            raise ValueError(f"not a Hugging Face tokenizer.json: {error}") from error
        vocab = tokenizer.get_vocab()
        end_token = next((token for token in KNOWN_END_TOKENS if token in vocab), None)
        if end_token is None:
            raise ValueError(
                "tokenizer.json has no end-of-document token: expected one of "
                + ", ".join(KNOWN_END_TOKENS)
            )
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.add_special_tokens([end_token])
        tokenizer.encode_special_tokens = True
        self.name = f"huggingface-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
        self.vocab_size = max(vocab.values()) + 1
        self.end_id = vocab[end_token]
        self._text = text
        self._tokenizer = tokenizer
        if self.end_id in self.encode(end_token):
            raise ValueError(
                f"tokenizer.json turns the text {end_token!r} into the end token {self.end_id}"
            )

    def encode(self, text: str) -> list[int]:
        """See `Tokenizer`."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """See `Tokenizer`."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(encoding.ids, dtype=np.int64) for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        """See `Tokenizer`."""
        return self._tokenizer.decode(checked_ids(ids, self.vocab_size), skip_special_tokens=True)

    def token_bytes(self) -> np.ndarray | None:
        """See `Tokenizer`; known for a byte-level BPE that keeps the text as it is."""
        if not _is_exact_byte_level(json.loads(self._tokenizer.to_str())):
            return None
        table = np.zeros(self.vocab_size, dtype=np.uint16)
        for token, i in self._tokenizer.get_vocab(with_added_tokens=False).items():
            table[i] = len(token)  # one character of a byte-level token is one byte
        for i, token in self._tokenizer.get_added_tokens_decoder().items():
            table[i] = 0 if token.special else len(token.content.encode())
        return table

    def to_json(self) -> str:
        """Return the content of its `tokenizer.json`."""
        return self._text

    def save(self, folder: str | Path) -> None:
        """See `Tokenizer`."""
        (Path(folder) / JSON_FILE).write_text(self._text, encoding="utf-8")
        write_info(folder, kind="huggingface")


def train_bpe(texts: Iterable[str], vocab_size: int) -> HuggingFaceTokenizer:
    """Train a byte-level BPE with GPT-2's pattern and the end token `<|endoftext|>`.

    The same texts give the same tokenizer.

    Raises:
        ValueError: If `vocab_size` is below 257 (256 bytes and the end token), or the texts are
            too small to fill it.
    """
    tokenizers = _import_tokenizers()
    if vocab_size < 257:
        raise ValueError(f"vocab_size of a byte-level BPE must be >= 257, got {vocab_size}")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_TOKEN],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() < vocab_size:
        raise ValueError(
            f"the text is too small for a vocabulary of {vocab_size}: "
            f"only {tokenizer.get_vocab_size()} tokens could be made; ask for at most that many"
        )
    return HuggingFaceTokenizer(tokenizer.to_str())


def _is_exact_byte_level(config: Mapping[str, Any]) -> bool:
    """Whether every token stands for exactly the bytes of text that its characters name."""
    model, decoder, pre_tokenizer = config["model"], config["decoder"], config["pre_tokenizer"]
    if model["type"] != "BPE" or config["normalizer"] or not decoder or not pre_tokenizer:
        return False
    alphabet = _import_tokenizers().pre_tokenizers.ByteLevel.alphabet()
    affixes = model.get("continuing_subword_prefix") or model.get("end_of_word_suffix")
    strips = any(token["lstrip"] or token["rstrip"] for token in config["added_tokens"])
    return (
        decoder["type"] == "ByteLevel"
        and _keeps_text(pre_tokenizer)
        and not affixes
        and not strips
        and all(character in model["vocab"] for character in alphabet)
    )


def _keeps_text(pre_tokenizer: Mapping[str, Any]) -> bool:
    match pre_tokenizer["type"]:
        case "Sequence":
            return all(_keeps_text(part) for part in pre_tokenizer["pretokenizers"])
        case "ByteLevel":
            return not pre_tokenizer["add_prefix_space"]
        case "Split":
            return pre_tokenizer["behavior"] != "Removed"
        case kind:
            return kind == "Digits"


def _import_tokenizers() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise ImportError(
            'this tokenizer needs tokenizers: pip install "depthroute[data]"'
        ) from error
    return tokenizers
