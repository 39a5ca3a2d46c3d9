"""The figures of one run that the report shows, read from its records.

Everything is optional: what a run did not record is left out of the page, never guessed.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from ..metrics import wilson_interval
from ..records import Run

__all__ = ["TEACHER_FILE", "EvalPoint", "RunFigures", "collect", "end_to_end_s", "number", "share"]

TEACHER_FILE = "teacher_eval.json"
"""Where `divopd eval --policy teacher --out` is expected in a run directory."""


def number(line: dict[str, Any], name: str) -> float | None:
    """A finite number of a record; None when it is absent or something else (runs come from anybody)."""
    value = line.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value


def learner_work_s(line: dict[str, Any]) -> float | None:
    """Seconds of the learner's own work in an update; all its seconds where no more was recorded."""
    own = number(line, "learner_work_s")
    return number(line, "learner_s") if own is None else own


def end_to_end_s(line: dict[str, Any]) -> float | None:
    """Seconds that an update took generator, teacher and learner together; None when they were not all kept."""
    parts = [number(line, "generator_s"), number(line, "teacher_s"), learner_work_s(line)]
    return None if None in parts else sum(parts)


@dataclass
class EvalPoint:
    """One evaluation, and what had been spent on the weights that it evaluates.

    Attributes:
        update: Completed updates of the weights evaluated.
        trained_tokens: Response tokens trained up to then.
        wall_s: Seconds since the run began, when these weights were there to be evaluated.
        rate: Strict success, 0 to 1.
        low: Lower end of its 95 % interval.
        high: Upper end.
        done_rate: Share of episodes that the environment ended, or None.
        score: Mean score, or None.
        episodes: How many.
        per_type: Task type -> (success rate, episodes or None).
        forwarded_tokens: Tokens, prompts included, that the learner had read.
        learner_s: Seconds of the learner's own work.
        end_to_end_s: Seconds of generator, teacher and learner together, or None.
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
    forwarded_tokens: int = 0
    learner_s: float = 0.0
    end_to_end_s: float | None = None

    @classmethod
    def from_line(cls, line: dict[str, Any], trained_tokens: int = 0) -> EvalPoint | None:
        """From an eval line of metrics.jsonl or the JSON of ``divopd eval``; None without a success rate."""
        rate = number(line, "success_rate")
        if rate is None or not 0 <= rate <= 1:
            return None
        episodes = int(number(line, "episodes") or 0)
        low, high = _interval(line) or wilson_interval(round(rate * episodes), max(episodes, 0))
        per_type = {}
        recorded = line.get("per_type")
        for name, value in (recorded if isinstance(recorded, dict) else {}).items():
            entry = value if isinstance(value, dict) else {"success_rate": value}
            share = number(entry, "success_rate" if "success_rate" in entry else "rate")
            if share is not None:
                per_type[str(name)] = (float(share), number(entry, "episodes"))
        return cls(
            update=int(number(line, "update") or 0),
            trained_tokens=trained_tokens,
            wall_s=float(number(line, "asked_s") or number(line, "wall_s") or 0.0),
            rate=float(rate),
            low=low,
            high=high,
            done_rate=number(line, "done_rate"),
            score=number(line, "score"),
            episodes=episodes,
            per_type=per_type,
        )


def _interval(line: dict[str, Any]) -> tuple[float, float] | None:
    for name in ("success_ci", "success_interval", "interval", "ci"):
        value = line.get(name)
        if isinstance(value, list | tuple) and len(value) == 2:
            line = {"success_low": value[0], "success_high": value[1]}
            break
    low, high = number(line, "success_low"), number(line, "success_high")
    return None if low is None or high is None else (float(low), float(high))


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
        totals: updates, env_turns, wall_s and sums over all updates; generator_s, teacher_s, generator_tokens and
            teacher_tokens only when recorded.
    """

    label: str
    run: Run
    evals: list[EvalPoint]
    teacher: EvalPoint | None
    train: list[dict[str, Any]]
    explorer: list[dict[str, Any]]
    totals: dict[str, float]

    @property
    def config(self) -> dict[str, Any]:
        """The run's settings; empty when there are none."""
        return self.run.config

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

    def points(self, name: str) -> list[tuple[int, float]]:
        """(update, value) of a field of the train lines, where it was recorded."""
        values = ((line["update"], number(line, name)) for line in self.train)
        return [(update, value) for update, value in values if value is not None]

    def mean(self, name: str) -> float | None:
        """Mean of a field over the updates that recorded it; None when none did."""
        values = [value for _, value in self.points(name)]
        return sum(values) / len(values) if values else None

    def sum(self, name: str) -> float | None:
        """Sum of a field over the updates; None when none recorded it."""
        values = [value for _, value in self.points(name)]
        return sum(values) if values else None


