"""The figures of a run that the report shows, read from its records.

Everything is optional: what a run did not record is left out of the page, never guessed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..metrics import wilson_interval
from ..records import Run

__all__ = ["Chart", "EvalPoint", "RunFigures", "Series", "charts_of", "collect"]

TEACHER_FILE = "teacher_eval.json"
"""Where `divopd eval --policy teacher --out` is expected in a run directory."""


@dataclass
class EvalPoint:
    """One evaluation.

    Attributes:
        update: Completed updates of the weights evaluated.
        trained_tokens: Tokens trained up to then.
        wall_s: Seconds since the run began, when these weights were there to be evaluated.
        rate: Strict success, 0 to 1.
        low: Lower end of its 95 % interval.
        high: Upper end.
        done_rate: Share of episodes that the environment ended, or None.
        score: Mean score, or None.
        episodes: How many.
        per_type: Task type -> (success rate, episodes or None).
    """

    update: int
    trained_tokens: int
    wall_s: float
    rate: float
    low: float
    high: float
    done_rate: float | None = None
    score: float | None = None
    episodes: int = 0
    per_type: dict[str, tuple[float, int | None]] = field(default_factory=dict)

    @classmethod
    def from_line(cls, line: dict[str, Any], trained_tokens: int = 0) -> EvalPoint | None:
        """From an eval line of metrics.jsonl or the JSON of ``divopd eval``; None without a success rate."""
        rate = line.get("success_rate")
        if rate is None:
            return None
        episodes = int(line.get("episodes") or 0)
        low, high = _interval(line) or wilson_interval(round(rate * episodes), episodes)
        per_type = {}
        for name, value in (line.get("per_type") or {}).items():
            if isinstance(value, dict):
                share, count = value.get("success_rate", value.get("rate")), value.get("episodes")
            else:
                share, count = value, None
            if share is not None:
                per_type[name] = (float(share), count)
        return cls(
            update=int(line.get("update") or 0),
            trained_tokens=trained_tokens,
            wall_s=float(line.get("asked_s") or line.get("wall_s") or 0.0),
            rate=float(rate),
            low=low,
            high=high,
            done_rate=line.get("done_rate"),
            score=line.get("score"),
            episodes=episodes,
            per_type=per_type,
        )


def _interval(line: dict[str, Any]) -> tuple[float, float] | None:
    for name in ("success_ci", "success_interval", "interval", "ci"):
        value = line.get(name)
        if isinstance(value, list | tuple) and len(value) == 2:
            return float(value[0]), float(value[1])
    if line.get("success_low") is not None and line.get("success_high") is not None:
        return float(line["success_low"]), float(line["success_high"])
    return None


@dataclass
class RunFigures:
    """One run as the report sees it.

    Attributes:
        label: What the page calls it.
        run: The records.
        evals: Evaluations of the student, oldest first.
        teacher: The teacher's own evaluation, or None.
        train: Train lines, oldest first.
        explorer: Explorer lines, oldest first.
        totals: updates, env_turns, wall_s, trained_tokens, forwarded_tokens, forwarded_tokens_rows.
    """

    label: str
    run: Run
    evals: list[EvalPoint]
    teacher: EvalPoint | None
    train: list[dict[str, Any]]
    explorer: list[dict[str, Any]]
    totals: dict[str, float]

    @property
    def initial(self) -> EvalPoint | None:
        """The evaluation before the first update, or None."""
        return self.evals[0] if self.evals and self.evals[0].update == 0 else None

    @property
    def final(self) -> EvalPoint | None:
        """The last evaluation after some update, or None."""
        return self.evals[-1] if self.evals and self.evals[-1].update > 0 else None

    @property
    def best(self) -> EvalPoint | None:
        """The evaluation with the highest success rate."""
        return max(self.evals, key=lambda point: point.rate, default=None)


def _is_teacher(line: dict[str, Any]) -> bool:
    return "teacher" in (line.get("who"), line.get("actor"), line.get("policy"))


def collect(run: Run, label: str | None = None, teacher: dict[str, Any] | None = None) -> RunFigures:
    """Read one run's figures.

    Args:
        run: From `divopd_trainer.records.read_run`.
        label: Defaults to the directory's name.
        teacher: An evaluation of the teacher (the JSON of ``divopd eval``); by default the one that lies in the
            run directory as teacher_eval.json, or the last eval line with ``who: teacher``.
    """
    train = run.lines("train")
    cumulative: list[tuple[int, int]] = []
    tokens = 0
    for line in train:
        tokens += int(line.get("trained_tokens") or 0)
        cumulative.append((line["update"], tokens))

    def trained_until(update: int) -> int:
        return max((total for at, total in cumulative if at <= update), default=0)

    evals, teachers = [], []
    for line in run.lines("eval"):
        point = EvalPoint.from_line(line, trained_until(line["update"]))
        if point is not None:
            (teachers if _is_teacher(line) else evals).append(point)
    beside = run.path / TEACHER_FILE
    if teacher is None and beside.exists():
        try:
            teacher = json.loads(beside.read_text("utf-8"))
        except ValueError:
            run.notices.append(f"{beside} is no JSON; the teacher's evaluation is left out.")
    given = EvalPoint.from_line(teacher) if teacher else None
    # Evaluations run beside training, so their lines need not come in the order of their updates.
    evals.sort(key=lambda point: point.update)
    totals = {
        "updates": max((line["update"] for line in train), default=0),
        "env_turns": max((line["env_turns"] for line in run.metrics), default=0),
        "wall_s": max((line["wall_s"] for line in run.metrics), default=0.0),
        "trained_tokens": tokens,
        "forwarded_tokens": sum(int(line.get("forwarded_tokens") or 0) for line in train),
        "forwarded_tokens_rows": sum(int(line.get("forwarded_tokens_rows") or 0) for line in train),
    }
    explorer = run.lines("explorer")
    return RunFigures(
        label or run.name, run, evals, given or (teachers[-1] if teachers else None), train, explorer, totals
    )


@dataclass
class Series:
    """One line of a chart.

    Attributes:
        label: Its name.
        x: Positions.
        y: Values; None breaks the line.
        low: Lower end of a band, or None.
        high: Upper end.
        run: Which run it belongs to (colour).
        style: "solid", "dashed", or "flat" for a reference over the whole width.
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
        series: Lines.
        note: One sentence for the reader, or empty.
        group: Heading under which it stands.
    """

    key: str
    title: str
    x_label: str
    unit: str
    series: list[Series]
    note: str = ""
    group: str = ""


_TRAIN_CHARTS = [
    # key, title, unit, group, note, [(field, label, style)]
    ("kl", "KL per token", "number", "Learning", "nats, student against teacher, on trained tokens",
     [("kl_per_token", "", "solid")]),
    ("grad_norm", "Gradient norm", "number", "Learning", "before clipping", [("grad_norm", "", "solid")]),
    ("effective_rollouts", "Effective rollouts", "number", "Batch composition",
     "1 / sum of squared token shares", [("effective_rollouts", "", "solid")]),
    ("top1_share", "Largest rollout's share", "share", "Batch composition", "of the batch's tokens",
     [("top1_share", "", "solid")]),
    ("turns_per_rollout", "Turns per rollout", "number", "Batch composition", "rows / distinct rollouts in the batch",
     [("turns_per_rollout", "", "solid")]),
    ("dead_rows", "Dead rows", "number", "Batch composition", "rows without a usable teacher score",
     [("dead_rows", "", "solid")]),
    ("pool", "Turns waiting", "number", "Pool and staleness", "pending in the pool; unread before it",
     [("pending", "pending", "solid"), ("unread", "unread", "dashed")]),
    ("stale", "Dropped as stale", "number", "Pool and staleness", "turns an update",
     [("dropped_stale", "", "solid")]),
]  # fmt: skip


def charts_of(runs: Sequence[RunFigures]) -> list[Chart]:
    """Every chart that the runs have data for."""
    charts = []
    for key, label, of in (
        ("success_updates", "update", lambda point: point.update),
        ("success_tokens", "trained tokens", lambda point: point.trained_tokens),
        ("success_wall", "minutes", lambda point: point.wall_s / 60),
    ):
        charts.append(_success_chart(runs, key, label, of))
    charts.append(_rollout_success(runs))
    for key, title, unit, group, note, fields in _TRAIN_CHARTS:
        series = []
        for number, figures in enumerate(runs):
            for name, label, style in fields:
                points = [
                    (line["update"], line[name]) for line in figures.train if line.get(name) is not None
                ]
                text = " · ".join(part for part in (figures.label if len(runs) > 1 else "", label) if part)
                series.append(_series(text or title, points, number, style))
        series = [s for s in series if s.x]
        if key == "dead_rows" and not any(any(s.y) for s in series):
            continue
        charts.append(Chart(key, title, "update", unit, series, note, group))
    charts += [_staleness(runs), _idle(runs), _seconds(runs), _speed(runs)]
    order = ["Success", "Learning", "Batch composition", "Pool and staleness", "Time"]
    charts = [chart for chart in charts if any(series.style != "flat" for series in chart.series)]
    return sorted(charts, key=lambda chart: order.index(chart.group))


def _series(label: str, points: Sequence[tuple[float, Any]], run: int, style: str = "solid") -> Series:
    """Long series are averaged in bins, so that a page of a long run stays small."""
    limit = 240
    size = math.ceil(len(points) / limit) if points else 1
    x, y = [], []
    for start in range(0, len(points), size):
        part = points[start : start + size]
        x.append(part[-1][0])
        y.append(sum(float(value) for _, value in part) / len(part))
    return Series(label, x, y, run=run, style=style)


def _success_chart(runs: Sequence[RunFigures], key: str, x_label: str, of: Any) -> Chart:
    series = []
    for number, figures in enumerate(runs):
        if figures.teacher is not None and number == 0:
            label = "teacher" if len(runs) == 1 else f"teacher ({figures.label})"
            series.append(Series(label, [], [figures.teacher.rate], run=-1, style="flat"))
        points = figures.evals
        series.append(
            Series(
                "student" if len(runs) == 1 else figures.label,
                [of(point) for point in points],
                [point.rate for point in points],
                [point.low for point in points],
                [point.high for point in points],
                run=number,
            )
        )
    series = [s for s in series if s.y]
    # All at one place is no curve: a run that counted no tokens has no token axis.
    drawn = [s for s in series if s.style != "flat" and (len(set(s.x)) > 1 or key == "success_updates")]
    flat = [s for s in series if s.style == "flat"]
    title = f"Success by {x_label}"
    return Chart(key, title, x_label, "share", flat + drawn, "strict success, band: 95 % interval", "Success")


def _rollout_success(runs: Sequence[RunFigures]) -> Chart:
    series = []
    for number, figures in enumerate(runs):
        points = [
            (line["update"], line["success_rate"])
            for line in figures.explorer
            if line.get("success_rate") is not None and line.get("episodes")
        ]
        series.append(_series(figures.label if len(runs) > 1 else "exploring", points, number))
    title, note = "Success while exploring", "recent training episodes, at the sampling temperature"
    return Chart("explore", title, "update", "share", [s for s in series if s.x], note, "Learning")


def _staleness(runs: Sequence[RunFigures]) -> Chart:
    """Mean lag of the trained rows, from the histogram (lag -> rows) of the train lines."""
    series = []
    for number, figures in enumerate(runs):
        points = []
        for line in figures.train:
            histogram = line.get("staleness")
            if isinstance(histogram, dict) and histogram:
                pairs = [(float(lag), float(rows)) for lag, rows in histogram.items()]
                total = sum(rows for _, rows in pairs)
                if total:
                    points.append((line["update"], sum(lag * rows for lag, rows in pairs) / total))
            elif isinstance(histogram, int | float):
                points.append((line["update"], histogram))
        series.append(_series(figures.label if len(runs) > 1 else "mean lag", points, number))
    return Chart(
        "staleness", "Staleness of trained rows", "update", "number", [s for s in series if s.x],
        "mean versions between writing a row and training it", "Pool and staleness",
    )  # fmt: skip


def _idle(runs: Sequence[RunFigures]) -> Chart:
    series = []
    for number, figures in enumerate(runs):
        name = f"{figures.label} · " if len(runs) > 1 else ""
        points = [
            (line["update"], line["wait_s"] / (line["wait_s"] + line["learner_s"]))
            for line in figures.train
            if line.get("wait_s") is not None and (line.get("learner_s") or 0) + line["wait_s"] > 0
        ]
        series.append(_series(f"{name}learner", points, number))
        slots = figures.run.config.get("max_concurrent")
        points = [
            (line["update"], max(0.0, 1 - line["in_flight"] / slots))
            for line in figures.explorer
            if slots and line.get("in_flight") is not None
        ]
        series.append(_series(f"{name}explorer", points, number, "dashed"))
    return Chart("idle", "Idle shares", "update", "share", [s for s in series if s.x],
                 "learner: waiting for turns; explorer: episode slots not in use", "Time")  # fmt: skip


def _seconds(runs: Sequence[RunFigures]) -> Chart:
    series = []
    for number, figures in enumerate(runs):
        points = [
            (line["update"], (line.get("learner_s") or 0) + (line.get("wait_s") or 0))
            for line in figures.train
        ]
        series.append(_series(figures.label if len(runs) > 1 else "seconds", points, number))
    series = [s for s in series if any(s.y)]
    return Chart("seconds", "Seconds per update", "update", "number", series, "learning and waiting", "Time")


def _speed(runs: Sequence[RunFigures]) -> Chart:
    series = []
    for number, figures in enumerate(runs):
        points = [
            (line["update"], line["tokens_per_s"])
            for line in figures.explorer
            if line.get("tokens_per_s") is not None
        ]
        series.append(_series(figures.label if len(runs) > 1 else "exploring", points, number))
    note = "written by the student while exploring"
    series = [s for s in series if s.x]
    return Chart("tokens_per_s", "Response tokens per second", "update", "number", series, note, "Time")
