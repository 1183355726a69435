"""Hyper-Connections: parallel residual streams, mixed freely (HC) or on a manifold (mHC)."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from depthroute.config import config_dataclass
from depthroute.ops import sinkhorn
from depthroute.ops.scores import accumulation_dtype, contract
from depthroute.residual.base import Cost, Draw, Kind, Norm, ResidualScheme


@config_dataclass
class HyperConfig:
    """Settings of Hyper-Connections.

    Args:
        num_streams: n, parallel copies of the residual stream, >= 1.
        coefficients: `"static"` are learned numbers; `"dynamic"` also depend on the token.
        mixing: `"free"` leaves coefficients as they come (HC); `"doubly_stochastic"` makes them
            positive, those between streams by Sinkhorn-Knopp (mHC).
    """

    name: Literal["hyper"] = "hyper"
    num_streams: int = 4
    coefficients: Literal["static", "dynamic"] = "dynamic"
    mixing: Literal["free", "doubly_stochastic"] = "free"

    def __post_init__(self) -> None:
        if self.num_streams < 1:
            raise ValueError(f"num_streams must be >= 1, got {self.num_streams}")


class Coefficients(NamedTuple):
    """How a sublayer meets the streams; `*b` is empty for static coefficients."""

    pre: Tensor  # [*b, n], what it reads of each stream
    res: Tensor  # [*b, n, n], what each new stream (row) takes of each old one (column)
    post: Tensor  # [*b, n], what each stream receives of its output


class HyperState(NamedTuple):
    """The streams and, while a sublayer runs, what its write will need."""

    streams: Tensor  # [B, T, n, D]
    ahead: tuple[Tensor, Coefficients] | None  # the streams in float32, copied once per sublayer


class Hyper(ResidualScheme):
    """Keep n residual streams; read a mix of them, mix them, and add each output to all of them.

    `h = sum_j pre_j x_j`, then `x_i <- sum_j res_ij x_j + post_i f(norm(h))`. All streams start as
    the embedding and their mean feeds the head. Row j of a site's parameters belongs to stream j
    and holds `(post_j, pre_j, res_1j .. res_nj)`. Training starts as the plain sum.

    Source: arXiv 2409.19606 (HC); arXiv 2512.24880 (mHC).
    """

    Config = HyperConfig

    def __init__(self, config: HyperConfig, *, dim: int, kinds: Sequence[Kind], eps: float) -> None:
        super().__init__(config, dim=dim, kinds=kinds, eps=eps)
        n, sites = config.num_streams, len(self.kinds)
        self.is_free = config.mixing == "free"
        self.bias = nn.Parameter(torch.empty(sites, n, n + 2, dtype=torch.float32))
        if config.coefficients == "dynamic":
            # HC looks at each stream alone and has one scale for pre and res; mHC does neither
            rows, width, scales = (n + 2, dim, 2) if self.is_free else (n * (n + 2), n * dim, 3)
            self.weight = nn.Parameter(torch.empty(sites, rows, width, dtype=torch.float32))
            self.scale = nn.Parameter(torch.empty(sites, scales, dtype=torch.float32))
        self.init_weights(lambda parameter: None)  # draws nothing

    def forward(self, x: Tensor) -> HyperState:
        """Copy the embedding to every stream."""
        streams = x.unsqueeze(-2).expand(*x.shape[:-1], self.config.num_streams, self.dim)
        return HyperState(streams, None)

    def read(
        self, state: HyperState, site: int, norm: Norm
    ) -> tuple[tuple[Tensor, ...], HyperState]:
        """Mix the streams for sublayer `site`."""
        wide = _wide(state.streams)
        ahead = self.coefficients(wide, site)
        hidden = contract("...j,...jd->...d", ahead.pre, wide).to(state.streams.dtype)
        return (norm(hidden),), HyperState(state.streams, (wide, ahead))

    def write(self, state: HyperState, site: int, y: Tensor) -> HyperState:
        """Mix the streams and add the output to each; rounded once."""
        assert state.ahead is not None, "a write follows a read"
        wide, (_, res, post) = state.ahead
        mixed = contract("...ij,...jd->...id", res, wide)
        streams = mixed + post.unsqueeze(-1) * _wide(y).unsqueeze(-2)
        return HyperState(streams.to(state.streams.dtype), None)

    def finish(self, state: HyperState, norm: Norm) -> Tensor:
        """Average the streams."""
        return norm(_wide(state.streams).mean(-2).to(state.streams.dtype))

    def coefficients(self, streams: Tensor, site: int) -> Coefficients:
        """Return the coefficients of sublayer `site`, float32 (float64 for float64 streams).

        Args:
            streams: `[*b, n, D]`, before the sublayer.
            site: Of the sublayer, 0 .. M-1.
        """
        wide = _wide(streams)
        logits = self.bias[site].to(wide.dtype)  # [n, n + 2]
        if self.config.coefficients == "dynamic":
            *first, last = self.scale[site].unbind()
            scale = torch.stack([*first, *[last] * (logits.shape[-1] - len(first))])
            logits = logits + scale.to(wide.dtype) * self._dynamic(wide, site)
        post, pre, res = logits[..., 0], logits[..., 1], logits[..., 2:].transpose(-1, -2)
        if self.is_free:
            return Coefficients(pre, res, post)
        return Coefficients(pre.sigmoid(), sinkhorn(res), 2 * post.sigmoid())

    def init_weights(self, draw: Draw) -> None:
        """Start as the plain sum: site t reads stream `t mod n`; nothing depends on the token."""
        super().init_weights(draw)
        with torch.no_grad():
            own = torch.eye(self.config.num_streams, device=self.bias.device)
            turns = own[torch.arange(len(self.kinds), device=own.device) % len(own)]  # [M, n]
            # sigmoid(0) * 2 = 1; streams that are read alike would stay alike for ever
            self.bias[..., 0] = 1.0 if self.is_free else 0.0
            self.bias[..., 1] = turns if self.is_free else 2 * turns - 1
            self.bias[..., 2:] = own if self.is_free else 8 * own - 8
            if self.config.coefficients == "dynamic":
                self.scale.fill_(0.01)

    def cost(self) -> Cost:
        """Count `(n + 2) n D` multiply-adds per sublayer, `weight`'s products, n - 1 streams."""
        n, sites = self.config.num_streams, len(self.kinds)
        multiply_adds = sites * n * (n + 2) * self.dim
        if self.config.coefficients == "dynamic":
            multiply_adds += self.weight.numel() * (n if self.is_free else 1)
        return super().cost()._replace(multiply_adds=multiply_adds, cached=(n - 1) * self.dim)

    def _dynamic(self, wide: Tensor, site: int) -> Tensor:
        """Return the part `[*b, n, n + 2]` that depends on the token, before its scale."""
        x = wide if self.is_free else wide.flatten(-2)
        # the norm's factor follows the product, so that no normed copy of the streams is kept
        rstd = (x.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        dots = contract("...d,kd->...k", x, self.weight[site].to(x.dtype)) * rstd
        return dots.tanh() if self.is_free else dots.unflatten(-1, self.bias.shape[1:])


def _wide(x: Tensor) -> Tensor:
    return x.to(accumulation_dtype(x.dtype))
