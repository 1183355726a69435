"""What a model costs, in closed form: parameters, multiply-adds and retained sources.

The convention is that of arXiv 2607.09694, appendix A: multiply-adds of products, per token. Norms,
softmax, rotations and block sums are of lower order and left out. The second half of the file
repeats the numbers that the paper prints.
"""

from typing import Any, NamedTuple

import torch

from depthroute.models import ModelConfig
from depthroute.residual import AttnResConfig, PreNormConfig, ProjectedKey, TailKey


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

    core: int  # matrices of the sublayers: `L (4 d^2 + 3 d m)` with full heads
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
        bytes_per_element: Size b of a retained value or key element, >= 1; 2 for bfloat16.

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
    kv_dim = config.kv_heads * config.head_width
    per_layer = dim * (2 * query_dim + 2 * kv_dim + 3 * config.intermediate_size)
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
    return Account(parameters, multiply_adds, cost.cached, bytes_per_element * cost.cached)


class PaperNumber(NamedTuple):
    """A number that the paper prints, beside ours."""

    name: str
    ours: float
    paper: str
    note: str = ""

    @property
    def ours_rounded(self) -> str:
        """Return our number with as many decimals as the printed one."""
        return f"{self.ours:,.{len(self.paper.partition('.')[2])}f}"

    @property
    def agrees(self) -> bool:
        """Return whether our number rounds to the printed one."""
        return self.ours_rounded == self.paper


class PaperRow(NamedTuple):
    """A row of Table 1."""

    method: str
    num_blocks: int  # 0 is full
    rank: int
    added: PaperNumber  # percent of the core
    loss: float  # the paper's validation loss


def paper_table() -> list[PaperRow]:
    """Return the 19 routed rows of Table 1 of arXiv 2607.09694, beside our count."""
    rows = []
    for method, num_blocks, rank, paper, loss in _TABLE_1:
        ours = _paper_account(method, num_blocks, rank).multiply_adds.added_percent
        added = PaperNumber("added, % of the core", ours, paper)
        rows.append(PaperRow(method, num_blocks, rank, added, loss))
    return rows


def paper_numbers() -> list[PaperNumber]:
    """Return the numbers of appendix A.6 and of the headline claims, beside our count.

    Two differ, because the paper computes with rounded parts: its 1.3866 is a sum of two rounded
    percentages (Table 1 has 1.3865), its 11.3 a ratio of two.
    """

    def added(method: str, num_blocks: int, rank: int) -> int:
        return _paper_account(method, num_blocks, rank).multiply_adds.added

    plain = _account_with(PreNormConfig())
    core, base = plain.multiply_adds.core, plain.parameters.total
    full = _paper_account("AttnRes", 0, 1024)
    projected = _paper_account("P-LR", 0, 32)
    sliced = _paper_account("S-LR", 0, 32)
    kernel = sliced.multiply_adds.added  # a slice is free, so this is the kernel of P-LR too
    key_path = projected.multiply_adds.added - kernel
    cache = projected.cached_elements / full.cached_elements
    best = added("S-LR", 8, 64)
    total = projected.multiply_adds.added_percent
    sum_note = "a sum of rounded parts; 1.3865 of Table 1 is right"
    ratio_note = "a ratio of rounded parts; unrounded it is 11.352"
    implied = "not printed; Table 1 implies it"
    numbers = (
        ("kernel reduction, r=32, %", 100 * (1 - kernel / full.multiply_adds.added), "48.44"),
        ("P-LR key path, r=32, multiply-adds", key_path, "2,981,888"),
        ("P-LR key path, r=32, % of the core", 100 * key_path / core, "0.9673"),
        ("P-LR added, full, r=32, % of the core", total, "1.3866", sum_note),
        ("P-LR parameters, r=32", projected.parameters.total - base, "2,983,424"),
        ("S-LR parameters, r=32", sliced.parameters.total - base, "1,536"),
        ("P-LR rows, r=32, % of the core", 100 * projected.parameters.emitted / core, "0.957"),
        ("P-LR source cache, r=32, % more", 100 * (cache - 1), "3.125"),
        ("added, AttnRes N=16 / S-LR N=8 r=64", added("AttnRes", 16, 1024) / best, "3.25"),
        ("added, P-LR N=8 r=32 / S-LR N=8 r=64", added("P-LR", 8, 32) / best, "11.3", ratio_note),
        # a full-width read costs 2 * 1024 multiply-adds per source
        ("sources over all reads, full", full.multiply_adds.added / 2048, "1,224", implied),
        ("sources over all reads, N=4", added("AttnRes", 4, 1024) / 2048, "168", implied),
        ("sources over all reads, N=8", added("AttnRes", 8, 1024) / 2048, "264", implied),
        ("sources over all reads, N=16", added("AttnRes", 16, 1024) / 2048, "456", implied),
    )
    return [PaperNumber(*number) for number in numbers]


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


