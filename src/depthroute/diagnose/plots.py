"""Pictures of training and of depth weights, each one PNG file; needs matplotlib."""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from depthroute.diagnose.record import DepthRecord
from depthroute.files import replacing

# Okabe and Ito's colours, told apart with any colour vision; yellow is too pale for lines
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_DASHES = ("-", "--", ":")
_START = 0.05  # share of the steps whose losses may leave the picture


def plot_losses(
    runs: Mapping[str, Sequence[tuple[int, float]]],
    path: str | Path,
    *,
    title: str = "Training loss",
    y_label: str = "loss (nats per token)",
) -> Path:
    """Draw the loss of several runs over their steps.

    The y axis fits the losses after the first 5 % of the steps; the legend has each last loss.

    Args:
        runs: Name -> `(step, loss)` pairs in order, at least one.
        path: Where to write; ends in `.png`.
        title: Title of the picture.
        y_label: What is on the y axis, with its unit.

    Raises:
        ValueError: No runs, a run without points, or another file type.
        ImportError: matplotlib is missing.
    """
    _check_some(runs, "runs")
    for name, points in runs.items():
        _check_some(points, f"run {name!r}")
    figure = _new_figure(8.0, 4.5)
    axes = _line_axes(figure, title, "step", y_label)
    for (name, points), style in zip(runs.items(), _styles(), strict=False):
        steps, losses = zip(*points, strict=True)
        marker = "o" if len(points) <= 30 else ""
        label = f"{_plain(name)}  {losses[-1]:.4f}"
        axes.plot(steps, losses, label=label, marker=marker, markersize=3, **style)
    axes.set_ylim(_loss_limits(np.array([point for points in runs.values() for point in points])))
    _legend(figure, "run, last loss")
    return _write(figure, path)


def plot_differences(
    differences: Mapping[str, Sequence[float]], path: str | Path, *, base: str
) -> Path:
    """Draw by how much each variant's loss differs from that of a base, seed by seed.

    A dot is one seed, paired with the base's run of that seed; a bar is mean and sample standard
    deviation. The smallest mean stands on top.

    Args:
        differences: Name -> loss minus the base's, nats per token, one per seed; at least one name.
        path: Where to write; ends in `.png`.
        base: Name of what is subtracted.

    Raises:
        ValueError: No variants, a variant without seeds, or another file type.
        ImportError: matplotlib is missing.
    """
    _check_some(differences, "differences")
    for name, values in differences.items():
        _check_some(values, f"variant {name!r}")
    ranked = sorted(differences, key=lambda name: np.mean(differences[name]), reverse=True)
    figure = _new_figure(8.0, 1.4 + 0.28 * len(ranked))
    axes = _line_axes(figure, f"Loss beside {_plain(base)}", "difference (nats per token)", "")
    for row, name in enumerate(ranked):
        values = np.array(differences[name])
        spread = values.std(ddof=1) if len(values) > 1 else 0.0
        axes.errorbar(values.mean(), row, xerr=spread, color=_COLOURS[0], capsize=3, fmt="o")
        axes.plot(values, [row] * len(values), ".", color=_COLOURS[1], markersize=4)
    axes.axvline(0.0, color="#555555", linewidth=0.6)
    axes.set_yticks(range(len(ranked)), map(_plain, ranked))
    return _write(figure, path)


