import json
import os
import signal
import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from depthroute.config import ConfigError, dump, load
from depthroute.diagnose import DepthRecord
from depthroute.train import CompareConfig, compare, load_model
from depthroute.train.compare import Outcome, format_outcomes
from depthroute.train.report import Reporter
from helpers import assert_close

VARIANTS = {"prenorm": ("model.residual.name=prenorm",), "s_lr": ()}
FILES = [
    "depth_s_lr.npz",
    "depth_weights.png",
    "differences.png",
    "effective_sources.png",
    "losses.png",
    "results.json",
    "table.md",
]


@pytest.fixture
def make_comparison(make_run, tmp_path):
    def make(**settings: Any) -> CompareConfig:
        (tmp_path / "run.toml").write_text(dump(make_run("train.steps=3")))
        shared = {"config": str(tmp_path / "run.toml"), "out": str(tmp_path / "comparison")}
        small = {"variants": VARIANTS, "seeds": (0, 1), "record_tokens": 64, "sample_tokens": 5}
        return CompareConfig(**{**shared, **small, **settings})

    return make


def records(config: CompareConfig, label: str, seed: int) -> list[dict[str, Any]]:
    path = Path(config.out) / f"{label}-seed{seed}" / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def losses(config: CompareConfig, label: str, seed: int) -> list[float]:
    found = records(config, label, seed)
    return [record["train/loss_nats"] for record in found if "train/loss_nats" in record]


def outcome(label: str, *losses: float, **changes: Any) -> Outcome:
    return Outcome(
        label=label,
        losses=losses,
        bits_per_byte=1.25,
        parameters=1_234_567,
        added_percent=0.125,
        tokens_per_s=2500.0,
        mean_grad_norm=0.5,
        effective_sources=3.5,
        peak_memory_gib=None,
        sample="",
    )._replace(**changes)


def cells(table: str) -> list[list[str]]:
    head, rule, *rows = table.splitlines()
    assert set(rule) == {"|", "-"}
    assert {len(line) for line in (head, rule, *rows)} == {len(head)}
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in (head, *rows)]


def test_comparison_writes_numbers_table_and_plots(make_comparison):
    config = make_comparison()
    outcomes, stopped_by = compare(config)
    assert stopped_by is None
    assert outcomes is not None
    assert [one.label for one in outcomes] == ["prenorm", "s_lr"]
    out = Path(config.out)
    assert sorted(path.name for path in out.iterdir() if path.is_file()) == FILES
    for file in out.glob("*.png"):
        assert file.read_bytes().startswith(b"\x89PNG"), file
    for one in outcomes:
        last = [records(config, one.label, seed)[-1] for seed in (0, 1)]
        assert one.losses == tuple(record["val/loss_nats"] for record in last)
        bits = statistics.fmean(record["val/bits_per_byte"] for record in last)
        assert one.bits_per_byte == pytest.approx(bits)
        later = [r for seed in (0, 1) for r in records(config, one.label, seed)[1:3]]
        norm = statistics.fmean(record["train/grad_norm"] for record in later)
        assert one.mean_grad_norm == pytest.approx(norm)
        model = load_model(out / f"{one.label}-seed0")
        assert one.parameters == sum(parameter.numel() for parameter in model.parameters())
    plain, routed = outcomes
    assert plain.effective_sources is None
    assert plain.added_percent == 0.0
    record = DepthRecord.load(out / "depth_s_lr.npz")
    assert record.num_tokens == 64
    assert routed.effective_sources == pytest.approx(np.mean(record.effective_sources[1:]))
    assert routed.added_percent > 0
    stored = json.loads((out / "results.json").read_text())
    assert [tuple(one["losses"]) for one in stored["outcomes"]] == [one.losses for one in outcomes]
    assert stored["config"]["seeds"] == [0, 1]
    assert (out / "table.md").read_text() == format_outcomes(outcomes) + "\n"


def test_table_of_one_seed():
    table = cells(
        format_outcomes(
            [
                outcome("base", 3.0, effective_sources=None, bits_per_byte=None),
                outcome("better", 2.875),
                outcome("worse", 3.5),
            ]
        )
    )
    head = "variant,val loss,difference,bits/byte,parameters,added FLOPs %,tokens/s,grad norm,N_eff"
    assert table[0] == head.split(",")
    shared = ["1,234,567", "0.1250", "2,500", "0.500"]
    assert table[1] == ["base", "3.0000", "-", "-", *shared, "-"]
    assert table[2] == ["better", "2.8750", "-0.1250", "1.2500", *shared, "3.50"]
    assert table[3] == ["worse", "3.5000", "+0.5000", "1.2500", *shared, "3.50"]


def test_table_of_several_seeds_pairs_them():
    table = cells(format_outcomes([outcome("base", 3.0, 5.0), outcome("other", 2.5, 4.75)]))
    assert table[1][:3] == ["base", "4.0000 +- 1.4142", "-"]
    # paired differences -0.5 and -0.25: their spread is far below that of the losses
    assert table[2][:3] == ["other", "3.6250 +- 1.5910", "-0.3750 +- 0.1768"]


