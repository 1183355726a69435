"""A folder for what the tests of compiled kernels compile."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder for a whole session: shapes share many kernels, each is compiled once."""
    return tmp_path_factory.mktemp("compiled")
