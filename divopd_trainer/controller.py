"""Who acts next: the student, or a helper that takes over for some turns of a training episode.

A `Controller` is one setting for the whole run; `begin` gives the small per-episode object that the episode runner
asks before each turn and tells after each. Turns of a helper stay in the history and never train. Evaluation is
always the student alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from divopd_gym.errors import ConfigError

from .seeds import derive_seed
from .turns import Actor

__all__ = ["Controller", "EpisodeController", "GuidedOPD", "Recovery", "StudentOnly", "TCODB2F"]


class EpisodeController(Protocol):
    """One episode's view. Where `actor` says "replay", ``replayed(turn) -> str`` gives the action."""

    def actor(self, turn: int) -> str:
        """Who acts at this turn: an `Actor` value. Asked once a turn, in order."""
        ...

    def observe(
        self,
        *,
        action: str,
        valid: bool,
        observation_before: str,
        observation_after: str,
        admissible_before: Sequence[str] | None,
        admissible_after: Sequence[str] | None,
    ) -> None:
        """What the turn did: the action sent, whether it was valid, and the situation before and after."""
        ...

    def summary(self) -> dict[str, Any]:
        """For the record; JSON values."""
        ...


class Controller(Protocol):
    """A setting for the run; `begin` is called once an episode."""

    name: str
    needs_teacher: bool

    # Optional: `needs_reference`, whether `begin` wants a reference trajectory; `imitates`, whether the student is
    # trained to say what the teacher says at its turns (cross-entropy).

    def begin(
        self, *, run_seed: int, task: str, attempt: int, update: int, evaluating: bool, reference: Any = None
    ) -> EpisodeController:
        """The controller of one episode.

        Args:
            run_seed: Seed of the run.
            task: Task id.
            attempt: Which try at it.
            update: Updates the learner has completed.
            evaluating: True gives the student every turn.
            reference: Actions that solve the task (list of str), or None where there are none.
        """
        ...


class _Student:
    def actor(self, turn: int) -> str:
        return Actor.STUDENT.value

    def observe(self, **_: Any) -> None:
        pass

    def summary(self) -> dict[str, Any]:
        return {}


@dataclass(frozen=True)
class StudentOnly:
    """The student plays every turn."""

    name = "student"
    needs_teacher = False

    def begin(self, **_: Any) -> EpisodeController:
        """See `Controller.begin`."""
        return _Student()


@dataclass(frozen=True)
class Recovery:
    """DivOPD's teacher recovery (arXiv 2609.34838, section 3.4 and appendix G).

    After `patience` no-progress turns in a row the teacher acts, at most `budget` turns a rollout in all, then the
    student goes on from where that led.

    Args:
        patience: No-progress turns that call the teacher.
        budget: Teacher turns a rollout.
        warmup_updates: Learner updates before which the teacher is not called.
        return_on_progress: Hand back at the first turn that makes progress.
    """

    patience: int = 4
    budget: int = 6
    warmup_updates: int = 0
    return_on_progress: bool = False

    name = "recovery"
    needs_teacher = True

    def __post_init__(self) -> None:
        for field, least in (("patience", 1), ("budget", 0), ("warmup_updates", 0)):
            if getattr(self, field) < least:
                raise ConfigError(
                    f"Recovery {field} is {getattr(self, field)}; expected at least {least}. See the settings table "
                    "in docs for the paper's values."
                )

    def begin(
        self, *, run_seed: int, task: str, attempt: int, update: int, evaluating: bool, reference: Any = None
    ) -> EpisodeController:
        """See `Controller.begin`."""
        if evaluating or update < self.warmup_updates or self.budget == 0:
            return _Student()
        return _RecoveryEpisode(self)


class _RecoveryEpisode:
    def __init__(self, setting: Recovery) -> None:
        from divopd_gym.wrappers import HandoffPolicy

        self._policy = HandoffPolicy(
            setting.patience, setting.budget, return_on_progress=setting.return_on_progress
        )
        self._turns = 0
        self._calls = 0
        self._was_acting = False

    def actor(self, turn: int) -> str:
        acting = self._policy.acting == Actor.TEACHER.value
        self._turns += acting
        self._calls += acting and not self._was_acting
        self._was_acting = acting
        return (Actor.TEACHER if acting else Actor.STUDENT).value

    def observe(self, **what: Any) -> None:
        self._policy.observe(**what)

    def summary(self) -> dict[str, Any]:
        return {"teacher_turns": self._turns, "handoffs": self._calls}


