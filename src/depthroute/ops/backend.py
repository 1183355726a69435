"""Which implementation runs a read: the setting, the limits of the kernels, and one log line."""

import importlib.util
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, get_args

import torch

from depthroute.ops.checks import Read

Backend = Literal["auto", "reference", "triton"]

MAX_SOURCES, MAX_QUERIES, MAX_WIDTH = 129, 16, 8192

_logger = logging.getLogger("depthroute.ops")
_setting: Backend = "auto"
_said: set[tuple[str, str]] = set()
_has_triton = importlib.util.find_spec("triton") is not None


@contextmanager
def use_backend(backend: Backend) -> Iterator[None]:
    """Choose what runs the reads within the block, in every thread of the process.

    Args:
        backend: "auto" takes the Triton kernels for CUDA tensors that they support, and plain
            PyTorch for all others; "reference" takes plain PyTorch; "triton" refuses what the
            kernels do not support. The backward pass follows the forward pass.

    Raises:
        ValueError: An unknown backend; within the block, a read that "triton" cannot run.
    """
    global _setting
    if backend not in get_args(Backend):
        raise ValueError(f"backend must be one of {get_args(Backend)}, got {backend!r}")
    before, _setting = _setting, backend
    try:
        yield
    finally:
        _setting = before


def runs_in_triton(op: str, read: Read) -> bool:
    """Decide for one call of an op; the first call of each outcome is logged.

    Raises:
        ValueError: The backend is "triton" and the kernels do not support the read.
    """
    if _setting == "reference":
        return False
    device = read.values[0].device
    reason = _unsupported_device(device.type, device.index) or _unsupported_read(read)
    if _setting == "triton" and reason:
        raise ValueError(f'{op} cannot run with backend "triton": {reason}')
    if _setting == "auto" and device.type != "cuda":
        return False
    _say(op, reason)
    return not reason


# Dynamo calls these when it traces, instead of tracing into them
@torch.compiler.assume_constant_result
def _unsupported_device(kind: str, index: int | None) -> str:
    if not _has_triton:
        return 'triton is not installed: pip install "depthroute[gpu]"'
    if kind == "cpu" and os.environ.get("TRITON_INTERPRET") == "1":
        return ""
    if kind != "cuda":
        return f"the tensors are on {kind}, not on a CUDA device"
    if torch.version.hip is not None:
        return "AMD devices are not supported"
    capability = torch.cuda.get_device_capability(index)
    if capability < (8, 0):
        return f"the device has compute capability {capability}, below (8, 0)"
    return ""


def _unsupported_read(read: Read) -> str:
    value, (num_queries, rank) = read.values[0], read.query.shape
    dtypes = {value.dtype, read.query.dtype, *(key.dtype for key in read.keys or ())}
    for dtype in dtypes - {torch.float32, torch.bfloat16, torch.float16}:
        return f"{dtype} is not among float32, bfloat16 and float16"
    if len(read.values) > MAX_SOURCES:
        return f"more than {MAX_SOURCES} sources, {len(read.values)}"
    if num_queries > MAX_QUERIES:
        return f"more than {MAX_QUERIES} queries, {num_queries}"
    if max(value.shape[-1], rank) > MAX_WIDTH:
        return f"a value or key wider than {MAX_WIDTH}, {max(value.shape[-1], rank)}"
    return ""


@torch.compiler.assume_constant_result
def _say(op: str, reason: str) -> None:
    if (op, reason) in _said:
        return
    _said.add((op, reason))
    if reason:
        _logger.warning("%s runs in plain PyTorch: %s", op, reason)
    else:
        _logger.info("%s runs in Triton kernels", op)
