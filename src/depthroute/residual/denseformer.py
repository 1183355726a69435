"""DenseFormer: a learned weighted average of all earlier layers' outputs after each layer."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from depthroute.config import config_dataclass
from depthroute.ops.scores import accumulation_dtype
from depthroute.residual.base import Cost, Draw, Kind, Norm, ResidualScheme


@config_dataclass
class DenseFormerConfig:
    """Settings of DenseFormer, which the paper names `dilation x period`, e.g. 4x5.

    Args:
        dilation: k, >= 1: layer i averages the outputs i, i - k, i - 2k, ...
        period: p, >= 1: only layers p, 2p, 3p, ... are followed by an average.
    """

    name: Literal["denseformer"] = "denseformer"
    dilation: int = 1
    period: int = 1

    def __post_init__(self) -> None:
        for field in ("dilation", "period"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} must be >= 1, got {getattr(self, field)}")


class DenseFormerState(NamedTuple):
    """What later averages and reads need."""

    outputs: tuple[Tensor, ...]  # embedding and each layer's output before its average, [B, T, D]
    stream: Tensor  # what the next sublayer reads and adds to, [B, T, D]


class DenseFormer(ResidualScheme):
    """Replace the stream, after a layer, by a learned weighted average of all layers' outputs.

    `X_i = layer_i(Y_{i-1})`, `Y_i = sum_j a_ij X_j` over `j = i, i - k, i - 2k, ... >= 0` if p
    divides i, else `Y_i = X_i`; `X_0 = Y_0` is the embedding, and `Y_L` feeds the final norm.
    Within a layer the residual sum stays. The weights `a_ij` are plain numbers, the same for all
    tokens; they may be negative and need not sum to 1. At the start `a_ii = 1` and the others are
    0: bit for bit the plain residual sum.

    A layer ends with its MLP, the last one with the last sublayer.

    Raises:
        ValueError: Dilation or period exceeds the layers.

    Source: arXiv 2402.02622.
    """

    Config = DenseFormerConfig

    def __init__(
        self, config: DenseFormerConfig, *, dim: int, kinds: Sequence[Kind], eps: float
    ) -> None:
        super().__init__(config, dim=dim, kinds=kinds, eps=eps)
        last = len(self.kinds) - 1
        self.ends = tuple(i for i, kind in enumerate(self.kinds) if kind == "mlp" or i == last)
        for field in ("dilation", "period"):
            if self.kinds and getattr(config, field) > len(self.ends):
                raise ValueError(
                    f"{field} must be at most the {len(self.ends)} layers of the model, "
                    f"got {getattr(config, field)}"
                )
        # one row per source, the oldest first; the last row is the layer itself
        self.weight = nn.ParameterList(
            torch.empty(len(self._sources(layer)), 1, dtype=torch.float32)
            for layer in range(config.period, len(self.ends) + 1, config.period)
        )
        self.init_weights()

    def forward(self, x: Tensor) -> DenseFormerState:
        """Start the stream with the embedding, which is also the first output."""
        return DenseFormerState((x,), x)

    def read(
        self, state: DenseFormerState, site: int, norm: Norm
    ) -> tuple[tuple[Tensor, ...], DenseFormerState]:
        """Norm the stream."""
        return (norm(state.stream),), state

    def write(self, state: DenseFormerState, site: int, y: Tensor) -> DenseFormerState:
        """Add to the stream; after a layer, average."""
        stream = state.stream + y
        if site not in self.ends:
            return state._replace(stream=stream)
        outputs = (*state.outputs, stream)
        layer = len(outputs) - 1
        if layer % self.config.period == 0:
            stream = self._average(outputs, layer)
        return DenseFormerState(outputs, stream)

    def finish(self, state: DenseFormerState, norm: Norm) -> Tensor:
        """Norm the stream."""
        return norm(state.stream)

    @torch.no_grad()
    def init_weights(self, draw: Draw | None = None) -> None:
        """Give the layer itself the weight 1, and the earlier ones 0; nothing is drawn."""
        for weight in self.weight:
            weight.zero_()
            weight[-1] = 1.0

    def cost(self) -> Cost:
        """Count one multiply-add per column, source and average; all outputs are kept."""
        num_weights = sum(weight.numel() for weight in self.weight)
        return Cost(num_weights, self.dim * num_weights, self.dim * (len(self.ends) + 1))

    def _sources(self, layer: int) -> range:
        """Return the outputs that the average after `layer`, from 1, is over."""
        dilation = self.config.dilation
        return range(layer % dilation, layer + 1, dilation)

    def _average(self, outputs: tuple[Tensor, ...], layer: int) -> Tensor:
        """Sum the weighted outputs in float32 (float64 for float64), and round once."""
        dtype = outputs[0].dtype
        weight = self.weight[layer // self.config.period - 1]
        total = torch.zeros_like(outputs[0], dtype=accumulation_dtype(dtype))
        for w, i in zip(weight, self._sources(layer), strict=True):
            total = total + w * outputs[i]
        return total.to(dtype)
