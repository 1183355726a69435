"""What a model costs, in closed form: parameters, multiply-adds and retained sources.

The convention is that of arXiv 2607.09694, appendix A: multiply-adds of products, per token. Norms,
softmax, rotations and block sums are of lower order and left out.
"""

from typing import NamedTuple

import torch

from depthroute.models import ModelConfig
from depthroute.nn.low_rank import LowRankConfig, Projection


class Parameters(NamedTuple):
    """Parameters of a model by where they are."""

    embedding: int
    head: int  # 0 if tied to the embedding
    sublayers: int
    emitted: int  # rows of the output projections that emit columns for the scheme
    routing: int  # the scheme's own

    @property
    def total(self) -> int:
        """Return the parameters of the whole model."""
        return sum(self)


class MultiplyAdds(NamedTuple):
    """Multiply-adds of one forward pass, per token."""

    core: int  # matrices of the sublayers: `L (4 d^2 + 3 d m)` with full heads and full rank
    head: int
    attention: int  # token attention, mean over a causal row; 0 without a context
    routing: int  # depth scores and mixes, and the scheme's own products
    emitted: int  # emitted columns

    @property
    def added(self) -> int:
        """Return what the residual scheme adds to the plain sum."""
        return self.routing + self.emitted

    @property
    def added_percent(self) -> float:
        """Return `added` in percent of the core, the unit of the paper's Table 1."""
        return 100 * self.added / self.core

    @property
    def total(self) -> int:
        """Return the multiply-adds of the whole forward pass."""
        return sum(self)


class Account(NamedTuple):
    """Closed-form cost of a model."""

    parameters: Parameters
    multiply_adds: MultiplyAdds
    cached_elements: int  # kept as depth sources, per token; 0 for the plain sum
    cached_bytes: int

    @property
    def training_flops(self) -> int:
        """Return the FLOPs of one training step per token, the numerator of MFU.

        `6 * multiply_adds.total`: two FLOPs per multiply-add, once forward and twice backward.
        Recomputed activations do not count.
        """
        return 6 * self.multiply_adds.total


def account(
    config: ModelConfig, *, context: int | None = None, bytes_per_element: int = 2
) -> Account:
    """Count what a model costs, whatever its residual scheme.

    Every weight of a matrix is one multiply-add per token; only the embedding is a look-up. A
    scheme states its own cost beyond that (`ResidualScheme.cost`).

    Args:
        config: Shape of the model; `vocab_size` must be set.
        context: Tokens T of a row, >= 1. Token attention then costs
            `L heads head_dim (T + 1)`: a score and a mix over the mean `(T + 1) / 2` keys that a
            causal mask leaves in one document. None leaves token attention out, as the paper does.
        bytes_per_element: Size of a retained element in the compute dtype, >= 1; 2 for bfloat16.
            What a scheme keeps in float32 takes at least 4.

    Raises:
        ValueError: `vocab_size` is 0, or a number is outside its range.
    """
    if config.vocab_size < 1:
        raise ValueError(f"vocab_size must be >= 1, got {config.vocab_size}")
    if context is not None and context < 1:
        raise ValueError(f"context must be >= 1 or None, got {context}")
    if bytes_per_element < 1:
        raise ValueError(f"bytes_per_element must be >= 1, got {bytes_per_element}")
    with torch.device("meta"):
        residual = config.build_residual()
    cost = residual.cost()
    dim, layers = config.hidden_size, config.num_hidden_layers
    query_dim = config.num_attention_heads * config.head_width
    per_layer = sum(
        _num_weights(config.low_rank, name, shape) for name, shape in config.projections.items()
    )
    output_widths = {"attention": query_dim, "mlp": config.intermediate_size}
    vocabulary = config.vocab_size * dim
    parameters = Parameters(
        embedding=vocabulary,
        head=0 if config.tie_word_embeddings else vocabulary,
        sublayers=layers * per_layer,
        emitted=residual.emit_dim * sum(output_widths[kind] for kind in residual.kinds),
        routing=cost.parameters,
    )
    multiply_adds = MultiplyAdds(
        core=parameters.sublayers,
        head=vocabulary,
        attention=0 if context is None else layers * query_dim * (context + 1),
        routing=cost.multiply_adds,
        emitted=parameters.emitted,
    )
    narrow = cost.cached - cost.cached_wide
    num_bytes = bytes_per_element * narrow + max(bytes_per_element, 4) * cost.cached_wide
    return Account(parameters, multiply_adds, cost.cached, num_bytes)


def format_account(cost: Account) -> str:
    """Render an account as aligned text."""
    products = cost.multiply_adds
    rows = [
        ("parameters", cost.parameters.total),
        *((f"  {name}", number) for name, number in cost.parameters._asdict().items()),
        ("multiply-adds per token, forward", products.total),
        *((f"  {name}", number) for name, number in products._asdict().items()),
        ("training FLOPs per token", cost.training_flops),
        ("retained sources per token, elements", cost.cached_elements),
        ("retained sources per token, bytes", cost.cached_bytes),
    ]
    lines = [f"{name:<36}  {number:>19,}" for name, number in rows]
    return "\n".join([*lines, f"the scheme adds {products.added_percent:.4f} % of the core"])


def _num_weights(low_rank: LowRankConfig | None, name: Projection, shape: tuple[int, int]) -> int:
    """Count a full matrix, or the two of a low-rank map, whose duplicated latents cost nothing."""
    rank = low_rank.rank_of(name) if low_rank else None
    return shape[0] * shape[1] if rank is None else rank * sum(shape)
