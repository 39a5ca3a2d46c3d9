"""Charts as inline SVG: colours from the page's style sheet, so that light and dark both work.

A chart also carries its points as JSON; the page's script reads values off it under the pointer.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Callable

from .charts import Chart, Series

__all__ = ["COLOURS", "colour_class", "drawing", "figure", "format_number", "format_value", "ticks"]

WIDTH, HEIGHT = 420, 232
LEFT, RIGHT, TOP, BOTTOM = 46, 14, 10, 34
COLOURS = (
    "#2563c9", "#d9730d", "#16866a", "#a8409b", "#7a5cd6", "#8a6d1f", "#0e8fb3", "#c2445d", "#5e7d1a", "#4b4f9e",
)  # fmt: skip
"""Of groups, by number; as in assets/report.css."""
REFERENCE = "#7b818b"

Place = Callable[[float], float]


def format_number(value: float) -> str:
    """Three significant digits, with k, M and G."""
    size = abs(value)
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.3g}{unit}"
    if size >= 1000:
        return f"{value:.0f}"
    return f"{value:.3g}"


def format_value(value: float | None, unit: str) -> str:
    """A value as people read it: shares in per cent."""
    if value is None:
        return "-"
    return f"{100 * value:.0f} %" if unit == "share" else format_number(value)


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round positions inside [low, high], about ``count`` of them."""
    if high <= low:
        return [low]
    raw = (high - low) / count
    power = 10 ** math.floor(math.log10(raw))
    size = next(power * nice for nice in (1, 2, 5, 10) if power * nice >= raw * 0.999)
    first = math.ceil(low / size - 1e-9)
    return [round(i * size, 12) for i in range(first, math.floor(high / size + 1e-9) + 1)]


def _range(chart: Chart) -> tuple[float, float, float, float]:
    drawn = [series for series in chart.series if series.style != "flat"]
    if chart.kind == "bars":
        x_low, x_high = -0.5, len(chart.categories) - 0.5
    else:
        xs = [x for series in drawn for x in series.x]
        x_low, x_high = min(0.0, min(xs)), max(xs)
        x_high += x_high == x_low
    if chart.kind == "stack":
        return x_low, x_high, 0.0, 1.0
    values = [value for series in chart.series for value in series.y if value is not None]
    values += [value for series in drawn for band in (series.low, series.high) if band for value in band]
    if chart.unit == "share":
        top = max(values)
        return x_low, x_high, 0.0, 1.0 if top > 0.5 else max(0.1, math.ceil(top * 11) / 10)
    low, high = min(0.0, min(values)), max(values)
    high += high == low
    return x_low, x_high, low, high + 0.06 * (high - low)


def drawing(chart: Chart) -> str:
    """What stands inside the chart's ``<svg>``, in a box of WIDTH x HEIGHT."""
    x_low, x_high, y_low, y_high = _range(chart)

    def px(x: float) -> float:
        return LEFT + (x - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)

    def py(y: float) -> float:
        return HEIGHT - BOTTOM - (y - y_low) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)

    parts = []
    for value in ticks(y_low, y_high):
        y = py(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        text = format_value(value, chart.unit)
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{text}</text>')
    marks = (
        list(enumerate(chart.categories))
        if chart.kind == "bars"
        else [(value, format_number(value)) for value in ticks(x_low, x_high, 5)]
    )
    # Many categories: only every n-th has room for its name.
    for value, text in marks[:: max(1, math.ceil(len(marks) / 14))]:
        x = min(px(value), WIDTH - 3.2 * len(text))
        parts.append(
            f'<text class="tick" x="{x:.1f}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle">'
            f"{html.escape(text)}</text>"
        )
    parts.append(
        f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{HEIGHT - BOTTOM}" y2="{HEIGHT - BOTTOM}"/>'
    )
    parts.append(
        f'<text class="label" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 4}" text-anchor="middle">'
        f"{html.escape(chart.x_label)}</text>"
    )
    if chart.kind == "bars":
        parts += _bars(chart, px, py)
    elif chart.kind == "stack":
        parts += _layers(chart, px, py)
    else:
        parts += [_line(series, px, py) for series in chart.series]
    return "".join(parts)


def figure(chart: Chart, legend: bool = True) -> str:
    """The chart as a ``<figure>``.

    Args:
        chart: What to draw.
        legend: Whether the chart names its own lines (the page has one legend for all methods).
    """
    shown = [s for s in chart.series if s.style != "thin"]
    data = {
        "box": [LEFT, WIDTH - RIGHT, TOP, HEIGHT - BOTTOM],
        "range": list(_range(chart)),
        "unit": chart.unit,
        "x": chart.x_label,
        "categories": chart.categories,
        "series": [
            {"label": s.label, "run": s.run, "x": [_short(x) for x in s.x], "y": [_short(y) for y in s.y]}
            for s in shown
        ],
    }
    text = html.escape(json.dumps(data, separators=(",", ":")), quote=True)
    title, note = html.escape(chart.title), html.escape(chart.note)
    return (
        f'<figure class="chart" id="chart-{html.escape(chart.key)}"><figcaption><b>{title}</b>'
        f'<span class="note">{note}</span></figcaption>{_legend(shown, chart) if legend else ""}'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}" data-chart="{text}">'
        f'{drawing(chart)}<g class="cursor"></g></svg></figure>'
    )


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")


