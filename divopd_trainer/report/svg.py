"""Line charts as inline SVG: colours from the page's style sheet, so that light and dark both work.

A chart also carries its points as JSON; the page's script reads values off it under the pointer.
"""

from __future__ import annotations

import html
import json
import math

from .collect import Chart, Series

__all__ = ["format_number", "format_value", "line_chart", "ticks"]

WIDTH, HEIGHT = 420, 232
LEFT, RIGHT, TOP, BOTTOM = 46, 12, 10, 34


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
    xs = [x for series in drawn for x in series.x]
    values = [value for series in chart.series for value in series.y if value is not None]
    values += [value for series in drawn for band in (series.low, series.high) if band for value in band]
    x_low, x_high = min(0.0, min(xs)), max(xs)
    if x_high == x_low:
        x_high = x_low + 1
    if chart.unit == "share":
        top = max(values)
        return x_low, x_high, 0.0, 1.0 if top > 0.5 else max(0.1, math.ceil(top * 11) / 10)
    low, high = min(0.0, min(values)), max(values)
    if high == low:
        high = low + 1
    return x_low, x_high, low, high + 0.06 * (high - low)


def line_chart(chart: Chart) -> str:
    """The chart as a ``<figure>``."""
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
    for value in ticks(x_low, x_high, 5):
        x, text = px(value), format_number(value)
        parts.append(
            f'<text class="tick" x="{x:.1f}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle">{text}</text>'
        )
    parts.append(
        f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{HEIGHT - BOTTOM}" y2="{HEIGHT - BOTTOM}"/>'
    )
    parts.append(
        f'<text class="label" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 4}" text-anchor="middle">'
        f"{html.escape(chart.x_label)}</text>"
    )
    for series in chart.series:
        parts.append(_line(series, px, py))
    data = {
        "box": [LEFT, WIDTH - RIGHT, TOP, HEIGHT - BOTTOM],
        "range": [x_low, x_high, y_low, y_high],
        "unit": chart.unit,
        "x": chart.x_label,
        "series": [
            {"label": s.label, "run": s.run, "x": [_short(x) for x in s.x], "y": [_short(y) for y in s.y]}
            for s in chart.series
        ],
    }
    text = html.escape(json.dumps(data, separators=(",", ":")), quote=True)
    legend = _legend(chart)
    title, note = html.escape(chart.title), html.escape(chart.note)
    return (
        f'<figure class="chart" id="chart-{html.escape(chart.key)}"><figcaption><b>{title}</b>'
        f'<span class="note">{note}</span></figcaption>{legend}'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}" data-chart="{text}">'
        f'{"".join(parts)}<g class="cursor"></g></svg></figure>'
    )


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")


def _colour(series: Series) -> str:
    return "ref" if series.run < 0 else f"c{series.run % 6}"


def _line(series: Series, px, py) -> str:
    colour = _colour(series)
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
    if series.low or len(points) == 1:
        parts += [f'<circle class="dot {colour}" cx="{x:.1f}" cy="{y:.1f}" r="2.4"/>' for x, y in points]
    return "".join(parts)


def _legend(chart: Chart) -> str:
    if len(chart.series) < 2:
        return ""
    items = "".join(
        f'<span><i class="key {series.style} {_colour(series)}"></i>{html.escape(series.label)}</span>'
        for series in chart.series
    )
    return f'<div class="legend">{items}</div>'
