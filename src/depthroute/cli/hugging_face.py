"""What `depthroute export` and `depthroute import` do."""

from depthroute.config import load
from depthroute.convert import ExportConfig, export_run, import_model


def run_export(run: str, out: str, settings: list[str], *, with_code: bool) -> str:
    """Export a run; returns what to say."""
    export_run(run, out, load(ExportConfig, None, settings), with_code=with_code)
    return f"made {out}"


def run_import(folder: str, out: str) -> str:
    """Import a folder; returns what to say."""
    import_model(folder, out)
    return f"made {out}\nnext: depthroute train {out}/start.toml out=... data.path=... ..."
