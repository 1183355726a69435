"""The `depthroute` command."""

from depthroute.cli.main import main

__all__ = ["main"]
