"""The report's curves as PNG files, drawn with matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, PercentFormatter

from .charts import Chart, Series
from .svg import COLOURS, REFERENCE, format_number

__all__ = ["write_pngs"]

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
    # A recorded "$" is a dollar sign, not mathematics.
    "text.parse_math": False,
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
        told: set[tuple[str, ...]] = set()
        for axis, chart in zip(axes, charts):
            names = tuple(series.label for series in chart.series)
            _draw(axis, chart, legend=names not in told)
            told.add(names)
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


def _draw(axis: Any, chart: Chart, legend: bool = True) -> None:
    if chart.kind == "bars":
        room = 0.78 / len(chart.series)
        for place, series in enumerate(chart.series):
            x = [at - 0.39 + (place + 0.5) * room for at in series.x]
            axis.bar(x, series.y, width=0.92 * room, color=_colour(series), label=series.label)
        axis.set_xticks(range(len(chart.categories)), chart.categories)
    elif chart.kind == "stack":
        colours = [_colour(series) for series in chart.series]
        labels = [series.label for series in chart.series]
        values = [series.y for series in chart.series]
        axis.stackplot(chart.series[0].x, values, colors=colours, labels=labels, alpha=0.8)
    else:
        for series in chart.series:
            _draw_line(axis, series)
    axis.set_title(chart.title, loc="left", fontsize=11, fontweight="bold", color="#20242b")
    axis.set_xlabel(chart.x_label)
    if chart.unit == "share":
        axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axis.set_ylim(0, 1 if axis.get_ylim()[1] > 0.5 else None)
    elif min((v for s in chart.series for v in s.y if v is not None), default=0) >= 0:
        axis.set_ylim(bottom=0)
    if chart.kind != "bars":
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_number(value)))
    if legend and sum(series.style != "thin" for series in chart.series) > 1:
        axis.legend(frameon=False, fontsize=9)


def _colour(series: Series) -> str:
    return REFERENCE if series.run < 0 else COLOURS[series.run % len(COLOURS)]


def _draw_line(axis: Any, series: Series) -> None:
    colour = _colour(series)
    if series.style == "flat":
        axis.axhline(series.y[0], color=colour, linestyle=":", linewidth=1.4, label=series.label)
        return
    if series.style == "thin":
        axis.plot(series.x, series.y, "-", color=colour, linewidth=0.7, alpha=0.45)
        return
    values = [float("nan") if value is None else value for value in series.y]
    marker = "o" if series.low and len(values) <= 40 else None
    line = "--" if series.style == "dashed" else "-"
    axis.plot(series.x, values, line, color=colour, label=series.label, linewidth=1.7, marker=marker, ms=3)
    if series.low and series.high:
        axis.fill_between(series.x, series.low, series.high, color=colour, alpha=0.13, linewidth=0)
