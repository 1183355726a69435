"""Who may import whom: the levels of the package, and optional packages only when needed."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import depthroute

ROOT = Path(depthroute.__file__).parent
LEVELS = {
    **dict.fromkeys(("config", "files", "ops", "table"), 0),
    **dict.fromkeys(("nn", "residual", "optim", "data"), 1),
    **dict.fromkeys(("models", "parallel", "account", "paper"), 2),
    **dict.fromkeys(("train", "evaluate", "diagnose", "convert"), 3),
    **dict.fromkeys(("cli", "__main__"), 4),
}
# these files are the form of a package's own classes; others import them inside functions
ADAPTERS = {"depthroute.models.hf": {"transformers"}}
OPTIONAL = {
    "triton",
    "transformers",
    "safetensors",
    "accelerate",
    "lm_eval",
    "matplotlib",
    "tokenizers",
    "tiktoken",
    "pyarrow",
}
FILES = sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


def part_of(path: Path) -> str:
    """Return the name of the subpackage or module that a file belongs to."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(nodes: list[ast.stmt]) -> set[str]:
    """Return the modules that any of the statements names, however deep inside."""
    found = set()
    for node in (inner for outer in nodes for inner in ast.walk(outer)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def without_functions(nodes: list[ast.stmt]) -> list[ast.stmt]:
    """Return the statements that run on import: also those in classes and under `if` or `try`."""
    kept = []
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            kept.append(node)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            children = (child for child in ast.iter_child_nodes(node))
            kept += without_functions([child for child in children if isinstance(child, ast.AST)])
    return kept


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_imports_from_its_own_level_or_below(path: Path) -> None:
    part, body = part_of(path), ast.parse(path.read_text()).body
    assert part in LEVELS, f"give {part} a level"
    for name in imports(body):
        package, _, rest = name.partition(".")
        other = rest.partition(".")[0]
        if package == "depthroute" and other and not other.startswith("__"):
            assert other in LEVELS, f"{name} has no level"
            assert LEVELS[other] <= LEVELS[part], f"{part} imports {name}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_optional_packages_are_imported_inside_functions(path: Path) -> None:
    on_import = imports(without_functions(ast.parse(path.read_text()).body))
    # a kernel is compiled where it is defined; whoever launches it imports its module
    allowed = {"triton"} if path.parent == ROOT / "ops" / "kernels" else set()
    for adapter, packages in ADAPTERS.items():
        if adapter.split(".")[1:] == list(path.relative_to(ROOT).parts[:-1]):
            allowed |= packages
        else:
            assert not {name for name in on_import if name.startswith(adapter)}
    assert not {name.partition(".")[0] for name in on_import} & (OPTIONAL - allowed)


def test_the_rules_see_through_classes_and_branches() -> None:
    source = "class A:\n  if x:\n    import triton\ndef f():\n  import pyarrow\n"
    body = ast.parse(source).body
    assert imports(without_functions(body)) == {"triton"}
    assert imports(body) == {"triton", "pyarrow"}


def modules_after(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(run.stdout.split())


def test_importing_the_evaluation_and_the_command_loads_no_harness() -> None:
    ours = modules_after("import depthroute.evaluate, depthroute.cli.evaluate")
    assert "depthroute.evaluate" in ours
    assert not ours & {"lm_eval", "datasets"}


def test_importing_the_package_loads_no_optional_package() -> None:
    parts = "depthroute.models, depthroute.train, depthroute.convert, depthroute.cli"
    ours = modules_after(f"import {parts}") - modules_after("import torch")
    assert set(parts.split(", ")) <= ours
    assert not ours & OPTIONAL
