"""Flattened code: relative imports of what is there, and guards around what may be missing."""

import ast
import sys
from pathlib import Path

from transformers.dynamic_module_utils import get_imports, get_relative_imports

from depthroute.convert.code import flatten, write_code


def test_imports_of_the_package_become_relative():
    source = (
        "from depthroute.nn import (\n    Linear,\n)\n"
        "def f():\n    from depthroute.ops.checks import g  # why\n    import numpy as np\n"
    )
    flat = flatten(source)
    assert flat.source == (
        "from .depthroute_nn import (\n    Linear,\n)\n"
        "def f():\n    from .depthroute_ops_checks import g  # why\n    import numpy as np\n"
    )
    assert set(flat.needs) == {"depthroute.nn", "depthroute.ops.checks"}


def test_submodules_are_told_from_names():
    """`checks` is a file; `rms_norm` is a file too, but the package has a function of that name."""
    flat = flatten("from depthroute.ops import checks, rms_norm\n")
    assert flat.source == (
        "from .depthroute_ops import rms_norm\nimport sys\n"
        "from .depthroute_ops_checks import __name__ as checks\nchecks = sys.modules[checks]\n"
    )
    assert set(flat.needs) == {"depthroute.ops", "depthroute.ops.checks"}


def test_imports_of_other_packages_are_guarded(tmp_path):
    source = "import torch\ndef f():\n    import triton\n    from a.b import (\n        c,\n    )\n"
    flat = flatten(source).source
    path = tmp_path / "flat.py"
    path.write_text(flat)
    assert get_imports(path) == ["torch"]
    assert flat == (
        "import torch\ndef f():\n"
        "    try:\n        import triton\n    except ImportError:\n        raise\n"
        "    try:\n        from a.b import (\n            c,\n        )\n"
        "    except ImportError:\n        raise\n"
    )


def test_every_file_is_there_and_asks_for_little(tmp_path: Path):
    write_code(tmp_path)
    files = {path.stem for path in tmp_path.glob("*.py")}
    assert {"modeling_depthroute", "depthroute_models_decoder"} <= files
    assert not {name for name in files if name.startswith(("depthroute_train", "depthroute_data"))}
    for path in tmp_path.glob("*.py"):
        assert set(get_relative_imports(path)) <= files
        ast.parse(path.read_text())
        packages = {"torch", "transformers", "numpy", "pydantic"}
        assert {
            name for name in get_imports(path) if name not in sys.stdlib_module_names
        } <= packages, path
