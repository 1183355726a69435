"""The closed forms against counts of real models, and against the numbers of arXiv 2607.09694."""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from depthroute.account import account, format_account
from depthroute.models import CausalLM, ModelConfig
from depthroute.nn import LowRankConfig
from depthroute.ops import block
from depthroute.paper import format_paper, paper_numbers, paper_table
from depthroute.residual import AttnResConfig, PreNormConfig, ProjectedKey
from helpers import VARIANTS, tiny_config

ATTN_RES = [name for name, config in VARIANTS.items() if isinstance(config, AttnResConfig)]

SHAPES: dict[str, dict[str, Any]] = {
    "gqa": {},
    "full_heads": {"num_key_value_heads": None},
    "tied": {"tie_word_embeddings": True},
    "wide_heads": {"head_dim": 12, "num_key_value_heads": 1},
    "low_rank": {"low_rank": LowRankConfig(rank=8, ranks={"down": 5}, scope=("q", "o", "down"))},
}
BATCH, TOKENS = 2, 7


class KernelCounter:
    """Pass-through ops that count the multiply-adds per token of the reads that really run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.multiply_adds = 0
        self._attend, self._merge = block.depth_attend, block.depth_merge
        monkeypatch.setattr(block, "depth_attend", self.attend)
        monkeypatch.setattr(block, "depth_merge", self.merge)

    def attend(self, values: Sequence[Tensor], query: Tensor, **options: Any) -> Any:
        for row in query:
            for value in values:
                self.multiply_adds += len(row) + value.shape[-1]
        return self._attend(values, query, **options)

    def merge(self, out: Tensor, lse: Tensor, value: Tensor, query: Tensor, **options: Any) -> Any:
        self.multiply_adds += len(query) + value.shape[-1]
        return self._merge(out, lse, value, query, **options)


def count_forward(config: ModelConfig) -> dict[str, Fraction]:
    """Return the multiply-adds per token that PyTorch's FLOP counter sees, by operator."""
    model, ids = CausalLM(config), torch.zeros((BATCH, TOKENS), dtype=torch.int64)
    counter = FlopCounterMode(display=False)
    # the plain backend, whose products the counter sees one by one
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter:
        model(ids)
    flops = counter.get_flop_counts()["Global"]
    return {str(op): Fraction(n, 2 * BATCH * TOKENS) for op, n in flops.items()}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_parameters_equal_those_of_the_model(variant: str, shape: str) -> None:
    config = tiny_config(VARIANTS[variant], **SHAPES[shape])
    with torch.device("meta"):
        model = CausalLM(config, seed=None)
    counts = dict.fromkeys(("embedding", "head", "sublayers", "emitted", "routing"), 0)
    for name, parameter in model.named_parameters():  # a tied matrix is named once
        kinds = {
            "lm_head.": "head",
            "model.embed_tokens.": "embedding",
            "model.residual.": "routing",
        }
        kind = next((kind for start, kind in kinds.items() if name.startswith(start)), "sublayers")
        counts["emitted" if name.endswith("emit_weight") else kind] += parameter.numel()
    assert account(config).parameters._asdict() == counts
    assert account(config).parameters.total == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("variant", ["prenorm", *ATTN_RES])
