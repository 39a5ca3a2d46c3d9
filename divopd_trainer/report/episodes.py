"""One pass over a run's rollouts: what became of the turns, and the episodes that the page carries."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from ..diagnostics import depth_band
from ..metrics import gini
from ..records import Run
from ..turns import Actor, Rollout
from .episode_data import EpisodeStore

__all__ = ["RolloutScan", "scan_rollouts"]


@dataclass
class RolloutScan:
    """What the report takes from the rollouts.

    Attributes:
        store: The episodes that the page carries.
        rollouts: How many were recorded.
        valid_rollouts: How many reached the learner with a turn that could be trained.
        never_used: How many of those had none trained.
        valid_turns: Turns that reached the learner and could be trained.
        trained_turns: Distinct turns that were.
        gini: Of the number of trained turns over valid rollouts; None without batches.
        scored_tokens: Response tokens with a teacher score in rollouts that reached the learner.
        dead_turns: Student turns that could not be trained, by reason.
        success_by_version: Last policy version -> (successes, rollouts).
        depth: (depth band, success) -> (valid turns, trained turns).
    """

    store: EpisodeStore
    rollouts: int = 0
    valid_rollouts: int = 0
    never_used: int = 0
    valid_turns: int = 0
    trained_turns: int = 0
    gini: float | None = None
    scored_tokens: int = 0
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


def scan_rollouts(run: Run, store: EpisodeStore | None = None) -> RolloutScan:
    """Read a run's rollouts once.

    Args:
        run: The run.
        store: Takes the episodes that the page carries.
    """
    trained_at: dict[tuple[int, int], int] = {}
    for batch in run.batches:
        for key in batch.selected:
            trained_at.setdefault(tuple(key), batch.update)
    # Rollouts that came after the last batch was composed had no chance to be used.
    arrived = {rid for batch in run.batches for rid, _ in batch.arrivals}
    scan = RolloutScan(EpisodeStore() if store is None else store)
    versions: dict[int, list[int]] = defaultdict(lambda: [0, 0])
    depths: dict[tuple[str, bool], list[int]] = defaultdict(lambda: [0, 0])
    used: list[int] = []
    for rollout in run.rollouts():
        scan.rollouts += 1
        student = [turn for turn in rollout.turns if turn.actor == Actor.STUDENT.value]
        valid = [turn for turn in student if turn.valid]
        trained = [turn for turn in valid if (turn.rollout_id, turn.index) in trained_at]
        if not arrived or rollout.rollout_id in arrived:
            if valid:
                used.append(len(trained))
            scan.valid_turns += len(valid)
            scan.trained_turns += len(trained)
            scan.scored_tokens += _scored_tokens(rollout)
        scan.dead_turns.update(turn.why_not for turn in student if not turn.valid)
        if rollout.policy_versions is not None:
            tally = versions[rollout.policy_versions[1]]
            tally[0] += rollout.success
            tally[1] += 1
        for turn in valid:
            tally = depths[depth_band(turn.index), rollout.success]
            tally[0] += 1
            tally[1] += (turn.rollout_id, turn.index) in trained_at
        scan.store.add(rollout, trained_at)
    scan.valid_rollouts, scan.never_used = len(used), used.count(0)
    scan.gini = gini(used) if run.batches else None
    scan.success_by_version = {version: tuple(tally) for version, tally in versions.items()}
    scan.depth = {key: tuple(tally) for key, tally in depths.items()}
    return scan


def _scored_tokens(rollout: Rollout) -> int:
    return sum(turn.n_tokens for turn in rollout.turns if turn.teacher_logprobs is not None)
