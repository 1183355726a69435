"""What all tokenizers share."""

import json
from collections.abc import Iterable
from pathlib import Path

INFO_FILE = "tokenizer_info.json"
END_TOKEN = "<|endoftext|>"


def write_info(folder: str | Path, **info: object) -> None:
    """Write the small file that says which kind of tokenizer a folder holds."""
    (Path(folder) / INFO_FILE).write_text(json.dumps(info, indent=2) + "\n", encoding="utf-8")


def checked_ids(ids: Iterable[int], vocab_size: int) -> list[int]:
    """List the ids; ValueError if one is outside `[0, vocab_size)`."""
    known = [int(i) for i in ids]
    for i in known:
        if not 0 <= i < vocab_size:
            raise ValueError(f"ids must be in [0, {vocab_size}), got {i}")
    return known
