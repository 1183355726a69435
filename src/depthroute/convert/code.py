"""The files that a model needs, flattened into one folder for `trust_remote_code=True`."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import depthroute
from depthroute.files import write_text

ROOT = Path(depthroute.__file__).parent
ENTRY = "depthroute.models.hf.modeling_depthroute"
# what the model card asks for; imports of anything else are guarded
_REQUIRED = {"numpy", "pydantic", "torch", "transformers"}


def write_code(folder: Path) -> None:
    """Write the entry file of a saved model and all that it imports from this package.

    A module `depthroute.a.b` becomes `depthroute_a_b.py`, the entry keeps its name, and their
    imports of each other become relative; nothing else changes.

    Args:
        folder: A folder that `save_pretrained` wrote.
    """
    done: set[str] = set()
    waiting = [ENTRY]
    while waiting:
        module = waiting.pop()
        if module in done:
            continue
        done.add(module)
        source = _path(module).read_text(encoding="utf-8")
        waiting += [imported for _, imported in _own_imports(source)]
        write_text(folder / f"{_flat(module)}.py", flatten(source))


def flatten(source: str) -> str:
    """Rewrite a module's imports from this package as relative ones.

    Imports of packages that a reader of the model may lack go into a `try` that changes nothing:
    transformers asks for every package that a file imports anywhere, except inside `try`.
    """
    lines = source.splitlines()
    edits = {node.lineno: (node, imported) for node, imported in _own_imports(source)}
    for number, (node, imported) in edits.items():
        old = f"from {node.module} import"
        line = lines[number - 1]
        assert line.strip().startswith(old), f"cannot rewrite {line!r}"
        lines[number - 1] = line.replace(old, f"from .{_flat(imported)} import", 1)
    for node in sorted(_optional_imports(source), key=lambda node: -node.lineno):
        block = lines[node.lineno - 1 : node.end_lineno]
        indent = " " * node.col_offset
        guarded = [f"{indent}try:", *(f"    {line}" for line in block)]
        guarded += [f"{indent}except ImportError:", f"{indent}    raise"]
        lines[node.lineno - 1 : node.end_lineno] = guarded
    return "\n".join(lines) + "\n"


def _own_imports(source: str) -> Iterator[tuple[ast.ImportFrom, str]]:
    """Yield each `from depthroute.x import y` and the module that it names."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            own = [alias.name for alias in node.names if alias.name.startswith("depthroute")]
            assert not own, f"cannot flatten import {own}: name what you need from it"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("depthroute"):
            yield node, node.module


def _optional_imports(source: str) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield imports of packages that are neither Python's own nor required."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
        else:
            continue
        packages = {name.partition(".")[0] for name in names}
        if packages - set(sys.stdlib_module_names) - _REQUIRED - {"depthroute"}:
            yield node


def _flat(module: str) -> str:
    return ENTRY.rpartition(".")[2] if module == ENTRY else module.replace(".", "_")


def _path(module: str) -> Path:
    path = ROOT.joinpath(*module.split(".")[1:])
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
