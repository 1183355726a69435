"""Benchmarks need a device, but the names that they use must exist without one."""

import ast
import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"
FILES = sorted(FOLDER.glob("*.py"))


def names_of_modules(tree: ast.Module, module: ModuleType) -> Iterator[tuple[ModuleType, str]]:
    """Yield `module.name`, and what is patched by its name, for modules of ours."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner, name = node.value, node.attr
        elif (
            isinstance(node, ast.Call) and len(node.args) > 1 and "patch" in ast.unparse(node.func)
        ):
            owner, second = node.args[:2]
            if not isinstance(second, ast.Constant):
                continue
            name = second.value
        else:
            continue
        found = getattr(module, owner.id, None) if isinstance(owner, ast.Name) else None
        if isinstance(found, ModuleType) and found.__name__.startswith("depthroute"):
            yield found, name


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
@pytest.mark.parametrize("file", FILES, ids=[file.stem for file in FILES])
def test_names_exist(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    module = importlib.import_module(file.stem)
    tree = ast.parse(file.read_text())
    missing = [name for found, name in names_of_modules(tree, module) if not hasattr(found, name)]
    assert not missing
    for node in ast.walk(tree):  # imports within functions
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("depthroute"):
            imported = importlib.import_module(node.module)
            assert not [a.name for a in node.names if not hasattr(imported, a.name)]
