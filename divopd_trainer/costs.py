"""End-to-end cost: what generator and teacher spent since the last update, beside the learner's own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["COSTS", "CostMeter", "engine_costs"]

COSTS = ("generator_s", "generator_tokens", "teacher_s", "teacher_tokens")
"""Fields of a train line: seconds of forward passes and tokens read or written in them. The generator's are of training
episodes and of evaluations that share its engine; the teacher's are scoring and the turns that it plays."""


def engine_costs(student: Any, teachers: Iterable[Any]) -> dict[str, float]:
    """Totals of `COSTS` since the engines started; 0 where an engine keeps no counters."""
    totals = dict.fromkeys(COSTS, 0.0)
    for engine, role in [(student, "generator"), *((teacher, "teacher") for teacher in teachers)]:
        counters: Mapping[str, float] = getattr(engine, "counters", None) or {}
        totals[f"{role}_s"] += counters.get("generate_s", 0.0) + counters.get("score_s", 0.0)
        for name in ("generated_tokens", "prefill_tokens", "scored_tokens"):
            totals[f"{role}_tokens"] += counters.get(name, 0)
    return totals


class CostMeter:
    """Turns totals that an explorer reports into costs an update; a restarted explorer begins at 0 again."""

    def __init__(self) -> None:
        self._last = dict.fromkeys(COSTS, 0.0)

    def since_last(self, totals: Mapping[str, float]) -> dict[str, float]:
        """What was spent since the last call.

        Args:
            totals: The newest totals; without `COSTS` in them nothing is known, and nothing is returned.
        """
        if not all(name in totals for name in COSTS):
            return {}
        now = {name: float(totals[name]) for name in COSTS}
        spent = {
            name: now[name] - (self._last[name] if now[name] >= self._last[name] else 0.0) for name in COSTS
        }
        self._last = now
        return spent
