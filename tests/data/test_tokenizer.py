import base64
import json
from pathlib import Path

import numpy as np
import pytest

from depthroute.data import Tokenizer, load_tokenizer, train_bpe

TEXTS = [
    "the cat sat on the mat, the cat sat on the hat\n",
    "def the_cat(mat):\n    return mat + 1  # 12345\n",
    "na\u00efve caf\u00e9 \u6f22\u5b57 \U0001f642 \r\n\t don't  DON'T ",
    "a<|endoftext|>b <|endoftext|>",
    " ",
]
MERGES = [b"th", b"the", b" the", b"at", b"cat", b" cat", b"  "]


def write_ranks(path: Path, tokens: list[bytes]) -> Path:
    lines = [base64.b64encode(token).decode() + f" {rank}\n" for rank, token in enumerate(tokens)]
    path.write_text("".join(lines))
    return path


def all_bytes() -> list[bytes]:
    return [bytes([i]) for i in range(256)]


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return train_bpe(TEXTS * 3, 300)


@pytest.fixture(params=["bytes", "bpe", "tiktoken"])
def tokenizer(request, tmp_path) -> Tokenizer:
    if request.param == "bpe":
        return request.getfixturevalue("bpe")
    if request.param == "tiktoken":
        ranks = write_ranks(tmp_path / "tiny.tiktoken", all_bytes() + MERGES)
        return load_tokenizer(f"tiktoken:{ranks}")
    return load_tokenizer("bytes")


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_encoding(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_of_tokens_add_up_to_bytes_of_text(tokenizer, text):
    table = tokenizer.token_bytes()
    assert table.shape == (tokenizer.vocab_size,)
    assert table.dtype == np.uint16
    assert table[tokenizer.encode(text)].sum() == len(text.encode())
    assert table[tokenizer.end_id] == 0


def test_text_that_spells_the_end_token_is_ordinary_text(tokenizer):
    ids = tokenizer.encode("a<|endoftext|>b")
    assert tokenizer.end_id not in ids
    assert all(0 <= i < tokenizer.vocab_size for i in ids)


def test_batch_encoding_equals_single_encoding(tokenizer):
    batch = tokenizer.encode_batch(TEXTS)
    assert [ids.tolist() for ids in batch] == [tokenizer.encode(text) for text in TEXTS]


def test_saved_tokenizer_loads_from_its_folder_alone(tokenizer, tmp_path):
    folder = tmp_path / "saved"
    folder.mkdir()
    tokenizer.save(folder)
    for path in tmp_path.glob("*.tiktoken"):
        path.unlink()
    loaded = load_tokenizer(folder)
    assert (loaded.name, loaded.vocab_size, loaded.end_id) == (
        tokenizer.name,
        tokenizer.vocab_size,
        tokenizer.end_id,
    )
    assert [loaded.encode(text) for text in TEXTS] == [tokenizer.encode(text) for text in TEXTS]
    assert np.array_equal(loaded.token_bytes(), tokenizer.token_bytes())


def test_decoding_replaces_invalid_utf8_and_drops_the_end_token(tokenizer):
    accented = tokenizer.encode("\u0416")  # two bytes, never merged in these vocabularies
    assert len(accented) == 2
    assert tokenizer.decode([tokenizer.end_id, accented[0], *tokenizer.encode("x")]) == "\ufffdx"


@pytest.mark.parametrize("shift", [0, 7])
def test_decoding_rejects_ids_out_of_range(tokenizer, shift):
    with pytest.raises(ValueError, match=rf"\[0, {tokenizer.vocab_size}\)"):
        tokenizer.decode([tokenizer.vocab_size + shift])


def test_byte_ids_are_the_bytes():
    assert load_tokenizer("bytes").encode("h\u00e9") == [104, 195, 169]


def test_ranks_are_merged_lowest_first_and_end_follows_the_last(tmp_path):
    ranks = write_ranks(tmp_path / "tiny.tiktoken", all_bytes() + MERGES)
    tokenizer = load_tokenizer(f"tiktoken:{ranks}")
    assert tokenizer.encode("the cat") == [257, 261]
    assert tokenizer.end_id == 263
    assert tokenizer.vocab_size == 264


def test_pattern_of_a_ranks_file_can_be_chosen(tmp_path):
    ranks = write_ranks(tmp_path / "tiny.tiktoken", [*all_bytes(), b"12", b"1212"])
    gpt2 = load_tokenizer(f"tiktoken:{ranks}")
    cl100k = load_tokenizer(f"tiktoken:{ranks}@cl100k_base")
    assert gpt2.encode("1212") == [257]
    assert cl100k.encode("1212") == [256, ord("1"), ord("2")]  # at most three digits together


def test_changed_ranks_file_is_read_anew(tmp_path):
    path = tmp_path / "tiny.tiktoken"
    write_ranks(path, [*all_bytes(), b"ab"])
    assert load_tokenizer(f"tiktoken:{path}").encode("abcd") == [256, ord("c"), ord("d")]
    write_ranks(path, [*all_bytes(), b"cd"])
    assert load_tokenizer(f"tiktoken:{path}").encode("abcd") == [ord("a"), ord("b"), 256]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("YQ== 0\nnot-base64! 1\n", ":2: expected a base64 token"),
        ("YQ== 0\nYg==\n", ":2: expected a base64 token"),
        ("YQ== 0\nYg== 0\n", "distinct ranks"),
        ("", "distinct ranks"),
        ("YQ== 0\n", "255 of the 256 single bytes"),
    ],
)
def test_malformed_ranks_file_is_rejected(tmp_path, content, message):
    path = tmp_path / "bad.tiktoken"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        load_tokenizer(f"tiktoken:{path}")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("byte", 'must be "bytes"'),
        ("bpe:4096", 'must be "bytes"'),
        ("tiktoken:gpt3", 'unknown tiktoken encoding "gpt3"; known: .*gpt2'),
        ("tiktoken:/nowhere/x.tiktoken", "no ranks file"),
        ("tiktoken:x.tiktoken@gpt5", "patterns gpt2, cl100k_base"),
    ],
)
def test_unknown_spec_is_rejected(spec, message):
    with pytest.raises(ValueError, match=message):
        load_tokenizer(spec)


