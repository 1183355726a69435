"""Several variants of a run side by side: same batches, same initial weights, one table."""

import json
import re
import statistics
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch

from depthroute.account import account
from depthroute.config import config_dataclass, load
from depthroute.data import TokenDataset, validation_windows
from depthroute.diagnose import (
    DepthRecord,
    plot_depth_weights,
    plot_differences,
    plot_effective_sources,
    plot_losses,
    record_depth,
)
from depthroute.files import write_text
from depthroute.models import generate
from depthroute.table import markdown_table
from depthroute.train.config import RunConfig
from depthroute.train.report import Reporter
from depthroute.train.run import RunFolder, environment, load_model, resolve
from depthroute.train.trainer import RunResult, train
from depthroute.train.validate import Validation, documents_of


@config_dataclass
class CompareConfig:
    """A run and the settings that vary.

    Args:
        out: Folder of the comparison; each run gets a folder inside.
        config: Run file that the variants share, relative to the working directory.
        variants: Overrides of each variant by its label; the first one is what the others are
            compared with.
        seeds: Every variant runs once per seed, paired across variants.
        record_tokens: Validation tokens over which depth weights are recorded.
        sample_tokens: Length of the sampled continuation.
    """

    out: str
    config: str
    variants: dict[str, tuple[str, ...]]
    seeds: tuple[int, ...] = (0,)
    record_tokens: int = 16_384
    sample_tokens: int = 80

    def __post_init__(self) -> None:
        if not self.variants:
            raise ValueError("variants must name at least one variant, got none")
        for label in self.variants:  # part of file names
            if not re.fullmatch(r"[A-Za-z0-9_-]+", label):
                raise ValueError(
                    f"variants must have labels of letters, digits, _ and -, got {label!r}"
                )
        if not self.seeds or len(set(self.seeds)) != len(self.seeds):
            raise ValueError(f"seeds must be different and at least one, got {self.seeds}")
        for name in ("record_tokens", "sample_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")


class Outcome(NamedTuple):
    """What came of one variant."""

    label: str
    losses: tuple[float, ...]  # validation loss by seed, nats per token
    bits_per_byte: float | None  # mean over seeds
    parameters: int
    added_percent: float  # multiply-adds beyond the plain sum, % of the core
    tokens_per_s: float  # median over steps and seeds
    mean_grad_norm: float  # mean over steps and seeds, before the clip
    effective_sources: float | None  # mean over reads; None without depth weights
    peak_memory_gib: float | None  # None where it is not known
    sample: str  # a continuation, first seed


def compare(
    config: CompareConfig, overrides: Iterable[str] = (), *, reporter: Reporter | None = None
) -> tuple[list[Outcome] | None, int | None]:
    """Train every variant with every seed and write a table, plots and the numbers behind them.

    Args:
        config: What to compare.
        overrides: Settings for every run, before the variant's own.
        reporter: Where progress goes; None prints it.

    Returns:
        The outcomes and None, or None and the number of the signal that stopped it; the same call
        continues.

    Raises:
        ValueError: As `train`; all runs are checked before the first one starts.
    """
    runs = {
        (label, seed): load(
            RunConfig,
            config.config,
            [
                *overrides,
                *own,
                f"train.seed={seed}",
                f"out={json.dumps(str(Path(config.out) / f'{label}-seed{seed}'))}",
            ],
        )
        for seed in config.seeds
        for label, own in config.variants.items()
    }
    results: dict[tuple[str, int], RunResult] = {}
    for (label, seed), run in runs.items():
        result = train(run, reporter=reporter or Reporter(f"{label} seed {seed}", run.train.steps))
        if result.stopped_by is not None:
            return None, result.stopped_by
        results[label, seed] = result
    outcomes, records = [], {}
    for label in config.variants:
        paired = [(runs[label, seed], results[label, seed]) for seed in config.seeds]
        outcome, record = _assess(label, paired, config)
        outcomes.append(outcome)
        if record is not None:
            records[label] = record
    _write(config, outcomes, records, results)
    return outcomes, None


