"""Tokenizers of this package as fast tokenizers of transformers."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from depthroute.data import Tokenizer
from depthroute.data.tokenizer import ByteTokenizer
from depthroute.data.tokenizer_common import END_TOKEN
from depthroute.data.tokenizer_huggingface import HuggingFaceTokenizer
from depthroute.data.tokenizer_tiktoken import TiktokenTokenizer

# runs of spaces, line ends, digits, several scripts, emoji that span tokens, special-looking text
_PROBES = (
    "Hello world",
    "  two  spaces\n\n\ttab \r\n end   ",
    "don't we'll HE'LL I'm",
    "1234567 x3.14e-10",
    "def f(x):\n    return x ** 2  # ok\n",
    "\u00e9\u00e8 \u4f60\u597d \u0434\u0430 \u05d0\u05d1 \U0001f600\U0001f44d\U0001f3fd",
    "a" * 50 + " " * 9 + "!?" * 9,
    END_TOKEN,
)


def fast_tokenizer(tokenizer: Tokenizer, *, context: int) -> Any:
    """Return a `PreTrainedTokenizerFast` that gives the same ids.

    It puts the end token first, as documents have it in training, uses it for padding too, and
    pads on the left. Text that spells the end token stays text.

    Args:
        tokenizer: What made the data of a run.
        context: Tokens that the model was trained on at a time.

    Raises:
        ValueError: The tokenizer is of a kind that cannot be converted, or the conversion gives
            other ids for some text.
    """
    from transformers import PreTrainedTokenizerFast

    backend, end_token = _backend(tokenizer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=end_token,
        eos_token=end_token,
        pad_token=end_token,
        padding_side="left",
        model_max_length=context,
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,
    )
    for text in _PROBES:
        expected = [tokenizer.end_id, *tokenizer.encode(text)]
        got = fast(text, verbose=False).input_ids  # not asking whether it fits the context
        if got != expected:
            raise ValueError(
                f"{tokenizer.name} cannot be converted: for {text!r} it gives {expected}, "
                f"the converted one {got}"
            )
    return fast


def _backend(tokenizer: Tokenizer) -> tuple[Any, str]:
    """Return a `tokenizers.Tokenizer` that starts texts with the end token, and that token."""
    import tokenizers

    match tokenizer:
        case HuggingFaceTokenizer():
            backend = tokenizers.Tokenizer.from_str(tokenizer.to_json())
        case ByteTokenizer():
            ranks = {bytes([i]): i for i in range(256)}
            backend = _byte_level(ranks, {END_TOKEN: tokenizer.end_id}, pattern=None)
        case TiktokenTokenizer():
            backend = _byte_level(
                tokenizer.ranks, tokenizer.special_tokens, pattern=tokenizer.pattern
            )
        case _:
            raise ValueError(f"{tokenizer.name} is of a kind that cannot be converted")
    end_token = backend.id_to_token(tokenizer.end_id)
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{end_token}:0 $A:0",
        pair=f"{end_token}:0 $A:0 {end_token}:1 $B:1",
        special_tokens=[(end_token, tokenizer.end_id)],
    )
    return backend, end_token


def _byte_level(
    ranks: Mapping[bytes, int], special_tokens: Mapping[str, int], *, pattern: str | None
) -> Any:
    """Return a byte-level BPE with these ids; a pattern of None cuts nothing."""
    import tokenizers

    names = _byte_names()
    spelled = {rank: "".join(names[byte] for byte in token) for token, rank in ranks.items()}
    merges = [
        (spelled[ranks[left]], spelled[ranks[right]])
        for token in sorted(ranks, key=ranks.__getitem__)
        if (pair := _last_merge(token, ranks)) is not None
        for left, right in [pair]
    ]
    vocab = {text: rank for rank, text in spelled.items()} | dict(special_tokens)
    # tiktoken takes a piece that is a token whole; uncut text, though, may spell a special token
    whole = pattern is not None
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges, ignore_merges=whole))
    parts = [tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    if pattern is not None:
        cut = tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
        parts.insert(0, cut)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(parts)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(sorted(special_tokens, key=special_tokens.__getitem__))
    return backend


def _last_merge(token: bytes, ranks: Mapping[bytes, int]) -> tuple[bytes, bytes] | None:
    """Return the two parts that are merged into `token`; None if no merge makes it."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        pairs = [ranks.get(a + b) for a, b in pairwise(parts)]
        best = min((rank for rank in pairs if rank is not None), default=None)
        if best is None or best >= ranks[token]:
            return None
        i = pairs.index(best)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return (parts[0], parts[1]) if len(parts) == 2 else None


def _byte_names() -> list[str]:
    """Return the printable character by which byte-level tokenizers spell each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    names = {byte: chr(byte) for byte in printable}
    others = (byte for byte in range(256) if byte not in names)
    names |= {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [names[byte] for byte in range(256)]
