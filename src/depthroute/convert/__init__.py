"""Trained models to and from Hugging Face folders."""

from depthroute.convert.export import ExportConfig, export_run
from depthroute.convert.hugging_face import import_model, to_hugging_face

__all__ = ["ExportConfig", "export_run", "import_model", "to_hugging_face"]
