"""TextWorld as a Gymnasium environment."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from divopd_gym.core import Expert, Outcome, TextEnv, package_version
from divopd_gym.envs.textworld.games import engine_lock, game_file, get_family, import_textworld, open_game
from divopd_gym.errors import ConfigError, DataNotFoundError

__all__ = ["PolicyExpert", "TextWorldEnv"]

_BEFORE_ROOM = re.compile(r"\A.*?(?=^\s*-= )", re.DOTALL | re.MULTILINE)
_PROMPT = re.compile(r"\s*>\s*(?:-= .*)?\Z")
_AFTER_END = re.compile(r"\s*Would you like to RESTART, .*\Z", re.DOTALL)
# They leave the game, or put it where TextWorld's own books do not follow.
_SPECIAL = re.compile(r"[\x00-\x1f\x7f\\]")
_META = frozenset(
    (
        "again",
        "g",
        "load",
        "noscript",
        "notify",
        "oops",
        "q",
        "quit",
        "record",
        "recording",
        "replay",
        "restart",
    )
    + ("restore", "save", "script", "transcript", "undo", "unscript", "verify", "version")
)
_NOT_UNDERSTOOD = "That's not a verb I recognise."
_MAX_COMMAND = 200


class TextWorldEnv(TextEnv):
    """Games that TextWorld generates, and game files (``.z8`` of TextWorld with their ``.json``, other Z-machine games).

    The score is the game's share of its own maximum. A command that is not among ``info["admissible_actions"]`` is
    played all the same, since games understand more than they list, and flagged as not valid; games that are not
    TextWorld's list nothing, and those that the interpreter does not know either score 0 and never end. Commands to the interpreter (quit, restart, save, undo and the like) are not passed on.

    Args:
        games: game files, or a folder of them; None to generate.
        family: generated games: coin_collector, treasure_hunter, cooking or custom.
        settings: generated games: difficulty; see `divopd_gym.envs.textworld.games.FAMILIES`.
        num_tasks: generated games: how many ids `tasks` lists (any other seed can be played too).
        first_seed: generated games: seed of the first one.
        max_turns: turns after which an episode is truncated; None for no limit.
        render_mode: None or ``ansi``.

    Raises:
        ConfigError: an argument that cannot work.
        DataNotFoundError: a game file or the package textworld is missing.
    """

    def __init__(
        self,
        games: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
        *,
        family: str = "coin_collector",
        settings: Mapping[str, int] | None = None,
        num_tasks: int = 100,
        first_seed: int = 0,
        max_turns: int | None = 30,
        render_mode: str | None = None,
    ):
        super().__init__(max_turns=max_turns, render_mode=render_mode)
        with engine_lock():
            self._textworld = import_textworld()
        self._family = get_family(family)
        self._settings = self._family.settings(settings)
        self._head = f"{family}/{','.join(f'{name}={value}' for name, value in self._settings.items())}"
        self._files: dict[str, Path] | None = None if games is None else _files(games)
        if self._files is not None:
            self._tasks: tuple[str, ...] = tuple(self._files)
        else:
            if num_tasks < 1 or first_seed < 0:
                raise ConfigError(
                    f"num_tasks={num_tasks}, first_seed={first_seed}; expected at least 1 and at least 0"
                )
            self._tasks = tuple(f"{self._head}/{first_seed + i}" for i in range(num_tasks))
        self._game: Any = None
        self._state: Any = None
        self._gold: list[str] | None = None

    @property
    def tasks(self) -> Sequence[str]:
        """Ids: a file's path below the common folder; ``family/settings/seed`` of a generated game."""
        return self._tasks

    def _knows(self, task: str) -> bool:
        if self._files is not None:
            return task in self._files
        head, _, seed = task.rpartition("/")
        # TextWorld's generators take 32-bit seeds.
        return head == self._head and seed.isascii() and seed.isdigit() and len(seed) <= 9

    def _start(self, task: str, seed: int, options: dict[str, Any]) -> tuple[str, Outcome]:
        if options:
            raise ConfigError(f"reset options {sorted(options)} are unknown; TextWorld knows only 'task'")
        with engine_lock():
            return self._begin(task)

    def _begin(self, task: str) -> tuple[str, Outcome]:
        if self._files is not None:
            path = self._files[task]
        else:
            path = game_file(self._family, self._settings, int(task.rpartition("/")[2]))
        self._end()
        ours = path.suffix == ".z8" and path.with_suffix(".json").is_file()
        wanted = self._textworld.EnvInfos(
            score=True,
            max_score=True,
            won=True,
            lost=True,
            objective=ours,
            admissible_commands=ours,
            policy_commands=ours,
        )
        self._game = open_game(path, wanted)
        self._state = self._game.reset()
        self._gold = list(self._state["policy_commands"] or ()) if ours else None
        text = _PROMPT.sub("", self._state.feedback)
        goal = " ".join(str(self._state["objective"] or "").split()) if ours else ""
        return goal or "Finish the game.", self._outcome(_BEFORE_ROOM.sub("", text), True)

    def _play(self, action: str) -> Outcome:
        # What a Z-machine reads as one line: it knows no other letters and no longer lines. The interpreter waits for
        # ever at a NUL, and takes a backslash for the start of a command to itself, of which some wait for ever.
        letters = _SPECIAL.sub(" ", action.encode("ascii", "replace").decode())
        command = " ".join(letters.split())[:_MAX_COMMAND]
        listed = self._state["admissible_commands"] if self._gold is not None else None
        if not command or _META & set(re.findall(r"[a-z]+", command.lower())):
            return self._outcome(_NOT_UNDERSTOOD, False)
        with engine_lock():
            self._state, _, _ = self._game.step(command)
        valid = listed is None or command.lower() in listed
        return self._outcome(_PROMPT.sub("", self._state.feedback), valid)

    def _outcome(self, text: str, valid: bool) -> Outcome:
        state = self._state
        won, lost = bool(state.get("won")), bool(state.get("lost"))
        most = state.get("max_score") or 0
        score = (state.get("score") or 0) / most if most > 0 else float(won)
        listed = state["admissible_commands"] if self._gold is not None else None
        return Outcome(
            observation=re.sub(r"\n\s*\n\s*\n", "\n\n", _AFTER_END.sub("", text)).strip(),
            score=1.0 if won else min(max(score, 0.0), 1.0),
            over=won or lost,
            success=won,
            valid_action=valid,
            admissible_actions=listed,
            extra={} if self._files is not None else {"task_type": self._family.name},
        )

    def gold_path(self) -> list[str] | None:
        """The commands that win the running game from its start; None where the game does not tell.

        Raises:
            ResetNeeded: no task was started.
        """
        self._running()
        return list(self._gold) if self._gold else None

    def expert(self) -> Expert | None:
        """A `PolicyExpert` of this environment."""
        return PolicyExpert(self._policy)

    def _policy(self) -> list[str]:
        return list(self._state["policy_commands"] or ()) if self._gold is not None else []

    def versions(self) -> dict[str, str]:
        """Packages, and what the games are made of."""
        made_of = "files" if self._files is not None else self._head
        return {**super().versions(), "textworld": package_version("textworld"), "games": made_of}

    def close(self) -> None:
        """Forget the running game."""
        self._end()
        self._task = None
        super().close()

    def _end(self) -> None:
        if self._game is not None:
            with engine_lock():
                self._game.close()
        self._game = None