def plot_depth_weights(records: Mapping[str, DepthRecord], path: str | Path) -> Path:
    """Draw the mean depth weights of each record as a heat map, reads by sources.

    Colours end at the 99.5th percentile of a panel, as in arXiv 2607.09694; the read at site 0,
    which sees the embedding alone, is left out.

    Args:
        records: Name -> record, at least one.
        path: Where to write; ends in `.png`.

    Raises:
        ValueError: No records, or another file type.
        ImportError: matplotlib is missing.
    """
    _check_some(records, "records")
    rows = math.ceil(len(records) / 3)
    columns = math.ceil(len(records) / rows)
    figure = _new_figure(1.0 + 4.0 * columns, 0.8 + 4.2 * rows)
    for place, (name, record) in enumerate(records.items(), start=1):
        axes = figure.add_subplot(rows, columns, place)
        axes.set_facecolor("#e6e6e6")
        weights = record.weights[1:]
        image = axes.imshow(
            weights,
            aspect="auto",
            interpolation="nearest",
            vmin=0.0,
            vmax=np.nanpercentile(weights, 99.5),
            extent=(-0.5, weights.shape[1] - 0.5, len(weights) + 0.5, 0.5),
        )
        axes.set_title(_plain(name))
        axes.set(xlabel="source (0 = embedding)", ylabel="read site (last = head)")
        axes.locator_params(integer=True)
        figure.colorbar(image, ax=axes, extend="max", label="mean weight")
    caption = "Mean attention mass; mass is not importance.\nGrey: no such source at that read."
    figure.supxlabel(caption, fontsize=9)
    return _write(figure, path)


def plot_effective_sources(records: Mapping[str, DepthRecord], path: str | Path) -> Path:
    """Draw the effective number of sources of every read, and its limit as a thin line.

    Args:
        records: Name -> record, at least one.
        path: Where to write; ends in `.png`.

    Raises:
        ValueError: No records, or another file type.
        ImportError: matplotlib is missing.
    """
    _check_some(records, "records")
    figure = _new_figure(8.0, 4.5)
    axes = _line_axes(
        figure,
        "Effective sources of each read",
        "read site (last = head)",
        "effective sources, exp(entropy)",
    )
    for (name, record), style in zip(records.items(), _styles(), strict=False):
        sites = np.arange(len(record.weights))
        label = f"{_plain(name)}  {record.mean_effective_sources:.2f}"
        axes.plot(sites, record.effective_sources, label=label, **style)
        limit = np.where(record.num_sources > 0, record.num_sources, np.nan)
        axes.plot(sites, limit, color=style["color"], linewidth=0.6, alpha=0.7)
    axes.plot([], [], color="#555555", linewidth=0.6, label="uniform weights: all sources")
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:g}")
    _legend(figure, "model, mean")
    return _write(figure, path)


def _loss_limits(points: np.ndarray) -> tuple[float | None, float | None]:
    """Return the y limits for `(step, loss)` rows, or None where matplotlib shall choose."""
    steps, losses = points[np.isfinite(points[:, 1])].T
    if not losses.size:
        return None, None
    low, high = losses.min(), losses[steps >= _START * steps.max()].max()
    margin = 0.05 * (high - low)
    return (low - margin, high + margin) if margin else (None, None)


def _check_some(items: Any, name: str) -> None:
    if not len(items):
        raise ValueError(f"{name} must have at least one entry, got none")


def _new_figure(width: float, height: float) -> Any:
    """Return a matplotlib figure of so many inches, apart from pyplot and its global state."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('plots need matplotlib: pip install "depthroute[plot]"') from error
    return Figure(figsize=(width, height), dpi=150, layout="constrained")


def _line_axes(figure: Any, title: str, x_label: str, y_label: str) -> Any:
    axes = figure.add_subplot(title=title, xlabel=x_label, ylabel=y_label)
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.02)
    axes.locator_params(axis="x", integer=True)
    return axes


def _plain(name: str) -> str:
    """Return a label that shows a name as it is: between dollars matplotlib reads mathematics."""
    return name.replace("$", r"\$")


def _styles() -> Iterator[dict[str, Any]]:
    """Yield line styles; they repeat after 21."""
    styles = [{"color": c, "linestyle": d} for d in _DASHES for c in _COLOURS]
    return cycle([{**style, "linewidth": 1.5} for style in styles])


def _legend(figure: Any, title: str) -> None:
    figure.legend(loc="outside right upper", title=title, frameon=False, alignment="left")


def _write(figure: Any, path: str | Path) -> Path:
    path = Path(path)
    with replacing(path, suffix=".png") as file:
        figure.savefig(file, format="png")
    return path
