"""``cap="auto"``: how many turns a rollout may give in the first sweep, from the pressure on the queue. Pure.

A large cap takes many turns of few rollouts: cheap with merged packing, since they share a forward pass, and the score
has more to choose from. A small one reaches more rollouts. Which of them can wait depends on the queue:

* Rollouts on their *last chance*, whose newest turn is too old for the next update, cannot wait at all.
* The others can, as long as the queue drains. At a pressure of rho turns arriving per turn trained, up to a share rho of
  what one update can see must be served now to keep up, and all of it once rho reaches 1: what is then put off will
  be pushed out by what arrives.

So ``need = max(last chance, ceil(min(1, rho) * rollouts in the pool))`` and ``k = floor(B / need)``, at least 1: the
largest cap that still reaches every rollout that cannot wait. The relaxation after the first sweep fills what is left.
"""

from __future__ import annotations

import math
from typing import Any

__all__ = ["QueuePressure", "covering_cap"]

_WEIGHT = 0.25


def covering_cap(batch_rows: int, rollouts: int, last_chance: int, pressure: float) -> int:
    """The largest first-sweep cap that reaches every rollout which cannot wait.

    Args:
        batch_rows: Rows of the batch (B).
        rollouts: Rollouts in the pool.
        last_chance: Those of them that no later update can train.
        pressure: Usable turns arriving per turn trained (rho).

    Returns:
        k, from 1 to B.
    """
    need = max(last_chance, math.ceil(min(1.0, pressure) * rollouts), 1)
    return max(1, batch_rows // need)


class QueuePressure:
    """Running ratio of usable turns that arrive to turns that are trained, an update.

    Args:
        batch_rows: What an update is taken to train before one was seen.

    Attributes:
        arriving: Moving average of usable arrivals an update; None before the first update.
        draining: Moving average of rows trained an update.
    """

    def __init__(self, batch_rows: int) -> None:
        self.arriving: float | None = None
        self.draining = float(batch_rows)
        self._arrived = 0

    def fed(self, usable: int) -> None:
        """So many usable turns arrived."""
        self._arrived += usable

    def measure(self) -> float:
        """Close the interval since the last call; the ratio (rho), 0 or above."""
        if self.arriving is None:
            self.arriving = float(self._arrived)
        else:
            self.arriving += _WEIGHT * (self._arrived - self.arriving)
        self._arrived = 0
        return self.arriving / max(self.draining, 1.0)

    def trained(self, rows: int) -> None:
        """A batch of so many rows was composed."""
        self.draining += _WEIGHT * (rows - self.draining)

    def state(self) -> dict[str, Any]:
        """JSON values."""
        return {"arriving": self.arriving, "draining": self.draining, "arrived": self._arrived}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from `state`."""
        self.arriving, self.draining = state["arriving"], state["draining"]
        self._arrived = state["arrived"]
