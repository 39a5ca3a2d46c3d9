"""The charts of the report, from the figures of grouped runs: one line a method, its mean over seeds.

`charts_of` leaves out every chart for which nothing was recorded.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..diagnostics import DEPTH_BANDS, depth_band
from .collect import EvalPoint, RunFigures, end_to_end_s, number
from .episodes import RolloutScan
from .groups import Group, over_seeds

__all__ = ["COSTS", "GROUPS", "Chart", "Series", "charts_of", "time_unit"]

GROUPS = ("Success", "Learning", "Batch composition", "Utilisation", "Staleness", "Time")
"""Headings, in the order of the page."""

COSTS: dict[str, tuple[str, Callable[[EvalPoint], float | None], bool]] = {
    "updates": ("updates", lambda point: point.update, False),
    "tokens": ("trained tokens", lambda point: point.trained_tokens, False),
    "forwarded": ("forwarded tokens", lambda point: point.forwarded_tokens, False),
    "learner": ("learner time", lambda point: point.learner_s, True),
    "end_to_end": ("end-to-end time", lambda point: point.end_to_end_s, True),
    "wall": ("wall time", lambda point: point.wall_s, True),
}
"""Key -> (what was spent, of an evaluation, whether in seconds)."""


@dataclass
class Series:
    """One line, set of bars or layer of a chart.

    Attributes:
        label: Its name.
        x: Positions; the number of the category for bars.
        y: Values; None breaks the line.
        low: Lower end of a band, or None.
        high: Upper end.
        run: Number of the group it belongs to (colour); -1 for a reference.
        style: "solid", "dashed", "thin" for one seed beside the mean, or "flat" for a reference over the width.
    """

    label: str
    x: list[float]
    y: list[float | None]
    low: list[float] | None = None
    high: list[float] | None = None
    run: int = 0
    style: str = "solid"


@dataclass
class Chart:
    """One chart of the page.

    Attributes:
        key: Short name, used for file names.
        title: What it shows.
        x_label: With unit.
        unit: "share" (0 to 1, shown as %), or "number".
        series: Lines, bars or layers.
        note: One sentence for the reader, or empty.
        group: Heading under which it stands, one of `GROUPS`.
        kind: "line", "bars" (categories side by side) or "stack" (layers that add up).
        categories: Names of the positions of bars.
    """

    key: str
    title: str
    x_label: str
    unit: str
    series: list[Series]
    note: str = ""
    group: str = ""
    kind: str = "line"
    categories: tuple[str, ...] = ()


Points = list[tuple[float, float]]
_LAST_LAG = 30


def time_unit(longest: float) -> tuple[float, str]:
    """Seconds in the unit to show times up to ``longest`` seconds in, and its name."""
    if longest < 300:
        return 1.0, "seconds"
    return (60.0, "minutes") if longest < 3 * 3600 else (3600.0, "hours")


def _name(group: Group, what: str, many: bool) -> str:
    return " · ".join(part for part in (group.label if many else "", what) if part)


def _lines(groups: Sequence[Group], of: Callable[[RunFigures], Points], what: str, unit: str) -> list[Series]:
    """One line a group: the mean over its seeds."""
    lines = []
    # Many jagged lines over one another show nothing: compared runs are averaged over a few updates.
    bins = 240 if len(groups) == 1 and len(groups[0].runs) == 1 else 50
    for group in groups:
        curve = over_seeds([of(run) for run in group.runs], unit == "share", bins)
        if curve.x:
            name = _name(group, "" if len(groups) > 1 else what, len(groups) > 1)
            lines.append(Series(name, curve.x, curve.y, curve.low, curve.high, group.number))
    return lines


# key, title, unit, heading, note, fields of the train lines as (name, label)
_TRAIN_CHARTS = [
    ("kl", "KL per token", "number", "Learning", "nats, student against teacher, on trained tokens",
     [("kl_per_token", "")]),
    ("grad_norm", "Gradient norm", "number", "Learning", "before clipping", [("grad_norm", "")]),
    ("effective_rollouts", "Effective rollouts", "number", "Batch composition",
     "1 / sum of squared token shares", [("effective_rollouts", "")]),
    ("top1_share", "Largest rollout's share", "share", "Batch composition", "of the batch's tokens",
     [("top1_share", "")]),
    ("turns_per_rollout", "Turns per rollout", "number", "Batch composition",
     "rows / distinct rollouts in the batch", [("turns_per_rollout", "")]),
    ("disagreement_std", "Spread of disagreement", "number", "Batch composition",
     "standard deviation of rollout sums in a batch, nats", [("disagreement_std", "")]),
    ("dead_rows", "Dead rows", "number", "Batch composition", "rows without a usable teacher score",
     [("dead_rows", "")]),
    ("pool", "Turns waiting", "number", "Utilisation", "valid turns kept in the pool for later updates",
     [("pending", "pending"), ("unread", "unread")]),
    ("stale", "Dropped as stale", "number", "Staleness", "turns an update", [("dropped_stale", "")]),
]  # fmt: skip


def charts_of(groups: Sequence[Group], scans: Sequence[Sequence[RolloutScan]] = ()) -> list[Chart]:
    """Every chart that the runs have data for, in the order of the page.

    Args:
        groups: From `groups.group_runs`.
        scans: For each group one scan a run; without them charts from rollouts are left out.
    """
    charts = [_success_chart(groups, key) for key in COSTS]
    charts.append(_exploring(groups, scans))
    for key, title, unit, heading, note, fields in _TRAIN_CHARTS:
        series = []
        for place, (name, label) in enumerate(fields if len(groups) == 1 else fields[:1]):
            lines = _lines(groups, lambda run, name=name: run.points(name), label or title, unit)
            for line in lines:
                line.style = "dashed" if place else "solid"
            series += [line for line in lines if not place or any(line.y)]
        if key in ("dead_rows", "disagreement_std") and not any(any(s.y) for s in series):
            continue
        charts.append(Chart(key, title, "update", unit, series, note, heading))
    charts += [_depth_over_time(groups), _depth_share(groups), _never_used(groups)]
    charts += [_staleness(groups), _staleness_histogram(groups), _idle(groups)]
    charts += [_seconds(groups), _end_to_end(groups), _speed(groups)]
    charts = [chart for chart in charts if any(series.style != "flat" for series in chart.series)]
    return sorted(charts, key=lambda chart: GROUPS.index(chart.group))


def _success_chart(groups: Sequence[Group], key: str) -> Chart:
    what, of, timed = COSTS[key]
    many = len(groups) > 1
    seeds = max(len(group.runs) for group in groups)
    all_x = [of(point) or 0 for group in groups for run in group.runs for point in run.evals]
    unit, unit_name = time_unit(max(all_x, default=0)) if timed else (1.0, "")
    series = []
    for group in groups:
        curves, names = [], []
        for run, seed in zip(group.runs, group.seeds):
            curve = [(of(point), point) for point in run.evals if of(point) is not None]
            if len({x for x, _ in curve}) > 1 or (key == "updates" and curve):
                # All at one place is no curve: a run that counted no tokens has no token axis.
                curves.append([(x / unit, point) for x, point in curve])
                names.append(f"{group.label}, seed {seed}")
        rates = [[(x, point.rate) for x, point in curve] for curve in curves]
        mean = over_seeds(rates, share=True)
        if not mean.x:
            continue
        if len(curves) == 1:
            mean.low = [point.low for _, point in curves[0]]
            mean.high = [point.high for _, point in curves[0]]
            mean.x, mean.y = [x for x, _ in curves[0]], [point.rate for _, point in curves[0]]
        else:
            for curve, name in zip(rates, names):
                line = Series(name, [x for x, _ in curve], [y for _, y in curve], run=group.number)
                line.style = "thin"
                series.append(line)
        name = group.label if many else "student" if seeds == 1 else "mean"
        series.append(Series(name, mean.x, mean.y, mean.low, mean.high, group.number))
    teachers = [run.teacher for group in groups for run in group.runs if run.teacher is not None]
    if teachers and series:
        # One teacher in all groups is the rule; the report says in its table where they differ.
        series.insert(0, Series("teacher", [], [teachers[0].rate], run=-1, style="flat"))
    note = "strict success; band: 95 % interval"
    if seeds > 1:
        note = note.replace("; band: 95 % interval", "; band: 95 % of the mean" if seeds > 2 else "")
        note += "; thin: seeds"
    spent = "generator + teacher + learner" if key == "end_to_end" else what
    label = f"{spent}, {unit_name}" if timed else "update" if key == "updates" else what
    return Chart(f"success_{key}", f"Success by {what}", label, "share", series, note, "Success")


def _exploring(groups: Sequence[Group], scans: Sequence[Sequence[RolloutScan]]) -> Chart:
    def recorded(run: RunFigures) -> Points:
        return [
            (line["update"], number(line, "success_rate"))
            for line in run.explorer
            if number(line, "success_rate") is not None and line.get("episodes")
        ]

    series = _lines(groups, recorded, "exploring", "share")
    note = "recent training episodes, at the sampling temperature"
    if not series and scans:
        curves = {
            id(run): scan.success_curve()
            for group, own in zip(groups, scans)
            for run, scan in zip(group.runs, own)
        }
        series = [
            line
            for line in _lines(groups, lambda run: curves[id(run)], "exploring", "share")
            if len(line.x) > 1
        ]
        note = "training episodes, at the sampling temperature, by the version that played"
    return Chart("explore", "Success while exploring", "update", "share", series, note, "Learning")


def _depth_over_time(groups: Sequence[Group]) -> Chart:
    """One method: layers of depth bands over updates. Several: the mean depth of the selected turns."""
    title = "Depth of selected turns"
    if len(groups) == 1:
        batches = [batch for run in groups[0].runs for batch in run.run.batches if batch.selected]
        last = max((batch.update for batch in batches), default=0)
        size = max(1, -(-last // 40))
        tallies: dict[int, Counter[str]] = {}
        for batch in batches:
            tallies.setdefault((batch.update - 1) // size, Counter()).update(
                depth_band(index) for _, index in batch.selected
            )
        places = sorted(tallies)
        x = [place * size + (size + 1) / 2 for place in places]
        layers = []
        for layer, band in enumerate(DEPTH_BANDS):
            y = [tallies[place][band] / tallies[place].total() for place in places]
            if any(y):
                layers.append(Series(f"turn {band}", x, y, run=layer))
        note = "share of the batch by number of the turn in its episode"
        return Chart("depth_time", title, "update", "share", layers, note, "Batch composition", "stack")

    def mean_depth(run: RunFigures) -> Points:
        return [
            (batch.update, 1 + sum(index for _, index in batch.selected) / len(batch.selected))
            for batch in run.run.batches
            if batch.selected
        ]

    series = _lines(groups, mean_depth, "", "number")
    return Chart(
        "depth_time", title, "update", "number", series, "mean number of the turn", "Batch composition"
    )


def _bars(groups: Sequence[Group], shares: Callable[[RunFigures], Counter], names: Sequence[str]) -> list:
    """Bars of each group: shares of its counts, seeds added up."""
    series = []
    for group in groups:
        counts = sum((shares(run) for run in group.runs), Counter())
        total = counts.total()
        if total:
            y = [counts[name] / total for name in names]
            series.append(Series(group.label, list(range(len(names))), y, run=group.number))
    return series


def _depth_share(groups: Sequence[Group]) -> Chart:
    def count(run: RunFigures) -> Counter:
        return Counter(depth_band(index) for batch in run.run.batches for _, index in batch.selected)

    seen = sum((count(run) for group in groups for run in group.runs), Counter())
    names = tuple(band for band in DEPTH_BANDS if seen[band])
    return Chart(
        "depth", "Depth of selected turns, whole run", "turn of the episode", "share",
        _bars(groups, count, names), "share of all trained rows", "Batch composition", "bars", names,
    )  # fmt: skip


def _never_used(groups: Sequence[Group]) -> Chart:
    def share(run: RunFigures) -> Points:
        pairs = [
            (line["update"], number(line, "never_used"), number(line, "valid_rollouts")) for line in run.train
        ]
        return [(update, unused / valid) for update, unused, valid in pairs if unused is not None and valid]

    series = _lines(groups, share, "never used", "share")
    note = "valid rollouts of which no turn was trained, so far"
    return Chart("never_used", "Rollouts never used", "update", "share", series, note, "Utilisation")


def _lags(line: dict[str, Any]) -> Counter:
    """Lag -> rows, from the histogram of a train line; lags from `_LAST_LAG` on count as that."""
    recorded = line.get("staleness")
    lags: Counter = Counter()
    if isinstance(recorded, dict):
        for lag in recorded:
            rows = number(recorded, lag)
            if rows is not None and re.fullmatch(r"\d{1,6}", str(lag)):
                lags[min(int(lag), _LAST_LAG)] += int(rows)
    return lags


def _staleness(groups: Sequence[Group]) -> Chart:
    def mean(run: RunFigures) -> Points:
        points = []
        for line in run.train:
            lags = _lags(line)
            plain = number(line, "staleness")
            if lags.total():
                plain = sum(lag * rows for lag, rows in lags.items()) / lags.total()
            if plain is not None:
                points.append((line["update"], plain))
        return points

    return Chart(
        "staleness", "Staleness of trained rows", "update", "number", _lines(groups, mean, "mean lag", "number"),
        "mean versions between writing a row and training it", "Staleness",
    )  # fmt: skip


def _staleness_histogram(groups: Sequence[Group]) -> Chart:
    def count(run: RunFigures) -> Counter:
        return sum((_lags(line) for line in run.train), Counter())

    seen = sum((count(run) for group in groups for run in group.runs), Counter())
    lags = range(min(seen, default=0), max(seen, default=0) + 1)
    names = tuple(f"{lag}+" if lag == _LAST_LAG else f"{lag}" for lag in lags)
    return Chart(
        "staleness_histogram", "Staleness, whole run", "versions", "share", _bars(groups, count, lags),
        "share of trained rows", "Staleness", "bars", names,
    )  # fmt: skip


def _idle(groups: Sequence[Group]) -> Chart:
    def learner(run: RunFigures) -> Points:
        pairs = [
            (line["update"], number(line, "wait_s"), number(line, "learner_s") or 0) for line in run.train
        ]
        return [(u, wait / (wait + work)) for u, wait, work in pairs if wait is not None and wait + work > 0]

    def explorer(run: RunFigures) -> Points:
        slots = number(run.config, "max_concurrent")
        points = [(line["update"], number(line, "in_flight")) for line in run.explorer]
        return [(update, max(0.0, 1 - n / slots)) for update, n in points if slots and n is not None]

    series = _lines(groups, learner, "learner", "share")
    if len(groups) == 1:
        series += [
            Series(line.label, line.x, line.y, line.low, line.high, 1, "dashed")
            for line in _lines(groups, explorer, "explorer", "share")
        ]
    note = "learner: waiting for turns"
    note += "; explorer: episode slots not in use" if len(groups) == 1 else ""
    return Chart("idle", "Idle shares", "update", "share", series, note, "Time")


def _seconds(groups: Sequence[Group]) -> Chart:
    def seconds(run: RunFigures) -> Points:
        return [
            (line["update"], (number(line, "learner_s") or 0) + (number(line, "wait_s") or 0))
            for line in run.train
        ]

    series = [s for s in _lines(groups, seconds, "seconds", "number") if any(s.y)]
    return Chart("seconds", "Seconds per update", "update", "number", series, "learning and waiting", "Time")


def _end_to_end(groups: Sequence[Group]) -> Chart:
    """One method: its three accounts. Several: their sum."""
    series = []
    if len(groups) == 1:
        for place, name in enumerate(("generator", "teacher", "learner")):
            if name != "learner" and "generator_s" not in groups[0].runs[0].totals:
                break
            lines = _lines(groups, lambda run, name=name: run.points(f"{name}_s"), name, "number")
            series += [Series(s.label, s.x, s.y, s.low, s.high, place) for s in lines]
        series = series if len(series) > 1 else []
    else:

        def both(run: RunFigures) -> Points:
            return [
                (line["update"], end_to_end_s(line)) for line in run.train if end_to_end_s(line) is not None
            ]

        series = _lines(groups, both, "", "number")
    note = "seconds; generator, teacher and learner overlap"
    return Chart("work", "Work per update", "update", "number", series, note, "Time")


def _speed(groups: Sequence[Group]) -> Chart:
    def speed(run: RunFigures) -> Points:
        points = [(line["update"], number(line, "tokens_per_s")) for line in run.explorer]
        return [(update, value) for update, value in points if value is not None]

    note = "written by the student while exploring"
    series = _lines(groups, speed, "exploring", "number")
    return Chart("tokens_per_s", "Response tokens per second", "update", "number", series, note, "Time")
