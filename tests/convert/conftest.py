"""Tests of conversions, which need the extra `hf`."""

import pytest

pytest.importorskip("transformers")

from transformers.utils import logging


@pytest.fixture(autouse=True, scope="session")
def _quiet() -> None:
    logging.disable_progress_bar()
    logging.set_verbosity_error()
