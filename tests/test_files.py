"""What cannot be written is named, and nothing of it stays."""

import pytest

from depthroute.files import new_folder, replacing, write_text
from helpers import full_disk


def test_a_full_disk_names_the_file(tmp_path):
    path = tmp_path / "table.md"
    with full_disk(), pytest.raises(OSError, match=r"File too large: '.*/table\.md'"):
        write_text(path, "text")
    assert not list(tmp_path.iterdir())


def test_a_full_disk_names_the_folder(tmp_path):
    with (
        full_disk(),
        pytest.raises(OSError, match=r"File too large: '.*/export'"),
        new_folder(tmp_path / "export") as folder,
    ):
        (folder / "file").write_text("text")
    assert not list(tmp_path.iterdir())


def test_errors_that_name_a_file_or_have_words_of_their_own_stay(tmp_path):
    with pytest.raises(OSError, match=r"/missing'$"), replacing(tmp_path / "file"):
        (tmp_path / "missing").read_bytes()
    with pytest.raises(OSError, match=r"^disk full$"), replacing(tmp_path / "file"):
        raise OSError("disk full")
