"""When to begin another episode, so that the learner rarely waits and little of what is played goes stale. Pure.

A turn of version v may train at updates v+1 ... v+delta. When u batches are composed, ``v + delta - u`` updates are
left for a turn written now, and each takes B turns. So an episode is begun only while all turns that are already
outstanding, plus those it is expected to bring, fit into ``load * B * (v + delta - u)``. Outstanding are: valid turns
with the learner that may still train, those on their way, and those expected of the episodes in flight. Lengths
vary, and what does not fit is thrown away; so a margin is left, of `margin` standard deviations of what is not yet
known. A learner that waits for the rest gets it from the newest weights, with an update more to live.

Whatever that says, an episode is begun when the learner waits and what is in flight cannot fill its batch. So
nothing can deadlock, at any staleness and batch size. While newer weights are being loaded, such an episode is begun
only if the batch is expected to take all of it: what is left of the last one goes stale unless it is of the new ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from divopd_gym.errors import ConfigError

__all__ = ["Pacer"]


@dataclass
class _Flight:
    expected: float
    played: int = 0


class Pacer:
    """Decides whether to begin an episode; told of everything that happens, it holds no clock.

    All counts are of valid student turns, those that can fill a batch.

    Args:
        batch_rows: Turns that one update trains (B).
        max_staleness: Updates that a version may lag (delta); 0 is treated as 1, which is on-policy already.
        load: Turns produced a turn trained: 1 = paced, 2 = a surplus to choose from, None = no limit.
        max_concurrent: Episodes in flight.
        expected_turns: Turns of an episode before any has ended.
        version: Version of the weights loaded at first.
        ema: Weight of a new episode in the expected number of turns and its spread.
        margin: Standard deviations to leave free.
    """

    def __init__(
        self,
        *,
        batch_rows: int,
        max_staleness: int = 2,
        load: float | None = 1.0,
        max_concurrent: int = 16,
        expected_turns: float = 15.0,
        version: int = 0,
        ema: float = 0.05,
        margin: float = 2.0,
    ) -> None:
        if batch_rows < 1 or max_concurrent < 1 or max_staleness < 0 or (load is not None and load <= 0):
            raise ConfigError(
                f"Pacer got batch_rows={batch_rows}, max_staleness={max_staleness}, load={load}, max_concurrent="
                f"{max_concurrent}; expected at least 1, at least 0, None or above 0, and at least 1."
            )
        self.batch_rows, self.max_staleness = batch_rows, max(1, max_staleness)
        self.load, self.max_concurrent = load, max_concurrent
        self.version = self._announced = version
        self.composed = version
        self.expected_turns = float(expected_turns)
        self._variance = (expected_turns / 2.0) ** 2
        self._ema, self._margin = ema, margin
        self._flights: dict[int, _Flight] = {}
        self._sent = 0
        self._held = 0
        self._with_learner = 0
        self._received = 0
        self._wanted = 0

    # --- what happened -----------------------------------------------------------------------------------------

    def begin(self, key: int) -> None:
        """An episode begins."""
        self._flights[key] = _Flight(max(1.0, self.expected_turns))

    def played(self, key: int) -> None:
        """An episode in flight has played one more turn."""
        if key in self._flights:
            self._flights[key].played += 1

    def end(self, key: int, valid_turns: int | None, usable: int | None = None) -> None:
        """An episode ended and its turns are sent.

        Args:
            key: As given to `begin`.
            valid_turns: None when it failed or was called off: then it says nothing of the usual length.
            usable: Those of them that are not stale already; all by default.
        """
        self._flights.pop(key, None)
        if valid_turns is None:
            return
        self._sent += valid_turns if usable is None else usable
        # A constant weight from the first on: short episodes end first, and must not stand for all at the start.
        off = valid_turns - self.expected_turns
        self.expected_turns += self._ema * off
        self._variance = (1 - self._ema) * (self._variance + self._ema * off * off)

    def hold(self, usable: int) -> None:
        """Turns of an ended episode are kept back; `end` was told of 0 usable ones."""
        self._held += usable

    def deliver(self, held: int, usable: int) -> None:
        """Turns that were kept back are sent now.

        Args:
            held: As given to `hold`.
            usable: Those of them that are not stale by now.
        """
        self._held -= held
        self._sent += usable

    def pool(self, *, composed: int, available: int, wanted: int, received: int) -> None:
        """The learner reports.

        Args:
            composed: Batches composed so far.
            available: Valid turns with the learner that may train in the next one.
            wanted: Turns it waits for right now, 0 if it does not wait.
            received: Usable turns that it had received from this explorer when it reported.
        """
        self.composed = max(self.composed, composed)
        self._with_learner, self._received, self._wanted = available, received, wanted

    def announce(self, version: int) -> None:
        """These weights are going to be loaded."""
        self._announced = max(self._announced, version)

    def policy(self, version: int) -> None:
        """These weights are loaded now."""
        self.version = version

    # --- what follows ------------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        """Episodes."""
        return len(self._flights)

    @property
    def in_flight_turns(self) -> float:
        """Turns expected of the episodes in flight; at least one more than an episode has already played."""
        return sum(max(f.expected, f.played + 1.0) for f in self._flights.values())

    @property
    def delivered(self) -> int:
        """Turns with the learner or on their way to it."""
        return self._with_learner + max(0, self._sent - self._received)

    @property
    def outstanding(self) -> float:
        """Turns delivered and not yet trained, and those expected."""
        return self.delivered + self._held + self.in_flight_turns

    @property
    def allowed(self) -> float:
        """Turns that may be outstanding."""
        if self.load is None:
            return float("inf")
        return self.load * self.batch_rows * max(0, self.version + self.max_staleness - self.composed)

    @property
    def oldest_usable(self) -> int:
        """The oldest version that may train in the next batch."""
        return self.composed + 1 - self.max_staleness

    @property
    def too_late(self) -> bool:
        """Whether newer weights are on their way and a turn written before they are here can never train."""
        return self.loading and self.version < self.oldest_usable

    @property
    def loading(self) -> bool:
        """Whether newer weights than the loaded ones were announced."""
        return self._announced > self.version

    @property
    def learner_wants(self) -> int:
        """Turns that the learner waits for right now, as it last said."""
        return self._wanted

    @property
    def hungry(self) -> bool:
        """Whether the learner waits and nothing under way fills its batch."""
        if self.loading:
            return self.outstanding + max(1.0, self.expected_turns) <= self._wanted
        # With nothing in flight it waits in vain even if the counts say otherwise.
        return self._wanted > 0 and (self.outstanding < self._wanted or not self._flights)

    def wants_more(self) -> bool:
        """Whether to begin an episode now."""
        if self.in_flight >= self.max_concurrent:
            return False
        if self.hungry:
            return True
        unknown = self._margin * math.sqrt((self.in_flight + 1) * self._variance)
        return self.outstanding + max(1.0, self.expected_turns) + unknown <= self.allowed
