"""ScienceWorld's tasks, their ids and the splits that the literature uses. No simulator is needed."""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Sequence
from pathlib import Path

from divopd_gym.errors import ConfigError

__all__ = [
    "ETO_MAX_TURNS",
    "SPLITS",
    "TASKS",
    "check_simplifications",
    "parse_task",
    "simplifications_for",
    "split_tasks",
]

# Number in the paper (arXiv 2203.07540, table 2), name, number of variations in 1.2.3.
_TABLE = (
    ("1-1", "boil", 30),
    ("1-2", "melt", 30),
    ("1-3", "freeze", 30),
    ("1-4", "change-the-state-of-matter-of", 30),
    ("2-1", "use-thermometer", 540),
    ("2-2", "measure-melting-point-known-substance", 436),
    ("2-3", "measure-melting-point-unknown-substance", 300),
    ("3-1", "power-component", 20),
    ("3-2", "power-component-renewable-vs-nonrenewable-energy", 20),
    ("3-3", "test-conductivity", 900),
    ("3-4", "test-conductivity-of-unknown-substances", 600),
    ("4-1", "find-living-thing", 300),
    ("4-2", "find-non-living-thing", 300),
    ("4-3", "find-plant", 300),
    ("4-4", "find-animal", 300),
    ("5-1", "grow-plant", 126),
    ("5-2", "grow-fruit", 126),
    ("6-1", "chemistry-mix", 32),
    ("6-2", "chemistry-mix-paint-secondary-color", 36),
    ("6-3", "chemistry-mix-paint-tertiary-color", 36),
    ("7-1", "lifespan-longest-lived", 125),
    ("7-2", "lifespan-shortest-lived", 125),
    ("7-3", "lifespan-longest-lived-then-shortest-lived", 125),
    ("8-1", "identify-life-stages-1", 14),
    ("8-2", "identify-life-stages-2", 10),
    ("9-1", "inclined-plane-determine-angle", 168),
    ("9-2", "inclined-plane-friction-named-surfaces", 1386),
    ("9-3", "inclined-plane-friction-unnamed-surfaces", 162),
    ("10-1", "mendelian-genetics-known-plant", 120),
    ("10-2", "mendelian-genetics-unknown-plant", 480),
)
TASKS: dict[str, int] = {name: variations for _, name, variations in _TABLE}
"""Name of every task and its number of variations, in the paper's order."""

NUMBERS: dict[str, str] = {name: number for number, name, _ in _TABLE}

# The 17 task types of TCOD and DivOPD that are trained on; the other 13 are held out.
_DIVOPD_TRAIN = (
    "boil",
    "melt",
    "change-the-state-of-matter-of",
    "use-thermometer",
    "measure-melting-point-known-substance",
    "power-component",
    "test-conductivity",
    "find-living-thing",
    "find-plant",
    "grow-plant",
    "chemistry-mix",
    "chemistry-mix-paint-secondary-color",
    "lifespan-shortest-lived",
    "identify-life-stages-2",
    "inclined-plane-determine-angle",
    "inclined-plane-friction-named-surfaces",
    "mendelian-genetics-known-plant",
)

ETO_MAX_TURNS: dict[str, int] = {
    "boil": 100,
    "melt": 80,
    "freeze": 80,
    "change-the-state-of-matter-of": 80,
    "use-thermometer": 30,
    "measure-melting-point-known-substance": 120,
    "power-component": 20,
    "power-component-renewable-vs-nonrenewable-energy": 30,
    "test-conductivity": 30,
    "test-conductivity-of-unknown-substances": 30,
    "find-living-thing": 15,
    "find-non-living-thing": 15,
    "find-plant": 15,
    "find-animal": 15,
    "grow-plant": 30,
    "grow-fruit": 60,
    "chemistry-mix": 60,
    "chemistry-mix-paint-secondary-color": 15,
    "chemistry-mix-paint-tertiary-color": 30,
    "lifespan-longest-lived": 10,
    "lifespan-shortest-lived": 10,
    "lifespan-longest-lived-then-shortest-lived": 12,
    "identify-life-stages-1": 30,
    "identify-life-stages-2": 30,
}
"""The 24 tasks of ETO (arXiv 2403.02502) and the turns that it allows for each."""

_ETO_TEST_VARIATIONS = 10

_SIMPLIFICATIONS = (
    "teleportAction",
    "noElectricalAction",
    "openDoors",
    "selfWateringFlowerPots",
    "openContainers",
)
# What ScienceWorld 1.2.3 means by it: openContainers is not in, whatever the paper says.
_EASY = _SIMPLIFICATIONS[:4]


def _official(task: str, part: str) -> range:
    """Variations of a task's official train (half), dev (a quarter) or test part (the rest)."""
    n = TASKS[task]
    quarter = n // 4
    bounds = {
        "train": (0, 2 * quarter),
        "dev": (2 * quarter, 3 * quarter),
        "test": (3 * quarter, n),
        "all": (0, n),
    }
    return range(*bounds[part])


