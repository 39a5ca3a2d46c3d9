"""The report's curves as PNG files, drawn with matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from .collect import Chart

__all__ = ["write_pngs"]

COLOURS = ["#2563c9", "#d9730d", "#16866a", "#a8409b", "#7a5cd6", "#8a6d1f"]
"""As in assets/report.css."""
_STYLE = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#b8bcc4",
    "axes.labelcolor": "#5b616b",
    "xtick.color": "#5b616b",
    "ytick.color": "#5b616b",
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#e6e8ec",
    "axes.axisbelow": True,
}


def write_pngs(charts: Sequence[Chart], folder: str | Path) -> list[Path]:
    """One PNG a chart, and ``overview.png`` with all of them; returns the paths, the overview first."""
    folder = Path(folder)
    if not charts:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    with matplotlib.rc_context(_STYLE):
        columns = min(3, len(charts))
        rows = -(-len(charts) // columns)
        overview = Figure(figsize=(5 * columns, 3.3 * rows), layout="tight")
        axes = list(overview.subplots(rows, columns, squeeze=False).flat)
        for axis, chart in zip(axes, charts):
            _draw(axis, chart)
        for axis in axes[len(charts) :]:
            axis.set_visible(False)
        paths.append(_save(overview, folder / "overview.png"))
        for chart in charts:
            figure = Figure(figsize=(6, 3.8))
            _draw(figure.add_axes((0.12, 0.14, 0.84, 0.76)), chart)
            paths.append(_save(figure, folder / f"{chart.key}.png"))
    return paths


def _save(figure: Figure, path: Path) -> Path:
    figure.savefig(path, dpi=120)
    return path


def _draw(axis, chart: Chart) -> None:
    for series in chart.series:
        colour = "#7b818b" if series.run < 0 else COLOURS[series.run % len(COLOURS)]
        if series.style == "flat":
            axis.axhline(series.y[0], color=colour, linestyle=":", linewidth=1.4, label=series.label)
            continue
        line = "--" if series.style == "dashed" else "-"
        values = [float("nan") if value is None else value for value in series.y]
        marker = "o" if series.low else None
        axis.plot(
            series.x, values, line, color=colour, label=series.label, linewidth=1.7, marker=marker, ms=3
        )
        if series.low and series.high:
            axis.fill_between(series.x, series.low, series.high, color=colour, alpha=0.13, linewidth=0)
    axis.set_title(chart.title, loc="left", fontsize=11, fontweight="bold", color="#20242b")
    axis.set_xlabel(chart.x_label)
    if chart.unit == "share":
        axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axis.set_ylim(0, 1 if axis.get_ylim()[1] > 0.5 else None)
    elif min((v for s in chart.series for v in s.y if v is not None), default=0) >= 0:
        axis.set_ylim(bottom=0)
    if len(chart.series) > 1:
        axis.legend(frameon=False, fontsize=9)
