"""ScienceWorld as a Gymnasium environment."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from divopd_gym.core import DoneReason, Expert, Outcome, TextEnv, package_version
from divopd_gym.envs.scienceworld.expert import GoldExpert
from divopd_gym.envs.scienceworld.gold import gold_path
from divopd_gym.envs.scienceworld.host import connect, end_hung, private
from divopd_gym.envs.scienceworld.java import find_simulator
from divopd_gym.envs.scienceworld.tasks import (
    ETO_MAX_TURNS,
    check_simplifications,
    parse_task,
    simplifications_for,
    split_tasks,
)
from divopd_gym.envs.scienceworld.wire import Connection, Lost, SimulatorDied, SimulatorFault, State
from divopd_gym.errors import ConfigError

__all__ = ["ScienceWorldEnv"]

_UNKNOWN = ("No known action matches that input.", "Unknown action.")
_SHARED_HEAP_MB, _OWN_HEAP_MB = 1536, 192
_MOST_SIMULATORS = 4


class ScienceWorldEnv(TextEnv):
    """Science experiments in text, by ScienceWorld 1.2.3.

    An episode is over when the simulator says so, or at once when its score is negative (a wrong ``focus on``), which
    counts as 0. Success is a score of 100 of 100, nothing less. Turns are counted here: the simulator's own count
    ignores some actions. ``reset task`` is no action here. A task and a list of actions fix everything that happens.

    Besides the usual keys the info has task_type, variation, action_templates and objects (what the visible things are
    called), raw_score (the simulator's, -100 to 100), best_score (0 to 1), moves (the simulator's count) and options
    (of an open question; then ``admissible_actions`` are its answers, else None).

    Args:
        split: see `divopd_gym.envs.scienceworld.tasks.split_tasks`. Every task of the benchmark can be played by name,
            whatever the split.
        task_types: only these tasks; None for all of the split.
        simplification: names with commas between, or ``easy``, or nothing for none.
        ambiguous: what happens to an action that fits several things: ``ask`` gives the simulator's question, to be
            answered by a number (anything else is swallowed); ``first`` takes the first.
        isolation: ``shared`` lets all of the user's episodes run on a few simulators, ``process`` gives this
            environment one of its own. What happens is the same.
        simulators: most shared simulators; None for one a core, at most four.
        call_timeout_s: seconds after which a simulator that does not answer is killed.
        max_turns: turns after which an episode is truncated; ``eto`` for ETO's number for each of its tasks; None for
            no limit.
        render_mode: None or ``ansi``.

    Raises:
        ConfigError: an argument that cannot work, or another version of scienceworld.
        DataNotFoundError: scienceworld or Java is missing.
    """

    def __init__(
        self,
        split: str = "train",
        *,
        task_types: Sequence[str] | None = None,
        simplification: str = "easy",
        ambiguous: str = "ask",
        isolation: str = "shared",
        simulators: int | None = None,
        call_timeout_s: float = 120.0,
        max_turns: int | str | None = 30,
        render_mode: str | None = None,
    ):
        by_task = max_turns == "eto"
        if isinstance(max_turns, str) and not by_task:
            raise ConfigError(f"max_turns={max_turns!r}; give a number of turns, None for no limit, or 'eto'")
        super().__init__(max_turns=None if by_task else max_turns, render_mode=render_mode)
        self._turns_by_task = ETO_MAX_TURNS if by_task else None
        self._tasks = split_tasks(split, task_types)
        if by_task:
            without = sorted({parse_task(task)[0] for task in self._tasks} - set(ETO_MAX_TURNS))
            if without:
                raise ConfigError(
                    f"max_turns='eto' with split {split!r}, whose tasks {', '.join(without)} ETO does not play; take an "
                    "eto_ split, name task_types, or give a number"
                )
        for name, value, known in (
            ("ambiguous", ambiguous, ("ask", "first")),
            ("isolation", isolation, ("shared", "process")),
        ):
            if value not in known:
                raise ConfigError(f"{name}={value!r}; choose from {', '.join(known)}")
        if simulators is not None and simulators < 1:
            raise ConfigError(f"simulators={simulators}; expected at least 1, or None for one a core")
        if call_timeout_s <= 0:
            raise ConfigError(f"call_timeout_s={call_timeout_s}; expected seconds above 0")
        check_simplifications(simplification)
        self.split, self.simplification = split, simplification
        self.ambiguous, self.isolation = ambiguous, isolation
        self.call_timeout_s = call_timeout_s
        self._simulators = simulators or min(_cores(), _MOST_SIMULATORS)
        self._simulator = find_simulator(_SHARED_HEAP_MB if isolation == "shared" else _OWN_HEAP_MB)
        self._connection: Connection | None = None
        self._state: State | None = None
        self._best = 0.0
        self._templates: tuple[str, ...] = ()
        self._about: dict[str, Any] = {}

    @property
    def tasks(self) -> Sequence[str]:
        """Ids, ``<task>/<variation>``, of the split."""
        return self._tasks

    def _knows(self, task: str) -> bool:
        parse_task(task)
        return True

    def _start(self, task: str, seed: int, options: dict[str, Any]) -> tuple[str, Outcome]:
        if options:
            raise ConfigError(f"reset options {sorted(options)} are unknown; ScienceWorld knows only 'task'")
        name, variation = parse_task(task)
        simplifications = simplifications_for(name, self.simplification)
        if self._turns_by_task is not None:
            if name not in self._turns_by_task:
                raise ConfigError(f"task {task!r} is none of ETO's, so max_turns='eto' has no number for it")
            self.max_turns = self._turns_by_task[name]
        state = self._load(name, variation, simplifications)
        self._templates = state.templates
        self._about = {"task_type": name, "variation": variation}
        outcome = self._outcome(state)
        # Some tasks give points for where one starts; they come with the first turn, so that an episode's return is its
        # final score.
        outcome.score = self._best = outcome.extra["best_score"] = 0.0
        return " ".join(state.description.split()), outcome

    def _load(self, name: str, variation: int, simplifications: str) -> State:
        for last in (False, True):
            connection = self._connected()
            try:
                return connection.load_task(name, variation, simplifications, "lean", self.call_timeout_s)
            except Lost as lost:
                # A simulator that died between two episodes is nobody's loss.
                if last or lost.hung:
                    raise self._died(connection, lost) from None
        raise AssertionError("unreachable")

    def _connected(self) -> Connection:
        if self._connection is None or not self._connection.usable:
            if self.isolation == "process":
                self._connection = private(self._simulator)
            else:
                self._connection = connect(self._simulator, self._simulators)
        return self._connection

    def _play(self, action: str) -> Outcome:
        connection = self._connection
        assert connection is not None
        try:
            state = connection.turn(action, self.call_timeout_s)
            if state.options and self.ambiguous == "first":
                state = connection.turn("0", self.call_timeout_s)
        except Lost as lost:
            raise self._died(connection, lost) from None
        except SimulatorFault:
            self._task = None
            raise
        if state.broken:
            self._task = None
            raise SimulatorFault(
                f"ScienceWorld's simulator caught {state.observation} at action {action[:80]!r} of task "
                f"{self._about}; the episode is lost, but the task was not failed. Call reset()."
            )
        return self._outcome(state)

    def _died(self, connection: Connection, lost: Lost) -> SimulatorDied:
        task, self._task = self._task, None
        connection.close()
        if lost.hung:
            end_hung(connection.pid)
        return SimulatorDied(
            f"ScienceWorld's simulator (process {connection.pid}) is gone in task {task}: {lost.why}. The episode is "
            "lost, but the task was not failed; reset() starts another simulator."
        )

    def _outcome(self, state: State) -> Outcome:
        self._state = state
        raw = round(100 * state.score)
        score = min(max(raw, 0), 100) / 100
        self._best = max(self._best, score)
        return Outcome(
            observation=state.observation,
            score=score,
            over=state.completed or raw < 0,
            success=raw == 100,
            valid_action=not state.observation.startswith(_UNKNOWN),
            admissible_actions=[str(n) for n in range(state.options)] if state.options else None,
            done_reason=str(DoneReason.FAILURE) if raw < 0 else None,
            extra={
                **self._about,
                "action_templates": list(self._templates),
                "objects": list(state.objects),
                "raw_score": raw,
                "best_score": self._best,
                "moves": state.moves,
                "options": state.options,
            },
        )

    def valid_actions(self) -> list[str]:
        """Every action that the simulator holds possible now, sorted: hundreds or thousands, in up to a second.

        Asking does not disturb the world. One in twelve does nothing when tried.

        Raises:
            ResetNeeded: no episode is running.
            SimulatorDied: the simulator ended or did not answer in time.
        """
        self._running()
        assert self._connection is not None
        try:
            found = self._connection.ask("V", "", self.call_timeout_s).decode("utf-8")
        except Lost as lost:
            raise self._died(self._connection, lost) from None
        return found.split("\n") if found else []

    def gold_path(self) -> list[str] | None:
        """The oracle's actions for the running task; None where they do not reach 100.

        With ``ambiguous="first"`` the answers to questions are left out, since none is asked.

        Raises:
            ResetNeeded: no task was started.
            SimulatorDied: the simulator that makes gold paths ended or did not answer in time.
        """
        return self.gold_path_of(self._running())

    def gold_path_of(self, task: str) -> list[str] | None:
        """`gold_path` of any task, running or not."""
        found = gold_path(task, simplifications_for(parse_task(task)[0], self.simplification))
        if round(100 * found.score) != 100:
            return None
        return [a for a in found.actions if self.ambiguous == "ask" or not a.isdigit()]

    def expert(self) -> Expert:
        """A fresh `GoldExpert`: it follows the gold path, and walks back to it from another room."""
        return GoldExpert(self.gold_path_of)

    def versions(self) -> dict[str, str]:
        """Packages, and the simplifications written out."""
        return {
            **super().versions(),
            "scienceworld": package_version("scienceworld"),
            "simplification": simplifications_for("", self.simplification) or "none",
            "ambiguous": self.ambiguous,
        }

    def close(self) -> None:
        """Give the world up; a simulator without any ends a second later."""
        if self._connection is not None:
            self._connection.close()
        self._connection = None
        self._task = None
        super().close()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
