"""ALFWorld as a Gymnasium environment: the benchmark's games, and houses made on the spot."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from typing import Any

from divopd_gym.core import Expert, Outcome, TextEnv, package_version
from divopd_gym.envs.alfworld.engine import GameSource, Reply, Session, engine
from divopd_gym.envs.alfworld.expert import SearchExpert
from divopd_gym.envs.alfworld.games import Split, digest, find_split, read_game, task_type, wording
from divopd_gym.envs.alfworld.houses import HouseFamily, get_family, house_from_id, is_seed, task_ids
from divopd_gym.errors import ConfigError

_BANNER = re.compile(r"\A-= Welcome to TextWorld, ALFRED! =-\s*")
_TASK = re.compile(r"Your task is to: (.+?)\s*\Z", re.DOTALL)


class ALFWorldEnv(TextEnv):
    """Household tasks in text.

    The first state in which the goal holds ends the episode with success. An action that is not among
    ``info["admissible_actions"]`` (leading and trailing blanks aside) costs a turn, is answered with "Nothing happens."
    and flagged by ``info["valid_action"] = False``. One key more than usual: ``info["task_type"]``, ALFWorld's name of it.

    Args:
        split: ``generated`` (no data needed), ``train``, ``valid_seen``, ``valid_unseen`` or ``valid_train``.
        data_dir: folder of the benchmark's games; else the environment variables DIVOPD_DATA, ALFWORLD_DATA.
        task_types: only these of ALFWorld's six task types; None for all.
        family: generated houses: a name (tiny, small, medium, large) or a `HouseFamily`.
        subset: generated houses: ``train`` or ``valid``, whose seeds never meet.
        num_tasks: generated houses: how many ids `tasks` lists (any other id of the family can be played too).
        first_seed: generated houses: seed of the first one inside the subset.
        max_turns: turns after which an episode is truncated; None for no limit.
        render_mode: None or ``ansi``.

    Raises:
        ConfigError: an argument that cannot work.
        DataNotFoundError: the data or the package alfworld is missing.
    """

    def __init__(
        self,
        split: str = "generated",
        *,
        data_dir: str | os.PathLike[str] | None = None,
        task_types: Sequence[str] | None = None,
        family: str | HouseFamily = "tiny",
        subset: str = "train",
        num_tasks: int = 1000,
        first_seed: int = 0,
        max_turns: int | None = 30,
        render_mode: str | None = None,
    ):
        super().__init__(max_turns=max_turns, render_mode=render_mode)
        if isinstance(task_types, str):
            raise ConfigError(f"task_types={task_types!r} is one text; give a list of task types")
        types = None if task_types is None else tuple(task_types)
        self.split = split
        self._family: HouseFamily | None = None
        self._games: Split | None = None
        if split == "generated":
            self._family = get_family(family)
            self._tasks: Sequence[str] = tuple(task_ids(self._family, num_tasks, subset, types, first_seed))
        else:
            self._games = find_split(split, data_dir, types)
            self._tasks = self._games.tasks
        self._known = frozenset(self._tasks)
        self._engine = engine()
        self._session: Session | None = None
        self._type = ""
        self._wording = "move"

    @property
    def tasks(self) -> Sequence[str]:
        """Ids: a game's folder path inside its split; ``family/task type/seed`` of a generated house."""
        return self._tasks

    def _knows(self, task: str) -> bool:
        if task in self._known:
            return True
        # Generated houses are endless: every id of this family can be played.
        parts = task.split("/")
        family = self._family
        return (
            family is not None
            and len(parts) == 3
            and parts[0] == family.name
            and parts[1] in family.task_types
            and is_seed(parts[2])
        )

    def _source(self, task: str) -> GameSource:
        if self._games is not None:
            return read_game(self._games.path(task))
        return house_from_id(task, self._family).source

    def _start(self, task: str, seed: int, options: dict[str, Any]) -> tuple[str, Outcome]:
        if options:
            raise ConfigError(f"reset options {sorted(options)} are unknown; ALFWorld knows only 'task'")
        source = self._source(task)
        self._session = self._engine.start(source)
        self._type, self._wording = task_type(task), wording(source.grammar)
        reply = self._session.last
        text = _BANNER.sub("", reply.text)
        found = _TASK.search(text)
        return found[1] if found else "", self._outcome(reply, text)

    def _play(self, action: str) -> Outcome:
        reply = self._session.step(action)
        return self._outcome(reply, reply.text)

    def _outcome(self, reply: Reply, text: str) -> Outcome:
        return Outcome(
            observation=text,
            score=float(reply.won),
            over=reply.won,
            success=reply.won,
            valid_action=reply.understood,
            admissible_actions=reply.admissible,
            extra={"task_type": self._type},
        )

    def task_type(self, task: str) -> str:
        """ALFWorld's own name of the task type: before the first dash of a game's folder, or a house id's middle."""
        return task.split("-", 1)[0] if self._games is not None else task.split("/")[1]

    def gold_path(self) -> list[str] | None:
        """The stored winning actions of the running task in the player's words; None where the game has none.

        It knows where things are: it shows that a task can be solved, and is no teacher.

        Raises:
            ResetNeeded: no task was started.
        """
        self._running()
        walkthrough = self._session.walkthrough
        return list(walkthrough) if walkthrough else None

    def expert(self) -> Expert:
        """A fresh `SearchExpert`: in the order of the room text in small generated houses, likely places first else.

        It uses the words of the game that was last started.
        """
        return SearchExpert(self._family.search if self._family is not None else "likely", self._wording)

    def versions(self) -> dict[str, str]:
        """Packages, the wording of the games and a digest of the tasks' data."""
        found = {**super().versions(), **{name: package_version(name) for name in ("alfworld", "textworld")}}
        if self._games is not None:
            found["wording"] = wording(read_game(self._games.path(self._games.tasks[0])).grammar)
            found["data"] = digest(self._games)
        else:
            found["wording"] = "move"
            found["data"] = hashlib.sha256(repr(self._family).encode()).hexdigest()[:16]
        return found

    def close(self) -> None:
        """Forget the running game."""
        self._session = None
        self._task = None
        super().close()