def test_encoding_that_cannot_be_downloaded_says_how_to_give_a_file(monkeypatch):
    def offline(name):
        raise OSError("no route to host")

    monkeypatch.setattr("tiktoken.get_encoding", offline)
    with pytest.raises(OSError, match=r"no route to host.*tiktoken:/path/gpt2\.tiktoken"):
        load_tokenizer("tiktoken:gpt2")


def test_empty_folder_holds_no_tokenizer(tmp_path):
    with pytest.raises(ValueError, match="holds no tokenizer"):
        load_tokenizer(tmp_path)


def test_trained_bpe_is_deterministic_and_has_the_size_asked_for(bpe):
    assert bpe.vocab_size == 300
    assert train_bpe(TEXTS * 3, 300).name == bpe.name
    assert train_bpe(TEXTS * 3, 299).name != bpe.name


@pytest.mark.parametrize(
    ("vocab_size", "message"), [(256, ">= 257, got 256"), (5000, "too small for a vocabulary")]
)
def test_bpe_that_cannot_be_trained_is_rejected(vocab_size, message):
    with pytest.raises(ValueError, match=message):
        train_bpe(["ab ab"], vocab_size)


def edited_json(bpe: Tokenizer, folder: Path, edit) -> str:
    bpe.save(folder)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))
    return str(path)


def test_truncation_in_a_tokenizer_json_is_switched_off(bpe, tmp_path):
    def edit(content):
        content["truncation"] = {
            "direction": "Right",
            "max_length": 4,
            "strategy": "LongestFirst",
            "stride": 0,
        }

    assert load_tokenizer(edited_json(bpe, tmp_path, edit)).encode(TEXTS[0]) == bpe.encode(TEXTS[0])


def test_end_token_that_is_not_marked_special_is_still_never_emitted(bpe, tmp_path):
    def edit(content):
        content["added_tokens"][0]["special"] = False

    tokenizer = load_tokenizer(edited_json(bpe, tmp_path, edit))
    assert tokenizer.end_id not in tokenizer.encode("a<|endoftext|>b")


def test_end_token_is_found_under_its_other_names(bpe, tmp_path):
    def edit(content):
        content["added_tokens"][0]["content"] = "</s>"
        content["model"]["vocab"]["</s>"] = content["model"]["vocab"].pop("<|endoftext|>")

    tokenizer = load_tokenizer(edited_json(bpe, tmp_path, edit))
    assert tokenizer.end_id == bpe.end_id
    assert tokenizer.end_id not in tokenizer.encode("a</s>b")


def test_tokenizer_without_an_end_token_is_rejected(bpe, tmp_path):
    def edit(content):
        content["added_tokens"] = []
        content["model"]["vocab"]["<other>"] = content["model"]["vocab"].pop("<|endoftext|>")

    with pytest.raises(ValueError, match=r"no end-of-document token.*</s>"):
        load_tokenizer(edited_json(bpe, tmp_path, edit))


def test_tokenizer_that_emits_its_end_token_for_text_is_rejected(tmp_path):
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": {"</s>": 0, "a": 1}, "unk_token": "a"},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="turns the text '</s>' into the end token 0"):
        load_tokenizer(tmp_path)


def test_json_that_is_no_tokenizer_is_rejected(tmp_path):
    (tmp_path / "tokenizer.json").write_text('{"a": 1}')
    with pytest.raises(ValueError, match=r"not a Hugging Face tokenizer\.json"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "edit",
    [
        lambda content: content.update(normalizer={"type": "NFC"}),
        lambda content: content["pre_tokenizer"].update(add_prefix_space=True),
        lambda content: content.update(pre_tokenizer={"type": "WhitespaceSplit"}),
        lambda content: content.update(decoder=None),
    ],
)
def test_bytes_of_tokens_are_unknown_when_the_text_is_changed(bpe, tmp_path, edit):
    assert load_tokenizer(edited_json(bpe, tmp_path, edit)).token_bytes() is None
