"""The benchmark's own games on disk: which there are, and reading one."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

from divopd_gym.data import locate
from divopd_gym.envs.alfworld.engine import GameSource
from divopd_gym.envs.alfworld.world import TASK_TYPES
from divopd_gym.errors import ConfigError, DataNotFoundError

SPLITS = ("train", "valid_seen", "valid_unseen", "valid_train")
GAME_FILE = "game.tw-pddl"
_SOLVABLE = re.compile(rb'(?<!\\)"solvable"\s*:\s*(true|false)')


@dataclass(frozen=True)
class Split:
    """The playable games of one split.

    Attributes:
        folder: the split's folder.
        tasks: ids in fixed (sorted) order: the game's folder path inside the split.
        skipped: why -> how many folders were passed over.
    """

    folder: Path
    tasks: tuple[str, ...]
    skipped: dict[str, int]

    def path(self, task: str) -> Path:
        """The game file of a task."""
        return self.folder / task / GAME_FILE


def task_type(task: str) -> str:
    """ALFWorld's task type of a task id: the folder's name before the first dash.

    Args:
        task: an id such as ``pick_heat_then_place_in_recep-Apple-None-DiningTable-26/trial_...``, or one of a
            generated house.
    """
    parts = task.split("/")
    if len(parts) == 3 and parts[1] in TASK_TYPES:
        return parts[1]
    return parts[0].split("-", 1)[0]


def find_split(
    split: str, data_dir: str | os.PathLike[str] | None = None, task_types: tuple[str, ...] | None = None
) -> Split:
    """List the playable games of a split.

    What ALFWorld itself leaves out is left out: movable receptacles, sliced objects, other task types, folders
    without a game, games not marked solvable (also files cut off in the middle).

    Args:
        split: one of `SPLITS`.
        data_dir: folder that holds ``json_2.1.1`` (or the splits themselves); else DIVOPD_DATA, then ALFWORLD_DATA.
        task_types: only these.

    Raises:
        ConfigError: an unknown split or task type.
        DataNotFoundError: no such folder, or no playable game in it.
    """
    if split not in SPLITS:
        raise ConfigError(f"split {split!r} of ALFWorld; choose from {', '.join(SPLITS)} or generated")
    wanted = tuple(task_types) if task_types is not None else TASK_TYPES
    unknown = sorted(set(wanted) - set(TASK_TYPES))
    if unknown or not wanted:
        raise ConfigError(f"task types {unknown or '()'} of ALFWorld; choose from {', '.join(TASK_TYPES)}")
    folder = locate(
        f"ALFWorld's split {split}",
        [f"json_2.1.*/{split}", split],
        "alfworld",
        data_dir,
        "ALFWORLD_DATA",
        ', or play split="generated", which needs no data',
    )
    tasks, skipped = _scan(folder.resolve(), _state(folder))
    chosen = tuple(t for t in tasks if task_type(t) in wanted)
    if not chosen:
        raise DataNotFoundError(
            f"ALFWorld's split {split} in {folder} holds no playable game of {', '.join(wanted)} (passed over: "
            f"{skipped or 'nothing'}); download it again with `divopd data download alfworld`, see `divopd data check`"
        )
    return Split(folder, chosen, skipped)


def _state(folder: Path) -> tuple[int, ...]:
    """What changes when games come or go, such as by a download that goes on."""
    folders = [folder, *sorted(one for one in folder.iterdir() if one.is_dir())]
    return tuple(one.stat().st_mtime_ns for one in folders)


@functools.lru_cache(maxsize=16)
def _scan(folder: Path, state: tuple[int, ...]) -> tuple[tuple[str, ...], dict[str, int]]:
    tasks: list[str] = []
    skipped: dict[str, int] = {}
    for root, _, files in os.walk(folder):
        if GAME_FILE not in files:
            if "traj_data.json" in files:
                skipped["no game"] = skipped.get("no game", 0) + 1
            continue
        task = Path(root).relative_to(folder).as_posix()
        why = None
        if "movable" in task or "Sliced" in task:
            why = "movable or sliced"
        elif task_type(task) not in TASK_TYPES:
            why = "other task type"
        else:
            # A search in the bytes: parsing thousands of files takes many seconds.
            marks = _SOLVABLE.findall((Path(root) / GAME_FILE).read_bytes())
            if marks != [b"true"]:
                why = "not marked solvable"
        if why:
            skipped[why] = skipped.get(why, 0) + 1
        else:
            tasks.append(task)
    return tuple(sorted(tasks)), skipped


def read_game(path: Path) -> GameSource:
    """Read one game file.

    Raises:
        DataNotFoundError: it is gone or damaged.
    """
    try:
        return GameSource.from_json(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError) as error:
        raise DataNotFoundError(
            f"the game {path} could not be read ({type(error).__name__}: {error}); "
            "download the data again with `divopd data download alfworld`"
        ) from error


def wording(grammar: str) -> str:
    """Which release's words a game uses: ``move`` (0.4) or ``put`` (up to 0.3)."""
    return "move" if "move {o} to {r}" in grammar else "put"


def digest(split: Split) -> str:
    """A short sha256 over a split's ids and games, in order."""
    total = hashlib.sha256()
    for task in split.tasks:
        total.update(task.encode())
        total.update(hashlib.sha256(split.path(task).read_bytes()).digest())
    return total.hexdigest()[:16]
