"""Plots are whole PNG files that show the numbers given."""

import builtins
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from depthroute.diagnose import (
    DepthRecord,
    plot_depth_weights,
    plot_differences,
    plot_effective_sources,
    plot_losses,
)

Draw = Callable[..., Path]
RUNS = {"plain": [(0, 9.0), (50, 4.0), (100, 3.5)], "routed": [(0, 9.0), (50, 3.9), (100, 3.25)]}


def _record(num_reads: int) -> DepthRecord:
    """Return a full scheme's record: read t sees t + 1 sources, with weights as 1, 2, 3, ..."""
    weights = np.full((num_reads, num_reads), np.nan)
    effective, largest = np.empty((2, num_reads))
    for t in range(num_reads):
        row = np.arange(1.0, t + 2) / np.arange(1, t + 2).sum()
        weights[t, : t + 1] = row
        effective[t] = np.exp(-(row * np.log(row)).sum())
        largest[t] = row.max()
    return DepthRecord(
        weights=weights,
        spread=weights / 10,
        effective_sources=effective,
        max_weight=largest,
        num_tokens=64,
    )


RECORDS = {"full": _record(9), "short": _record(5)}
PLOTS = pytest.mark.parametrize(
    ("draw", "content"),
    [(plot_losses, RUNS), (plot_depth_weights, RECORDS), (plot_effective_sources, RECORDS)],
    ids=["losses", "depth_weights", "effective_sources"],
)


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Return the figures that the test saves."""
    saved: list[Figure] = []
    save = Figure.savefig

    def keep(self: Figure, *args: Any, **kwargs: Any) -> None:
        saved.append(self)
        save(self, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", keep)
    return saved


@PLOTS
def test_writes_one_png_and_nothing_else(draw: Draw, content: Any, tmp_path: Path) -> None:
    path = draw(content, str(tmp_path / "plots" / "picture.png"))
    assert path == tmp_path / "plots" / "picture.png"
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert path.read_bytes()[-8:-4] == b"IEND"
    assert list(path.parent.iterdir()) == [path]


@PLOTS
def test_a_failed_write_keeps_the_old_picture(
    draw: Draw, content: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "picture.png"
    path.write_bytes(b"old")

    def fail(self: Figure, file: Any, **kwargs: Any) -> None:
        file.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(Figure, "savefig", fail)
    with pytest.raises(OSError, match="disk full"):
        draw(content, path)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@PLOTS
def test_pyplot_is_left_alone(
    draw: Draw, content: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "matplotlib.pyplot", raising=False)
    draw(content, tmp_path / "picture.png")
    assert "matplotlib.pyplot" not in sys.modules


@PLOTS
def test_missing_matplotlib_names_the_extra(
    draw: Draw, content: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(f"no {name}")
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r'pip install "depthroute\[plot\]"'):
        draw(content, tmp_path / "picture.png")


@PLOTS
def test_nothing_to_draw_is_refused(draw: Draw, content: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one entry"):
        draw({}, tmp_path / "picture.png")


@PLOTS
def test_dollars_in_names_are_no_mathematics(draw: Draw, content: Any, tmp_path: Path) -> None:
    names = (r"$\foo$", "$a$ and $b$")  # the first one is no mathematics that matplotlib knows
    named = dict(zip(names, content.values(), strict=True))
    assert draw(named, tmp_path / "picture.png").stat().st_size > 0


@PLOTS
def test_other_file_types_are_refused(draw: Draw, content: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"must end in \.png"):
        draw(content, tmp_path / "picture.pdf")
    assert not list(tmp_path.iterdir())


def test_run_without_points_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="run 'empty' must have at least one entry"):
        plot_losses({"empty": []}, tmp_path / "picture.png")


def test_losses_show_each_run_and_its_last_loss(tmp_path: Path, figures: list[Figure]) -> None:
    plot_losses(RUNS, tmp_path / "picture.png", title="Validation loss")
    (figure,) = figures
    (axes,) = figure.axes
    assert axes.get_title() == "Validation loss"
    assert [line.get_xydata().tolist() for line in axes.lines] == [
        [list(point) for point in points] for points in RUNS.values()
    ]
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["plain  3.5000", "routed  3.2500"]
    low, high = axes.get_ylim()
    assert low < 3.25
    assert 4.0 < high < 9.0  # the start may leave the picture


@pytest.mark.parametrize(
    "points",
    [[(0, 3.0)], [(1, 3.0), (2, 3.0)], [(1, float("nan"))], [(1, 4.0), (2, float("inf"))]],
    ids=["one point", "constant", "nan", "inf"],
)
def test_losses_of_unusual_runs_are_drawn(points: Any, tmp_path: Path) -> None:
    assert plot_losses({"run": points}, tmp_path / "picture.png").stat().st_size > 0


@pytest.mark.parametrize("num_records", [1, 2, 4, 7])
def test_depth_weights_have_a_panel_and_a_colour_bar_each(
    num_records: int, tmp_path: Path, figures: list[Figure]
) -> None:
    records = {f"model {i}": _record(5 + i) for i in range(num_records)}
    plot_depth_weights(records, tmp_path / "picture.png")
    (figure,) = figures
    panels = [axes for axes in figure.axes if axes.images]
    assert [axes.get_title() for axes in panels] == list(records)
    assert len(figure.axes) == 2 * num_records
    assert "mass is not importance" in figure.get_supxlabel()


def test_depth_weights_leave_out_site_0_and_clip_the_colours(
    tmp_path: Path, figures: list[Figure]
) -> None:
    plot_depth_weights({"full": RECORDS["full"]}, tmp_path / "picture.png")
    (image,) = figures[0].axes[0].images
    weights = RECORDS["full"].weights[1:]
    np.testing.assert_array_equal(np.ma.filled(image.get_array(), np.nan), weights)
    assert image.get_extent() == [-0.5, 8.5, 8.5, 0.5]  # row t is centred at site t
    seen = np.sort(weights[~np.isnan(weights)])
    place = 0.995 * (len(seen) - 1)
    below = int(place)
    clip = seen[below] + (place - below) * (seen[below + 1] - seen[below])
    np.testing.assert_allclose(image.get_clim(), (0.0, clip))


def test_effective_sources_come_with_their_limit(tmp_path: Path, figures: list[Figure]) -> None:
    plot_effective_sources(RECORDS, tmp_path / "picture.png")
    (figure,) = figures
    (axes,) = figure.axes
    for i, record in enumerate(RECORDS.values()):
        line, limit = axes.lines[2 * i : 2 * i + 2]
        np.testing.assert_array_equal(line.get_ydata(), record.effective_sources)
        np.testing.assert_array_equal(limit.get_ydata(), np.arange(1, len(record.weights) + 1))
        assert limit.get_linewidth() < line.get_linewidth()
        assert limit.get_color() == line.get_color()
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    means = [record.effective_sources[1:].mean() for record in RECORDS.values()]
    assert labels[:2] == [f"full  {means[0]:.2f}", f"short  {means[1]:.2f}"]


def test_a_site_without_weights_has_no_limit(tmp_path: Path, figures: list[Figure]) -> None:
    record = _record(5)
    record.weights[-1] = record.effective_sources[-1] = np.nan
    plot_effective_sources({"no final read": record}, tmp_path / "picture.png")
    limit = figures[0].axes[0].lines[1]
    np.testing.assert_array_equal(limit.get_ydata(), [1, 2, 3, 4, np.nan])


def test_differences_stand_in_order_with_mean_and_spread(figures, tmp_path):
    differences = {"worse": [0.1, 0.3], "better": [-0.2, -0.4], "single": [0.05]}
    plot_differences(differences, tmp_path / "picture.png", base="plain")
    (axes,) = figures[0].axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["worse", "single", "better"]
    means = [bar.lines[0].get_xdata()[0] for bar in axes.containers]
    assert means == pytest.approx([0.2, 0.05, -0.3])
    ends = axes.containers[0].lines[2][0].get_segments()[0][:, 0]
    assert ends == pytest.approx([0.2 - 0.02**0.5, 0.2 + 0.02**0.5])  # sample deviation
    assert "plain" in axes.get_title(loc="left") + axes.get_title()


def test_names_with_dollars_are_shown_as_they_are(figures, tmp_path):
    plot_differences({r"$\foo$": [0.1]}, tmp_path / "picture.png", base=r"$\bar$")
    (axes,) = figures[0].axes
    (label,) = axes.get_yticklabels()
    assert label.get_text() == r"\$\foo\$"
    assert axes.get_title() == r"Loss beside \$\bar\$"


def test_differences_need_a_variant_and_a_seed(tmp_path):
    with pytest.raises(ValueError, match="differences"):
        plot_differences({}, tmp_path / "picture.png", base="plain")
    with pytest.raises(ValueError, match="variant 'a'"):
        plot_differences({"a": []}, tmp_path / "picture.png", base="plain")
