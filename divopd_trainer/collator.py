"""From finished rollouts to the packed batch of one update.

`TurnCollator` empties the explorer's buffer, records what arrived, waits until a batch can be formed (with a
health check at every wake-up), lets the composer choose, and packs the chosen turns for every rank. It holds no
model and no torch.distributed call; the trainer scatters what it returns.
"""

from __future__ import annotations

import queue
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from divopd_gym.errors import DivOPDError

from .composer import Batch, BatchComposer
from .diagnostics import batch_facts, depth_outcome
from .metrics import effective_rollouts, top1_share
from .packing import MicroBatch, pack, split_ranks
from .records import BatchRecord, RunWriter
from .turns import Rollout, Turn
from .weighting import RowWeighting

__all__ = ["ComposedBatch", "PackOptions", "RolloutSource", "TurnCollator", "check_rollout"]


_OUTCOMES_KEPT = 10_000


class RolloutSource(Protocol):
    """What the collator needs of an explorer.

    ``rollout_buffer.get(timeout=seconds)`` and ``.get_nowait()`` give rollouts in order of arrival and raise
    ``queue.Empty``; ``check_health(seconds)`` raises when the explorer is dead or silent.
    """

    rollout_buffer: Any

    def check_health(self, stale_after_s: float) -> None: ...  # noqa: D102


@dataclass(frozen=True)
class PackOptions:
    """How chosen turns become tensors.

    Attributes:
        merge: One sequence per segment instead of one per row.
        max_tokens: Tokens of one forward pass.
        layout: "padded" or "packed".
        pad_id: Id that fills rows.
        world: Ranks to share the batch.
    """

    merge: bool = True
    max_tokens: int = 16384
    layout: str = "padded"
    pad_id: int = 0
    world: int = 1


@dataclass
class ComposedBatch:
    """One update's batch.

    Attributes:
        update: The update it is for: completed updates + 1.
        rows: The chosen turns.
        shares: Micro-batches of each rank; every rank has the same number.
        facts: Values of the train line of metrics.jsonl that are known before training.
    """

    update: int
    rows: list[Turn]
    shares: list[list[MicroBatch]]
    facts: dict[str, Any] = field(default_factory=dict)


class _Usage:
    """Counts rollouts that had trainable turns and gave none."""

    def __init__(self) -> None:
        self.valid = self.never_used = 0
        self._left: dict[int, int] = {}
        self._used: set[int] = set()

    def arrived(self, rollout: Rollout) -> None:
        count = len(rollout.valid_turns)
        if count:
            self.valid += 1
            self._left[rollout.rollout_id] = count

    def gone(self, turn: Turn, *, used: bool) -> None:
        rid = turn.rollout_id
        if not turn.valid or rid not in self._left:
            return
        if used:
            self._used.add(rid)
        self._left[rid] -= 1
        if self._left[rid] <= 0:
            del self._left[rid]
            self.never_used += rid not in self._used
            self._used.discard(rid)

    def state(self) -> dict[str, Any]:
        left = [[rid, n, rid in self._used] for rid, n in self._left.items()]
        return {"valid": self.valid, "never_used": self.never_used, "left": left}

    def load(self, state: dict[str, Any]) -> None:
        self.valid, self.never_used = state["valid"], state["never_used"]
        self._left = {rid: n for rid, n, _ in state["left"]}
        self._used = {rid for rid, _, used in state["left"] if used}


