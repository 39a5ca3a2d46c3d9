"""Which task is played next: shuffled epochs, every task exactly once an epoch, and a state that loses none.

The state names what is *finished*. What was in flight when it was taken is played again, in the same order and
with the same attempt numbers, so the same seeds. A failed task is dropped for its epoch and freezes nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from divopd_gym.errors import ConfigError

__all__ = ["Frontier", "TaskSchedule", "Ticket"]


@dataclass(frozen=True)
class Ticket:
    """One episode to play.

    Attributes:
        epoch: From 0.
        place: Position in the epoch's order, from 0.
        task: Task id.
        attempt: Which try at this task it is over the whole run, from 0; with the task it fixes the seeds.
    """

    epoch: int
    place: int
    task: str
    attempt: int


class Frontier:
    """Which places of which epochs are finished; needs no task list.

    Args:
        size: Places an epoch.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.epoch = 0
        self.finished_in: dict[int, set[int]] = {}
        self.finished = 0
        self.dropped = 0

    def finish(self, ticket: Ticket, *, dropped: bool = False) -> bool:
        """Count one place as finished, with a rollout or dropped; False when it was finished before."""
        if ticket.epoch < self.epoch or ticket.place in self.finished_in.get(ticket.epoch, ()):
            return False
        self.finished_in.setdefault(ticket.epoch, set()).add(ticket.place)
        self.finished += 1
        self.dropped += dropped
        while len(self.finished_in.get(self.epoch, ())) == self.size:
            del self.finished_in[self.epoch]
            self.epoch += 1
        return True

    def is_finished(self, epoch: int, place: int) -> bool:
        """Whether this place needs no more play."""
        return epoch < self.epoch or place in self.finished_in.get(epoch, ())

    def state_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "size": self.size,
            "epoch": self.epoch,
            "finished_in": {str(e): sorted(places) for e, places in sorted(self.finished_in.items())},
            "finished": self.finished,
            "dropped": self.dropped,
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Frontier:
        """Back from `state_dict`; other keys are ignored."""
        frontier = cls(state["size"])
        frontier.epoch, frontier.finished, frontier.dropped = (
            state["epoch"],
            state["finished"],
            state["dropped"],
        )
        frontier.finished_in = {int(e): set(places) for e, places in state["finished_in"].items()}
        return frontier


class TaskSchedule:
    """Hands out tickets: epoch after epoch, each a seeded shuffle of the tasks.

    The attempts of one task in an epoch follow each other, so that a group of them is played at about one time.

    Args:
        tasks: Task ids, each once.
        seed: Fixes every epoch's order.
        group: Attempts a task and epoch.
        epochs: How many; None = without end.

    Raises:
        ConfigError: There is no task, or an id occurs twice.
    """

    def __init__(
        self, tasks: Sequence[str], *, seed: int = 0, group: int = 1, epochs: int | None = None
    ) -> None:
        if not tasks:
            raise ConfigError(
                "The task list is empty; expected at least one task id. Check the split and the data directory."
            )
        if len(set(tasks)) != len(tasks):
            twice = next(task for task in tasks if list(tasks).count(task) > 1)
            raise ConfigError(f"Task {twice!r} is listed more than once; list every task id exactly once.")
        if group < 1:
            raise ConfigError(f"group is {group}; expected at least 1 attempt a task.")
        self.tasks = list(tasks)
        self.seed, self.group, self.epochs = seed, group, epochs
        self.digest = hashlib.sha256("\n".join(self.tasks).encode()).hexdigest()[:16]
        self.frontier = Frontier(len(self.tasks) * group)
        self.in_flight: set[Ticket] = set()
        self._returned: list[Ticket] = []
        self._upcoming = self._tickets(0)

    def take(self) -> Ticket | None:
        """The next episode to play, now in flight; None when every epoch has been handed out."""
        if self._returned:
            ticket: Ticket | None = self._returned.pop(0)
        else:
            ticket = next(self._upcoming, None)
        if ticket is not None:
            self.in_flight.add(ticket)
        return ticket

    def finish(self, ticket: Ticket, *, dropped: bool = False) -> bool:
        """An episode in flight ended, with a rollout or (``dropped``) without; False when it was not in flight."""
        if ticket not in self.in_flight:
            return False
        self.in_flight.remove(ticket)
        return self.frontier.finish(ticket, dropped=dropped)

    def give_back(self, ticket: Ticket) -> None:
        """An episode in flight was called off: it is handed out again before anything else."""
        self.in_flight.discard(ticket)
        self._returned.append(ticket)
        self._returned.sort(key=lambda t: (t.epoch, t.place))

    @property
    def exhausted(self) -> bool:
        """Whether nothing is left to hand out nor in flight."""
        return self.epochs is not None and self.frontier.epoch >= self.epochs

    def state_dict(self) -> dict[str, Any]:
        """JSON values; what is in flight is simply not finished."""
        return {**self.frontier.state_dict(), "seed": self.seed, "group": self.group, "digest": self.digest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state: unfinished places of begun epochs come first, in their order.

        Raises:
            ConfigError: The state is of other tasks, another seed or another group size.
        """
        for name, mine in (("digest", self.digest), ("seed", self.seed), ("group", self.group)):
            if state.get(name) != mine:
                raise ConfigError(
                    f"The saved task schedule has {name} {state.get(name)!r}, this run has {mine!r} "
                    f"({len(self.tasks)} tasks); resume with the same tasks, seed and group size, or start a new run."
                )
        self.frontier = Frontier.from_state(state)
        self.in_flight, self._returned = set(), []
        self._upcoming = self._tickets(self.frontier.epoch)

    def _tickets(self, epoch: int) -> Iterator[Ticket]:
        while self.epochs is None or epoch < self.epochs:
            # A stream of its own per epoch: no order depends on how the run got there.
            order = np.random.default_rng([self.seed, epoch]).permutation(len(self.tasks))
            for position, index in enumerate(order):
                for member in range(self.group):
                    place = position * self.group + member
                    if not self.frontier.is_finished(epoch, place):
                        yield Ticket(epoch, place, self.tasks[index], epoch * self.group + member)
            epoch += 1
