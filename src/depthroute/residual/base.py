"""The one interface of all residual schemes."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

Kind = Literal["attention", "mlp"]
Norm = Callable[[Tensor], Tensor]
State = Any  # each scheme's own immutable NamedTuple, or a tensor
Draw = Callable[[nn.Parameter], None]


class Cost(NamedTuple):
    """Closed-form cost of a scheme beyond the plain residual sum (arXiv 2607.09694, appendix A).

    Columns emitted by the output projections are left out: they follow from `emit_dim`.
    """

    parameters: int
    multiply_adds: int  # per token; scores, mixes and the scheme's own products
    cached: int  # elements per token kept as sources, keys included
    cached_wide: int = 0  # those of them that are float32 whatever the compute dtype


class ResidualScheme(nn.Module, ABC):
    """A state machine over depth that decides what each sublayer reads and where its output goes.

    The model calls, for its M sublayers (sites 0 .. M-1) in order:

        state = scheme(embedding)
        inputs, state = scheme.read(state, site, norm)
        state = scheme.write(state, site, sublayer(*inputs))
        ...
        hidden = scheme.finish(state, norm)

    The contract, tested for every registered scheme:
    - A state is immutable; `read` and `write` return a new one and change nothing in place.
    - Everything is per token: no state crosses tokens, so decoding needs no cache for it.
    - The scheme owns every routing parameter, in float32, and its statistics run in float32.
    - `start` is the module's `forward`, so that wrappers with forward hooks (FSDP) see it.

    Args:
        config: The scheme's own `Config`.
        dim: Width D of the residual stream.
        kinds: What each of the M sublayers is, in order.
        eps: The model's norm epsilon, also that of every key norm.
    """

    Config: ClassVar[type]
    emit_dim: int = 0
    """Extra columns that every sublayer's output projection emits for the scheme."""
    token_null: bool = False
    """Whether attention runs Softmax1 and appends its null mass, one column after the emitted ones.

    The null mass of a token is `1 / (1 + sum_j exp(score_j))`, averaged over the attention heads.
    """

    def __init__(self, config: Any, *, dim: int, kinds: Sequence[Kind], eps: float) -> None:
        super().__init__()
        self.config, self.dim, self.kinds, self.eps = config, dim, tuple(kinds), eps

    @property
    def depth_block_ends(self) -> tuple[int, ...]:
        """Return the sites after which little state is alive: where checkpointing should cut."""
        return tuple(range(1, len(self.kinds) + 1))

    @abstractmethod
    def forward(self, x: Tensor) -> State:
        """Return the state that holds the embedding `[B, T, D]`."""

    @abstractmethod
    def read(self, state: State, site: int, norm: Norm) -> tuple[tuple[Tensor, ...], State]:
        """Return the inputs of sublayer `site`, normed, one `[B, T, D]` per role, and a state."""

    @abstractmethod
    def write(self, state: State, site: int, y: Tensor) -> State:
        """Return the state after sublayer `site` gave `y`, `[B, T, D + emit_dim]`.

        With `token_null`, that of an attention sublayer has one more column.
        """

    def settle(self, state: State) -> State:
        """Return an equal state that keeps as little as possible, for one that will be kept.

        A scheme may leave a write to the next read, to add it in one pass with what the read does;
        until then the state holds two tensors in place of their sum.
        """
        return state

    @abstractmethod
    def finish(self, state: State, norm: Norm) -> Tensor:
        """Return the normed input of the head, `[B, T, D]`."""

    def weights(self, state: State, site: int) -> Tensor | None:
        """Return the depth weights of the read at `site`, for diagnostics.

        `site = M` asks for the final read. Reference arithmetic, not a fast path.

        Returns:
            `[roles, S, B, T, H]`, a null last; None for a scheme or a site without depth weights.
        """
        return None

    def init_weights(self, draw: Draw) -> None:
        """Initialise the routing parameters; all zero unless the scheme overrides this.

        Args:
            draw: Fills one parameter from the model's normal distribution, by its name alone.
        """
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.zero_()

    def cost(self) -> Cost:
        """Return the closed-form cost, without emitted columns."""
        return Cost(sum(p.numel() for p in self.parameters()), 0, 0)
