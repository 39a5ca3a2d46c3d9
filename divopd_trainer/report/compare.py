"""Methods against each other over seeds: peak, final five, area under the curve, and cost to a target.

Source: DivOPD (arXiv 2609.34838), section 4.1. A ratio is cost(baseline) / cost(method): above 1 the method is
cheaper. Its interval is a percentile bootstrap that draws the seeds of both sides anew.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..metrics import cost_to_target, final_mean, normalized_auc, peak
from .charts import COSTS
from .collect import RunFigures
from .groups import Group, interval_of_mean

__all__ = ["Comparison", "Estimate", "GroupResult", "Ratio", "compare", "cost_ratio", "ratio_text"]

RESAMPLES = 2000


@dataclass
class Estimate:
    """A mean over seeds.

    Attributes:
        mean: The mean.
        interval: Student's 95 % interval of it; None below three seeds.
        values: One a seed.
    """

    mean: float
    interval: tuple[float, float] | None
    values: list[float]

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate | None:
        """None without values."""
        return cls(statistics.fmean(values), interval_of_mean(values), list(values)) if values else None


@dataclass
class Ratio:
    """cost(baseline) / cost(method), up to the first evaluation that reaches the target.

    Attributes:
        value: Of the mean costs.
        interval: Bootstrap over seeds; None when either side has a single one.
        reached: Seeds of the method that reached the target.
        seeds: Its seeds. When fewer reached it, the others count with all that they spent, so ``value`` is the
            most that the ratio can be, and there is no interval.
    """

    value: float
    interval: tuple[float, float] | None
    reached: int
    seeds: int


@dataclass
class GroupResult:
    """One method.

    Attributes:
        group: Its runs.
        peak: Best evaluation.
        final: Mean of the last five evaluations; None if a seed has fewer.
        auc: Mean success rate over updates 0 to the common budget.
        before: Success before training.
        after: The last evaluation.
        ratios: Key of `COSTS` -> ratio against the baseline; absent without that cost.
    """

    group: Group
    peak: Estimate | None = None
    final: Estimate | None = None
    auc: Estimate | None = None
    before: Estimate | None = None
    after: Estimate | None = None
    ratios: dict[str, Ratio] = field(default_factory=dict)


@dataclass
class Comparison:
    """All methods.

    Attributes:
        results: One a group.
        baseline: The group that ratios are against; None when it has no usable evaluation.
        target: Success rate; None likewise.
        budget: Updates of the area under the curve: the least last-evaluated update of all runs.
    """

    results: list[GroupResult]
    baseline: Group | None
    target: float | None
    budget: int


def compare(
    groups: Sequence[Group], *, baseline: str | None = None, target: float | None = None
) -> Comparison:
    """Compare the methods.

    Args:
        groups: Two or more, or one for its own figures.
        baseline: Label or method of the group to divide by; default the method ``vanilla``, else the first group.
        target: Success rate; default the largest multiple of 5 % that every seed of the baseline reaches at
            its peak. None is chosen where some run began at it or above: its cost would be nothing.
    """
    evaluated = [run.evals[-1].update for group in groups for run in group.runs if run.evals]
    budget = min(evaluated, default=0)
    results = [_result(group, budget) for group in groups]
    base = _baseline(groups, baseline)
    peaks = base.values(lambda run: peak(_points(run, "updates")))
    if len(peaks) < len(base.runs) or not peaks:
        return Comparison(results, None, None, budget)
    if target is None:
        # The small addend keeps 0.35, which is a hair below 7 x 0.05, at 35 %.
        target = math.floor(min(peaks) * 20 + 1e-9) / 20
        begun = [
            rate for group in groups for rate in group.values(lambda run: run.initial and run.initial.rate)
        ]
        if target <= max(begun, default=0.0):
            target = 0.0
    if target <= 0:
        return Comparison(results, base, None, budget)
    for result in results:
        for key in COSTS:
            ratio = cost_ratio(
                [_points(run, key) for run in base.runs],
                [_points(run, key) for run in result.group.runs],
                target,
            )
            if ratio is not None:
                result.ratios[key] = ratio
    return Comparison(results, base, target, budget)


def _baseline(groups: Sequence[Group], wanted: str | None) -> Group:
    for name in (wanted, "vanilla"):
        for group in groups:
            if name is not None and name in (group.label, group.method):
                return group
    return groups[0]


def _points(run: RunFigures, key: str) -> list[tuple[float, float]]:
    of: Callable = COSTS[key][1]
    return [(of(point), point.rate) for point in run.evals if of(point) is not None]


def _result(group: Group, budget: int) -> GroupResult:
    curves = [_points(run, "updates") for run in group.runs if run.evals]
    finals = [final_mean(curve)[0] for curve in curves if len(curve) >= 5]
    return GroupResult(
        group,
        peak=Estimate.of([peak(curve) for curve in curves]),
        final=Estimate.of(finals) if len(finals) == len(curves) else None,
        auc=Estimate.of([normalized_auc(curve, budget) for curve in curves] if budget > 0 else []),
        before=Estimate.of(group.values(lambda run: run.initial and run.initial.rate)),
        after=Estimate.of(group.values(lambda run: run.final and run.final.rate)),
    )


def cost_ratio(
    baseline: Sequence[Sequence[tuple[float, float]]],
    method: Sequence[Sequence[tuple[float, float]]],
    target: float,
) -> Ratio | None:
    """cost(baseline) / cost(method) at a target; None when it cannot be told.

    Args:
        baseline: (cost, success rate) of each seed, in the order of evaluation.
        method: Likewise.
        target: Success rate.
    """
    base = [cost_to_target(curve, target) for curve in baseline]
    own = [cost_to_target(curve, target) for curve in method]
    if not base or not own or None in base or not all(baseline) or not all(method):
        return None
    reached = sum(cost is not None for cost in own)
    costs = [curve[-1][0] if cost is None else cost for cost, curve in zip(own, method)]
    if not reached or min(statistics.fmean(costs), statistics.fmean(base)) <= 0:
        return None
    value = statistics.fmean(base) / statistics.fmean(costs)
    interval = None
    if reached == len(own) and len(base) > 1 and len(own) > 1:
        rng = np.random.default_rng(0)
        above = np.asarray(base, float)[rng.integers(0, len(base), (RESAMPLES, len(base)))].mean(axis=1)
        below = np.asarray(costs, float)[rng.integers(0, len(costs), (RESAMPLES, len(costs)))].mean(axis=1)
        if below.min() > 0:
            low, high = np.quantile(above / below, [0.025, 0.975])
            interval = (float(low), float(high))
    return Ratio(value, interval, reached, len(own))


def ratio_text(ratio: Ratio | None) -> str:
    """As people read it: ``1.84x [1.6-2.1]``; ``< 0.9x, 2 of 3 seeds`` when not all seeds got there."""
    if ratio is None:
        return "-"
    if ratio.reached < ratio.seeds:
        return f"< {ratio.value:.2f}x ({ratio.reached} of {ratio.seeds} seeds)"
    ends = "" if ratio.interval is None else f" [{ratio.interval[0]:.2f}-{ratio.interval[1]:.2f}]"
    return f"{ratio.value:.2f}x{ends}"
