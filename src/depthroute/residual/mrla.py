"""MRLA-light, adapted to language models: a recurrence over gated layer outputs."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from depthroute.config import config_dataclass
from depthroute.ops import rms_norm
from depthroute.ops.scores import accumulation_dtype
from depthroute.residual.base import Cost, Draw, Kind, Norm, ResidualScheme


@config_dataclass
class MrlaConfig:
    """The width of a head, a divisor of the model's width."""

    name: Literal["mrla"] = "mrla"
    head_dim: int = 16


class MrlaState(NamedTuple):
    """What the layers add to, and what they carry on."""

    stream: Tensor  # x, [B, T, D]
    carried: Tensor  # o, [B, T, D]


class Mrla(ResidualScheme):
    """Keep the residual sum; after each layer add what a recurrence over layer outputs gives.

    Both x and o start as the embedding. After each layer, per token and in each head h:

        n = rms(x),  q = query_filter * n,  k = key_filter * n      convolutions over columns
        o <- sigmoid(<q_h, k_h> / sqrt(head_dim)) value_gain n_h + carry_gain o_h
        x <- x + out_gain o_h                                       gains per column

    A layer ends with its MLP. Training starts as the plain sum, with `out_gain = 0`.
    Source: arXiv 2302.03985 (MRLA-light), a method for images. The adaptation is our own.
    """

    Config = MrlaConfig

    def __init__(self, config: MrlaConfig, *, dim: int, kinds: Sequence[Kind], eps: float) -> None:
        super().__init__(config, dim=dim, kinds=kinds, eps=eps)
        layers, taps = self.kinds.count("mlp"), 2 * (dim.bit_length() // 4) + 1  # taps as in MRLA
        if config.head_dim < 1 or dim % config.head_dim:
            raise ValueError(f"head_dim must divide the model width {dim}, got {config.head_dim}")
        shapes = ((layers, taps),) * 2 + ((layers, dim),) * 3
        rows = (nn.Parameter(torch.zeros(shape, dtype=torch.float32)) for shape in shapes)
        self.query_filter, self.key_filter, self.value_gain, self.carry_gain, self.out_gain = rows
        self.init_weights(lambda parameter: None)  # draws nothing

    def forward(self, x: Tensor) -> MrlaState:
        """Start the stream and the recurrence with the embedding."""
        return MrlaState(x, x)

    def read(self, state: MrlaState, site: int, norm: Norm) -> tuple[tuple[Tensor, ...], MrlaState]:
        """Norm the stream."""
        return (norm(state.stream),), state

    def write(self, state: MrlaState, site: int, y: Tensor) -> MrlaState:
        """Add to the stream; after a layer advance the recurrence, in float32, and add it too."""
        stream, layer = state.stream + y, self.kinds[:site].count("mlp")
        if self.kinds[site] == "attention":
            return state._replace(stream=stream)
        heads = (-1, self.config.head_dim)
        normed = rms_norm(stream.to(accumulation_dtype(stream.dtype)), eps=self.eps)
        query, key = (_convolve(normed, f[layer]) for f in (self.query_filter, self.key_filter))
        logits = (query * key).unflatten(-1, heads).sum(-1, keepdim=True) * heads[-1] ** -0.5
        value = (self.value_gain[layer] * normed).unflatten(-1, heads)
        carried = (logits.sigmoid() * value).flatten(-2) + self.carry_gain[layer] * state.carried
        x = stream + self.out_gain[layer] * carried
        return MrlaState(x.to(stream.dtype), carried.to(stream.dtype))

    def finish(self, state: MrlaState, norm: Norm) -> Tensor:
        """Norm the stream."""
        return norm(state.stream)

    @torch.no_grad()
    def init_weights(self, draw: Draw) -> None:
        """Start with `k = n`, value gains of 1 and all else at zero; nothing is drawn."""
        super().init_weights(draw)
        self.key_filter[:, self.key_filter.shape[1] // 2] = 1.0
        self.value_gain.fill_(1.0)

    def cost(self) -> Cost:
        """Count, per layer, D multiply-adds per tap and gain, and for scores and weighing."""
        multiply_adds = 2 * self.dim * self.key_filter.numel() + 5 * self.value_gain.numel()
        return super().cost()._replace(multiply_adds=multiply_adds, cached=self.dim)


def _convolve(x: Tensor, taps: Tensor) -> Tensor:
    """Weigh neighbours along the last axis by an odd number of taps; zeros lie beyond its ends."""
    padded = F.pad(x, [len(taps) // 2] * 2)
    first, *rest = (tap * padded[..., i : i + x.shape[-1]] for i, tap in enumerate(taps.unbind()))
    return sum(rest, first)
