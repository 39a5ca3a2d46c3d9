"""Episodes of one task that are compared with each other: held until the last of them has ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..turns import Rollout
from .tasks import Ticket

__all__ = ["Finished", "Groups", "group_advantages"]


def group_advantages(rewards: list[float]) -> list[float]:
    """Group-normalised rewards (GRPO, arXiv 2402.03300): less their mean, divided by their standard deviation.

    Args:
        rewards: Returns of the episodes of one task.

    Returns:
        One a reward; all 0 when the rewards are equal, as then none was better.
    """
    values = np.asarray(rewards, np.float64)
    if not len(values):
        return []
    spread = values.std()
    return [0.0] * len(rewards) if spread < 1e-8 else ((values - values.mean()) / spread).tolist()


@dataclass
class Finished:
    """An episode that ended.

    Attributes:
        ticket: Its place in the schedule.
        rollout: None when it failed.
        scored: Whether the teacher scored it.
        held: Turns that count as kept back until it is sent.
    """

    ticket: Ticket
    rollout: Rollout | None = None
    scored: bool = False
    held: int = 0


class Groups:
    """Holds finished episodes until their group is whole, so that none of it is sent, or lost, without the others.

    They go in one message, so no death of an explorer and no checkpoint splits a group.

    Args:
        size: Attempts a task and epoch; 1 holds nothing.
        finished: ``finished(epoch, place)``: whether that episode was sent or dropped earlier, by an explorer that
            died, or before the checkpoint; nobody waits for it.
    """

    def __init__(self, size: int, finished: Callable[[int, int], bool] = lambda epoch, place: False) -> None:
        self.size, self._finished = size, finished
        self._members: dict[tuple[int, int], dict[int, Finished]] = {}

    def add(self, finished: Finished) -> list[Finished]:
        """Take an episode in.

        Returns:
            The whole group in the order of its attempts, failed ones included, once it is complete; the turns of the
            others then carry ``info["group_advantage"]``. Else nothing.
        """
        if self.size == 1:
            return [finished]
        ticket = finished.ticket
        key = (ticket.epoch, ticket.place // self.size)
        members = self._members.setdefault(key, {})
        members[ticket.place] = finished
        first = key[1] * self.size
        if any(
            p not in members and not self._finished(ticket.epoch, p) for p in range(first, first + self.size)
        ):
            return []
        del self._members[key]
        whole = [members[place] for place in sorted(members)]
        played = [member.rollout for member in whole if member.rollout is not None]
        for rollout, advantage in zip(played, group_advantages([r.reward for r in played])):
            rollout.meta["group_advantage"] = advantage
            for turn in rollout.turns:
                turn.info["group_advantage"] = advantage
        return whole