class PolicyExpert:
    """Plays what the game itself holds for the shortest way to win from where it is now.

    It looks into the game of the environment that it came from, whoever acts there, and not at observations.

    Args:
        policy: the commands that are left to win.
    """

    def __init__(self, policy: Callable[[], list[str]]):
        self._policy = policy

    def reset(self, observation: str, info: dict) -> None:
        """Begin an episode."""

    def act(self) -> str:
        """The next command; ``look`` where the game tells none."""
        left = self._policy()
        return left[0] if left else "look"

    def observe(self, action: str, observation: str, info: dict) -> None:
        """Nothing to remember."""


def _files(games: Any) -> dict[str, Path]:
    given = [games] if isinstance(games, (str, os.PathLike)) else list(games)
    found: list[Path] = []
    for one in map(Path, given):
        if one.is_dir():
            found.extend(sorted(p for p in one.rglob("*") if re.fullmatch(r"\.z[1-8]", p.suffix)))
        elif one.is_file():
            found.append(one)
        else:
            raise DataNotFoundError(f"game file {one} does not exist; give a .z8 file or a folder of them")
    if not found:
        raise DataNotFoundError(f"no Z-machine games (.z1 to .z8) in {[str(g) for g in given]}")
    wrong = [p for p in found if not re.fullmatch(r"\.z[1-8]", p.suffix)]
    if wrong:
        raise ConfigError(f"{wrong[0]} is no Z-machine game; expected a file named .z1 to .z8")
    if len(found) == 1:
        return {found[0].name: found[0]}
    root = Path(os.path.commonpath([p.parent.resolve() for p in found]))
    return {p.resolve().relative_to(root).as_posix(): p for p in found}