def test_multiply_adds_equal_those_of_a_forward(
    variant: str, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(VARIANTS[variant], **SHAPES[shape])
    kernel = KernelCounter(monkeypatch)
    matrices = count_forward(config)["aten.mm"]  # every weight's product
    ours = account(config).multiply_adds
    assert ours.core + ours.head + ours.added == matrices + Fraction(kernel.multiply_adds)


@pytest.mark.parametrize("shape", SHAPES)
def test_core_and_head_of_the_plain_sum(shape: str) -> None:
    config = tiny_config(PreNormConfig(), **SHAPES[shape])
    with torch.device("meta"):
        model = CausalLM(config, seed=None)
    sizes = {name: p.numel() for name, p in model.named_parameters() if ".layers." in name}
    ours = account(config).multiply_adds
    assert ours.core == sum(sizes.values())
    assert ours.head == model.lm_head.weight.numel()
    assert (ours.added, ours.added_percent, ours.attention) == (0, 0.0, 0)


@pytest.mark.parametrize("shape", SHAPES)
def test_attention_is_the_causal_part_of_the_counted_products(shape: str) -> None:
    config = tiny_config(PreNormConfig(), **SHAPES[shape])
    square = count_forward(config)["aten.bmm"]  # all keys for every token
    causal = Fraction(sum(position + 1 for position in range(TOKENS)), TOKENS**2)
    assert account(config, context=TOKENS).multiply_adds.attention == square * causal


def test_training_flops_count_two_per_multiply_add_three_times() -> None:
    config = tiny_config(PreNormConfig())
    model, ids = CausalLM(config), torch.zeros((1, 1), dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model(ids).sum().backward()
    flops = counter.get_flop_counts()["Global"]
    # mm holds the weights' products alone; without a context we leave out token attention too
    assert account(config).training_flops == flops[torch.ops.aten.mm]


@pytest.mark.parametrize(
    ("residual", "values", "keys"),
    [
        (PreNormConfig(), 0, 0),
        (AttnResConfig(num_blocks=0), 9, 0),
        (AttnResConfig(num_blocks=3), 4, 0),
        (AttnResConfig(num_blocks=3, key=ProjectedKey(rank=5)), 4, 4),
    ],
)
def test_cache_holds_the_embedding_and_each_block(residual: Any, values: int, keys: int) -> None:
    cost = account(tiny_config(residual), bytes_per_element=4)
    assert cost.cached_elements == 32 * values + 5 * keys
    assert cost.cached_bytes == 4 * cost.cached_elements


@pytest.mark.parametrize("variant", ATTN_RES)
def test_cache_is_what_the_last_state_holds(variant: str) -> None:
    config = tiny_config(VARIANTS[variant])
    scheme = config.build_residual()
    zeros = torch.zeros(1, 1, 32 + scheme.emit_dim, dtype=torch.bfloat16)
    state = scheme(zeros[..., :32])
    for site in range(len(scheme.kinds)):
        _, state = scheme.read(state, site, torch.nn.Identity())
        state = scheme.write(state, site, zeros)
    held = (*state.values, *state.keys)
    assert account(config).cached_elements == sum(tensor.numel() for tensor in held)
    assert account(config).cached_bytes == sum(tensor.nbytes for tensor in held)


def test_all_rows_of_table_1_agree() -> None:
    table = paper_table()
    assert len({(row.method, row.num_blocks, row.rank) for row in table}) == 19
    assert [row for row in table if f"{row.added.ours:.4f}" != row.added.paper] == []
    assert all(row.added.agrees for row in table)


def test_table_1_follows_from_source_counts_by_simulation() -> None:
    for row in paper_table():
        ends = {-(-48 * j // row.num_blocks) for j in range(1, row.num_blocks + 1)}
        sources, is_open, reads = 1, False, 0
        for write in range(1, 49):
            is_open = bool(row.num_blocks) and write not in ends
            sources += not is_open
            reads += sources + is_open
        kernel = (1024 + row.rank) * reads
        keys = row.rank * (24 * (1024 + 2816) + 1024) if row.method == "P-LR" else 0
        core = 24 * (4 * 1024**2 + 3 * 1024 * 2816)
        assert row.added.ours == pytest.approx(100 * (kernel + keys) / core, rel=1e-12)


def test_paper_numbers_differ_only_where_the_paper_rounds_first() -> None:
    numbers = {number.name: number for number in paper_numbers()}
    differing = {number.paper: number for number in numbers.values() if not number.agrees}
    assert set(differing) == {"1.3866", "11.3"}
    assert all(number.note for number in differing.values())
    printed = {row[:3]: float(row.added.paper) for row in paper_table()}
    key_path = float(numbers["P-LR key path, r=32, % of the core"].paper)
    assert f"{printed['S-LR', 0, 32] + key_path:.4f}" == "1.3866"
    assert f"{printed['P-LR', 8, 32] / printed['S-LR', 8, 64]:.1f}" == "11.3"
    assert differing["1.3866"].ours == pytest.approx(1.386536, abs=5e-7)
    assert differing["11.3"].ours == pytest.approx(11.352, abs=5e-4)
    exact = {name: n.ours for name, n in numbers.items() if n.paper.replace(",", "").isdigit()}
    assert list(exact.values()) == [2_981_888, 2_983_424, 1_536, 1224, 168, 264, 456]


def test_printed_source_counts_are_the_only_ones_that_give_table_1() -> None:
    core = 24 * (4 * 1024**2 + 3 * 1024 * 2816)
    printed = [row.added.paper for row in paper_table() if row.method == "AttnRes"]
    possible = [
        [n for n in range(2000) if f"{100 * 2 * 1024 * n / core:.4f}" == p] for p in printed
    ]
    assert possible == [[1224], [168], [264], [456]]


def test_reports_are_aligned_and_say_how_many_agree() -> None:
    lines = format_paper().splitlines()
    assert "19 of 19 rows agree" in lines
    assert "12 of 14 numbers agree" in lines
    rows = [line for line in lines if line.startswith(("AttnRes", "P-LR  ", "S-LR  "))]
    assert len(rows) == 19
    assert len({line.index("agrees") for line in rows}) == 1
    report = format_account(account(tiny_config(PreNormConfig()))).splitlines()
    assert report[0].split() == ["parameters", f"{4 * 32 * (32 + 32 + 32 + 144) + 2 * 61 * 32:,}"]
    assert len({len(line) for line in report[:-1]}) == 1


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"vocab_size": 0}, {}, "vocab_size must be >= 1, got 0"),
        ({}, {"context": 0}, "context must be >= 1 or None, got 0"),
        ({}, {"bytes_per_element": 0}, "bytes_per_element must be >= 1, got 0"),
    ],
)
def test_bad_numbers_are_named(
    changes: dict[str, int], options: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        account(tiny_config(PreNormConfig(), **changes), **options)
