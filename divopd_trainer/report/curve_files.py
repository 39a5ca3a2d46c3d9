"""The report's curves as files that need nothing else: SVG with its own colours, and CSV with every point."""

from __future__ import annotations

import csv
import html
from collections.abc import Sequence
from pathlib import Path

from .charts import COSTS, Chart
from .compare import Comparison, Estimate
from .svg import COLOURS, HEIGHT, REFERENCE, WIDTH, colour_class, drawing

__all__ = ["standalone_svg", "write_csv", "write_curves", "write_summary"]

_HEAD = 26
_LEGEND_LINE = 15


def write_curves(charts: Sequence[Chart], folder: str | Path) -> list[Path]:
    """One SVG and one CSV a chart; returns their paths."""
    folder = Path(folder)
    if charts:
        folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for chart in charts:
        picture = folder / f"{chart.key}.svg"
        picture.write_text(standalone_svg(chart), encoding="utf-8")
        paths += [picture, write_csv(chart, folder / f"{chart.key}.csv")]
    return paths


def write_csv(chart: Chart, path: str | Path) -> Path:
    """Long form: one line a point with series, seed or mean, x, y and the ends of the band."""
    path = Path(path)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["series", "kind", chart.x_label, chart.title, "low", "high"])
        for series in chart.series:
            kind = {"thin": "seed", "flat": "reference"}.get(series.style, "mean" if series.low else "value")
            x = [chart.categories[i] for i in series.x] if chart.categories else series.x or [""]
            nothing = [""] * len(series.y)
            rows = zip(x, series.y, series.low or nothing, series.high or nothing)
            writer.writerows([_cell(series.label), kind, *row] for row in rows)
    return path


def write_summary(comparison: Comparison, path: str | Path) -> Path:
    """One line a method: means over seeds with their intervals, and cost ratios to the target."""
    path = Path(path)
    names = ["before", "after", "peak", "final", "auc"]
    head = ["method", "seeds"]
    head += [f"{name}{end}" for name in names for end in ("", "_low", "_high")]
    head += ["target", "baseline"]
    head += [f"{key}_ratio{end}" for key in COSTS for end in ("", "_low", "_high", "_reached")]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(head)
        for result in comparison.results:
            row: list = [_cell(result.group.label), " ".join(result.group.seeds)]
            for name in names:
                estimate: Estimate | None = getattr(result, name)
                row += [""] * 3 if estimate is None else [estimate.mean, *(estimate.interval or ("", ""))]
            row += [comparison.target, _cell(comparison.baseline.label) if comparison.baseline else ""]
            for key in COSTS:
                ratio = result.ratios.get(key)
                row += (
                    [""] * 4 if ratio is None else [ratio.value, *(ratio.interval or ("", "")), ratio.reached]
                )
            writer.writerow(row)
    return path


def _cell(text: str) -> str:
    """A text that no spreadsheet takes for a formula."""
    return f"'{text}" if text[:1] in ("=", "+", "-", "@", "\t") else text


def standalone_svg(chart: Chart) -> str:
    """The chart with title and legend on white, as a file of its own."""
    shown = [series for series in chart.series if series.style != "thin"]
    names = shown if len(shown) > 1 else []
    head = _HEAD + _LEGEND_LINE * len(names)
    legend = []
    for place, series in enumerate(names):
        y = _HEAD + 4 + _LEGEND_LINE * place
        legend.append(
            f'<line class="line {series.style} {colour_class(series.run)}" x1="46" x2="64" y1="{y}" y2="{y}"/>'
            f'<text x="70" y="{y + 3.5}">{html.escape(series.label)}</text>'
        )
    colours = "".join(
        f".line.c{i}{{stroke:{colour}}}.band.c{i},.dot.c{i},.bar.c{i},.layer.c{i}{{fill:{colour}}}"
        for i, colour in enumerate(COLOURS)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT + head}" '
        f'width="{WIDTH}" height="{HEIGHT + head}"><style>'
        "text{font:11px sans-serif;fill:#5b616b}.title{font-size:13px;font-weight:bold;fill:#20242b}"
        ".grid{stroke:#e6e8ec}.axis{stroke:#b8bcc4}.line{fill:none;stroke-width:1.8;stroke-linejoin:round}"
        ".line.dashed{stroke-dasharray:5 4}.line.flat{stroke-dasharray:1.5 4}"
        ".line.thin{stroke-width:.8;opacity:.45}.band{opacity:.14}"
        f".line.ref{{stroke:{REFERENCE}}}{colours}</style>"
        f'<rect width="{WIDTH}" height="{HEIGHT + head}" fill="#fff"/>'
        f'<text class="title" x="12" y="18">{html.escape(chart.title)}</text>{"".join(legend)}'
        f'<g transform="translate(0 {head})">{drawing(chart)}</g></svg>'
    )
