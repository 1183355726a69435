"""The decoders that whole-model benchmarks compare."""

import argparse
from typing import Any

from depthroute.models import ModelConfig
from depthroute.residual import AttnResConfig, PreNormConfig, ProjectedKey, TailKey

LOW_RANK = TailKey(rank=128)
VARIANTS: dict[str, Any] = {
    "prenorm": PreNormConfig(),
    "attn_res_8": AttnResConfig(num_blocks=8),
    "s_lr_8": AttnResConfig(num_blocks=8, key=LOW_RANK),
    "p_lr_8": AttnResConfig(num_blocks=8, key=ProjectedKey(rank=32)),
    "attn_res_4": AttnResConfig(num_blocks=4),
    "s_lr_4": AttnResConfig(num_blocks=4, key=LOW_RANK),
    "attn_res_full": AttnResConfig(num_blocks=0),
    "s_lr_full": AttnResConfig(num_blocks=0, key=LOW_RANK),
}


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """Add the sizes of the decoder as options."""
    for name, size in {"layers": 24, "width": 1024, "heads": 16, "vocab": 100277}.items():
        parser.add_argument(f"--{name}", type=int, default=size)


def config_of(name: str, options: argparse.Namespace) -> ModelConfig:
    """Return the decoder of a variant in the sizes of the options."""
    return ModelConfig(
        vocab_size=options.vocab,
        hidden_size=options.width,
        intermediate_size=options.width * 11 // 4,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        residual=VARIANTS[name],
    )
