"""What a batch is made of and what it cost: the diagnostics of DivOPD (arXiv 2609.34838, appendices B, D and E).

Pure functions of turns, selections and outcomes, the same for a live batch (`batch_facts`) and for a recorded run
(`run_diagnostics`). The gradient audit, which needs a model, is in `gradient_audit`. No torch here.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .records import Run
from .turns import Turn

__all__ = [
    "DEPTH_BANDS", "RunDiagnostics", "batch_facts", "depth_band", "depth_outcome", "disagreement_std", "run_diagnostics",
    "scored_per_trained", "staleness_histogram",
]  # fmt: skip

_DEPTH_ENDS = (1, 2, 5, 10, 20)
DEPTH_BANDS = ("1", "2", "3-5", "6-10", "11-20", "21+")
"""Names of the depth bands, by one-based turns."""

Key = tuple[int, int]


def depth_band(index: int) -> str:
    """The band of a zero-based turn index."""
    return DEPTH_BANDS[sum(index >= end for end in _DEPTH_ENDS)]


def disagreement_std(scores: Iterable[tuple[int, float]]) -> float:
    """Spread over rollouts of the disagreement that each brings to a batch.

    Args:
        scores: (rollout id, signed sum of student minus teacher log-prob) of each row, in nats.

    Returns:
        Population standard deviation over rollouts of the sum of their rows' scores, in nats; 0 without rows.
    """
    sums: dict[int, float] = defaultdict(float)
    for rollout_id, score in scores:
        sums[rollout_id] += score
    return statistics.pstdev(sums.values()) if sums else 0.0


def depth_outcome(selected: Iterable[Key], successes: Mapping[int, bool]) -> dict[str, dict[str, int]]:
    """How many selected turns lie at which depth of episodes that ended how.

    Args:
        selected: (rollout id, turn index) of each row.
        successes: Strict success of rollouts, by id; rows of a rollout that is not in it count as "unknown".

    Returns:
        ``{"success": {band: rows}, "failure": ..., "unknown": ...}``, every band of `DEPTH_BANDS` in each; "unknown"
        only if there are such rows.
    """
    names = {True: "success", False: "failure", None: "unknown"}
    table = {name: dict.fromkeys(DEPTH_BANDS, 0) for name in names.values()}
    for rollout_id, index in selected:
        table[names[successes.get(rollout_id)]][depth_band(index)] += 1
    if not any(table["unknown"].values()):
        del table["unknown"]
    return table


def staleness_histogram(versions: Iterable[int], update: int) -> dict[int, int]:
    """Rows by age: updates completed since the weights that wrote them, smallest first.

    Args:
        versions: Policy version of each row.
        update: The update that the rows train (completed updates + 1); age 0 is the newest possible.
    """
    ages = Counter(update - 1 - version for version in versions)
    return {age: ages[age] for age in sorted(ages)}


def scored_per_trained(scored_tokens: int, trained_tokens: int) -> float | None:
    """Teacher tokens scored for each token trained; None before anything was trained."""
    return scored_tokens / trained_tokens if trained_tokens else None


def batch_facts(rows: Sequence[Turn]) -> dict[str, float]:
    """What the train line says of a batch beyond its counts; a few additions a row.

    Returns:
        ``disagreement_std`` (nats; see `disagreement_std`) and ``depth_mean``, the mean zero-based turn index of the
        rows, dead ones left out of both.
    """
    live = [turn for turn in rows if turn.valid]
    return {
        "disagreement_std": disagreement_std((turn.rollout_id, turn.score) for turn in live),
        "depth_mean": sum(turn.index for turn in live) / len(live) if live else 0.0,
    }


@dataclass
class RunDiagnostics:
    """The offline diagnostics of one run.

    Attributes:
        updates: Batches that were recorded.
        disagreement_std: Mean over batches of `disagreement_std`; None without a batch.
        depth_outcome: See `depth_outcome`, over all batches.
        staleness: Rows by age, over all batches.
        scored_tokens: Response tokens that the teacher scored, in all recorded rollouts.
        trained_tokens: Valid tokens of the selected rows.
        scored_per_trained: Their ratio; None if nothing was trained.
        lost_rows: Selected rows that are missing in the recorded rollouts; left out of everything else but the table.
        by_update: The cheap facts of each batch: ``update``, ``disagreement_std``, ``depth_mean``.
    """

    updates: int = 0
    disagreement_std: float | None = None
    depth_outcome: dict[str, dict[str, int]] = field(default_factory=dict)
    staleness: dict[int, int] = field(default_factory=dict)
    scored_tokens: int = 0
    trained_tokens: int = 0
    scored_per_trained: float | None = None
    lost_rows: int = 0
    by_update: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class _Row:
    """What is kept of a selected turn while the run is read; a few numbers instead of its tokens."""

    rollout_id: int
    index: int
    policy_version: int
    score: float
    valid: bool
    n_valid: int


def run_diagnostics(run: Run) -> RunDiagnostics:
    """Everything here that follows from a run's records, in one pass over its rollouts.

    Raises:
        RecordError: A record cannot be read.
    """
    wanted = {key for batch in run.batches for key in batch.selected}
    rows: dict[Key, _Row] = {}
    successes: dict[int, bool] = {}
    found = RunDiagnostics(updates=len(run.batches))
    for rollout in run.rollouts():
        successes[rollout.rollout_id] = rollout.success
        for turn in rollout.turns:
            # A teacher's own replies hold log-probs too, but nobody had to score them.
            if turn.actor == "student" and turn.teacher_logprobs is not None:
                found.scored_tokens += turn.n_tokens
            if (turn.rollout_id, turn.index) in wanted:
                n_valid = int(turn.valid_mask().sum())
                rows[turn.rollout_id, turn.index] = _Row(
                    turn.rollout_id, turn.index, turn.policy_version, turn.score, turn.valid, n_valid
                )
    staleness: Counter[int] = Counter()
    for batch in run.batches:
        known = [rows[key] for key in batch.selected if key in rows]
        found.lost_rows += len(batch.selected) - len(known)
        found.trained_tokens += sum(row.n_valid for row in known)
        staleness.update(staleness_histogram((row.policy_version for row in known), batch.update))
        if known:
            found.by_update.append({"update": batch.update, **batch_facts(known)})
    spreads = [line["disagreement_std"] for line in found.by_update]
    found.disagreement_std = statistics.fmean(spreads) if spreads else None
    found.depth_outcome = depth_outcome((key for batch in run.batches for key in batch.selected), successes)
    found.staleness = {age: staleness[age] for age in sorted(staleness)}
    found.scored_per_trained = scored_per_trained(found.scored_tokens, found.trained_tokens)
    return found