def share(part: float | None, whole: float | None) -> float | None:
    """Part / whole; None when either is unknown or the whole is 0."""
    return part / whole if part is not None and whole else None


def _is_teacher(line: dict[str, Any]) -> bool:
    return "teacher" in (line.get("who"), line.get("actor"), line.get("policy"))


_SUMS = ("trained_tokens", "forwarded_tokens", "forwarded_tokens_rows", "learner_s")
_OPTIONAL_SUMS = ("generator_s", "teacher_s", "generator_tokens", "teacher_tokens")


def collect(run: Run, label: str | None = None, teacher: dict[str, Any] | None = None) -> RunFigures:
    """Read one run's figures.

    Args:
        run: From `divopd_trainer.records.read_run`.
        label: Defaults to the directory's name.
        teacher: An evaluation of the teacher (the JSON of ``divopd eval``); by default the one that lies in the
            run directory as teacher_eval.json, or the last eval line with ``who: teacher``.
    """
    if not isinstance(run.config, dict):
        run.notices.append(f"{run.path / 'config.yaml'} is no mapping of settings; it is left out.")
        run.config = {}
    run.metrics = [line for line in run.metrics if number(line, "update") is not None]
    train = sorted(run.lines("train"), key=lambda line: line["update"])
    updates = [line["update"] for line in train]
    spent = {
        name: [0, *accumulate(number(line, name) or 0 for line in train)]
        for name in (*_SUMS, *_OPTIONAL_SUMS)
    }
    spent["learner_s"] = [0, *accumulate(learner_work_s(line) or 0 for line in train)]
    whole = [end_to_end_s(line) for line in train]
    whole_spent = [0.0, *accumulate(whole)] if train and None not in whole else None
    evals, teachers = [], []
    for line in run.lines("eval"):
        point = EvalPoint.from_line(line)
        if point is None:
            continue
        place = bisect_right(updates, point.update)
        for name in ("trained_tokens", "forwarded_tokens", "learner_s"):
            setattr(point, name, spent[name][place])
        point.end_to_end_s = None if whole_spent is None else whole_spent[place]
        (teachers if _is_teacher(line) else evals).append(point)
    # Evaluations run beside training, so their lines need not come in the order of their updates.
    evals.sort(key=lambda point: point.update)
    given = EvalPoint.from_line(teacher) if teacher else _teacher_beside(run)
    totals = {"updates": max(updates, default=0)}
    for name in ("env_turns", "wall_s"):
        totals[name] = max((number(line, name) or 0 for line in run.metrics), default=0)
    totals |= {name: spent[name][-1] for name in _SUMS}
    for name in _OPTIONAL_SUMS:
        if any(number(line, name) is not None for line in train):
            totals[name] = spent[name][-1]
    if given is None and teachers:
        given = teachers[-1]
    return RunFigures(label or run.name, run, evals, given, train, run.lines("explorer"), totals)


def _teacher_beside(run: Run) -> EvalPoint | None:
    beside = run.path / TEACHER_FILE
    if not beside.exists():
        return None
    try:
        recorded = json.loads(beside.read_text("utf-8"))
    except ValueError:
        recorded = None
    if not isinstance(recorded, dict):
        run.notices.append(f"{beside} is no JSON object; the teacher's evaluation is left out.")
        return None
    return EvalPoint.from_line(recorded)
