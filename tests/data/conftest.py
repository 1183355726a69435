from collections.abc import Callable
from pathlib import Path

import pytest

from depthroute.data import TokenDataset, TokenWriter

MakeDataset = Callable[..., TokenDataset]


@pytest.fixture
def make_dataset(tmp_path: Path) -> MakeDataset:
    """Write splits of documents (lists of ids) as a dataset and open it; the end token is 0."""

    def make(*, vocab_size: int = 300, shard_tokens: int = 10**6, **splits) -> TokenDataset:
        out = tmp_path / f"dataset_{len(list(tmp_path.iterdir()))}"
        with TokenWriter(out, vocab_size=vocab_size, end_id=0, shard_tokens=shard_tokens) as writer:
            for split, documents in splits.items():
                for ids in documents:
                    writer.add(split, ids)
        return TokenDataset(out)

    return make
