"""Runs that differ only in their seed are one method: grouping, names, and mean and band over seeds."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .collect import RunFigures

__all__ = ["NOT_COMPARED", "Curve", "Group", "group_runs", "interval_of_mean", "over_seeds"]

NOT_COMPARED = frozenset(
    [
        "seed",
        "data_seed",
        "run_dir",
        "output_dir",
        "name",
        "run_name",
        "logging_dir",
        "resume_from_checkpoint",
        "progress",
        "disable_tqdm",
        "record_rollouts",
        "save_every",
        "save_steps",
        "keep_checkpoints",
        "report_to",
        "hub_model_id",
        "hub_token",
    ]
)
"""Settings in which the runs of one method may differ."""

# Quantile 0.975 of Student's t by degrees of freedom, 1 to 15.
_T = (
    12.706,
    4.303,
    3.182,
    2.776,
    2.571,
    2.447,
    2.365,
    2.306,
    2.262,
    2.228,
    2.201,
    2.179,
    2.160,
    2.145,
    2.131,
)
_MOST_POINTS = 240


@dataclass
class Group:
    """The runs of one method.

    Attributes:
        label: The method's name, unique in the report.
        runs: One a seed, in the order given.
        number: Its place among the groups, which is its colour.
    """

    label: str
    runs: list[RunFigures] = field(default_factory=list)
    number: int = 0

    @property
    def method(self) -> str:
        """The configured method; the label when it was not recorded."""
        return str(self.runs[0].config.get("method") or self.label)

    @property
    def seeds(self) -> list[str]:
        """The seed of each run, or ``?``."""
        return [str(run.config.get("seed", "?")) for run in self.runs]

    def values(self, of: Any) -> list[float]:
        """``of(run)`` of every run, where it is not None."""
        return [value for value in map(of, self.runs) if value is not None]


def group_runs(runs: Sequence[RunFigures], labels: Sequence[str] | None = None) -> list[Group]:
    """Group runs whose settings are equal apart from `NOT_COMPARED`, in order of first appearance.

    Args:
        runs: One or more.
        labels: A name a run; runs of one name then are one group, whatever their settings.
    """
    keys: dict[str, Group] = {}
    for place, run in enumerate(runs):
        settings = {name: value for name, value in run.config.items() if name not in NOT_COMPARED}
        name = str(run.config.get("name") or run.config.get("method") or run.label)
        if labels is not None:
            key = name = labels[place]
        elif settings:
            # The same settings under two names are two methods: that is what the name is for.
            key = json.dumps([run.config.get("name"), settings], sort_keys=True, default=str)
        else:
            key = str(run.run.path)
        keys.setdefault(key, Group(name, number=len(keys))).runs.append(run)
    groups = list(keys.values())
    for name in {group.label for group in groups}:
        same = [group for group in groups if group.label == name]
        if len(same) > 1:
            _tell_apart(same)
    return groups


def _tell_apart(groups: list[Group]) -> None:
    """Append to equal labels the settings in which they differ, two at most; else a number."""
    configs = [group.runs[0].config for group in groups]
    names = sorted(set().union(*configs) - NOT_COMPARED)
    differ = [name for name in names if len({str(config.get(name)) for config in configs}) > 1][:2]
    for group, config in zip(groups, configs):
        told = ", ".join(f"{name} {config.get(name)}" for name in differ)
        group.label = f"{group.label} ({told})" if told else group.label
    if len({group.label for group in groups}) < len(groups):
        for place, group in enumerate(groups, 1):
            group.label = f"{group.label} #{place}"


@dataclass
class Curve:
    """A curve, or the mean of several.

    Attributes:
        x: Rising.
        y: The mean.
        low: Lower end of the 95 % interval of the mean; None below three seeds.
        high: Upper end.
    """

    x: list[float]
    y: list[float]
    low: list[float] | None = None
    high: list[float] | None = None


def interval_of_mean(values: Sequence[float]) -> tuple[float, float] | None:
    """Student's 95 % interval of the mean of independent values; None for fewer than three.

    Two values give an interval so wide that it says nothing.
    """
    if len(values) < 3:
        return None
    t = _T[len(values) - 2] if len(values) - 2 < len(_T) else 1.96 + 2.6 / (len(values) - 1)
    half = t * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    mean = float(np.mean(values))
    return mean - half, mean + half


def over_seeds(
    curves: Sequence[Sequence[tuple[float, float]]], share: bool = False, bins: int = _MOST_POINTS
) -> Curve:
    """Mean and band of one curve a seed, over the part of the axis that all of them cover.

    Seeds are interpolated linearly to the union of their positions (an even grid when there are many); one
    curve alone stays as it is, long ones averaged in bins.

    Args:
        curves: Points (x, y) of each seed; empty ones are left out.
        share: Whether the band ends at 0 and 1.
        bins: Points of a curve at most; longer ones are averaged first.
    """
    curves = [_binned(sorted(curve, key=lambda point: point[0]), bins) for curve in curves if curve]
    if not curves:
        return Curve([], [])
    if len(curves) == 1:
        return Curve([x for x, _ in curves[0]], [y for _, y in curves[0]])
    start, end = max(curve[0][0] for curve in curves), min(curve[-1][0] for curve in curves)
    grid = sorted({x for curve in curves for x, _ in curve if start <= x <= end})
    if len(grid) > _MOST_POINTS:
        grid = np.linspace(start, end, _MOST_POINTS).tolist()
    if not grid:
        return Curve([], [])
    table = np.array([np.interp(grid, *zip(*curve)) for curve in curves])
    mean = table.mean(axis=0).tolist()
    bands = [interval_of_mean(column) for column in table.T]
    if bands[0] is None:
        return Curve(grid, mean)
    low, high = ([float(band[end]) for band in bands] for end in (0, 1))
    if table.min() >= 0:
        low = [max(0.0, value) for value in low]
    if share:
        high = [min(1.0, value) for value in high]
    return Curve(grid, mean, low, high)


def _binned(points: Sequence[tuple[float, float]], bins: int) -> list[tuple[float, float]]:
    """Averaged in bins, so that a page of a long run stays small."""
    size = math.ceil(len(points) / bins)
    if size <= 1:
        return list(points)
    parts = [points[start : start + size] for start in range(0, len(points), size)]
    return [(part[-1][0], sum(float(y) for _, y in part) / len(part)) for part in parts]
