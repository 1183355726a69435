"""What several tests need."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from depthroute.models import CausalLM, ModelConfig
from depthroute.residual import (
    AttnResConfig,
    FromValueKey,
    PreNormConfig,
    ProjectedKey,
    Summary,
    TailKey,
)

# One row per scheme, and one for each setting that changes its arithmetic. A new scheme adds a row.
VARIANTS: dict[str, Any] = {
    "prenorm": PreNormConfig(),
    "attn_res_full": AttnResConfig(num_blocks=0),
    "attn_res_block3": AttnResConfig(num_blocks=3),  # 8 writes in blocks of 3, 3, 2
    "attn_res_block1": AttnResConfig(num_blocks=1),
    "attn_res_uneven": AttnResConfig(block_ends=(1, 6, 8)),
    "s_lr": AttnResConfig(num_blocks=4, key=TailKey(rank=8)),
    "s_lr_full_norm": AttnResConfig(num_blocks=3, key=TailKey(rank=8, norm="full")),
    "p_lr_full": AttnResConfig(num_blocks=0, key=ProjectedKey(rank=8)),
    "p_lr": AttnResConfig(num_blocks=3, key=ProjectedKey(rank=8)),
    "p_lr_sum": AttnResConfig(num_blocks=3, key=ProjectedKey(rank=8, block="sum")),
    "from_value": AttnResConfig(num_blocks=3, key=FromValueKey(rank=8)),
    "summary": AttnResConfig(num_blocks=3, summary=Summary(alpha=0.5, beta=0.7)),
}

# relative tolerance by dtype: a few hundred roundings of a sum over depth and width
RTOL = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}


def assert_close(actual: Tensor, expected: Tensor, name: str = "", rtol: float = 0.0) -> None:
    """Compare by the largest error relative to the largest expected value."""
    rtol = rtol or RTOL[actual.dtype]
    assert actual.shape == expected.shape, f"{name}: {actual.shape} against {expected.shape}"
    if not actual.numel():
        return
    expected = expected.to(torch.float64)
    error = (actual.to(torch.float64) - expected).abs().max().item()
    bound = rtol * max(expected.abs().max().item(), 1e-30)
    assert error <= bound, f"{name}: error {error:.3e} above {bound:.3e}"


def assert_all_close(
    actual: Sequence[Tensor], expected: Sequence[Tensor], names: Sequence[str], rtol: float = 0.0
) -> None:
    """Compare several tensors by name."""
    for a, e, name in zip(actual, expected, names, strict=True):
        assert_close(a, e, name, rtol)


def tiny_config(residual: Any, **changes: Any) -> ModelConfig:
    """Return a decoder of 4 layers, 8 sublayers."""
    shape: dict[str, Any] = {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    return ModelConfig(**{**shape, **changes}, residual=residual)


def tiny_model(residual: Any, *, dtype: torch.dtype = torch.float32, **changes: Any) -> CausalLM:
    """Return a small model whose routing parameters are away from zero, so that they matter."""
    model = CausalLM(tiny_config(residual, **changes)).to(dtype)
    source = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.model.residual.parameters():
            noise = torch.randn(parameter.shape, generator=source, dtype=torch.float64)
            parameter.add_(0.5 * noise)
    return model
