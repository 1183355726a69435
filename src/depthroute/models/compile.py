"""Compilation of a model's parts, in place: names in the state dict do not change."""

from typing import Literal

import torch

from depthroute.models.decoder import CausalLM
from depthroute.nn.loss import chunk_sums

CompileMode = Literal["none", "sublayer", "model"]


def compile_model(model: CausalLM, mode: CompileMode) -> None:
    """Compile each sublayer, or the whole decoder, and the loss of a chunk.

    Sublayers make two graphs at any depth and leave the reads to their own operations; the whole
    decoder is one graph that takes longer to build.
    """
    if mode == "none":
        return
    if mode == "sublayer":
        for layer in model.model.layers:
            layer.self_attn.compile(fullgraph=True)
            layer.mlp.compile(fullgraph=True)
    else:
        model.model.compile(fullgraph=True)
    model.chunk_sums = torch.compile(chunk_sums, fullgraph=True)
