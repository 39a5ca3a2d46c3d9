"""Gold paths: made by the simulator's own oracle, in a process of its own, and kept on disk.

The oracle sees everything: a path shows that a task can be solved, and is no demonstration of reasoning. It is good
only for the simplifications and the flags that it was made under. Making one leaves traces in the simulator that made
it, and needs more heap than playing.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from divopd_gym.data import default_root
from divopd_gym.envs.scienceworld.host import connect, end_hung
from divopd_gym.envs.scienceworld.java import DETERMINISM, SCIENCEWORLD_VERSION, find_simulator
from divopd_gym.envs.scienceworld.tasks import parse_task
from divopd_gym.envs.scienceworld.wire import Lost, SimulatorDied

__all__ = ["GoldPath", "gold_folder", "gold_path"]

GOLD_HEAP_MB = 768
_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class GoldPath:
    """What the oracle found.

    Attributes:
        actions: from the start to the action that ends the task, answers to questions among them.
        score: the score that they end with, -1 to 1.
    """

    actions: tuple[str, ...]
    score: float


def gold_folder() -> Path:
    """Where gold paths are kept; a folder for each version of the simulator and its flags."""
    flags = hashlib.sha256(" ".join(DETERMINISM).encode()).hexdigest()[:8]
    return default_root() / "scienceworld" / f"gold-{SCIENCEWORLD_VERSION}-{flags}"


def gold_path(task: str, simplifications: str, timeout_s: float = _TIMEOUT_S) -> GoldPath:
    """The gold path of a task, from disk or made now (a tenth of a second to eight seconds).

    Args:
        task: id.
        simplifications: their names written out, with commas between.
        timeout_s: seconds that making it may take.

    Raises:
        ConfigError: no such task.
        SimulatorDied: the simulator ended or took too long.
        SimulatorFault: the simulator raised an exception.
    """
    name, variation = parse_task(task)
    path = gold_folder() / (simplifications or "none") / name / f"{variation}.json"
    with contextlib.suppress(OSError, ValueError, KeyError):
        kept = json.loads(path.read_text(encoding="utf-8"))
        return GoldPath(tuple(kept["actions"]), float(kept["score"]))
    connection = connect(find_simulator(GOLD_HEAP_MB), 1, "gold")
    try:
        reply = connection.ask("G", "\n".join((name, str(variation), simplifications)), timeout_s)
    except Lost as lost:
        if lost.hung:
            end_hung(connection.pid)
        raise SimulatorDied(
            f"ScienceWorld's simulator made no gold path of {task}: {lost.why}. Try again; give it more time if it "
            "was too slow."
        ) from None
    finally:
        connection.close()
    score, *actions = reply.decode("utf-8").split("\n")
    found = GoldPath(tuple(actions), float(score))
    _keep(path, found)
    return found


def _keep(path: Path, found: GoldPath) -> None:
    # A cache that cannot be written is no reason to fail.
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".new")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump({"actions": found.actions, "score": found.score}, file)
        os.replace(name, path)
