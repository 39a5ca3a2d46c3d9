"""What is measured of batches and runs (DivOPD, section 4.1 and appendices B, D, E): pure functions on numbers."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence

from divopd_gym.errors import ConfigError

__all__ = [
    "bootstrap_interval", "cost_to_target", "effective_rollouts", "final_mean", "gini", "never_used_share",
    "normalized_auc", "peak", "top1_share", "turns_per_rollout", "wilson_interval",
]  # fmt: skip

Points = Sequence[tuple[float, float]]


def effective_rollouts(tokens_by_rollout: Mapping[int, int]) -> float:
    """``1 / sum(p_r ** 2)`` with p_r a rollout's share of the batch's tokens; 0 without tokens."""
    total = sum(tokens_by_rollout.values())
    return total * total / sum(n * n for n in tokens_by_rollout.values()) if total else 0.0


def top1_share(tokens_by_rollout: Mapping[int, int]) -> float:
    """Share of the batch's tokens that the largest rollout supplies, 0 to 1; 0 without tokens."""
    total = sum(tokens_by_rollout.values())
    return max(tokens_by_rollout.values()) / total if total else 0.0


def turns_per_rollout(rollout_ids: Sequence[int]) -> float:
    """Mean number of rows that a rollout gives to a batch, from the rollout id of each row; 0 without rows."""
    return len(rollout_ids) / len(set(rollout_ids)) if rollout_ids else 0.0


def gini(counts: Sequence[int]) -> float:
    """Gini coefficient of non-negative counts, 0 (all equal) to 1; 0 if there are none or all are 0."""
    n, total = len(counts), sum(counts)
    if not total:
        return 0.0
    return sum((2 * rank - n - 1) * count for rank, count in enumerate(sorted(counts), 1)) / (n * total)


def never_used_share(selected_by_rollout: Mapping[int, int]) -> float:
    """Share of rollouts of which no turn entered a batch, from the number selected of every valid rollout."""
    if not selected_by_rollout:
        return 0.0
    return sum(count == 0 for count in selected_by_rollout.values()) / len(selected_by_rollout)


def normalized_auc(points: Points, budget: float) -> float:
    """Mean success rate over updates 0 to `budget`: linear between points, constant before the first and after the last.

    Args:
        points: (update, success rate), in any order.
        budget: Updates, above 0.

    Returns:
        In the unit of the success rate.

    Raises:
        ConfigError: No point, or a budget that is not above 0.
    """
    if not points or not budget > 0:
        raise ConfigError(
            f"A normalised area needs one point or more and a budget above 0; found {len(points)} points and {budget}."
        )
    ordered = sorted(points, key=lambda p: p[0])
    knots = [(-math.inf, ordered[0][1]), *ordered, (math.inf, ordered[-1][1])]
    pieces = []
    for (x0, y0), (x1, y1) in zip(knots, knots[1:]):
        left, right = max(x0, 0.0), min(x1, budget)
        if right <= left:
            continue
        slope = 0.0 if y0 == y1 else (y1 - y0) / (x1 - x0)
        at_left = y0 if slope == 0 else y0 + slope * (left - x0)
        pieces.append((right - left) * (at_left + slope * (right - left) / 2))
    return math.fsum(pieces) / budget


def cost_to_target(points: Points, target: float) -> float | None:
    """Cost at the first point, in the order given, whose success rate is at or above the target; None if none is.

    Args:
        points: (cumulative cost, success rate), in the order of evaluation.
        target: Success rate.
    """
    return next((cost for cost, rate in points if rate >= target), None)


def peak(points: Points) -> float | None:
    """Best success rate, or None without points."""
    return max((rate for _, rate in points), default=None)


def final_mean(points: Points, last: int = 5) -> tuple[float, float] | None:
    """Mean and population standard deviation of the last evaluations' success rates; None without points."""
    rates = [rate for _, rate in points][-last:]
    return (statistics.fmean(rates), statistics.pstdev(rates)) if rates else None


def wilson_interval(successes: int, episodes: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval of a success rate, both ends 0 to 1; (0, 1) without episodes.

    Raises:
        ConfigError: More successes than episodes, or a confidence outside 0 to 1.
    """
    if not 0 <= successes <= max(episodes, 0) or not 0 < confidence < 1:
        raise ConfigError(
            f"{successes} successes of {episodes} episodes at confidence {confidence}: expected no more successes "
            "than episodes and a confidence between 0 and 1."
        )
    if episodes == 0:
        return 0.0, 1.0
    z = statistics.NormalDist().inv_cdf(0.5 + confidence / 2)
    rate, shrink = successes / episodes, 1 + z * z / episodes
    centre = (rate + z * z / (2 * episodes)) / shrink
    half = z / shrink * math.sqrt(rate * (1 - rate) / episodes + z * z / (4 * episodes * episodes))
    # The ends at 0 and 1 are exact; rounding would leave them a hair outside.
    low = 0.0 if successes == 0 else centre - half
    high = 1.0 if successes == episodes else centre + half
    return low, high


def bootstrap_interval(
    values: Sequence[float],
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
    statistic: Callable[[Sequence[float]], float] = statistics.fmean,
) -> tuple[float, float]:
    """Percentile bootstrap interval of a statistic of independent values, such as one result a seed.

    Args:
        values: One or more.
        confidence: 0 to 1.
        resamples: Draws with replacement.
        seed: The same seed gives the same interval.
        statistic: Of a sample.

    Raises:
        ConfigError: No values.
    """
    if not values:
        raise ConfigError("A bootstrap interval needs one value or more; found none.")
    rng, n = random.Random(seed), len(values)
    draws = sorted(statistic(rng.choices(values, k=n)) for _ in range(resamples))
    tail = (1 - confidence) / 2

    def quantile(q: float) -> float:
        at = q * (resamples - 1)
        low, high = draws[math.floor(at)], draws[math.ceil(at)]
        return low + (high - low) * (at - math.floor(at))

    return quantile(tail), quantile(1 - tail)
