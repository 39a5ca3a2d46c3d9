"""One pass over a run's rollouts: episodes to browse, success while exploring, what became of the turns."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

from ..records import Run
from ..turns import Actor, Rollout, Turn

__all__ = ["RolloutScan", "Thinning", "episode_json", "scan_rollouts", "task_type"]

TEXT_LIMIT = 4000
"""Characters of one observation that the page carries."""
DEPTHS = (1, 2, 5, 10, 20, 10**9)


class Thinning:
    """Keeps an even sample of a stream whose length is not known.

    Args:
        limit: At least half of this many are kept, and at most this many, once so many have come.
    """

    def __init__(self, limit: int):
        self.limit = max(2, limit)
        self.kept: list[Any] = []
        self.last: Any = None
        self._every, self._seen = 1, 0

    def wants_next(self) -> bool:
        """Whether the next item of the stream will be kept; the last one always is, too."""
        return self._seen % self._every == 0

    def add(self, item: Any) -> None:
        """The next item of the stream."""
        if self.wants_next() and len(self.kept) == self.limit:
            self.kept = self.kept[::2]
            self._every *= 2
        if self.wants_next():
            self.kept.append(item)
        self._seen += 1
        self.last = item

    def sample(self) -> list[Any]:
        """What was kept, in order."""
        ends_with_last = self.last is None or (self.kept and self.kept[-1] is self.last)
        return list(self.kept) if ends_with_last else [*self.kept, self.last]


@dataclass
class RolloutScan:
    """What the report takes from the rollouts.

    Attributes:
        episodes: Records for the page's episode view, in order of arrival.
        rollouts: How many were recorded.
        valid_rollouts: How many reached the learner with a turn that could be trained.
        never_used: How many of those had none trained.
        valid_turns: Turns that reached the learner and could be trained.
        trained_turns: Distinct turns that were.
        dead_turns: Student turns that could not, by reason.
        success_by_version: Last policy version -> (successes, rollouts).
        depth: (depth band, success) -> (valid turns, trained turns).
    """

    episodes: list[dict[str, Any]] = field(default_factory=list)
    rollouts: int = 0
    valid_rollouts: int = 0
    never_used: int = 0
    valid_turns: int = 0
    trained_turns: int = 0
    dead_turns: Counter[str] = field(default_factory=Counter)
    success_by_version: dict[int, tuple[int, int]] = field(default_factory=dict)
    depth: dict[tuple[str, bool], tuple[int, int]] = field(default_factory=dict)

    def success_curve(self, least: int = 20) -> list[tuple[int, float]]:
        """(version, success share); versions are joined until each point stands on ``least`` rollouts."""
        points, wins, count = [], 0, 0
        for version in sorted(self.success_by_version):
            more_wins, more = self.success_by_version[version]
            wins, count = wins + more_wins, count + more
            if count >= least:
                points.append((version, wins / count))
                wins = count = 0
        return points


def depth_band(index: int) -> str:
    """The band of a zero-based turn index, named by one-based turns."""
    start = 1
    for end in DEPTHS:
        if index + 1 <= end:
            return f"{start}" if start == end else f"{start}-{end}" if end < 10**9 else f"{start}+"
        start = end + 1
    raise AssertionError


def scan_rollouts(run: Run, limit: int = 60) -> RolloutScan:
    """Read a run's rollouts once.

    Args:
        run: The run.
        limit: Episodes that the page may carry.
    """
    trained_at: dict[tuple[int, int], int] = {}
    for batch in run.batches:
        for key in batch.selected:
            trained_at.setdefault(tuple(key), batch.update)
    # Rollouts that came after the last batch was composed had no chance to be used.
    arrived = {rid for batch in run.batches for rid, _ in batch.arrivals}
    scan, sample = RolloutScan(), Thinning(limit)
    versions: dict[int, list[int]] = defaultdict(lambda: [0, 0])
    depths: dict[tuple[str, bool], list[int]] = defaultdict(lambda: [0, 0])
    for rollout in run.rollouts():
        scan.rollouts += 1
        student = [turn for turn in rollout.turns if turn.actor == Actor.STUDENT.value]
        valid = [turn for turn in student if turn.valid]
        trained = [turn for turn in valid if (turn.rollout_id, turn.index) in trained_at]
        if not arrived or rollout.rollout_id in arrived:
            scan.valid_rollouts += bool(valid)
            scan.never_used += bool(valid) and not trained
            scan.valid_turns += len(valid)
            scan.trained_turns += len(trained)
        scan.dead_turns.update(turn.why_not for turn in student if not turn.valid)
        if rollout.policy_versions is not None:
            tally = versions[rollout.policy_versions[1]]
            tally[0] += rollout.success
            tally[1] += 1
        for turn in valid:
            tally = depths[depth_band(turn.index), rollout.success]
            tally[0] += 1
            tally[1] += (turn.rollout_id, turn.index) in trained_at
        sample.add((rollout, trained_at))
    scan.success_by_version = {version: tuple(tally) for version, tally in versions.items()}
    scan.depth = {key: tuple(tally) for key, tally in depths.items()}
    scan.episodes = [episode_json(*item) for item in sample.sample()]
    return scan


def episode_json(rollout: Rollout, trained_at: dict[tuple[int, int], int]) -> dict[str, Any]:
    """What the episode view needs of a rollout, under short names.

    A turn has ``o`` observation, ``a`` action, ``who``, ``v`` policy version, ``d`` mean over its valid tokens of
    student minus teacher log-prob (None without a score), ``n`` tokens, ``ok`` whether the action was valid,
    ``u`` the update at which it trained (None if it did not) and ``why`` it could not.
    """
    return {
        "id": rollout.rollout_id,
        "task": rollout.task,
        "type": task_type(rollout),
        "goal": rollout.meta.get("goal") or "",
        "attempt": rollout.attempt,
        "success": rollout.success,
        "score": round(float(rollout.score), 4),
        "reason": rollout.done_reason or "",
        "versions": list(rollout.policy_versions or ()),
        "turns": [_turn_json(turn, trained_at) for turn in rollout.turns],
    }


def task_type(rollout: Rollout) -> str:
    """What kind of task it was: from the episode's record, else empty."""
    return str(rollout.meta.get("task_type") or "")


def _turn_json(turn: Turn, trained_at: dict[tuple[int, int], int]) -> dict[str, Any]:
    text = turn.observation
    if len(text) > TEXT_LIMIT:
        text = f"{text[:TEXT_LIMIT]} ... ({len(text) - TEXT_LIMIT} more characters)"
    n_valid = int(turn.valid_mask().sum())
    return {
        "o": text,
        "a": turn.action,
        "who": turn.actor,
        "v": turn.policy_version,
        "d": round(turn.score / n_valid, 3) if n_valid else None,
        "n": turn.n_tokens,
        "ok": turn.action_valid,
        "u": trained_at.get((turn.rollout_id, turn.index)) if turn.valid else None,
        "why": turn.why_not,
    }