def format_paper() -> str:
    """Render `paper_table` and `paper_numbers` as aligned text, with how many agree."""
    table, numbers = paper_table(), paper_numbers()
    lines = ["Table 1: added multiply-adds per token, % of the core"]
    lines.append(f"{'method':<8} {'N':>4} {'rank':>5} {'loss':>7} {'ours':>11} {'paper':>11}")
    for row in table:
        name = f"{row.method:<8} {row.num_blocks or 'full':>4} {row.rank:>5} {row.loss:>7.4f}"
        lines.append(f"{name} {_columns(row.added)}")
    lines += [f"{sum(row.added.agrees for row in table)} of {len(table)} rows agree", ""]
    lines.append(f"{'Appendix A.6 and headline claims':<40} {'ours':>11} {'paper':>11}")
    lines += [f"{number.name:<40} {_columns(number)}" for number in numbers]
    lines.append(f"{sum(number.agrees for number in numbers)} of {len(numbers)} numbers agree")
    return "\n".join(lines)


def _columns(number: PaperNumber) -> str:
    note = f"  ({number.note})" if number.note else ""
    verdict = "agrees" if number.agrees else "differs"
    return f"{number.ours_rounded:>11} {number.paper:>11}  {verdict}{note}"


_PAPER_KEYS: dict[str, Any] = {"AttnRes": TailKey, "P-LR": ProjectedKey, "S-LR": TailKey}

_TABLE_1 = (  # method, blocks (0 is full), rank, printed added percent, validation loss
    ("AttnRes", 0, 1024, "0.8131", 2.9752),
    ("AttnRes", 4, 1024, "0.1116", 2.9797),
    ("AttnRes", 8, 1024, "0.1754", 2.9778),
    ("AttnRes", 16, 1024, "0.3029", 2.9673),
    ("P-LR", 0, 16, "0.8966", 2.9606),
    ("P-LR", 0, 32, "1.3865", 2.9538),
    ("P-LR", 0, 64, "2.3665", 2.9501),
    ("P-LR", 4, 32, "1.0248", 2.9488),
    ("P-LR", 8, 32, "1.0577", 2.9477),
    ("P-LR", 16, 32, "1.1235", 2.9543),
    ("S-LR", 0, 16, "0.4129", 2.9762),
    ("S-LR", 0, 32, "0.4193", 2.9682),
    ("S-LR", 0, 64, "0.4320", 2.9638),
    ("S-LR", 0, 128, "0.4574", 2.9630),
    ("S-LR", 0, 256, "0.5082", 2.9626),
    ("S-LR", 0, 512, "0.6099", 2.9617),
    ("S-LR", 4, 64, "0.0593", 2.9533),
    ("S-LR", 8, 64, "0.0932", 2.9480),
    ("S-LR", 16, 64, "0.1609", 2.9494),
)


def _paper_account(method: str, num_blocks: int, rank: int) -> Account:
    key = _PAPER_KEYS[method](rank=rank)
    return _account_with(AttnResConfig(num_blocks=num_blocks, key=key))


def _account_with(residual: Any) -> Account:
    """Count the paper's 24-layer model with a residual scheme."""
    config = ModelConfig(
        vocab_size=100_277,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=24,
        num_attention_heads=16,
        residual=residual,
    )
    return account(config)
