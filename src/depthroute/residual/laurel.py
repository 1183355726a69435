"""LAuReL: residual connections with learned weights, a low-rank part and previous activations."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from depthroute.config import config_dataclass
from depthroute.ops.scores import accumulation_dtype
from depthroute.residual.base import Cost, Draw, Kind, Norm, ResidualScheme


@config_dataclass
class LaurelConfig:
    """Settings of LAuReL; the paper's RW, LR and PA add up.

    Args:
        balance: RW: `"softmax"` weighs new against old by `2 softmax` of two numbers, so that the
            weights sum to 2; `"fixed"` leaves both at 1.
        rank: LR: rank r of the learned map of the old; 0 is none.
        previous: PA: how many activations k, the latest included, a connection adds; 0 is none.
        around: What a connection goes around.
    """

    name: Literal["laurel"] = "laurel"
    balance: Literal["softmax", "fixed"] = "softmax"
    rank: int = 32
    previous: int = 0
    around: Literal["layer", "sublayer"] = "layer"

    def __post_init__(self) -> None:
        for field in ("rank", "previous"):
            if getattr(self, field) < 0:
                raise ValueError(f"{field} must be >= 0 (0 is none), got {getattr(self, field)}")
        if self.balance == "fixed" and not self.rank and not self.previous:
            raise ValueError('balance must be "softmax" if rank and previous are 0, got "fixed"')


class LaurelState(NamedTuple):
    """Activations between connections, and what the open connection goes around."""

    recent: tuple[Tensor, ...]  # x_i, x_{i-1}, ..., [B, T, D]
    written: Tensor | None  # sum of the open connection's writes


class Laurel(ResidualScheme):
    """Learn how a residual connection carries the old beside the new.

    `x_{i+1} = a_i f_i + b_i (x_i + sum_j g_ij B_ij A_ij x_{i-j})`, j from 0 to k - 1. `f_i` is the
    sum of what the sublayers inside wrote. Without `rank`, `B A` is the identity; without
    `previous`, j is 0 alone and `g` is 1; without both there is no sum. There is no term before the
    embedding either. A layer ends with its MLP, the last one with the last sublayer.

    At the start a, b are 1 and the sum is 0 (B = 0; g = 0 where there is no B): the plain residual
    sum. With a rank g starts at 1, since with both B and g at 0 neither would ever move.

    Raises:
        ValueError: A rank above the width, or more `previous` than connections.

    Source: arXiv 2411.07501.
    """

    Config = LaurelConfig

    def __init__(
        self, config: LaurelConfig, *, dim: int, kinds: Sequence[Kind], eps: float
    ) -> None:
        super().__init__(config, dim=dim, kinds=kinds, eps=eps)
        open_after = ("attention",) if config.around == "layer" else ()
        sites = range(len(self.kinds))
        self.ends = tuple(i for i in sites if self.kinds[i] not in open_after or i == sites[-1])
        count, rank, window = len(self.ends), config.rank, max(config.previous, 1)
        if rank > dim:
            raise ValueError(f"rank must be at most the model width {dim}, got {rank}")
        if self.kinds and config.previous > count:
            raise ValueError(f"previous must be at most {count} connections, got {config.previous}")
        self.window = window
        # connection i has a term, a row of A, B and g, for each of the activations that exist
        self.starts = (0, *accumulate(min(window, i + 1) for i in range(count)))
        num_terms = self.starts[-1]
        self.balance = _parameter(config.balance == "softmax", 2, count)  # logits of new and old
        self.down = _parameter(rank > 0, num_terms, rank, dim)  # A
        self.up = _parameter(rank > 0, num_terms, dim, rank)  # B
        self.gain = _parameter(config.previous > 0, num_terms, 1)  # g
        self.init_weights()

    def forward(self, x: Tensor) -> LaurelState:
        """Make the embedding the first activation."""
        return LaurelState((x,), None)

    def read(
        self, state: LaurelState, site: int, norm: Norm
    ) -> tuple[tuple[Tensor, ...], LaurelState]:
        """Norm the latest activation, plus what the open connection holds."""
        x = state.recent[0]
        return (norm(x if state.written is None else x + state.written),), state

    def write(self, state: LaurelState, site: int, y: Tensor) -> LaurelState:
        """Add to the open connection, and close it after its last write."""
        written = y if state.written is None else state.written + y
        if site not in self.ends:
            return state._replace(written=written)
        x = self._connect(state.recent, written, self.ends.index(site))
        return LaurelState((x, *state.recent)[: self.window], None)

    def finish(self, state: LaurelState, norm: Norm) -> Tensor:
        """Norm the latest activation."""
        return norm(state.recent[0])

    @torch.no_grad()
    def init_weights(self, draw: Draw | None = None) -> None:
        """Start as the plain sum, `A[j, i] = 1 / sqrt(r D)` at `i mod r = j`; nothing is drawn."""
        for parameter in self.parameters():
            parameter.zero_()
        if self.down is not None:
            rank = self.config.rank
            for row in range(rank):
                self.down[:, row, row::rank] = (rank * self.dim) ** -0.5
            if self.gain is not None:
                self.gain.fill_(1.0)

    def cost(self) -> Cost:
        """Count `2 r D` multiply-adds per map, D per plain previous one, 2 D for the balance."""
        rank, count = self.config.rank, len(self.ends)
        num_terms = sum(min(self.window, i + 1) for i in range(count))
        products = (2 * rank or self.config.previous > 0) * num_terms
        balance = 2 * count if self.balance is not None else 0
        retained = self.dim * (self.window - 1)  # the latest activation is the stream itself
        num_parameters = sum(p.numel() for p in self.parameters())
        return Cost(num_parameters, self.dim * (products + balance), retained)

    def _connect(self, recent: tuple[Tensor, ...], written: Tensor, i: int) -> Tensor:
        """Return the activation after connection `i`, summed in float32 and rounded once."""
        new, old = (x.to(accumulation_dtype(x.dtype)) for x in (written, recent[0]))
        if self.up is not None or self.gain is not None:
            terms = range(self.starts[i], self.starts[i + 1])
            old = sum((self._term(x, j) for j, x in zip(terms, recent, strict=True)), start=old)
        if self.balance is not None:
            a, b = 2 * self.balance[:, i].softmax(0)
            new, old = a * new, b * old
        return (new + old).to(written.dtype)

    def _term(self, x: Tensor, term: int) -> Tensor:
        """Return `g B A x` by the parameters of a term."""
        if self.up is not None and self.down is not None:
            low = F.linear(x, self.down[term].to(x.dtype))
            x = F.linear(low, self.up[term].to(x.dtype))
        return x if self.gain is None else self.gain[term] * x.to(accumulation_dtype(x.dtype))


def _parameter(present: bool, *shape: int) -> nn.Parameter | None:
    return nn.Parameter(torch.empty(shape, dtype=torch.float32)) if present else None
