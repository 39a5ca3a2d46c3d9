"""What the trainer and the explorer say to each other over one ordered pipe.

Every message is a small picklable dataclass. Because the pipe is ordered, whatever came before a `StateReply` is
with the trainer and whatever comes after it was in flight: a consistent cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from divopd_gym.errors import ConfigError, DivOPDError

from ..turns import Rollout
from .tasks import Ticket

__all__ = [
    "EpisodeFailed",
    "EvalDone",
    "Evaluate",
    "ExplorerDied",
    "ExplorerError",
    "ExplorerHung",
    "ExplorerState",
    "Fatal",
    "GetState",
    "GroupDone",
    "Heartbeat",
    "PolicyLoaded",
    "PoolStatus",
    "Ready",
    "RolloutDone",
    "SetPolicy",
    "StateReply",
    "Stop",
]


class ExplorerError(DivOPDError, RuntimeError):
    """The explorer cannot go on."""


class ExplorerDied(ExplorerError):
    """The explorer's process ended, or reported that it cannot go on."""


class ExplorerHung(ExplorerError):
    """The explorer's process lives but no longer answers."""


@dataclass
class ExplorerState:
    """What a new explorer needs to go on where another one ended; JSON values only.

    Attributes:
        schedule: `TaskSchedule.state_dict`: finished tasks by epoch. Whatever was in flight counts as not begun and is
            played again. None = a fresh start.
        next_rollout_id: The number that the next finished rollout gets.
        counters: Counters so far, so that they go on rising.
        depth: `DepthControl.state_dict`; None = a fresh start.
    """

    schedule: dict[str, Any] | None = None
    next_rollout_id: int = 0
    counters: dict[str, float] = field(default_factory=dict)
    depth: dict[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, state: dict[str, Any]) -> ExplorerState:
        """Back from `to_dict`.

        Raises:
            ConfigError: A field is missing or unknown; the message names it.
        """
        expected, found = set(cls.__dataclass_fields__), set(state)
        if expected != found:
            raise ConfigError(
                f"The explorer state has missing fields {sorted(expected - found)} and unknown fields "
                f"{sorted(found - expected)}; expected exactly {sorted(expected)}. It was written by another "
                "version: resume with that one, or start a new run."
            )
        return cls(**state)


# --- trainer -> explorer ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SetPolicy:
    """Load these weights; answered by `PolicyLoaded`.

    Attributes:
        version: Completed updates that the weights have seen.
        path: A safetensors file that stays in place until `PolicyLoaded` or a later `SetPolicy`.
        update: Completed updates of the learner now (controllers and pacing go by it).
    """

    version: int
    path: str
    update: int


@dataclass(frozen=True)
class PoolStatus:
    """What the learner holds; sent after each composed batch and whenever it begins to wait.

    Attributes:
        update: Batches composed so far: the number of the update that is being trained or was trained last.
        available: Valid turns in the learner's pool, pending and unread, that may still train at ``update + 1``.
        wanted: Turns that the learner waits for right now; 0 while it trains.
        unread: The part of ``available`` that the composer has not read yet; for the record only.
        buffered: Valid turns received but not yet handed to the composer. Filled in by `ExplorerProcess.send`.
        received: Usable turns received so far from the explorer now running. Filled in by `ExplorerProcess.send`.
    """

    update: int
    available: int
    wanted: int
    unread: int = 0
    buffered: int = 0
    received: int = 0


@dataclass(frozen=True)
class Evaluate:
    """Play evaluation episodes with exactly these weights; answered by `EvalDone`.

    Attributes:
        request_id: Chosen by the sender, comes back in the answer.
        version: Policy version of the weights.
        path: Safetensors file; must stay until the answer.
        tasks: Task ids; None = the evaluation split's own.
        episodes: At most so many tasks, the first ones; None = all.
        temperature: Sampling temperature.
        max_turns: Horizon.
        greedy: Take the most likely token instead of sampling.
        seed: Seed of the evaluation's sampling.
    """

    request_id: int
    version: int
    path: str
    tasks: Sequence[str] | None = None
    episodes: int | None = None
    temperature: float = 0.4
    max_turns: int = 30
    greedy: bool = False
    seed: int = 0


@dataclass(frozen=True)
class GetState:
    """Ask for an `ExplorerState`; answered by `StateReply`."""

    request_id: int


@dataclass(frozen=True)
class Stop:
    """End: drop what is in flight, close the environments, leave.

    Attributes:
        grace_s: Seconds after which the process ends itself by force.
    """

    grace_s: float = 10.0


# --- explorer -> trainer ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ready:
    """Everything is loaded and checked; play begins once a policy is set or at once with the initial one.

    Attributes:
        info: Versions, number of tasks, sizes, what the checks found.
        state: The state it starts from.
    """

    info: dict[str, Any]
    state: dict[str, Any]


@dataclass(frozen=True)
class Heartbeat:
    """The event loop is alive; sent every second.

    Attributes:
        counters: Totals since the run began.
        gauges: Values now.
        pids: Environment workers.
    """

    counters: dict[str, float]
    gauges: dict[str, float]
    pids: tuple[int, ...] = ()


@dataclass(frozen=True)
class RolloutDone:
    """One finished, scored episode.

    Attributes:
        rollout: Its rollout_id rises by one with every message.
        ticket: The place in the task schedule that it fills.
        usable: Its valid turns that were not stale when it was sent.
        depth: `DepthControl.state_dict` after it; None changes nothing.
    """

    rollout: Rollout
    ticket: Ticket
    usable: int = 0
    depth: dict[str, Any] | None = None


@dataclass(frozen=True)
class GroupDone:
    """Episodes of one task that are compared with each other: received together or not at all.

    Attributes:
        members: At least two, in the order of their attempts.
    """

    members: tuple[RolloutDone, ...]


@dataclass(frozen=True)
class EpisodeFailed:
    """One episode that left nothing; its task counts as dropped in this epoch.

    Attributes:
        task: Task id.
        attempt: Which try at it.
        why: The first cause.
        ticket: The place in the task schedule.
    """

    task: str
    attempt: int
    why: str
    ticket: Ticket


@dataclass(frozen=True)
class PolicyLoaded:
    """Responses begun from now on are of this version."""

    version: int


@dataclass(frozen=True)
class EvalDone:
    """Answer to `Evaluate`.

    Attributes:
        request_id: As asked.
        result: Values of an evaluation line, or None when it failed.
        error: Why it failed.
        version: The one policy version it was played with.
    """

    request_id: int
    result: dict[str, Any] | None
    error: str | None = None
    version: int | None = None


@dataclass(frozen=True)
class StateReply:
    """Answer to `GetState`; ``state`` is `ExplorerState.to_dict`."""

    request_id: int
    state: dict[str, Any]


@dataclass(frozen=True)
class Fatal:
    """The explorer gives up; no restart can help."""

    message: str
