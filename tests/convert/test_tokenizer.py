"""Converted tokenizers: the same ids as the tokenizer that made the data."""

import random
from itertools import pairwise

import pytest
from transformers import AutoTokenizer

from depthroute.convert.tokenizer import fast_tokenizer
from depthroute.data import load_tokenizer, train_bpe
from depthroute.data.tokenizer_tiktoken import PATTERNS, TiktokenTokenizer

WORDS = "the then there theme help 12345 \u00e9t\u00e9 \u4f60\u597d don't\n\n  \t\U0001f600 a_b(c)"


def random_texts(count: int) -> list[str]:
    draw = random.Random(0)
    return ["".join(draw.choices(WORDS, k=draw.randint(0, 40))) for _ in range(count)]


def tiktoken_like(pattern: str) -> TiktokenTokenizer:
    """Learn 150 merges of neighbours from text, so that ids need several merges each."""
    ranks = {bytes([i]): 255 - i for i in range(256)}  # not in the order of the bytes
    corpus = [[bytes([b]) for b in word.encode()] for word in (WORDS + " ").split(" ") * 3]
    while len(ranks) < 300:
        pairs = sorted({a + b for row in corpus for a, b in pairwise(row)} - ranks.keys())
        if not pairs:
            break
        ranks[pairs[0]] = len(ranks) + 7  # gaps between ids
        for row in corpus:
            for i in reversed(range(len(row) - 1)):
                if i + 1 < len(row) and row[i] + row[i + 1] == pairs[0]:
                    row[i : i + 2] = [pairs[0]]
    ranks[b"zz q"] = 400  # a token that no merge makes
    special = {"<|endoftext|>": 410, "<|other|>": 405}
    return TiktokenTokenizer("made", pattern=PATTERNS[pattern], ranks=ranks, special_tokens=special)


MAKERS = {
    "bytes": lambda: load_tokenizer("bytes"),
    "bpe": lambda: train_bpe([WORDS] * 3, 290),
    "tiktoken_gpt2": lambda: tiktoken_like("gpt2"),
    "tiktoken_cl100k": lambda: tiktoken_like("cl100k_base"),
}


@pytest.mark.parametrize("name", MAKERS)
def test_ids_are_the_same_after_saving(tmp_path, name):
    own = MAKERS[name]()
    fast_tokenizer(own, context=64).save_pretrained(tmp_path)
    fast = AutoTokenizer.from_pretrained(tmp_path)
    assert len({len(own.encode(text)) for text in random_texts(50)}) > 5
    for text in [*random_texts(300), WORDS, "", "<|endoftext|>", "x<|other|> y", "zz q"]:
        ids = own.encode(text)
        assert fast(text, verbose=False).input_ids == [own.end_id, *ids], repr(text)
        assert fast(text, add_special_tokens=False, verbose=False).input_ids == ids
        assert fast.decode([own.end_id, *ids], skip_special_tokens=True) == own.decode(ids)
    assert fast.eos_token_id == fast.bos_token_id == fast.pad_token_id == own.end_id
    assert len(fast) <= own.vocab_size


def test_batches_are_padded_on_the_left(tmp_path):
    fast_tokenizer(load_tokenizer("bytes"), context=64).save_pretrained(tmp_path)
    batch = AutoTokenizer.from_pretrained(tmp_path)(["a", "abc"], padding=True)
    assert batch.input_ids == [[256, 256, 256, 97], [256, 97, 98, 99]]
    assert batch.attention_mask == [[0, 0, 1, 1], [1, 1, 1, 1]]


def test_a_tokenizer_that_cannot_be_converted_is_refused():
    class Own:
        name, vocab_size, end_id = "own", 3, 2

    with pytest.raises(ValueError, match="own is of a kind that cannot be converted"):
        fast_tokenizer(Own(), context=8)
    ranks = {bytes([i]): i for i in range(256)}
    special = {"<|endoftext|>": 256}
    broken = TiktokenTokenizer("odd", pattern=r".", ranks=ranks, special_tokens=special)
    with pytest.raises(ValueError, match="odd cannot be converted: for"):
        fast_tokenizer(broken, context=8)  # a pattern that drops line ends in tiktoken alone