@dataclass(frozen=True)
class GuidedOPD:
    """Guided-OPD (arXiv 2606.15912): each turn is the teacher's with probability b, which a cosine takes to 0.

    ``b = 0.5 * (1 + cos(pi * min(n / (0.8 * N), 1)))`` with n completed updates of N.

    Args:
        updates: N, updates of the whole run.
        share: Part of the run after which b is 0.
    """

    updates: int
    share: float = 0.8

    name = "guided"
    needs_teacher = True
    imitates = True

    def __post_init__(self) -> None:
        if self.updates < 1 or not 0 < self.share <= 1:
            raise ConfigError(
                f"GuidedOPD has updates={self.updates}, share={self.share}; expected updates >= 1 and "
                "0 < share <= 1. Set updates to the number of updates of the run."
            )

    def probability(self, update: int) -> float:
        """The teacher's share of turns after so many updates."""
        return 0.5 * (1 + math.cos(math.pi * min(update / (self.share * self.updates), 1.0)))

    def begin(
        self, *, run_seed: int, task: str, attempt: int, update: int, evaluating: bool, reference: Any = None
    ) -> EpisodeController:
        """See `Controller.begin`."""
        b = 0.0 if evaluating else self.probability(update)
        return _GuidedEpisode(b, run_seed, task, attempt) if b > 0 else _Student()


class _GuidedEpisode(_Student):
    def __init__(self, probability: float, *key: int | str) -> None:
        self._b, self._key, self._teacher_turns = probability, key, 0

    def actor(self, turn: int) -> str:
        teacher = derive_seed("guided", *self._key, turn) / 2**63 < self._b
        self._teacher_turns += teacher
        return (Actor.TEACHER if teacher else Actor.STUDENT).value

    def summary(self) -> dict[str, Any]:
        return {"teacher_turns": self._teacher_turns, "teacher_probability": self._b}


@dataclass(frozen=True)
class TCODB2F:
    """TCOD back to front (arXiv 2604.24005): the first actions are those of a reference trajectory.

    Of a reference of L actions the first ``max(0, L - 1 - floor(n / every))`` are replayed, with n completed updates
    (explorer rounds there); the student acts from where they lead. An episode that the replay already ends has
    nothing to train.

    Args:
        every: Updates for one turn less of replay (eta).
    """

    every: int = 4

    name = "tcod-b2f"
    needs_teacher = False
    needs_reference = True

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ConfigError(f"TCOD-B2F has every={self.every}; expected at least 1 update.")

    def replayed_turns(self, length: int, update: int) -> int:
        """Actions to replay of a reference of this length after so many updates."""
        return max(0, length - 1 - update // self.every)

    def begin(
        self, *, run_seed: int, task: str, attempt: int, update: int, evaluating: bool, reference: Any = None
    ) -> EpisodeController:
        """See `Controller.begin`.

        Raises:
            ConfigError: The environment has no reference trajectory for this task.
        """
        if evaluating:
            return _Student()
        if reference is None:
            raise ConfigError(
                f"TCOD-B2F replays reference trajectories, but the environment has none for task {task!r} "
                "(gold_path() is None). Use a split with gold paths, or method: tcod-f2b."
            )
        return _ReplayEpisode(list(reference)[: self.replayed_turns(len(reference), update)])


class _ReplayEpisode(_Student):
    def __init__(self, actions: list[str]) -> None:
        self._actions = actions

    def actor(self, turn: int) -> str:
        return (Actor.REPLAY if turn < len(self._actions) else Actor.STUDENT).value

    def replayed(self, turn: int) -> str:
        return self._actions[turn]

    def summary(self) -> dict[str, Any]:
        return {"replayed_turns": len(self._actions)}
