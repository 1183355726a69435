"""Language models with a residual scheme of choice."""

from depthroute.models.config import ModelConfig
from depthroute.models.decode import DecodeStep
from depthroute.models.decoder import CausalLM, Decoder
from depthroute.models.fold import fold
from depthroute.models.generate import generate

__all__ = ["CausalLM", "DecodeStep", "Decoder", "ModelConfig", "fold", "generate"]
