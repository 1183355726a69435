"""MUDD connections: a layer's queries, keys, values and stream mix all earlier outputs."""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from depthroute.config import config_dataclass
from depthroute.ops import rms_norm
from depthroute.ops.scores import accumulation_dtype, contract
from depthroute.residual.base import Cost, Draw, Kind, Norm, ResidualScheme


@config_dataclass
class MuddConfig:
    """Settings of MUDD connections.

    `norm = "pre_post"` norms the sources, and the stream's mix before it is added to the newest
    output (the paper's PrePostDANorm); `"none"` mixes the sources as they are.
    """

    name: Literal["mudd"] = "mudd"
    norm: Literal["none", "pre_post"] = "pre_post"


class MuddState(NamedTuple):
    """What layers gave, and the sum inside the layer that is running."""

    sources: tuple[Tensor, ...]  # embedding and layer outputs [B, T, D], normed by "pre_post"
    stream: Tensor  # [B, T, D]; between layers the newest output, not normed


class Mudd(ResidualScheme):
    """Mix the outputs of all earlier layers anew for queries, keys, values and stream.

    After layer i (the embedding is source 0), per token, with way c in (q, k, v, r):

        w = gelu(rms(x_i) W1^T) W2^T + a                        [C, i + 1], no softmax
        x^c = sum_j w[c, j] x_j                                 norm = "none"
        x^c = x_i + post_c(sum_j w[c, j] gain_j rms(x_j))       norm = "pre_post"

    `post_r(z) = post_gain rms(z)`; the other ways have none. The next attention reads q, k and v;
    inside the layer r is the plain residual stream. After the last layer r alone feeds the head.
    Each mix has its own W1 [K, D], W2 [C (i + 1), K], a and post_gain; each source has its gain.
    Training starts as the plain sum.

    Source: arXiv 2502.12170, sections 2.2 to 2.5; the authors' code where a choice is open.
    """

    Config = MuddConfig

    def __init__(self, config: MuddConfig, *, dim: int, kinds: Sequence[Kind], eps: float) -> None:
        super().__init__(config, dim=dim, kinds=kinds, eps=eps)
        layers = len(self.kinds) // 2
        if self.kinds != ("attention", "mlp") * layers:
            raise ValueError(f"kinds must be attention and mlp in turn, got {self.kinds}")
        # entry i serves the mix after layer i, which sees i + 2 sources
        self.shapes = [(1 if i + 1 == layers else 4, i + 2) for i in range(layers)]
        # as in the authors' code: the last mix is as wide as if it had four ways, and a width that
        # is a multiple of 64 still goes to the next one
        pairs = [(math.prod(shape), (4 * shape[1] // 64 + 1) * 64) for shape in self.shapes]
        self.hidden_weight = nn.ParameterList(_empty(width, dim) for _, width in pairs)
        self.out_weight = nn.ParameterList(_empty(*pair) for pair in pairs)
        self.static_weight = nn.ParameterList(_empty(*shape) for shape in self.shapes)
        self.is_normed = config.norm == "pre_post"
        if self.is_normed:
            self.source_gain = _empty(layers + 1, dim)
            self.post_gain = _empty(layers, dim)
        self.init_weights(_normal)

    def forward(self, x: Tensor) -> MuddState:
        """Make the embedding the first source."""
        return MuddState((self._source(x, 0),), x)

    def read(self, state: MuddState, site: int, norm: Norm) -> tuple[tuple[Tensor, ...], MuddState]:
        """Mix the sources before an attention; norm the stream before an MLP."""
        if site == 0 or self.kinds[site] == "mlp":
            return (norm(state.stream),), state
        *inputs, stream = self._mix(state)
        return tuple(norm(x) for x in inputs), state._replace(stream=stream)

    def write(self, state: MuddState, site: int, y: Tensor) -> MuddState:
        """Add to the stream, which is a source once its layer is done."""
        stream = state.stream + y
        if self.kinds[site] == "attention":
            return state._replace(stream=stream)
        source = self._source(stream, len(state.sources))
        return MuddState((*state.sources, source), stream)

    def finish(self, state: MuddState, norm: Norm) -> Tensor:
        """Mix once more, for the stream alone."""
        return norm(self._mix(state)[0] if self.kinds else state.stream)

    def coefficients(self, x: Tensor, layer: int) -> Tensor:
        """Return the weights of the mix after a layer; they may have any sign and sum.

        Args:
            x: Output of the layer, `[*b, D]`.
            layer: 0 .. L-1.

        Returns:
            `[C, *b, layer + 2]`, ways q, k, v, r (after the last layer r alone) by sources,
            float32 (float64 for float64 `x`).
        """
        dtype = accumulation_dtype(x.dtype)
        hidden = F.linear(rms_norm(x, eps=self.eps), self.hidden_weight[layer].to(x.dtype))
        hidden = F.gelu(hidden.to(dtype))
        dynamic = contract("...k,ok->...o", hidden, self.out_weight[layer].to(dtype))
        weights = dynamic.unflatten(-1, self.shapes[layer]) + self.static_weight[layer].to(dtype)
        return weights.movedim(-2, 0)

    @torch.no_grad()
    def init_weights(self, draw: Draw) -> None:
        """Start as the plain sum: nothing dynamic, and each way the newest layer output alone."""
        super().init_weights(draw)
        for weight in self.hidden_weight:
            draw(weight)
            weight.mul_(self.dim**-0.5 / weight.square().mean().sqrt())  # to N(0, 1 / D)
        if self.is_normed:
            self.source_gain.fill_(1.0)
            self.post_gain.fill_(1e-3)
        else:
            for static in self.static_weight:
                static[:, -1] = 1.0

    def cost(self) -> Cost:
        """Count the products of W1 and W2, and D multiply-adds per way, source and mix."""
        products = sum(weight.numel() for weight in (*self.hidden_weight, *self.out_weight))
        mixes = self.dim * sum(math.prod(shape) for shape in self.shapes)
        parameters = sum(p.numel() for p in self.parameters())
        return Cost(parameters, products + mixes, self.dim * (len(self.shapes) + 1))

    def _source(self, x: Tensor, index: int) -> Tensor:
        if not self.is_normed:
            return x
        wide = x.to(accumulation_dtype(x.dtype))
        return (self.source_gain[index] * rms_norm(wide, eps=self.eps)).to(x.dtype)

    def _mix(self, state: MuddState) -> tuple[Tensor, ...]:
        """Return one tensor per way, summed in float32 and rounded once."""
        x, layer = state.stream, len(state.sources) - 2
        weights = self.coefficients(x, layer).unbind(-1)
        # promotion inside the product: a cast of each source would keep a copy of it per mix
        first, *rest = (w.unsqueeze(-1) * v for w, v in zip(weights, state.sources, strict=True))
        ways = list(sum(rest, first).unbind(0))  # C tensors [B, T, D]
        if self.is_normed:
            ways[-1] = self.post_gain[layer] * rms_norm(ways[-1], eps=self.eps)
            ways = [x + way for way in ways]
        return tuple(way.to(x.dtype) for way in ways)


def _empty(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=torch.float32))


def _normal(parameter: nn.Parameter) -> None:
    nn.init.normal_(parameter)
