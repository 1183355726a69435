"""What `auto_map` in a saved `config.json` names; every saved folder has a copy of this file."""

from depthroute.models.hf.config import DepthRouteConfig
from depthroute.models.hf.model import DepthRouteForCausalLM, DepthRouteModel

__all__ = ["DepthRouteConfig", "DepthRouteForCausalLM", "DepthRouteModel"]