class TurnCollator:
    """Turns an explorer's rollouts into batches.

    Args:
        source: The explorer.
        composer: Chooses the turns.
        options: How they are packed.
        stale_after_s: Silence after which the explorer counts as hung.
        writer: Where rollouts and selections are recorded; None records nothing.
        record_rollouts: Whether whole rollouts are recorded too.
        weighting: How tokens are weighted; None: mean over rows of the mean over valid tokens.
        on_status: ``on_status(update, available, wanted, unread)`` when waiting begins, after each arrival while
            waiting, and after a batch.
        on_wake: Called whenever the wait wakes up; for draining messages and drawing progress.
        stopping: Asked at every wake-up whether to give up waiting.
        clock: Seconds; only differences count.

    Attributes:
        counters: Totals: rollouts, turns, env_turns, stale, gated, expired.
        finished: Whether the last batch has been given: nothing is left, and nothing more will come.
    """

    poll_s = 0.2

    def __init__(
        self,
        source: RolloutSource,
        composer: BatchComposer,
        options: PackOptions | None = None,
        *,
        stale_after_s: float = 120.0,
        writer: RunWriter | None = None,
        record_rollouts: bool = True,
        weighting: RowWeighting | None = None,
        on_status: Callable[[int, int, int, int], None] = lambda *status: None,
        on_wake: Callable[[], None] = lambda: None,
        stopping: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.source = source
        self.composer = composer
        self.options = options or PackOptions()
        self.stale_after_s = stale_after_s
        self.writer = writer
        self.record_rollouts = record_rollouts
        self.weighting = weighting
        self.on_status, self.on_wake, self.stopping = on_status, on_wake, stopping
        self._clock = clock
        self._arrivals: list[Turn] = []
        self._untrained: list[Turn] = []
        self._held_back: list[Rollout] = []
        self._usage = _Usage()
        self._outcomes: dict[int, bool] = {}
        self._wait_began: float | None = None
        self.finished = False
        self.counters: Counter[str] = Counter()
        composer.on_drop = self._dropped
        # A batch that could be full must not be short, or empty, for the dead turns in front of the valid ones.
        composer.fill = True

    def _dropped(self, turn: Turn, why: str) -> None:
        self.counters[why] += 1
        self._usage.gone(turn, used=False)

    @property
    def exhausted(self) -> bool:
        """Whether the explorer will send no more rollouts."""
        return bool(getattr(self.source, "exhausted", False))

    def drain(self, before: int | None = None) -> int:
        """Take over what has arrived, without waiting; returns the number of rollouts.

        Args:
            before: Leave rollouts with this id or a later one: a checkpoint's explorer will play them again.
        """
        count = 0
        while (rollout := self._next(0.0)) is not None:
            if before is not None and rollout.rollout_id >= before:
                self._held_back.insert(0, rollout)
                break
            self._take(rollout)
            count += 1
        return count

    def _next(self, timeout_s: float) -> Rollout | None:
        if self._held_back:
            return self._held_back.pop(0)
        try:
            if timeout_s > 0:
                return self.source.rollout_buffer.get(timeout=timeout_s)
            return self.source.rollout_buffer.get_nowait()
        except queue.Empty:
            return None

    def _take(self, rollout: Rollout) -> None:
        check_rollout(rollout)
        if self.weighting is not None and (annotate := getattr(self.weighting, "annotate", None)):
            annotate(rollout)
        if self.writer is not None and self.record_rollouts:
            try:
                self.writer.write_rollout(rollout)
            except BaseException:
                # A checkpoint must not count it among what was received and recorded.
                self._held_back.insert(0, rollout)
                raise
        self.counters["rollouts"] += 1
        self.counters["env_turns"] += rollout.turns_played
        # Other turns live in the history; they are no candidates, so the gate does not count them.
        turns = [turn for turn in rollout.turns if turn.trainable]
        self.counters["turns"] += len(turns)
        self._usage.arrived(rollout)
        self._outcomes[rollout.rollout_id] = bool(rollout.success)
        while len(self._outcomes) > _OUTCOMES_KEPT:
            self._outcomes.pop(next(iter(self._outcomes)))
        self._arrivals += turns
        self.composer.feed(turns)

    def poll(self, update: int, timeout_s: float = float("inf")) -> ComposedBatch | None:
        """Wait until the batch of an update can be formed, and form it.

        Args:
            update: Completed updates + 1.
            timeout_s: Longest wait.

        Returns:
            None when the time is up, when ``stopping()`` turned true, or when nothing is left and nothing more will
            come. The last batch before that may be short; it is divided by its own number of rows.

        Raises:
            DivOPDError: The explorer died or fell silent, or sent a rollout that is not one.
        """
        began = self._clock()
        if self._wait_began is None:
            self._wait_began = began
        wanted = self.composer.batch_rows
        told = False
        while True:
            self.drain()
            available = self.composer.available(update)
            if available >= wanted or (self.exhausted and not self.drain()):
                break
            if not told:
                self.on_status(update - 1, available, wanted, self.composer.unread)
                told = True
            self.on_wake()
            if self.stopping() or self._clock() - began >= timeout_s:
                return None
            self.source.check_health(self.stale_after_s)
            rollout = self._next(self.poll_s)
            if rollout is not None:
                self._take(rollout)
                told = False  # the explorer paces itself by what is still missing
        batch = self._compose(update)
        self.finished = batch is None
        return batch

    def _compose(self, update: int) -> ComposedBatch | None:
        wait_s, self._wait_began = self._clock() - self._wait_began, None
        began = self._clock()
        arrivals, self._arrivals = self._arrivals, []
        batch = self.composer.compose(update)
        for turn in batch.selected:
            self._usage.gone(turn, used=True)
        self._untrained = list(batch.selected)
        if self.writer is not None:
            newest = max((turn.policy_version for turn in batch.selected), default=update - 1)
            oldest = max(update - self.composer.max_staleness, 0)
            record = BatchRecord.of(
                update, batch, arrivals, versions=(oldest, newest), unread=self.composer.unread
            )
            self.writer.write_batch(record)
        available = self.composer.available(update + 1)
        self.on_status(update, available, 0, self.composer.unread)
        if not batch.selected:
            return None
        shares = self._share(update, batch.selected)
        facts = self._facts(update, batch, shares)
        facts |= {"wait_s": wait_s, "compose_s": self._clock() - began, "arrived": len(arrivals)}
        return ComposedBatch(update, batch.selected, shares, facts)

    def _share(self, update: int, rows: list[Turn]) -> list[list[MicroBatch]]:
        o = self.options
        weights = None if self.weighting is None else self.weighting.weights(rows, update)
        micro_batches = pack(
            rows,
            weights,
            update=update,
            merge=o.merge,
            max_tokens=o.max_tokens,
            pad_id=o.pad_id,
            layout=o.layout,
            world=o.world,
        )
        return split_ranks(micro_batches, o.world, o.pad_id)

    def _facts(self, update: int, batch: Batch, shares: list[list[MicroBatch]]) -> dict[str, Any]:
        rows = batch.selected
        trained: Counter[int] = Counter()
        merged: dict[int, int] = {}
        apart = 0
        for turn in rows:
            n = int(turn.valid_mask().sum())
            trained[turn.rollout_id] += n
            if n:  # dead rows are not forwarded
                merged[id(turn.segment)] = max(merged.get(id(turn.segment), 0), turn.end)
                apart += turn.seq_len
        tokens = {rid: n for rid, n in trained.items() if n}
        staleness = Counter(update - 1 - turn.policy_version for turn in rows)
        return {
            "rows": len(rows),
            "dead_rows": sum(not turn.valid for turn in rows),
            # A budget of tokens buys as many rows as it buys.
            "short": len(rows) < self.composer.batch_rows and "token_budget" not in batch.facts,
            "forwarded_tokens": sum(merged.values()),
            "forwarded_tokens_rows": apart,
            "padded_tokens": sum(m.padded_tokens for share in shares for m in share),
            "micro_batches": len(shares[0]),
            "trained_tokens": sum(trained.values()),
            "response_tokens": sum(turn.n_tokens for turn in rows),
            "rollouts": len(trained),
            "effective_rollouts": effective_rollouts(tokens) if tokens else 0.0,
            "top1_share": top1_share(tokens) if tokens else 0.0,
            "turns_per_rollout": len(rows) / max(len(trained), 1),
            "dropped_stale": batch.dropped_stale,
            "passed_over": batch.passed_over,
            "gated": batch.gated,
            "expired": batch.expired,
            "pool": batch.pool,
            "pending": len(batch.pending),
            "unread": self.composer.unread,
            "staleness": {str(age): staleness[age] for age in sorted(staleness)},
            "depth_outcome": depth_outcome(((t.rollout_id, t.index) for t in rows), self._outcomes),
            **batch_facts(rows),
            **batch.facts,
            "valid_rollouts": self._usage.valid,
            "never_used": self._usage.never_used,
        }

    # Checkpoints.

    def trained(self) -> None:
        """The update of the last batch is done."""
        self._untrained = []

    def give_up(self) -> int:
        """The update of the last batch failed: its rows are lost, and counted as such; how many."""
        lost, self._untrained = len(self._untrained), []
        self.counters["lost_rows"] += lost
        return lost

    def state_dict(self) -> dict[str, Any]:
        """Counters as JSON values; the composer's state is kept beside them."""
        return {
            "weighting": _state_of(self.weighting),
            "counters": dict(self.counters),
            "usage": self._usage.state(),
            "outcomes": list(self._outcomes.items()),
            "arrivals": [[turn.rollout_id, turn.index] for turn in self._arrivals],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`; call it after the composer has been restored."""
        if state.get("weighting") is not None and hasattr(self.weighting, "load_state_dict"):
            self.weighting.load_state_dict(state["weighting"])
        self.counters = Counter(state["counters"])
        self._usage.load(state["usage"])
        self._outcomes = dict(map(tuple, state.get("outcomes", [])))
        turns = {(turn.rollout_id, turn.index): turn for turn in self.composer.state_dict()["unread"]}
        self._arrivals = [turns[rid, i] for rid, i in map(tuple, state["arrivals"]) if (rid, i) in turns]


def _state_of(part: Any) -> Any:
    return part.state_dict() if hasattr(part, "state_dict") else None


def check_rollout(rollout: Any) -> None:
    """Refuse what is no rollout, before it becomes a wrong batch.

    Raises:
        DivOPDError: A field is missing or does not fit; the message names it.
    """
    if not isinstance(rollout, Rollout):
        raise DivOPDError(
            f"The explorer sent {type(rollout).__name__}; expected a Rollout. Send divopd_trainer.turns.Rollout objects."
        )
    for name in ("rollout_id", "turns_played"):
        if not isinstance(getattr(rollout, name), (int, np.integer)):
            raise DivOPDError(
                f"Rollout {rollout.rollout_id!r} has {name}={getattr(rollout, name)!r}; expected a whole number."
            )
    for turn in rollout.turns:
        for name in ("segment", "start", "end", "student_logprobs", "policy_version", "actor"):
            if getattr(turn, name, None) is None:
                raise DivOPDError(
                    f"A turn of rollout {rollout.rollout_id} has no {name}; expected every field of "
                    "divopd_trainer.turns.Turn. Build turns with make_turn."
                )
        if turn.rollout_id != rollout.rollout_id:
            raise DivOPDError(
                f"Rollout {rollout.rollout_id} holds a turn with rollout_id {turn.rollout_id}; expected its own. "
                "Give turns the id of their rollout."
            )
