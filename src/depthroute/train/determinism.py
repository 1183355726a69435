"""Runs that can be repeated bit for bit."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def determinism(wanted: bool) -> Iterator[None]:
    """Have torch add in a fixed order inside, or fail where it cannot.

    Args:
        wanted: False leaves torch as it is.
    """
    if not wanted:
        yield
        return
    # cuBLAS reads it when its first product runs
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
