"""Tensor operations of depth routing: tensors in, tensors out."""

from depthroute.ops.backend import use_backend
from depthroute.ops.depth_attend import depth_attend, depth_read
from depthroute.ops.depth_merge import depth_merge
from depthroute.ops.reference import depth_weights
from depthroute.ops.rms_norm import rms_norm
from depthroute.ops.sinkhorn import sinkhorn

__all__ = [
    "depth_attend",
    "depth_merge",
    "depth_read",
    "depth_weights",
    "rms_norm",
    "sinkhorn",
    "use_backend",
]