def colour_class(number: int) -> str:
    """CSS class of a group's colour; of references below 0."""
    return "ref" if number < 0 else f"c{number % len(COLOURS)}"


def _classes(series: Series) -> str:
    """Colour, and the group by which the page's legend switches lines off."""
    return f"{colour_class(series.run)} g{series.run}" if series.run >= 0 else "ref"


def _line(series: Series, px: Place, py: Place) -> str:
    colour = _classes(series)
    if series.style == "flat":
        y = py(series.y[0])
        return (
            f'<line class="line flat {colour}" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
    parts = []
    if series.low and series.high:
        upper = [f"{px(x):.1f},{py(y):.1f}" for x, y in zip(series.x, series.high)]
        lower = [f"{px(x):.1f},{py(y):.1f}" for x, y in zip(series.x, series.low)]
        parts.append(f'<polygon class="band {colour}" points="{" ".join(upper + lower[::-1])}"/>')
    points = [(px(x), py(y)) for x, y in zip(series.x, series.y) if y is not None]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    parts.append(f'<polyline class="line {series.style} {colour}" points="{path}"/>')
    if (series.low and len(points) <= 40 and series.style == "solid") or len(points) == 1:
        parts += [f'<circle class="dot {colour}" cx="{x:.1f}" cy="{y:.1f}" r="2.2"/>' for x, y in points]
    return "".join(parts)


def _bars(chart: Chart, px: Place, py: Place) -> list[str]:
    room = 0.78 / max(1, len(chart.series))
    width = max(1.0, px(room) - px(0) - 1)
    parts = []
    for place, series in enumerate(chart.series):
        for x, y in zip(series.x, series.y):
            left, top = px(x - 0.39 + place * room), py(y)
            parts.append(
                f'<rect class="bar {_classes(series)}" x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" '
                f'height="{max(0.0, py(0) - top):.1f}"/>'
            )
    return parts


def _layers(chart: Chart, px: Place, py: Place) -> list[str]:
    parts = []
    floor = [0.0] * len(chart.series[0].x)
    for series in chart.series:
        top = [below + y for below, y in zip(floor, series.y)]
        upper = [f"{px(x):.1f},{py(y):.1f}" for x, y in zip(series.x, top)]
        lower = [f"{px(x):.1f},{py(y):.1f}" for x, y in zip(series.x, floor)]
        points = " ".join(upper + lower[::-1])
        parts.append(f'<polygon class="layer {colour_class(series.run)}" points="{points}"/>')
        floor = top
    return parts


def _legend(shown: list[Series], chart: Chart) -> str:
    if len(shown) < 2:
        return ""
    kind = "" if chart.kind == "line" else "box"
    items = "".join(
        f'<span><i class="key {kind} {series.style} {colour_class(series.run)}"></i>'
        f"{html.escape(series.label)}</span>"
        for series in shown
    )
    return f'<div class="legend">{items}</div>'