def format_outcomes(outcomes: list[Outcome]) -> str:
    """Return the table, in Markdown, that fits a terminal as well.

    With several seeds the loss is mean and sample standard deviation, and the last column the mean
    paired difference to the first variant.
    """
    head = ["variant", "val loss", "difference", "bits/byte", "parameters", "added FLOPs %"]
    head += ["tokens/s", "grad norm", "N_eff"]
    base = outcomes[0]
    memory = any(outcome.peak_memory_gib is not None for outcome in outcomes)
    rows = [head + (["peak GiB"] if memory else [])]
    for one in outcomes:
        row = [
            one.label,
            _spread(one.losses, ""),
            "-" if one is base else _spread(_differences(one, base), "+"),
            _or_dash(one.bits_per_byte, ".4f"),
            f"{one.parameters:,}",
            f"{one.added_percent:.4f}",
            f"{one.tokens_per_s:,.0f}",
            f"{one.mean_grad_norm:.3f}",
            _or_dash(one.effective_sources, ".2f"),
        ]
        rows.append(row + ([_or_dash(one.peak_memory_gib, ".2f")] if memory else []))
    return markdown_table(rows)


def _differences(one: Outcome, base: Outcome) -> list[float]:
    """Return the losses less those of another variant, seed by seed."""
    return [a - b for a, b in zip(one.losses, base.losses, strict=True)]


def _spread(values: list[float] | tuple[float, ...], sign: str) -> str:
    mean = format(statistics.fmean(values), f"{sign}.4f")
    return mean if len(values) < 2 else f"{mean} +- {statistics.stdev(values):.4f}"


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _assess(
    label: str, runs: list[tuple[RunConfig, RunResult]], config: CompareConfig
) -> tuple[Outcome, DepthRecord | None]:
    """Measure a variant; what needs a model is measured with the first seed's."""
    validations: list[Validation] = [result.validation for _, result in runs if result.validation]
    bits = [v.bits_per_byte for v in validations if v.bits_per_byte is not None]
    steps = [
        record
        for _, result in runs
        for record in _steps(result.path)
        if record["step"] > 1 or result.step == 1  # the first step builds and compiles
    ]
    memory = [r["perf/peak_memory_gib"] for r in steps if "perf/peak_memory_gib" in r]
    run, result = runs[0]
    dataset = TokenDataset(run.data.path)
    record, sample = _look(run, result.path, dataset, config)
    cost = account(resolve(run, dataset).model)
    return Outcome(
        label=label,
        losses=tuple(v.loss_nats for v in validations),
        bits_per_byte=statistics.fmean(bits) if bits else None,
        parameters=cost.parameters.total,
        added_percent=cost.multiply_adds.added_percent,
        tokens_per_s=statistics.median(r["perf/tokens_per_s"] for r in steps),
        mean_grad_norm=statistics.fmean(r["train/grad_norm"] for r in steps),
        effective_sources=None if record is None else record.mean_effective_sources,
        peak_memory_gib=max(memory) if memory else None,
        sample=sample,
    ), record


def _look(
    run: RunConfig, path: Path, dataset: TokenDataset, config: CompareConfig
) -> tuple[DepthRecord | None, str]:
    """Record the depth weights of a trained model and sample from it."""
    device, _ = run.train.placement()
    model = load_model(path, device=device)
    windows = validation_windows(
        dataset.split("val"),
        context=run.data.context,
        max_tokens=max(config.record_tokens, run.data.context),
    )
    batches = (
        (batch.ids.to(device), documents_of(batch, device) if run.data.mask_documents else None)
        for batch in windows.batches(4)
    )
    record = record_depth(model, batches)
    prompt = torch.tensor([[dataset.end_id]], device=device)
    ids = generate(
        model, prompt, max_new_tokens=config.sample_tokens, temperature=0.8, top_k=50, seed=0
    )
    return record, dataset.tokenizer().decode(ids[0, 1:].tolist())


def _steps(path: Path) -> list[dict[str, Any]]:
    return [record for record in RunFolder.read(path) if "train/loss_nats" in record]


def _write(
    config: CompareConfig,
    outcomes: list[Outcome],
    records: dict[str, DepthRecord],
    results: dict[tuple[str, int], RunResult],
) -> None:
    out = Path(config.out)
    write_text(out / "table.md", format_outcomes(outcomes) + "\n")
    numbers = {
        "config": asdict(config),
        "environment": environment(),
        "outcomes": [outcome._asdict() for outcome in outcomes],
    }
    write_text(out / "results.json", json.dumps(numbers, indent=1) + "\n")
    curves = {
        label: [
            (record["step"], record["train/loss_nats"])
            for record in _steps(results[label, config.seeds[0]].path)
        ]
        for label in config.variants
    }
    plot_losses(curves, out / "losses.png")
    base, *others = outcomes
    if others:
        plot_differences(
            {other.label: _differences(other, base) for other in others},
            out / "differences.png",
            base=base.label,
        )
    if records:
        plot_depth_weights(records, out / "depth_weights.png")
        plot_effective_sources(records, out / "effective_sources.png")
    for label, record in records.items():
        record.save(out / f"depth_{label}.npz")
