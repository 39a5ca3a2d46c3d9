"""End-to-end cost: what generator and teacher spent since the last update, beside the learner's own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

__all__ = ["COSTS", "TROUBLES", "CostMeter", "engine_costs", "engine_troubles", "work_clock"]

COSTS = ("generator_s", "generator_tokens", "teacher_s", "teacher_tokens")
"""Fields of a train line: seconds of forward passes and tokens read or written in them. The generator's are of training
episodes and of evaluations that share its engine; the teacher's are scoring and the turns that it plays."""


TROUBLES = {
    "student_retries": "requests to the student's servers that were sent again",
    "student_restarts": "times a student server was found to have been started again",
    "teacher_retries": "requests to the teacher's servers that were sent again",
    "teacher_restarts": "times a teacher server was found to have been started again",
}
"""What engines on servers had to put up with; see `engine_troubles`."""


def engine_troubles(student: Any, teachers: Iterable[Any]) -> dict[str, float]:
    """Totals of `TROUBLES` since the engines started; empty where no engine counts them."""
    totals: dict[str, float] = {}
    for engine, role in [(student, "student"), *((teacher, "teacher") for teacher in teachers)]:
        counters: Mapping[str, float] = getattr(engine, "counters", None) or {}
        for name in ("retries", "restarts"):
            if name in counters:
                totals[f"{role}_{name}"] = totals.get(f"{role}_{name}", 0) + counters[name]
    return totals


def engine_costs(student: Any, teachers: Iterable[Any]) -> dict[str, float]:
    """Totals of `COSTS` since the engines started; 0 where an engine keeps no counters."""
    totals = dict.fromkeys(COSTS, 0.0)
    for engine, role in [(student, "generator"), *((teacher, "teacher") for teacher in teachers)]:
        counters: Mapping[str, float] = getattr(engine, "counters", None) or {}
        totals[f"{role}_s"] += counters.get("generate_s", 0.0) + counters.get("score_s", 0.0)
        for name in ("generated_tokens", "prefill_tokens", "scored_tokens"):
            totals[f"{role}_tokens"] += counters.get(name, 0)
    return totals


def work_clock(device_type: str, num_threads: int) -> Callable[[], float]:
    """A clock that runs while the calling thread works.

    On a CPU with one thread it counts the thread's own CPU seconds, so that neighbours (other runs, an evaluation beside
    the training) cost nothing; anywhere else the work is not this thread's, and it counts seconds.

    Args:
        device_type: "cpu", "cuda", ...
        num_threads: torch threads of the work.
    """
    return time.thread_time if device_type == "cpu" and num_threads == 1 else time.perf_counter


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
