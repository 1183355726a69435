"""What `depthroute export` and `depthroute import` do."""

from depthroute.config import load
from depthroute.convert import ExportConfig, export_run, import_model


def run_export(run: str, out: str, settings: list[str], *, with_code: bool) -> str:
    """Export a run; returns what to say."""
    config = load(ExportConfig, None, settings)
    _hide_progress_bars()
    export_run(run, out, config, with_code=with_code)
    return f"made {out}"


def run_import(folder: str, out: str) -> str:
    """Import a folder; returns what to say."""
    _hide_progress_bars()
    import_model(folder, out)
    return f"made {out}\nnext: depthroute train {out}/start.toml out=... data.path=... ..."


def _hide_progress_bars() -> None:
    """Keep transformers from drawing where a log may be written."""
    try:
        from transformers.utils.logging import disable_progress_bar
    except ImportError as error:
        raise ImportError(
            'Hugging Face folders need transformers: pip install "depthroute[hf]"'
        ) from error
    disable_progress_bar()
