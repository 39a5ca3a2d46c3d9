"""`TextEnv`: what every text environment of this package has in common, as a Gymnasium environment of texts.

A subclass says how a task starts and what a turn does; the base keeps the books: which task, rewards as increments of
the score, limits, the info keys, and that nothing is played after an episode's end.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from numbers import Integral
from typing import Any, Protocol, TypedDict, runtime_checkable

import gymnasium

from divopd_gym.errors import ConfigError, DataNotFoundError, ResetNeeded
from divopd_gym.spaces import TextSpace

__all__ = ["INFO_KEYS", "DoneReason", "Expert", "Outcome", "TextEnv", "TextInfo"]


class DoneReason(str, Enum):
    """Why an episode ended; ``info["done_reason"]`` holds the plain value, or None while it runs."""

    SUCCESS = "success"
    FAILURE = "failure"
    TURN_LIMIT = "turn_limit"
    NO_PROGRESS = "no_progress"

    def __str__(self) -> str:
        return self.value


class TextInfo(TypedDict, total=False):
    """The keys that every `info` has; environments may add some, first of all ``task_type``.

    Attributes:
        task: id of the running task.
        goal: what is to be done, as one sentence.
        admissible_actions: actions that would do something now; None where listing them is dear or disturbs.
        score: what has been reached, 0 to 1.
        success: whether the task is solved, strictly.
        valid_action: whether the environment understood the last action; True after reset.
        done_reason: a value of `DoneReason`, or None while the episode runs.
        turns: turns played since reset.
    """

    task: str
    goal: str
    admissible_actions: list[str] | None
    score: float
    success: bool
    valid_action: bool
    done_reason: str | None
    turns: int


INFO_KEYS = tuple(TextInfo.__annotations__)


@runtime_checkable
class Expert(Protocol):
    """A player that is told what was executed, by whomever, and says what it would do next."""

    def reset(self, observation: str, info: dict) -> None:
        """Begin an episode with what `TextEnv.reset` returned."""

    def act(self) -> str:
        """The next action; asking twice gives the same."""

    def observe(self, action: str, observation: str, info: dict) -> None:
        """Take note of an executed action and what came back."""


@dataclass
class Outcome:
    """What a subclass returns after starting a task or playing a turn.

    Attributes:
        observation: the text the player sees.
        score: 0 to 1.
        over: whether the task itself is over.
        success: whether it is solved.
        valid_action: whether the action was understood.
        admissible_actions: see `TextInfo`.
        done_reason: only when over and neither success nor plain failure.
        extra: further keys of the info.
    """

    observation: str
    score: float = 0.0
    over: bool = False
    success: bool = False
    valid_action: bool = True
    admissible_actions: Sequence[str] | None = None
    done_reason: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)


class TextEnv(gymnasium.Env[str, str]):
    """Base of every environment here: texts in, texts out.

    `reset(options={"task": id})` plays that task; without a task the seed decides. The reward is the increment of the
    score, so an episode's return is its final score. `terminated` means that the task is over, `truncated` that the
    turn limit was reached.

    A subclass sets `tasks` and implements `_start` and `_play`.

    Args:
        max_turns: turns after which an episode is truncated; None for no limit.
        render_mode: None or ``ansi`` (`render` returns the last action and observation).

    Raises:
        ConfigError: a limit below 1 or an unknown render mode.
    """

    metadata = {"render_modes": ["ansi"], "render_fps": 1}
    observation_space: TextSpace
    action_space: TextSpace

    def __init__(self, *, max_turns: int | None = 30, render_mode: str | None = None):
        if max_turns is not None and (not isinstance(max_turns, Integral) or max_turns < 1):
            raise ConfigError(
                f"max_turns={max_turns!r}; give a number of turns of at least 1, or None for no limit"
            )
        if render_mode not in (None, *self.metadata["render_modes"]):
            raise ConfigError(
                f"render_mode={render_mode!r}; choose None or one of {self.metadata['render_modes']}"
            )
        self.max_turns = max_turns
        self.render_mode = render_mode
        self.observation_space = TextSpace()
        self.action_space = TextSpace()
        self._task: str | None = None
        self._goal = ""
        self._score = 0.0
        self._turns = 0
        self._ended: str | None = None
        self._last = ("", "")

    # For subclasses.
    @property
    def tasks(self) -> Sequence[str]:
        """Ids of all tasks, stable between versions."""
        raise NotImplementedError

    def _start(self, task: str, seed: int, options: dict[str, Any]) -> tuple[str, Outcome]:
        """Begin a task.

        Args:
            task: its id, one of `tasks`.
            seed: for whatever is random in it.
            options: what `reset` was given besides the task; raise ConfigError for unknown keys.

        Returns:
            The goal sentence and the first outcome.
        """
        raise NotImplementedError

    def _play(self, action: str) -> Outcome:
        """Play one turn."""
        raise NotImplementedError

    def _knows(self, task: str) -> bool:
        """Whether there is such a task; a subclass with endless tasks says so here."""
        return task in self.tasks

    def task_type(self, task: str) -> str | None:
        """The kind of task that an id names, as results are grouped by; None where there are no kinds."""
        return None

    def gold_path(self) -> list[str] | None:
        """Actions that solve the running task from its start, or None where none is known."""
        return None

    def expert(self) -> Expert | None:
        """A fresh expert for this environment that goes by the observations alone, or None."""
        return None

    def versions(self) -> dict[str, str]:
        """What results depend on: packages and data, by name."""
        return {"divopd": package_version("divopd"), "gymnasium": package_version("gymnasium")}

    # Gymnasium.
    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Start an episode.

        Args:
            seed: seeds the choice of the task (without one in `options`) and whatever is random in it.
            options: ``{"task": id}``; some environments know more keys.

        Returns:
            The first observation and the info.

        Raises:
            ConfigError: an unknown task or option.
            DataNotFoundError: there are no tasks.
        """
        # Whatever fails below: the episode before is over.
        self._task = None
        super().reset(seed=seed)
        options = dict(options or {})
        task = options.pop("task", None)
        # Drawn in any case, so that naming a task does not change what later episodes draw.
        draw = int(self.np_random.integers(2**31))
        if task is None:
            tasks = self.tasks
            if not tasks:
                raise DataNotFoundError(f"{type(self).__name__} has no tasks; check the split and its data")
            task = tasks[draw % len(tasks)]
        elif not isinstance(task, str) or not self._knows(task):
            raise ConfigError(
                f"task {task!r} is not one of this environment's {len(self.tasks)} tasks; "
                f"ids are in env.unwrapped.tasks, for example {list(self.tasks[:2])}"
            )
        self._goal, outcome = self._start(task, int(self.np_random.integers(2**31)), options)
        self._task, self._score, self._turns, self._ended = task, float(outcome.score), 0, None
        self._last = ("", outcome.observation)
        return outcome.observation, self._info(outcome, None)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Play one turn.

        Args:
            action: any text; what the environment does not understand costs a turn and is flagged in the info.

        Returns:
            Observation, reward (increment of the score), terminated, truncated, info.

        Raises:
            ResetNeeded: no episode is running.
            ConfigError: the action is not a text.
        """
        if self._task is None:
            raise ResetNeeded("step() was called before reset(); call reset() first")
        if self._ended is not None:
            raise ResetNeeded(
                f"step() was called after the episode ended ({self._ended}); call reset() first"
            )
        if not isinstance(action, str):
            raise ConfigError(f"the action is of type {type(action).__name__}; actions are texts (str)")
        outcome = self._play(action)
        self._turns += 1
        reward = float(outcome.score) - self._score
        self._score = float(outcome.score)
        truncated = not outcome.over and self.max_turns is not None and self._turns >= self.max_turns
        if outcome.over:
            plain = DoneReason.SUCCESS if outcome.success else DoneReason.FAILURE
            self._ended = str(outcome.done_reason or plain)
        elif truncated:
            self._ended = str(DoneReason.TURN_LIMIT)
        self._last = (action, outcome.observation)
        return outcome.observation, reward, bool(outcome.over), truncated, self._info(outcome, self._ended)

    def render(self) -> str | None:
        """The last action and observation as text, in render mode ``ansi``."""
        if self.render_mode != "ansi":
            return None
        action, observation = self._last
        return f"> {action}\n{observation}" if action else observation

    def _running(self) -> str:
        """Id of the task that was last started.

        Raises:
            ResetNeeded: none was.
        """
        if self._task is None:
            raise ResetNeeded("no task was started yet; call reset() first")
        return self._task

    def _info(self, outcome: Outcome, done_reason: str | None) -> dict[str, Any]:
        admissible = outcome.admissible_actions
        info: dict[str, Any] = {
            "task": self._task,
            "goal": self._goal,
            "admissible_actions": None if admissible is None else list(admissible),
            "score": self._score,
            "success": bool(outcome.success),
            "valid_action": bool(outcome.valid_action),
            "done_reason": done_reason,
            "turns": self._turns,
        }
        task_type = self.task_type(self._running())
        if task_type is not None:
            info["task_type"] = task_type
        info.update(outcome.extra)
        return info


def package_version(name: str) -> str:
    """Installed version of a distribution, ``not installed`` where there is none."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
