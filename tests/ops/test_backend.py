"""The choice of an implementation, on machines without a GPU."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from depthroute.ops import backend, checks, depth_attend, depth_merge, use_backend
from helpers import ignore_dynamo_warnings

V, Q = torch.zeros(2, 4, 8), torch.zeros(1, 8)


def read_of(values: Any = (V,), query: Any = Q) -> checks.Read:
    options: dict[str, Any] = {"keys": None, "heads": 1, "key_norm": "tail", "eps": 1e-6}
    return checks.read(values, query, **options, scale=1.0, bias=None, null=None)


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ValueError, match=r"backend must be one of .*got 'cuda'"):
        use_backend("cuda").__enter__()


CALLS = {
    "depth_attend": lambda: depth_attend([V], Q),
    "depth_merge": lambda: depth_merge(V[None], torch.zeros(1, 2, 4, 1), V, Q),
}


@pytest.mark.skipif(backend._interprets, reason="the interpreter takes CPU tensors")
@pytest.mark.parametrize("op", CALLS)
def test_triton_says_what_it_needs(op: str) -> None:
    message = rf"{op} cannot run .*(on cpu, not on a CUDA device|depthroute\[gpu\])"
    with use_backend("triton"), pytest.raises(ValueError, match=message):
        CALLS[op]()


UNSUPPORTED = {
    "float64": (read_of([V.double()]), "torch.float64 is not one of"),
    "float64_query": (read_of(query=Q.double()), "torch.float64 is not one of"),
    "sources": (read_of([V] * 130), "130 sources, more than 129"),
    "queries": (read_of(query=torch.zeros(17, 8)), "17 queries, more than 16"),
    "width": (read_of([torch.zeros(2, 8193)]), "8193 columns, more than 8192"),
    "nothing": (read_of([V] * 129, torch.zeros(16, 8)), ""),
}


@pytest.mark.parametrize(("read", "reason"), UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_reasons_against_the_kernels(read: checks.Read, reason: str) -> None:
    found = backend._unsupported_read(read)
    assert found.startswith(reason)
    assert bool(found) == bool(reason)


@pytest.fixture
def messages(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], list[tuple[str, str]]]:
    monkeypatch.setattr(backend, "_said", set())
    caplog.set_level(logging.INFO, "depthroute.ops")
    return lambda: [(record.levelname, record.getMessage()) for record in caplog.records]


def test_auto_leaves_the_cpu_to_plain_pytorch_and_says_so_once(messages: Any) -> None:
    for _ in range(2):
        depth_attend([V], Q)
    assert messages() == [("INFO", "depth_attend runs in plain PyTorch: the tensors are on cpu")]


@ignore_dynamo_warnings
def test_a_compiled_read_says_it_too(messages: Any) -> None:
    torch.compiler.reset()
    torch.compile(depth_attend, backend="eager", fullgraph=True)([V], Q)
    assert messages() == [("INFO", "depth_attend runs in plain PyTorch: the tensors are on cpu")]


def test_the_setting_is_restored(messages: Any) -> None:
    with use_backend("triton"), use_backend("reference"):
        depth_attend([V], Q)
    depth_attend([V], Q)
    assert [message for _, message in messages()] == [
        "depth_attend runs in plain PyTorch: the backend is set so",
        "depth_attend runs in plain PyTorch: the tensors are on cpu",
    ]


def test_a_missed_kernel_is_a_warning(messages: Any) -> None:
    backend.report("depth_attend", "")
    backend.report("depth_merge", "17 queries, more than 16")
    assert messages() == [
        ("INFO", "depth_attend runs in Triton kernels"),
        ("WARNING", "depth_merge runs in plain PyTorch: 17 queries, more than 16"),
    ]
