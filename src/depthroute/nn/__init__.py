"""Building blocks of a decoder that know no residual scheme."""

from depthroute.nn.attention import Attention
from depthroute.nn.cache import CacheAt, KVCache
from depthroute.nn.context import AttentionContext, Documents
from depthroute.nn.linear import JoinedWeights, Linear, OutProjection
from depthroute.nn.loss import LossSums, linear_cross_entropy
from depthroute.nn.low_rank import DuplicatedLatentLinear, LowRankConfig
from depthroute.nn.mlp import SwiGLU
from depthroute.nn.norm import RMSNorm

__all__ = [
    "Attention",
    "AttentionContext",
    "CacheAt",
    "Documents",
    "DuplicatedLatentLinear",
    "JoinedWeights",
    "KVCache",
    "Linear",
    "LossSums",
    "LowRankConfig",
    "OutProjection",
    "RMSNorm",
    "SwiGLU",
    "linear_cross_entropy",
]