def test_memory_has_a_column_where_it_was_measured():
    table = cells(format_outcomes([outcome("a", 1.0, peak_memory_gib=1.5), outcome("b", 1.0)]))
    assert [row[-1] for row in table] == ["peak GiB", "1.50", "-"]


def test_variants_share_batches_and_initial_weights(make_comparison):
    # nothing learns, and with zero queries all sources weigh the same: a mean in place of a sum,
    # which the norm before each sublayer undoes, so that both variants compute one function
    config = make_comparison(variants={**VARIANTS, "s_lr": ("model.residual.num_blocks=0",)})
    compare(config, ("optim.muon.lr=0", "optim.adamw.lr=0", "model.norm_eps=1e-12"))
    for seed in (0, 1):
        plain, routed = losses(config, "prenorm", seed), losses(config, "s_lr", seed)
        assert routed == pytest.approx(plain, abs=1e-5)
        assert min(abs(a - b) for a, b in pairwise(plain)) > 1e-3
        weights = [
            load_model(Path(config.out) / f"{label}-seed{seed}").state_dict() for label in VARIANTS
        ]
        assert weights[1].keys() - weights[0].keys() == {"model.residual.query"}
        for name, weight in weights[0].items():
            assert_close(weights[1][name], weight, name, rtol=1e-12)
    assert losses(config, "prenorm", 0) != losses(config, "prenorm", 1)


def test_stopped_comparison_continues(make_comparison, tmp_path, monkeypatch):
    expected, _ = compare(make_comparison(out=str(tmp_path / "straight"), seeds=(0,)))
    config = make_comparison(seeds=(0,))
    say = Reporter.say

    def say_and_stop(self: Reporter, text: str) -> None:
        say(self, text)
        if text.startswith("s_lr seed 0 step 1/3"):
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(Reporter, "say", say_and_stop)
        assert compare(config) == (None, signal.SIGTERM)
    assert not (Path(config.out) / "table.md").exists()
    assert len(losses(config, "s_lr", 0)) == 2
    outcomes, stopped_by = compare(config)
    assert stopped_by is None
    assert outcomes is not None
    assert expected is not None
    assert [one.losses for one in outcomes] == [one.losses for one in expected]
    assert [one.sample for one in outcomes] == [one.sample for one in expected]


def test_shared_settings_come_before_those_of_a_variant(make_comparison):
    config = make_comparison(variants={"a": (), "b": ("train.batch_size=3",)}, seeds=(0,))
    compare(config, ["train.batch_size=2", "train.steps=1"])
    sizes = [records(config, label, 0)[0]["train/tokens"] for label in ("a", "b")]
    assert sizes == [2 * 16, 3 * 16]


def test_mistake_in_one_variant_stops_before_any_run(make_comparison):
    config = make_comparison(variants={"good": (), "bad": ("model.residual.key.rnk=8",)})
    with pytest.raises(ConfigError, match=r"model\.residual\.key\.rnk: unknown key.*\"rank\""):
        compare(config)
    assert not Path(config.out).exists()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("variants={a = 1}", r"^variants\.a: expected array \[string, \.\.\.\], got int 1$"),
        ("variants={a = ['x=1', 2]}", r"^variants\.a\[1\]: expected string, got int 2$"),
        ("variants={a = {b = ['x=1']}}", r"^variants\.a: expected array .*, got table "),
        ("variants=[]", r"^variants: expected table, got array \[\]$"),
        ("variants={}", "variants must name at least one variant"),
        ("variants={'../a' = []}", r"variants must have labels of letters.*'\.\./a'"),
        ("seeds=[]", r"seeds must be different and at least one"),
        ("seeds=[1, 1]", r"seeds must be different .* \(1, 1\)"),
        ("seeds=[0.5]", r"^seeds\[0\]: expected int, got float 0\.5$"),
        ("sample_tokens=0", "sample_tokens must be >= 1, got 0"),
    ],
)
def test_mistakes_in_the_comparison_are_explained(override, message):
    base = {"out": "o", "config": "c", "variants": {"a": []}}
    if override.startswith("variants"):
        del base["variants"]
    with pytest.raises(ConfigError, match=message):
        load(CompareConfig, None, [override], base=base)


def test_variants_of_a_file_and_of_overrides_are_merged():
    base = {"out": "o", "config": "c", "variants": {"a": ["x=1"], "b": []}}
    config = load(CompareConfig, None, ["variants.b=['y=2']", "variants.c=[]"], base=base)
    assert config.variants == {"a": ("x=1",), "b": ("y=2",), "c": ()}


def test_settings_of_a_comparison_read_back(tmp_path, make_comparison):
    config = make_comparison(variants={"a": ("x='1'", "y=2"), "b": ()})
    (tmp_path / "compare.toml").write_text(dump(config))
    assert load(CompareConfig, tmp_path / "compare.toml") == config
