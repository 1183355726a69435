"""Low-rank products of the sublayers, with the latents duplicated into the output."""

import math
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from depthroute.config import config_dataclass
from depthroute.nn.linear import Linear, OutProjection

Projection = Literal["q", "k", "v", "o", "gate", "up", "down"]
Activation = Literal["silu", "identity"]
Shapes = Mapping[Projection, tuple[int, int]]  # (in, out) of each projection


@config_dataclass
class LowRankConfig:
    """Replace matrices of the sublayers by low-rank maps.

    Args:
        rank: Latents r of a map.
        ranks: Ranks that differ, by projection, e.g. `{"k": 16}`.
        scope: The projections that are replaced.
        activation: What the latents pass through.
        alpha: Weight of the duplicated latents; 0 is the plain low-rank map.
    """

    rank: int
    ranks: dict[str, int] = field(default_factory=dict)
    scope: tuple[Projection, ...] = get_args(Projection)
    activation: Activation = "silu"
    alpha: float = 1.0

    def __post_init__(self) -> None:
        for name, rank in {"rank": self.rank, **self.ranks}.items():
            if rank < 1:
                place = name if name == "rank" else f"ranks.{name}"
                raise ValueError(f"{place} must be >= 1, got {rank}")
        if unknown := self.ranks.keys() - set(self.scope):
            raise ValueError(f"ranks must name projections in scope, got {sorted(unknown)}")
        if not math.isfinite(self.alpha):
            raise ValueError(f"alpha must be finite, got {self.alpha}")

    def rank_of(self, name: Projection) -> int | None:
        """Return the rank of a projection; None if it stays a full matrix."""
        return self.ranks.get(name, self.rank) if name in self.scope else None

    def check(self, shapes: Shapes) -> None:
        """Hold the ranks against the matrices that they replace.

        Raises:
            ValueError: A rank above the smaller side of its matrix.
        """
        for name, shape in shapes.items():
            rank = self.rank_of(name)
            if rank is not None and rank > min(shape):
                raise ValueError(
                    f"low_rank: the rank of {name} must be at most {min(shape)}, the smaller side "
                    f"of its matrix, got {rank}; ranks = {{ {name} = ... }} sets it apart"
                )


class DuplicatedLatentLinear(nn.Module):
    """A low-rank product whose output also gets the latents themselves, each K times.

    `z = act(A x)`, `y_o = (B z)_o + alpha / sqrt(K) z_{floor(o / K)}` with `K = ceil(out / r)`.
    If r does not divide the output width, the last latents have fewer copies or none. The sum is
    linear in z, so that both terms are one product `B* z`, formed from B in each forward pass:
    folding (`depthroute.models.fold`) stores it and changes no number.

    Source: arXiv 2606.28932.

    Args:
        in_dim: Width of the input.
        out_dim: Width of the output.
        emit_dim: Columns emitted for the residual scheme, `W_emit x`: a full product beside the
            low-rank one, as in `OutProjection`.
        rank: r.
        activation: Of the latents.
        alpha: Weight of the copies; 0 for none.
    """

    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        emit_dim: int = 0,
        *,
        rank: int,
        activation: Activation = "silu",
        alpha: float = 1.0,
    ) -> None:
        super().__init__()
        self.activation, self.alpha = activation, alpha
        self.copies = math.ceil(out_dim / rank)
        self.latent_weight = nn.Parameter(torch.empty(rank, in_dim))  # A
        self.weight = nn.Parameter(torch.empty(out_dim, rank))  # B
        emit = nn.Parameter(torch.empty(emit_dim, in_dim)) if emit_dim else None
        self.register_parameter("emit_weight", emit)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[..., in_dim]` to `[..., out_dim + emit_dim]`, in the dtype of `x`."""
        z = F.linear(x, self.latent_weight.to(x.dtype))
        if self.activation == "silu":
            z = F.silu(z)
        y = F.linear(z, self.folded_weight().to(x.dtype))
        if self.emit_weight is None:
            return y
        return torch.cat([y, F.linear(x, self.emit_weight.to(x.dtype))], dim=-1)

    def folded_weight(self) -> Tensor:
        """Return `B* = B + alpha / sqrt(K) R^T`, `[out_dim, r]`; `R^T[o, floor(o / K)]` is 1."""
        if not self.alpha:
            return self.weight
        out_dim, rank = self.weight.shape
        outputs = torch.arange(out_dim, device=self.weight.device)
        latents = torch.arange(rank, device=self.weight.device)
        copied = (outputs // self.copies).unsqueeze(1) == latents
        return self.weight + self.alpha / self.copies**0.5 * copied.to(self.weight.dtype)

    def init_weights(self, draw: Callable[..., None]) -> None:
        """Draw A and B with deviation `(r (in + out))^(-1/4)`, the emitted rows like any matrix."""
        rank, in_dim = self.latent_weight.shape
        std = (rank * (in_dim + len(self.weight))) ** -0.25
        draw(self.latent_weight, std)
        draw(self.weight, std)
        if self.emit_weight is not None:
            draw(self.emit_weight)

    def extra_repr(self) -> str:
        """Show what the parameters do not."""
        return f"activation={self.activation}, alpha={self.alpha}"


def build_projection(
    name: Projection,
    in_dim: int,
    out_dim: int,
    emit_dim: int = 0,
    *,
    low_rank: LowRankConfig | None,
) -> Linear | DuplicatedLatentLinear:
    """Build a projection of a sublayer: low-rank if the config has it in scope, else full.

    Args:
        name: Which one.
        in_dim: Width of the input.
        out_dim: Width of the output.
        emit_dim: Columns emitted beside the output.
        low_rank: None for a full matrix.
    """
    rank = low_rank.rank_of(name) if low_rank else None
    if low_rank is None or rank is None:
        return OutProjection(in_dim, out_dim, emit_dim) if emit_dim else Linear(in_dim, out_dim)
    return DuplicatedLatentLinear(
        in_dim,
        out_dim,
        emit_dim,
        rank=rank,
        activation=low_rank.activation,
        alpha=low_rank.alpha,
    )
