"""Compilation of a model's parts, in place: names in the state dict do not change."""

from typing import Literal

import torch

from depthroute.models.decoder import CausalLM
from depthroute.nn.loss import chunk_sums

CompileMode = Literal["none", "sublayer", "model"]


def compile_model(model: CausalLM, mode: CompileMode) -> None:
    """Compile each sublayer, or the whole decoder, and the loss of a chunk.

    Sublayers make two graphs at any depth and leave the reads to their own operations, but for what
    learned keys are made of; the whole decoder is one graph that takes longer to build.
    """
    if mode == "none":
        return
    if mode == "sublayer":
        for layer in model.model.layers:
            layer.self_attn.compile(fullgraph=True)
            layer.mlp.compile(fullgraph=True)
        for part in model.model.residual.children():
            if any(True for _ in part.parameters()):  # an empty graph costs more than it saves
                part.compile(fullgraph=True)
    else:
        model.model.compile(fullgraph=True)
    model.chunk_sums = torch.compile(chunk_sums, fullgraph=True)
