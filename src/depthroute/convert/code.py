"""The files that a model needs, flattened into one folder for `trust_remote_code=True`."""

import ast
import sys
from pathlib import Path
from typing import NamedTuple

import depthroute
from depthroute.files import write_text

ROOT = Path(depthroute.__file__).parent
ENTRY = "depthroute.models.hf.modeling_depthroute"
_IMPORTS = (ast.Import, ast.ImportFrom)
# what the model card asks for; imports of anything else are guarded
_REQUIRED = {"depthroute", "numpy", "pydantic", "torch", "transformers"}


class Flattened(NamedTuple):
    """A rewritten module, and the modules of this package that it imports."""

    source: str
    needs: tuple[str, ...]


def write_code(folder: Path) -> None:
    """Write the entry file of a saved model and all that it imports from this package.

    A module `depthroute.a.b` becomes `depthroute_a_b.py`; the entry keeps its name.

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
        flat = flatten(_path(module).read_text(encoding="utf-8"))
        waiting += flat.needs
        name = ENTRY.rpartition(".")[2] if module == ENTRY else _flat(module)
        write_text(folder / f"{name}.py", flat.source)


def flatten(source: str) -> Flattened:
    """Make a module's imports from this package relative, and leave everything else.

    Imports of packages that a reader of the model may lack go into a `try` that changes nothing:
    transformers asks for every package that a file imports anywhere, except inside `try`.
    """
    lines, needs = source.splitlines(), []
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, _IMPORTS)]
    for node in sorted(nodes, key=lambda node: -node.lineno):
        block = lines[node.lineno - 1 : node.end_lineno]
        if isinstance(node, ast.ImportFrom) and _packages(node) == {"depthroute"}:
            modules, block = _relative(node, block)
            needs += modules
        elif _packages(node) - _REQUIRED - set(sys.stdlib_module_names):
            indent = " " * node.col_offset
            block = [f"{indent}try:", *(f"    {line}" for line in block)]
            block += [f"{indent}except ImportError:", f"{indent}    raise"]
        lines[node.lineno - 1 : node.end_lineno] = block
    return Flattened("\n".join(lines) + "\n", tuple(needs))


def _relative(node: ast.ImportFrom, block: list[str]) -> tuple[list[str], list[str]]:
    """Return the modules that a `from depthroute.a import b` needs, and its new lines."""
    assert node.module is not None
    submodules = [alias for alias in node.names if _is_submodule(node.module, alias.name)]
    names = [alias for alias in node.names if alias not in submodules]
    modules = [f"{node.module}.{alias.name}" for alias in submodules]
    indent, lines = " " * node.col_offset, []
    if not submodules:
        old, new = f"from {node.module} import", f"from .{_flat(node.module)} import"
        return [node.module], [block[0].replace(old, new, 1), *block[1:]]
    if names:
        modules.append(node.module)
        only = ast.ImportFrom(_flat(node.module), names, level=1)
        lines = [indent + ast.unparse(only)]
    for alias in submodules:
        # transformers copies the files that `from .x import` names, not those of `from . import x`
        name = alias.asname or alias.name
        lines += [
            f"{indent}import sys",
            f"{indent}from .{_flat(f'{node.module}.{alias.name}')} import __name__ as {name}",
            f"{indent}{name} = sys.modules[{name}]",
        ]
    return modules, lines


def _packages(node: ast.Import | ast.ImportFrom) -> set[str]:
    if isinstance(node, ast.Import):
        return {alias.name.partition(".")[0] for alias in node.names}
    return {(node.module or "").partition(".")[0]}


def _is_submodule(package: str, name: str) -> bool:
    """Tell a module from a name that the package's `__init__` imports."""
    if not _path(f"{package}.{name}").is_file():
        return False
    tree = ast.parse(_path(package).read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, _IMPORTS)]
    return all(name != (alias.asname or alias.name) for node in imports for alias in node.names)


def _flat(module: str) -> str:
    return module.replace(".", "_")


def _path(module: str) -> Path:
    path = ROOT.joinpath(*module.split(".")[1:])
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
