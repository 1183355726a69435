"""The decoder as a Hugging Face model; importing this registers it with the Auto classes.

After `import depthroute.models.hf`, `AutoModelForCausalLM.from_pretrained(folder)` loads a saved
model. Without the import, `trust_remote_code=True` finds it through `auto_map` in `config.json`.
"""

try:
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, __version__
except ImportError as error:
    raise ImportError(
        'Hugging Face models need transformers: pip install "depthroute[hf]"'
    ) from error

if tuple(map(int, __version__.split(".")[:2])) < (5, 17):
    raise ImportError(f"Hugging Face models need transformers >= 5.17, got {__version__}")

from depthroute.models.hf.config import DepthRouteConfig
from depthroute.models.hf.model import DepthRouteForCausalLM, DepthRouteModel

AutoConfig.register(DepthRouteConfig.model_type, DepthRouteConfig)
AutoModel.register(DepthRouteConfig, DepthRouteModel)
AutoModelForCausalLM.register(DepthRouteConfig, DepthRouteForCausalLM)

__all__ = ["DepthRouteConfig", "DepthRouteForCausalLM", "DepthRouteModel"]
