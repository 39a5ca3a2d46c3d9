"""What the explorer counts: totals that only rise, and a few values of now. One place that knows the names."""

from __future__ import annotations

import time
from collections.abc import Mapping

from ..turns import Actor, Rollout

__all__ = ["COUNTERS", "Counters"]

COUNTERS: dict[str, str] = {
    "episodes": "finished episodes",
    "episodes_failed": "episodes that an engine or environment failed",
    "successes": "finished episodes with strict success",
    "turns": "actions sent to environments in finished episodes",
    "student_turns": "turns the student played",
    "teacher_turns": "turns the teacher played",
    "valid_turns": "turns that may train",
    "dead_rows": "student turns without a usable teacher score",
    "invalid_actions": "turns whose action did not parse or was refused",
    "context_overflows": "episodes cut because the context was full",
    "turn_limits": "episodes cut at the horizon",
    "stale_at_source": "valid turns that were too old to train when their episode ended",
    "unscored_turns": "turns not scored because they could no longer train, of episodes that were scored",
    "unscored_episodes": "episodes not scored because no turn of theirs could still train",
    "response_tokens": "tokens written by the student",
    "scored_tokens": "tokens the teacher read to score",
    "policy_loads": "times new weights were loaded",
    "evaluations": "evaluations finished",
    "evaluations_failed": "evaluations that ended with an error",
    "reset_s": "seconds episodes waited for resets",
    "env_s": "seconds episodes waited for environments",
    "student_s": "seconds episodes waited for the student",
    "teacher_s": "seconds episodes waited for teacher turns",
    "score_s": "seconds episodes waited for scores",
}


class Counters:
    """Totals by name, going on from earlier ones.

    Args:
        start: Totals so far; names that are not in `COUNTERS` are kept as they are.
    """

    def __init__(self, start: Mapping[str, float] | None = None) -> None:
        self.totals: dict[str, float] = dict.fromkeys(COUNTERS, 0)
        self.totals.update(start or {})
        self.success_rate = 0.0
        self._rated = 0
        self._last = (time.monotonic(), self.totals["turns"], self.totals["response_tokens"])

    def add(self, name: str, amount: float = 1) -> None:
        """Raise a total; an unknown name is an error."""
        if name not in COUNTERS:
            raise KeyError(f"unknown counter {name!r}; add it to COUNTERS")
        self.totals[name] += amount

    def episode(self, rollout: Rollout, *, stale: int = 0, scored: bool = True) -> None:
        """Count a finished episode.

        Args:
            rollout: The episode.
            stale: Valid turns of it that can no longer train.
            scored: Whether the teacher read it.
        """
        self.add("episodes")
        self.add("successes", int(rollout.success))
        self.add("turns", rollout.turns_played)
        self.add("context_overflows", rollout.done_reason == "context_overflow")
        self.add("turn_limits", rollout.done_reason == "turn_limit")
        self.add("stale_at_source", stale)
        students = [turn for turn in rollout.turns if turn.actor == Actor.STUDENT.value]
        self.add("student_turns", len(students))
        self.add("teacher_turns", sum(turn.actor == Actor.TEACHER.value for turn in rollout.turns))
        self.add("valid_turns", sum(turn.valid for turn in students))
        self.add("invalid_actions", sum(not turn.action_valid for turn in rollout.turns))
        self.add("response_tokens", sum(turn.n_tokens for turn in students))
        if scored:
            late = [turn for turn in students if "unscored" in turn.info]
            self.add("unscored_turns", len(late))
            self.add("dead_rows", sum(not turn.valid for turn in students) - len(late))
            ends: dict[int, int] = {}
            for turn in students:
                if "unscored" in turn.info:
                    continue
                ends[id(turn.segment)] = max(turn.end, ends.get(id(turn.segment), 0))
            self.add("scored_tokens", sum(ends.values()))
        else:
            self.add("unscored_episodes")
        for name in ("reset_s", "env_s", "student_s", "teacher_s", "score_s"):
            self.add(name, rollout.timings.get(name, 0.0))
        self._rated += 1
        self.success_rate += (rollout.success - self.success_rate) / min(self._rated, 50)

    def rates(self) -> dict[str, float]:
        """Turns and response tokens a second since the last call."""
        now = (time.monotonic(), self.totals["turns"], self.totals["response_tokens"])
        seconds = max(now[0] - self._last[0], 1e-9)
        rates = {
            "turns_per_s": (now[1] - self._last[1]) / seconds,
            "tokens_per_s": (now[2] - self._last[2]) / seconds,
        }
        self._last = now
        return rates
