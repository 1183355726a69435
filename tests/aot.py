"""Compiling kernels for GPUs that are not there: what the launchers launch, ahead of time."""

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest


class Compiled(NamedTuple):
    """One kernel as ptxas left it."""

    name: str
    num_warps: int
    registers: int  # per thread
    stack_bytes: int  # per thread; registers that spill go there
    shared_bytes: int  # per program


@contextmanager
def recorded_launches(capability: int, folder: Path) -> Iterator[list[Compiled]]:
    """Compile every launch within the block for a compute capability instead of running it.

    The tensors of a launch may be on the CPU: only their types and alignment matter. The launch
    itself is triton's (3.6 and 3.7), up to the point where a device would be asked.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.runtime.jit import JITFunction, create_function_from_signature

    target = GPUTarget("cuda", capability, 32)
    backend = make_backend(target)
    compiled: list[Compiled] = []

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        options = {**kwargs, "debug": False}
        binder = create_function_from_signature(kernel.signature, kernel.params, backend)
        bound, specialization, _ = binder(*args, **options)
        parsed, signature, constants, attributes = kernel._pack_args(
            backend, options, bound, specialization, options
        )
        source = ASTSource(kernel, signature, constants, attributes)
        result = triton.compile(source, target=target, options=parsed.__dict__)
        binary = folder / "kernel.cubin"
        binary.write_bytes(result.asm["cubin"])
        usage = subprocess.run(
            [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(binary)],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
        assert found, usage
        registers, stack = map(int, found.groups())
        shared = result.metadata.shared
        compiled.append(Compiled(kernel.__name__, parsed.num_warps, registers, stack, shared))

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(folder / "cache"))
        patch.setattr(JITFunction, "run", compile_only)
        yield compiled
