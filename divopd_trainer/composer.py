"""Which turns form the next learner batch: DivOPD's composer (arXiv 2609.34838, algorithm 1) and its controls.

Pure: no clock, no input or output, no torch. The same turns in the same order give the same batches. A turn is
any object with the attributes of `ComposableTurn`; it is handed back as it came and never changed.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from divopd_gym.errors import ConfigError

from .composer_auto import QueuePressure, covering_cap
from .composer_cost import CostReference, buy, check_costed, merged_tokens
from .registry import resolve

__all__ = ["PRESETS", "Batch", "BatchComposer", "ComposableTurn", "Preset", "make_composer"]

STATE_SCHEMA = 1
_MASK = (1 << 64) - 1


class ComposableTurn(Protocol):
    """What the composer reads of a turn.

    ``policy_version`` is the number of completed updates whose weights wrote it; ``score`` ranks turns inside a
    rollout (a NaN ranks last); ``valid`` is the gate's verdict.
    """

    rollout_id: int
    index: int
    policy_version: int
    score: float
    valid: bool


@dataclass(frozen=True)
class Preset:
    """One composition rule.

    Attributes:
        gate: Discard turns that are not valid. Without it they take rows and carry no loss.
        coverage: "arrival" takes turns as they came; "rollout" gives every rollout, oldest first, up to the cap
            and then tops all up together; "cost" does so with pieces bought with tokens (`composer_cost`); "ranked"
            ignores rollouts.
        order: Inside a rollout (or, when "ranked", over all): "arrival", "uniform" or "score".
        capped: Whether the cap holds in the first sweep.
        pooled: Keep unselected turns and read up to the pool's size; otherwise read one batch and keep none.
    """

    gate: bool = True
    coverage: Literal["arrival", "rollout", "cost", "ranked"] = "rollout"
    order: Literal["arrival", "uniform", "score"] = "score"
    capped: bool = True
    pooled: bool = True


PRESETS: dict[str, Preset] = {
    "vanilla": Preset(gate=False, coverage="arrival", order="arrival", pooled=False),
    "gate-only": Preset(coverage="arrival", order="arrival"),
    "divopd-base": Preset(order="uniform"),
    "divopd": Preset(),
    "divopd-r": Preset(),
    "divopd-cost": Preset(coverage="cost"),
    "no-cap": Preset(order="uniform", capped=False),
    "top-b": Preset(coverage="ranked"),
}


@dataclass
class Batch:
    """What one call of `BatchComposer.compose` decided.

    Attributes:
        selected: The batch's rows, in the order they were chosen.
        pending: Turns kept for later updates, in the order they were read.
        dropped_stale: Turns dropped by this call because their version is too old.
        passed_over: Those of them that earlier calls could have chosen and did not.
        gated: Turns that this call discarded as not valid.
        expired: Valid turns that this call discarded because they waited too long.
        pool: Turns that could be chosen from.
        facts: Values for the update's train line: ``cap_used`` (k, None for no cap) and, with a budget of tokens,
            ``token_budget`` and ``budget_spent``.
    """

    selected: list[Any] = field(default_factory=list)
    pending: list[Any] = field(default_factory=list)
    dropped_stale: int = 0
    passed_over: int = 0
    gated: int = 0
    expired: int = 0
    pool: int = 0
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def cap(self) -> int | None:
        """Turns a rollout could give in the first sweep (k); None: no cap."""
        return self.facts.get("cap_used")


class BatchComposer:
    """Holds unread and pending turns and composes one batch an update.

    Args:
        preset: A name in `PRESETS`, or a `Preset`.
        batch_rows: Rows of a batch (B). With a budget of tokens, rows are not limited, and B sets the pool's size and
            what is enough to compose.
        pool_multiplier: The pool holds at most this many batches (c).
        cap: Turns that one rollout may give in the first sweep (k); None for no cap; "auto" for the largest that
            reaches every rollout which cannot wait (`composer_auto`).
        max_staleness: A turn of version v may train at updates v+1 ... v+max_staleness (delta).
        max_pending_age: Updates that an unselected turn stays pending after it was first seen (W).
        seed: Of the uniform orders.
        token_budget: Preset divopd-cost: tokens forwarded an update under merged packing. None: what `batch_rows` rows
            of preset divopd would forward, by the running mean (`composer_cost.CostReference`).

    Attributes:
        counters: Totals since the start: read, selected, dead_selected, stale, gated, expired.
        on_drop: Called as ``on_drop(turn, why)`` for every turn that leaves unselected, with why one of "stale",
            "gated" and "expired"; not part of the saved state.
        fill: Read beyond the pool's size while it holds fewer usable turns than a batch has rows, so that turns which
            the gate discards cannot leave a batch short (False: algorithm 1 to the letter). Not part of the state.

    Raises:
        ConfigError: An unknown preset or a size out of range.
    """

    def __init__(
        self,
        preset: str | Preset = "divopd",
        batch_rows: int = 64,
        pool_multiplier: int = 4,
        cap: int | Literal["auto"] | None = 4,
        max_staleness: int = 2,
        max_pending_age: int = 8,
        seed: int = 0,
        token_budget: int | None = None,
    ) -> None:
        if isinstance(preset, str) and preset not in PRESETS:
            raise ConfigError(
                f"Unknown composer preset {preset!r}; choose one of {', '.join(sorted(PRESETS))}."
            )
        for name, value, least in [
            ("batch_rows", batch_rows, 1),
            ("pool_multiplier", pool_multiplier, 1),
            ("cap", 1 if cap in (None, "auto") else cap, 1),
            ("max_staleness", max_staleness, 0),
            ("max_pending_age", max_pending_age, 0),
            ("token_budget", 1 if token_budget is None else token_budget, 1),
        ]:
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(
                    f"{name} is {value!r}; it must be a whole number, {least} or more"
                    + {"cap": ', "auto", or null.', "token_budget": ", or null."}.get(name, ".")
                )
        self.preset = PRESETS[preset] if isinstance(preset, str) else preset
        self.batch_rows = batch_rows
        self.pool_multiplier = pool_multiplier
        self.cap = cap if self.preset.capped else None
        self.max_staleness = max_staleness
        self.max_pending_age = max_pending_age
        self.seed = seed
        self.token_budget = token_budget
        self.on_drop: Callable[[Any, str], None] | None = None
        self.fill = False
        self.counters: Counter[str] = Counter()
        self._unread: deque[Any] = deque()
        self._pending: list[
            tuple[int, Any]
        ] = []  # (update at which it was first seen, turn), in reading order
        self._unread_versions: Counter[int] = (
            Counter()
        )  # usable turns by version, so that available() is cheap
        self._pending_versions: Counter[int] = Counter()
        self._pressure = QueuePressure(batch_rows)
        self._reference = CostReference()

    @property
    def unread(self) -> int:
        """Turns that arrived and were not read yet, stale ones included."""
        return len(self._unread)

    def feed(self, arrivals: Iterable[ComposableTurn]) -> None:
        """Append new turns, in arrival order, to the unread ones without composing a batch."""
        arrivals = list(arrivals)
        if self.preset.coverage == "cost":
            check_costed(arrivals)
        usable = [turn.policy_version for turn in arrivals if self._usable(turn)]
        self._unread.extend(arrivals)
        self._unread_versions.update(usable)
        self._pressure.fed(len(usable))

    def available(self, update: int) -> int:
        """How many turns, pending and unread, could be rows at this update: valid (if gated) and not stale.

        Costs a few operations a policy version, so a learner can ask after every arrival. Without `fill`, `compose`
        reads no more than the pool holds; if most of what it reads is gated, it selects fewer than this.
        """
        oldest = self._oldest_version(update)
        return sum(
            count
            for versions in (self._unread_versions, self._pending_versions)
            for version, count in versions.items()
            if version >= oldest
        )

    def compose(self, update: int, arrivals: Iterable[ComposableTurn] = ()) -> Batch:
        """Form the batch of one update; never waits.

        Args:
            update: Completed updates + 1 (q).
            arrivals: New turns in arrival order; they join the unread ones.

        Returns:
            At most `batch_rows` rows, fewer only if the pool has no more; or, with a budget of tokens, as many rows
            as it buys.
        """
        self.feed(arrivals)
        batch = Batch()
        pool = self._refill(update, batch)
        batch.pool = len(pool)
        batch.facts["cap_used"] = cap = self._first_cap(update, pool)
        chosen = self._choose(update, pool, cap, batch.facts)
        self._pressure.trained(len(chosen))
        batch.selected = [pool[i][1] for i in chosen]
        self._keep(update, pool, set(chosen), batch)
        self.counters["selected"] += len(chosen)
        self.counters["dead_selected"] += sum(not turn.valid for turn in batch.selected)
        return batch

    def state_dict(self) -> dict[str, Any]:
        """A snapshot: the pending and unread turns themselves, and the totals."""
        return {
            "schema": STATE_SCHEMA,
            "pending": list(self._pending),
            "unread": list(self._unread),
            "counters": dict(self.counters),
            "adaptive": {
                "pressure": self._pressure.state(),
                "reference": [self._reference.tokens, self._reference.rows],
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a snapshot, whatever this composer held before.

        Raises:
            ConfigError: The snapshot is not one of `state_dict`, or of another schema.
        """
        missing = {"schema", "pending", "unread", "counters"} - set(state)
        if missing or state["schema"] != STATE_SCHEMA:
            raise ConfigError(
                f"This is no composer state of schema {STATE_SCHEMA}: missing {sorted(missing)}, schema "
                f"{state.get('schema')!r}. Resume with the version of divopd that wrote the checkpoint."
            )
        self._pending = [(seen, turn) for seen, turn in state["pending"]]
        self._unread = deque(state["unread"])
        self.counters = Counter(state["counters"])
        self._unread_versions = Counter(t.policy_version for t in self._unread if self._usable(t))
        self._pending_versions = Counter(turn.policy_version for _, turn in self._pending)
        self._pressure, self._reference = QueuePressure(self.batch_rows), CostReference()
        adaptive = state.get("adaptive")  # older checkpoints have none
        if adaptive is not None:
            self._pressure.load(adaptive["pressure"])
            self._reference.tokens, self._reference.rows = adaptive["reference"]

    def _usable(self, turn: ComposableTurn) -> bool:
        return turn.valid or not self.preset.gate

    def _oldest_version(self, update: int) -> int:
        return max(update - self.max_staleness, 0)

    def _drop(self, turn: ComposableTurn, why: str) -> None:
        self.counters[why] += 1
        if self.on_drop is not None:
            self.on_drop(turn, why)

    def _refill(self, update: int, batch: Batch) -> list[tuple[int, Any]]:
        """Steps 1-3: drop stale turns, read while there is room, gate. Returns the pool in reading order."""
        oldest = self._oldest_version(update)
        pool = []
        for entry in self._pending:
            if entry[1].policy_version < oldest:
                batch.dropped_stale += 1
                batch.passed_over += 1
                self._drop(entry[1], "stale")
            else:
                pool.append(entry)
        size = self.batch_rows * (self.pool_multiplier if self.preset.pooled else 1)
        room, read = size - len(pool), 0
        unread, versions, gate = self._unread, self._unread_versions, self.preset.gate
        # Turns that the gate discards have used room: they were read before they were judged.
        while unread and (room > 0 or (self.fill and len(pool) < self.batch_rows)):
            turn = unread.popleft()
            version, usable = turn.policy_version, turn.valid or not gate
            if usable:
                versions[version] -= 1
            if version < oldest:
                batch.dropped_stale += 1
                self._drop(turn, "stale")
                continue
            room, read = room - 1, read + 1
            if usable:
                pool.append((update, turn))
            else:
                batch.gated += 1
                self._drop(turn, "gated")
        self.counters["read"] += read
        self._unread_versions = +self._unread_versions
        return pool

    def _first_cap(self, update: int, pool: list[tuple[int, Any]]) -> int | None:
        """The first sweep's k."""
        pressure = self._pressure.measure()
        if self.cap != "auto":
            return self.cap
        newest: dict[int, int] = {}
        for _, turn in pool:
            newest[turn.rollout_id] = max(newest.get(turn.rollout_id, 0), turn.policy_version)
        next_oldest = self._oldest_version(update + 1)
        last_chance = sum(version < next_oldest for version in newest.values())
        return covering_cap(self.batch_rows, len(newest), last_chance, pressure)

    def _choose(
        self, update: int, pool: list[tuple[int, Any]], cap: int | None, facts: dict[str, Any]
    ) -> list[int]:
        """Steps 4-7: positions in the pool of the rows, in the order of choice."""
        if self.preset.coverage == "arrival":
            return list(range(min(self.batch_rows, len(pool))))
        if self.preset.coverage == "ranked":
            return self._ranked(update, pool, range(len(pool)))[: self.batch_rows]
        groups = self._groups(pool)
        if self.preset.coverage == "rollout":
            return self._sweep(update, pool, groups, cap)
        budget = self.token_budget
        if budget is None:
            rows = self._sweep(update, pool, groups, cap)
            self._reference.add(merged_tokens(pool[i][1] for i in rows), len(rows))
            budget = self._reference.budget(self.batch_rows)
        chosen, spent = buy([[(i, pool[i][1]) for i in group] for group in groups], budget)
        facts |= {"token_budget": budget, "budget_spent": spent}
        return chosen

    @staticmethod
    def _groups(pool: list[tuple[int, Any]]) -> list[list[int]]:
        """Step 4: positions by rollout, the rollout first seen longest ago first."""
        members: dict[int, list[int]] = {}
        first_seen: dict[int, int] = {}
        for position, (seen, turn) in enumerate(pool):
            rollout_id = turn.rollout_id
            if rollout_id in members:
                members[rollout_id].append(position)
                first_seen[rollout_id] = min(first_seen[rollout_id], seen)
            else:
                members[rollout_id] = [position]
                first_seen[rollout_id] = seen
        return [members[r] for r in sorted(members, key=lambda r: (first_seen[r], r))]

    def _sweep(
        self, update: int, pool: list[tuple[int, Any]], groups: list[list[int]], cap: int | None
    ) -> list[int]:
        """Steps 5-7."""
        chosen: list[int] = []
        rest: list[list[int]] = []
        for members in groups:
            if len(chosen) == self.batch_rows:
                return chosen
            ranked = self._ranked(update, pool, members)
            take = len(ranked) if cap is None else cap
            chosen += ranked[: min(take, self.batch_rows - len(chosen))]
            rest.append(ranked[take:])
        # Relaxation: the cap rises by one a sweep, so every rollout with turns left gives one more.
        offset = 0
        while len(chosen) < self.batch_rows:
            rest = [ranked for ranked in rest if len(ranked) > offset]
            if not rest:
                break
            chosen += [ranked[offset] for ranked in rest[: self.batch_rows - len(chosen)]]
            offset += 1
        return chosen

    def _ranked(self, update: int, pool: list[tuple[int, Any]], positions: Iterable[int]) -> list[int]:
        """Positions, best first. Ties and NaN cannot make the order depend on anything but the turns."""
        if self.preset.order == "arrival":
            return list(positions)
        keys: list[tuple] = []
        if self.preset.order == "uniform":
            base, states = _mixed(self.seed, update), {}
            for i in positions:
                turn = pool[i][1]
                rollout_id = turn.rollout_id
                if rollout_id not in states:
                    states[rollout_id] = _mixed(base, rollout_id)
                keys.append((_mixed(states[rollout_id], turn.index), rollout_id, turn.index, i))
        else:
            for i in positions:
                turn = pool[i][1]
                score = float(turn.score)
                lost = math.inf if math.isnan(score) else -score
                keys.append((lost, score != score, turn.rollout_id, turn.index, i))
        keys.sort()
        return [key[-1] for key in keys]

    def _keep(self, update: int, pool: list[tuple[int, Any]], chosen: set[int], batch: Batch) -> None:
        """Step 8: what was not selected stays pending while it is young enough."""
        self._pending = []
        for position, entry in enumerate(pool):
            if position in chosen:
                continue
            if self.preset.pooled and update - entry[0] <= self.max_pending_age:
                self._pending.append(entry)
            else:
                batch.expired += 1
                self._drop(entry[1], "expired")
        batch.pending = [turn for _, turn in self._pending]
        self._pending_versions = Counter(turn.policy_version for turn in batch.pending)


def _mixed(state: int, value: int) -> int:
    """Fold a value into a 64-bit state, so that chained calls give numbers that depend on the values alone.

    Sorting by such numbers is a uniform draw without replacement. SplitMix64's output function:
    https://prng.di.unimi.it/splitmix64.c
    """
    state = ((state ^ (int(value) & _MASK)) + 0x9E3779B97F4A7C15) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)


def make_composer(args: Any) -> BatchComposer:
    """The composer that a `DivOPDConfig` names: a preset of ours, or an object with the methods of `BatchComposer`."""
    settings = {
        "batch_rows": args.batch_rows,
        "pool_multiplier": args.pool_multiplier,
        "cap": args.cap,
        "max_staleness": args.max_staleness,
        "max_pending_age": args.max_pending_age,
        "seed": args.seed,
        "token_budget": args.token_budget,
    }
    if args.composer in PRESETS:
        return BatchComposer(args.composer, **settings)
    return resolve("composer", args.composer)(**settings)
