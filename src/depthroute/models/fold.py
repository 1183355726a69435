"""Folding duplicated latents away, for export."""

from dataclasses import replace

import torch

from depthroute.models.decoder import CausalLM
from depthroute.nn import DuplicatedLatentLinear


@torch.no_grad()
def fold(model: CausalLM) -> CausalLM:
    """Return a copy whose low-rank maps hold their duplicated latents in B.

    The copy is the plain low-rank model, `low_rank.alpha = 0`, with parameters of the same names
    and shapes; its outputs are the same. Folding it again, or a model of full matrices, changes
    nothing. Weight decay acts on what is stored: after a fold that is `B*`, no longer B.

    Args:
        model: On one device, its parameters in one dtype.
    """
    config, weight = model.config, model.lm_head.weight
    if config.low_rank is not None:
        config = replace(config, low_rank=replace(config.low_rank, alpha=0.0))
    folded = CausalLM(config, seed=None).to(device=weight.device, dtype=weight.dtype)
    weights = model.state_dict()
    for name, module in model.named_modules():
        if isinstance(module, DuplicatedLatentLinear):
            weights[f"{name}.weight"] = module.folded_weight()
    folded.load_state_dict(weights)
    folded.model.compute_dtype = model.model.compute_dtype
    return folded
