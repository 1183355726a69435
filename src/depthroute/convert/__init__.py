"""Trained models to and from Hugging Face folders."""

from depthroute.convert.export import ExportConfig, export_run
from depthroute.convert.hugging_face import from_hugging_face, import_model, to_hugging_face

__all__ = ["ExportConfig", "export_run", "from_hugging_face", "import_model", "to_hugging_face"]
