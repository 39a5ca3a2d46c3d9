"""Where received rollouts wait for the learner."""

from __future__ import annotations

import queue
import threading
from collections import deque

from ..turns import Rollout

__all__ = ["RolloutBuffer"]


class RolloutBuffer:
    """Rollouts received and not yet taken, oldest first; safe between threads, with the method names of a queue."""

    def __init__(self) -> None:
        self.condition = threading.Condition()
        self._rollouts: deque[Rollout] = deque()
        self._valid_turns = 0

    def __len__(self) -> int:
        return len(self._rollouts)

    qsize = __len__

    @property
    def valid_turns(self) -> int:
        """Valid turns of the rollouts in here."""
        return self._valid_turns

    def put(self, rollout: Rollout) -> None:
        """Append one and wake who waits."""
        with self.condition:
            self._rollouts.append(rollout)
            self._valid_turns += len(rollout.valid_turns)
            self.condition.notify_all()

    put_nowait = put

    def get(self, timeout: float | None = None) -> Rollout:
        """Take the oldest; waits at most `timeout` seconds (None: does not wait).

        Raises:
            queue.Empty: There is none.
        """
        with self.condition:
            if timeout and not self._rollouts:
                self.condition.wait_for(lambda: self._rollouts, timeout)
            if not self._rollouts:
                raise queue.Empty
            rollout = self._rollouts.popleft()
            self._valid_turns -= len(rollout.valid_turns)
            return rollout

    get_nowait = get

    def drain(self) -> list[Rollout]:
        """Take all there are."""
        with self.condition:
            rollouts = list(self._rollouts)
            self._rollouts.clear()
            self._valid_turns = 0
            return rollouts

    def wait(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds for one to be there; whether one is. `wake` ends the wait early."""
        with self.condition:
            if not self._rollouts:
                self.condition.wait(timeout)
            return bool(self._rollouts)

    def wake(self) -> None:
        """End every `wait`, so that its caller looks after the explorer's health."""
        with self.condition:
            self.condition.notify_all()