def _divopd(trained: bool) -> list[str]:
    tasks = sorted(task for task in TASKS if (task in _DIVOPD_TRAIN) == trained)
    ids = [f"{task}/{variation}" for task in tasks for variation in range(TASKS[task] // 2)]
    # https://docs.python.org/3/library/random.html: the same order in every version of Python since 3.2.
    random.Random(42).shuffle(ids)
    return ids


def _ids(tasks: Sequence[str], part: str, most: int | None = None) -> list[str]:
    return [f"{task}/{variation}" for task in tasks for variation in _official(task, part)[:most]]


SPLITS = (
    "train",
    "dev",
    "test",
    "all",
    "divopd_train",
    "divopd_test",
    "eto_train",
    "eto_dev",
    "eto_test",
)
"""Official parts by variation; TCOD's and DivOPD's by task type; the official parts over ETO's 24 tasks."""


@functools.lru_cache(maxsize=len(SPLITS))
def _split(split: str) -> tuple[str, ...]:
    if split.startswith("divopd_"):
        return _listed(split)
    if split.startswith("eto_"):
        part = split.removeprefix("eto_")
        # Its list of 211: the first ten of each task's official test part.
        return tuple(_ids(list(ETO_MAX_TURNS), part, _ETO_TEST_VARIATIONS if part == "test" else None))
    return tuple(_ids(list(TASKS), split))


def _listed(split: str) -> tuple[str, ...]:
    path = Path(__file__).parent / "splits" / f"{split}.txt"
    return tuple(path.read_text(encoding="ascii").split())


def split_tasks(split: str, task_types: Sequence[str] | None = None) -> tuple[str, ...]:
    """Ids of a split, ``<task>/<variation>``, in an order that does not change between versions.

    Args:
        split: one of `SPLITS`. ``train``, ``dev``, ``test`` are ScienceWorld's own parts of all 30 tasks,
            ``divopd_train`` and ``divopd_test`` the 2,294 and 1,308 instances of TCOD and DivOPD (17 task types and the
            13 others; of each the first half of its variations; one shuffle with seed 42), ``eto_train``,
            ``eto_dev`` and ``eto_test`` ScienceWorld's parts of ETO's 24 tasks (in ``eto_test``, as there, at most the
            first ten variations of each).
        task_types: only these tasks.

    Raises:
        ConfigError: an unknown split or task, or nothing is left.
    """
    if split not in SPLITS:
        raise ConfigError(f"split {split!r} of ScienceWorld; choose from {', '.join(SPLITS)}")
    ids = _split(split)
    if task_types is None:
        return ids
    if isinstance(task_types, str):
        raise ConfigError(f"task_types={task_types!r} is one text; give a list of task names")
    unknown = sorted(set(task_types) - set(TASKS))
    if unknown:
        raise ConfigError(f"task types {unknown} of ScienceWorld; choose from {', '.join(TASKS)}")
    kept = tuple(i for i in ids if i.rpartition("/")[0] in set(task_types))
    if not kept:
        raise ConfigError(f"split {split!r} of ScienceWorld has none of the task types {list(task_types)}")
    return kept


def parse_task(task: str) -> tuple[str, int]:
    """Name and variation of an id.

    Raises:
        ConfigError: no such task, or a variation that it does not have.
    """
    name, _, number = task.rpartition("/")
    if name not in TASKS:
        raise ConfigError(
            f"task {task[:200]!r}: ScienceWorld has no task {(name or task)[:200]!r}; an id is '<task>/<variation>', for example "
            f"'boil/0', and the tasks are {', '.join(TASKS)}"
        )
    # At most four digits: Python refuses to read a number of thousands of them.
    if not re.fullmatch("0|[1-9][0-9]{0,3}", number) or int(number) >= TASKS[name]:
        raise ConfigError(
            f"task {task[:200]!r}: {name} has no variation {number[:20]!r}; its {TASKS[name]} variations are 0 to "
            f"{TASKS[name] - 1}"
        )
    return name, int(number)


def check_simplifications(simplification: str) -> tuple[str, ...]:
    """The names in a list of simplifications with commas between, ``easy`` among them; each once.

    Raises:
        ConfigError: an unknown name.
    """
    names = tuple(dict.fromkeys(part.strip() for part in simplification.split(",") if part.strip()))
    unknown = [name for name in names if name not in (*_SIMPLIFICATIONS, "easy")]
    if unknown:
        raise ConfigError(
            f"simplification {', '.join(unknown)!r} of ScienceWorld; choose from {', '.join(_SIMPLIFICATIONS)}, or "
            f"easy, which stands for {', '.join(_EASY)}; join several by commas"
        )
    return names


def simplifications_for(task: str, simplification: str) -> str:
    """The simplifications of a task written out, as the simulator takes them.

    ``easy`` leaves noElectricalAction out where the task is about electricity. Beside other names ``easy`` means the
    same, where ScienceWorld's own reading gives no simplification at all.

    Args:
        task: its name.
        simplification: see `check_simplifications`.

    Raises:
        ConfigError: an unknown name, or noElectricalAction was asked for by name in an electrical task.
    """
    names = check_simplifications(simplification)
    electrical = "power-component" in task or "conductivity" in task
    if electrical and "noElectricalAction" in names:
        raise ConfigError(
            f"simplification noElectricalAction takes away what task {task} is about; leave it out, use 'easy', which "
            "does so by itself, or leave the task out by task_types"
        )
    wanted = set(names) | (set(_EASY) if "easy" in names else set())
    if electrical:
        wanted.discard("noElectricalAction")
    return ",".join(name for name in _SIMPLIFICATIONS if name in wanted)
