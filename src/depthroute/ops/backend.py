"""Which implementation runs a read: the setting, the limits of the kernels, and one log line."""

import importlib.util
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, get_args

import torch
from torch import Tensor

from depthroute.ops.checks import Read

Backend = Literal["auto", "reference", "triton"]

MAX_SOURCES, MAX_QUERIES, MAX_WIDTH = 129, 16, 8192

_logger = logging.getLogger("depthroute.ops")
_setting: Backend = "auto"
_said: set[str] = set()
# read once: torch.compile traces the code below
_has_triton = importlib.util.find_spec("triton") is not None
_interprets = os.environ.get("TRITON_INTERPRET") == "1"


@contextmanager
def use_backend(backend: Backend) -> Iterator[None]:
    """Choose what runs the reads within the block, in every thread of the process.

    A backward pass runs where its forward pass ran.

    Args:
        backend: "auto" takes the Triton kernels for CUDA tensors that they support, and plain
            PyTorch for everything else; "reference" takes plain PyTorch; "triton" refuses what the
            kernels do not support.

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


def describe_backend(device: torch.device) -> str:
    """Say what runs the reads of tensors on a device, and why if it is not the kernels.

    Single reads that the kernels do not support run in plain PyTorch on every device.
    """
    reason = _against_device(device)
    return f"plain PyTorch, since {reason}" if reason else "Triton kernels"


def runs_in_triton(op: str, read: Read) -> bool:
    """Decide for one call of an op, and log each decision once.

    Raises:
        ValueError: The backend is "triton" and the kernels do not support the read.
    """
    reason = _against_device(read.values[0].device) or _unsupported_read(read)
    return _decide(op, read.values[0], reason)


def fuses(value: Tensor, apart: str = "") -> bool:
    """Decide whether the kernels of the block schedule take a tensor, and log each reason once.

    Where they do not, the operations that they replace run one by one, by their own decisions.

    Args:
        value: A source or the residual stream.
        apart: Why the reads must run one by one; nothing if they need not.

    Raises:
        ValueError: The backend is "triton" and no kernels support the tensor.
    """
    reason = _against_device(value.device) or _unsupported_value(value)
    if apart and not reason:
        _log_once(f"depth reads run one by one: {apart}", logging.INFO)
        return False
    return _decide("the block schedule", value, reason)


def report(op: str, reason: str, kernels_expected: bool = True) -> None:
    """Log once what runs an op: the kernels, or plain PyTorch for a reason."""
    if reason:
        level = logging.WARNING if kernels_expected else logging.INFO
        _log_once(f"{op} runs in plain PyTorch: {reason}", level)
    else:
        _log_once(f"{op} runs in Triton kernels", logging.INFO)


def log_once(message: str, level: int) -> None:
    """Log a message, unless it was logged before."""
    if message not in _said:
        _said.add(message)
        _logger.log(level, message)


def _decide(op: str, value: Tensor, reason: str) -> bool:
    """Log what runs an op, and return whether it is the kernels."""
    if _setting == "triton" and reason:
        raise ValueError(f'{op} cannot run with backend "triton": {reason}')
    report(op, reason, _setting == "auto" and value.is_cuda)
    return not reason


def _log_once(message: str, level: int) -> None:
    if torch.compiler.is_compiling():
        from depthroute.ops.traced import log
    else:
        log = log_once
    log(message, level)


def _against_device(device: torch.device) -> str:
    """Return why the kernels do not run on a device by the present setting, or nothing."""
    if _setting == "reference":
        return "the backend is set so"
    if _setting == "auto" and device.type != "cuda":  # nor in the interpreter, which is slow
        return f"the tensors are on {device.type}"
    return _unsupported_device(device)


def _unsupported_device(device: torch.device) -> str:
    if not _has_triton:
        return 'triton is not installed: pip install "depthroute[gpu]"'
    if device.type == "cpu" and _interprets:
        return ""
    if device.type != "cuda":
        return f"the tensors are on {device.type}, not on a CUDA device"
    if torch.version.hip is not None:
        return "AMD devices are not supported"
    major = torch.cuda.get_device_properties(device).major
    return "" if major >= 8 else f"the device has compute capability {major}.x, below 8.0"


def _unsupported_value(value: Tensor) -> str:
    if value.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"{value.dtype} is not one of float32, bfloat16, float16"
    if value.shape[-1] > MAX_WIDTH:
        return f"{value.shape[-1]} columns, more than {MAX_WIDTH}"
    return ""


def _unsupported_read(read: Read) -> str:
    value, (num_queries, rank) = read.values[0], read.query.shape
    if reason := _unsupported_value(value):
        return reason
    for tensor in (read.query, *(read.keys or ())[:1]):
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"{tensor.dtype} is not one of float32, bfloat16, float16"
    if len(read.values) > MAX_SOURCES:
        return f"{len(read.values)} sources, more than {MAX_SOURCES}"
    if num_queries > MAX_QUERIES:
        return f"{num_queries} queries, more than {MAX_QUERIES}"
    return f"a rank of {rank}, more than {MAX_WIDTH}" if rank > MAX_WIDTH else ""
