"""Other producer loads, simulated from a recorded run: who gets trained, what it costs, how long it takes.

A discrete-event simulation. `load` producers play the recorded episodes in turn, back to back, each as long as it
lasted; the learner composes, trains for as long as its batch's forwarded tokens take, and publishes a policy version.
Turns carry the version that was loaded when they were written, so staleness follows from the simulated clock and not
from the record. No model runs, and no clock but the simulated one.

What is assumed: an episode lasts as long as it did in the run whatever the load; replies do not depend on the weights;
a producer loads new weights at its next turn; producers never wait for the learner; the teacher takes as long as
recorded and scores rollouts side by side.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Literal

from divopd_gym.errors import ConfigError

from .composer import Batch, BatchComposer
from .composer_cost import merged_tokens
from .framelog import RecordError
from .metrics import gini
from .records import Run
from .replay import ReplayTurn, Variant, composition, light_turns

__all__ = [
    "CostModel",
    "Episode",
    "LearnerTime",
    "StressResult",
    "Workload",
    "load_workload",
    "simulate",
    "stress_table",
]

CostModel = Literal["rows", "merged"]


@dataclass(frozen=True)
class Episode:
    """One recorded rollout.

    Attributes:
        play_s: Seconds it was played.
        score_s: Seconds the teacher took.
        turns: Its student turns.
        turns_played: Turns in all; teacher turns take time too.
    """

    play_s: float
    score_s: float
    turns: tuple[ReplayTurn, ...]
    turns_played: int


@dataclass(frozen=True)
class LearnerTime:
    """Seconds of an update: ``fixed_s + per_token_s * tokens forwarded``."""

    fixed_s: float
    per_token_s: float

    def of(self, tokens: int) -> float:
        """Seconds for a batch."""
        return self.fixed_s + self.per_token_s * tokens

    @classmethod
    def fit(cls, points: Sequence[tuple[float, float]]) -> LearnerTime:
        """Least squares of (tokens, seconds); through the origin where a line would have a negative part.

        Raises:
            RecordError: No point with tokens and seconds above 0.
        """
        points = [(x, y) for x, y in points if x > 0 and y > 0]
        if not points:
            raise RecordError(
                "The run recorded no update with forwarded_tokens and learner_s, so what an update takes is unknown; "
                "expected train lines in metrics.jsonl. Pass a run that has trained."
            )
        x_mean = sum(x for x, _ in points) / len(points)
        y_mean = sum(y for _, y in points) / len(points)
        spread = sum((x - x_mean) ** 2 for x, _ in points)
        slope = sum((x - x_mean) * (y - y_mean) for x, y in points) / spread if spread else 0.0
        if slope > 0 and y_mean - slope * x_mean >= 0:
            return cls(y_mean - slope * x_mean, slope)
        return cls(0.0, y_mean / x_mean)


@dataclass
class Workload:
    """What a run tells about its producers and its learner.

    Attributes:
        episodes: In the order in which they ended.
        learner: What an update takes.
        sync_s: Seconds from the end of an update until its weights can be loaded.
        updates: Updates that the run made.
        settings: The composer's settings of the run.
        notices: What is not as recorded, one sentence each.
    """

    episodes: list[Episode]
    learner: LearnerTime
    sync_s: float
    updates: int
    settings: dict[str, Any]
    notices: list[str] = field(default_factory=list)


def load_workload(run: Run, settings: dict[str, Any]) -> Workload:
    """Read episodes and durations of a run. Rollouts that the teacher never scored are left out: of no use to replay.

    Args:
        run: From `records.read_run`.
        settings: The composer's, from `replay.load_stream`.

    Raises:
        RecordError: Durations of episodes or updates were not recorded.
    """
    episodes, unknown, unscored, notices = [], 0, 0, list(run.notices)
    for rollout in run.rollouts():
        play_s = rollout.timings.get("play_s", rollout.timings.get("total_s", 0.0))
        turns = tuple(light_turns(rollout))
        if not play_s > 0:
            unknown += 1
        elif not any(turn.n_scored for turn in turns):
            unscored += bool(turns)
        else:
            score_s = rollout.timings.get("score_s", 0.0)
            episodes.append(Episode(play_s, score_s, turns, max(rollout.turns_played, turns[-1].index + 1)))
    if not episodes:
        raise RecordError(
            f"{run.path} holds {unknown} rollouts without timings.play_s and {unscored} without teacher scores, and none "
            "with both; a simulation of other loads needs at least one. Pass a run that was made by divopd train."
        )
    if unknown:
        notices.append(f"{unknown} rollouts have no duration; left out.")
    if unscored:
        notices.append(f"{unscored} rollouts were never scored (lazy scoring); left out.")
    lines = [line for line in run.metrics if line.get("kind") == "train"]
    merged = run.config.get("merge_packing", True)
    tokens = "forwarded_tokens" if merged else "forwarded_tokens_rows"
    learner = LearnerTime.fit([(line.get(tokens, 0), line.get("learner_s", 0)) for line in lines])
    sync_s = sum(line.get("sync_s", 0.0) for line in lines) / len(lines)
    return Workload(episodes, learner, sync_s, len(lines), settings, notices)


class _Producers:
    """Producers that play the recorded episodes, one after another."""

    def __init__(self, episodes: Sequence[Episode], load: int) -> None:
        self._episodes, self._next = episodes, count()
        self._playing: list[tuple[float, int, float, Episode]] = []  # (end, tie-break, begin, episode)
        for _ in range(load):
            self._begin(0.0)

    def _begin(self, now: float) -> None:
        number = next(self._next)
        episode = self._episodes[number % len(self._episodes)]
        heapq.heappush(self._playing, (now + episode.play_s, number, now, episode))

    @property
    def next_end(self) -> float:
        return self._playing[0][0]

    def finish(self, published: Sequence[float], rollout_id: int) -> tuple[float, float, list[ReplayTurn]]:
        """The next episode ends, its producer begins another.

        Args:
            published: Seconds at which policy version 1, 2, ... could be loaded, up to now.
            rollout_id: Episodes are numbered as they end.

        Returns:
            (seconds at which it ended, seconds of scoring, its turns with their versions).
        """
        end, _, begin, episode = heapq.heappop(self._playing)
        self._begin(end)
        turns = []
        for turn in episode.turns:
            written = begin + episode.play_s * turn.index / episode.turns_played
            version = bisect_right(published, written)
            turns.append(replace(turn, rollout_id=rollout_id, policy_version=version))
        return end, episode.score_s, turns


@dataclass
class StressResult:
    """What one variant made of one load under one cost model.

    Attributes:
        variant: Its label.
        load: Episodes in flight.
        cost_model: "rows": one forward a turn; "merged": one a segment.
        lazy: Whether the teacher scored only what reached the pool.
        figures: By the names of `FIGURES`.
    """

    variant: str
    load: int
    cost_model: CostModel
    lazy: bool
    figures: dict[str, float | None]


FIGURES: dict[str, tuple[str, str]] = {
    "arrived_per_trained": ("usable turns arrived per turn trained", "{:.2f}"),
    "dropped_stale": ("stale rows", "{:,.0f}"),
    "never_used_share": ("valid rollouts never used", "{:.1%}"),
    "effective_rollouts": ("effective rollouts a batch", "{:.2f}"),
    "gini": ("Gini of selected turns a rollout", "{:.3f}"),
    "scored_per_trained": ("teacher tokens scored per token trained", "{:.2f}"),
    "scored_per_trained_lazy": ("  scoring only what reaches the pool", "{:.2f}"),
    "read_per_trained": ("teacher tokens read, prompts included, per token trained", "{:.1f}"),
    "read_per_trained_lazy": ("  scoring only what reaches the pool", "{:.1f}"),
    "rows_per_update": ("rows an update", "{:.1f}"),
    "cap_used": ("turns a rollout, first sweep (k, mean)", "{:.1f}"),
    "forwarded_per_update": ("tokens forwarded an update", "{:,.0f}"),
    "forwarded_per_trained": ("tokens forwarded per token trained", "{:.1f}"),
    "forwarded_per_rollout": ("tokens forwarded per rollout reached", "{:,.0f}"),
    "score_per_1000": ("disagreement per 1,000 tokens forwarded", "{:.2f}"),
    "learner_s": ("learner seconds", "{:,.1f}"),
    "wait_s": ("  waiting for turns", "{:,.1f}"),
}
"""Figure -> (label, format). Forwarded tokens are those of the cost model."""


def simulate(
    workload: Workload,
    variant: Variant,
    load: int,
    *,
    cost_model: CostModel = "merged",
    lazy: bool = False,
    updates: int | None = None,
    **overrides: Any,
) -> StressResult:
    """Run one variant at one load.

    Args:
        workload: From `load_workload`.
        variant: A composer preset with what it changes.
        load: Episodes in flight, 1 or more.
        cost_model: What the learner pays for.
        lazy: Score a rollout only when the composer's pool has room for it and only its turns that are not stale by
            then; the update waits for the slowest of what is scored for it. Otherwise every rollout is scored when it
            ends, and arrives when it is scored.
        updates: As many as the run made if None.
        **overrides: Composer settings instead of the run's.

    Raises:
        ConfigError: A load or a number of updates below 1, an unknown cost model.
        RecordError: The recorded episodes cannot fill a batch at this staleness.
    """
    updates = workload.updates if updates is None else updates
    if load < 1 or updates < 1 or cost_model not in ("rows", "merged"):
        raise ConfigError(
            f"load is {load}, updates is {updates} and the cost model is {cost_model!r}; expected at least 1, at least "
            "1, and 'rows' or 'merged'."
        )
    composer = BatchComposer(**(workload.settings | overrides | variant.settings))
    composer.fill = True  # as the learner's collator has it
    world = _World(workload, load, composer, lazy)
    lines = [world.update(q, cost_model) for q in range(1, updates + 1)]
    return StressResult(variant.label, load, cost_model, lazy, world.figures(lines))


class _World:
    """Clock, producers, teacher and learner of one simulation."""

    def __init__(self, workload: Workload, load: int, composer: BatchComposer, lazy: bool) -> None:
        self.workload, self.composer, self.load, self.lazy = workload, composer, load, lazy
        self.producers = _Producers(workload.episodes, load)
        self.now = 0.0
        self.published: list[float] = []
        self.rollouts = 0
        self.scored_all = self.scored_lazy = self.read_all = self.read_lazy = 0
        self.selected: Counter[int] = Counter()
        self.valid_rollouts: set[int] = set()
        self.usable = 0
        self._arriving: list[tuple[float, int, float, list[ReplayTurn]]] = []
        self._unscored: dict[int, tuple[float, list[ReplayTurn]]] = {}
        self._read_and_dropped: list[ReplayTurn] = []
        composer.on_drop = self._dropped

    def _dropped(self, turn: ReplayTurn, why: str) -> None:
        if why != "stale":
            self._read_and_dropped.append(turn)

    def update(self, q: int, cost_model: CostModel) -> dict[str, Any]:
        """One update: wait, score what is still unscored, compose, train, publish."""
        began = self.now
        self._take(self.now)
        patience = self.rollouts + self.load + (self.composer.batch_rows + 1) * len(self.workload.episodes)
        while self.composer.available(q) < self.composer.batch_rows:
            if self.rollouts > patience:
                raise RecordError(
                    f"At update {q} {self.composer.available(q)} turns are usable and {self.composer.batch_rows} are "
                    f"needed, however many episodes are played; max_staleness is {self.composer.max_staleness}. "
                    "Expected recorded turns that are valid, and a max_staleness of 1 or more."
                )
            self.now = max(self.now, self._next_arrival())
            self._take(self.now)
        batch = self.composer.compose(q)
        scoring_s = self._score_pool(max(q - self.composer.max_staleness, 0), batch)
        if self.lazy:
            self.now += scoring_s
        line = composition(q, batch, self.composer.unread)
        line["wait_s"] = self.now - began
        line["forwarded"] = line[f"forwarded_tokens_{cost_model}"]
        line["score"] = sum(turn.score for turn in batch.selected if turn.n_valid)
        line["cap_used"] = batch.cap
        line["learner_s"] = self.workload.learner.of(line["forwarded"])
        self.now += line["learner_s"] + self.workload.sync_s
        self.published.append(self.now)
        self.selected.update(turn.rollout_id for turn in batch.selected if turn.valid)
        return line

    def figures(self, lines: list[dict[str, Any]]) -> dict[str, float | None]:
        """The row of the table."""
        n, last = len(lines), lines[-1]["update"]

        def total(name: str) -> float:
            return sum(line[name] for line in lines)

        state = self.composer.state_dict()
        left = [turn for _, turn in state["pending"]] + state["unread"]
        oldest = last + 1 - self.composer.max_staleness
        # What is still usable may yet be trained: neither used nor wasted.
        open_ids = {turn.rollout_id for turn in left if turn.valid and turn.policy_version >= oldest}
        decided = sorted(r for r in self.valid_rollouts if self.selected[r] or r not in open_ids)
        counts = [self.selected[r] for r in decided]
        trained, rows, reached = total("trained_tokens"), total("rows"), total("rollouts")
        caps = [line["cap_used"] for line in lines if line["cap_used"] is not None]
        forwarded = total("forwarded")

        def per(amount: float, of: float) -> float | None:
            return amount / of if of else None

        return {
            "arrived_per_trained": per(self.usable, rows),
            "dropped_stale": total("dropped_stale") + sum(turn.policy_version < oldest for turn in left),
            "never_used_share": per(counts.count(0), len(counts)),
            "effective_rollouts": total("effective_rollouts") / n,
            "gini": gini(counts) if counts else None,
            "scored_per_trained": per(self.scored_all, trained),
            "scored_per_trained_lazy": per(self.scored_lazy, trained),
            "read_per_trained": per(self.read_all, trained),
            "read_per_trained_lazy": per(self.read_lazy, trained),
            "rows_per_update": rows / n,
            "cap_used": per(sum(caps), len(caps)),
            "forwarded_per_update": forwarded / n,
            "forwarded_per_trained": per(forwarded, trained),
            "forwarded_per_rollout": per(forwarded, reached),
            "score_per_1000": per(1000 * total("score"), forwarded),
            "learner_s": total("learner_s"),
            "wait_s": total("wait_s"),
        }

    def _next_arrival(self) -> float:
        """When the next rollout arrives at the latest known; ends episodes until one is certain."""
        while not self._arriving or self._arriving[0][0] > self.producers.next_end:
            self._end_episode()
        return self._arriving[0][0]

    def _end_episode(self) -> None:
        end, score_s, turns = self.producers.finish(self.published, self.rollouts)
        heapq.heappush(self._arriving, (end if self.lazy else end + score_s, self.rollouts, score_s, turns))
        self.rollouts += 1

    def _take(self, now: float) -> None:
        """Hand over what has arrived by now."""
        while self.producers.next_end <= now:
            self._end_episode()
        while self._arriving and self._arriving[0][0] <= now:
            _, rollout_id, score_s, turns = heapq.heappop(self._arriving)
            self.composer.feed(turns)
            self.scored_all += sum(turn.n_scored for turn in turns)
            self.read_all += _read_tokens(turns)
            valid = sum(turn.valid for turn in turns)
            self.usable += valid
            if valid:
                self.valid_rollouts.add(rollout_id)
            self._unscored[rollout_id] = (score_s, turns)

    def _score_pool(self, oldest: int, batch: Batch) -> float:
        """Count what lazy scoring scores for this update: what has reached the pool for the first time.

        Returns:
            Seconds until the slowest of it is scored.
        """
        seconds = 0.0
        for turn in [*batch.selected, *batch.pending, *self._read_and_dropped]:
            score_s, turns = self._unscored.pop(turn.rollout_id, (0.0, []))
            fresh = [turn for turn in turns if turn.policy_version >= oldest]
            self.scored_lazy += sum(turn.n_scored for turn in fresh)
            self.read_lazy += _read_tokens(fresh)
            seconds = max(seconds, score_s)
        self._read_and_dropped.clear()
        return seconds


def _read_tokens(turns: Sequence[ReplayTurn]) -> int:
    """Tokens the teacher reads to score these turns of one rollout: of every segment, up to the deepest of them."""
    return merged_tokens(turn for turn in turns if turn.n_scored)


def stress_table(results: Sequence[StressResult]) -> Any:
    """A `rich.table.Table` of one load and cost model: one line a figure, one column a variant."""
    from rich.table import Table

    first = results[0]
    model = "one row per turn" if first.cost_model == "rows" else "prefixes merged"
    scoring = ", lazy scoring" if first.lazy else ""
    table = Table(title=f"{first.load} episodes in flight, {model}{scoring}", title_justify="left")
    table.add_column("")
    for result in results:
        table.add_column(result.variant, justify="right")
    for name, (label, form) in FIGURES.items():
        values = [result.figures[name] for result in results]
        table.add_row(label, *("-" if value is None else form.format(value) for value in values))
    return table
