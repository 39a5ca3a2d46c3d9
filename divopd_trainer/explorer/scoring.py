"""Which finished rollouts the teacher reads: only those that the composer can still use, oldest first.

A scored turn that never enters the composer's pool is wasted. So a rollout waits, unscored, while the turns that the
learner holds or is about to get fill its pool; meanwhile it may go stale, and then it is never scored.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable

from ..turns import Rollout

__all__ = ["ScoringGate"]


class ScoringGate:
    """Lets rollouts through to the teacher in the order in which they ended.

    Args:
        pool_turns: Turns that the composer's pool holds; None lets everything through at once.
        delivered: Turns with the learner, or on their way to it, that may still train.
        stale: Whether nothing of a rollout may still train.
        wanted: Turns that the learner waits for right now; so many are let through whatever the pool holds, for in a
            fleet that runs out of tasks the last explorer must fill the whole batch.
    """

    def __init__(
        self,
        pool_turns: int | None,
        delivered: Callable[[], int],
        stale: Callable[[Rollout], bool],
        wanted: Callable[[], int] = lambda: 0,
    ) -> None:
        self.pool_turns, self._delivered, self._stale, self._wanted = pool_turns, delivered, stale, wanted
        self._waiting: deque[tuple[Rollout, asyncio.Future[bool]]] = deque()
        self._scoring: dict[int, int] = {}

    @property
    def waiting(self) -> int:
        """Rollouts that wait."""
        return len(self._waiting)

    @property
    def scoring(self) -> int:
        """Turns that were let through and are not back yet."""
        return sum(self._scoring.values())

    async def enter(self, rollout: Rollout) -> bool:
        """Wait for a rollout's turn; False when it went stale meanwhile. `leave` must follow a True."""
        mine = asyncio.get_running_loop().create_future()
        self._waiting.append((rollout, mine))
        self.pump()
        try:
            return await mine
        except asyncio.CancelledError:
            if mine.done() and not mine.cancelled() and mine.result():
                self.leave(rollout)
            raise

    def leave(self, rollout: Rollout) -> None:
        """A rollout that was let through is scored, or failed; its turns count as delivered from now on, or never."""
        # By the number it entered with: what happens in between may add turns.
        self._scoring.pop(id(rollout), None)

    def pump(self) -> None:
        """Let through what may; to be called whenever the learner reports or weights change."""
        kept: deque[tuple[Rollout, asyncio.Future[bool]]] = deque()
        limit = math.inf if self.pool_turns is None else max(self.pool_turns, self._wanted())
        while self._waiting:
            rollout, future = self._waiting.popleft()
            if future.done():
                continue
            if self._stale(rollout):
                future.set_result(False)
            elif self._delivered() + self.scoring < limit:
                self._scoring[id(rollout)] = sum(turn.trainable for turn in rollout.turns)
                future.set_result(True)
            else:
                kept.append((rollout, future))
        self._waiting = kept
