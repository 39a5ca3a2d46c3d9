"""What a checkpoint holds beyond the learner's own state, written so that it is whole or absent.

A checkpoint is a folder ``checkpoint-N`` (N completed updates) that is written under another name and then renamed.
``divopd_state/`` in it holds the composer (pending and unread turns with all their data), the explorer's
state and the counters; ``manifest.json`` lists every file with its size, so that a damaged one is recognised.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from divopd_gym.errors import ConfigError, DivOPDError

from .framelog import FrameLogWriter, RecordError, read_frames
from .records import rollout_from_dict, rollout_to_dict
from .turns import Rollout, Turn

__all__ = [
    "CheckpointError",
    "SideState",
    "find_checkpoint",
    "load_side_state",
    "publish",
    "rotate",
    "save_side_state",
    "set_aside",
    "whole",
    "writing",
]

SCHEMA = 1
_FOLDER = "divopd_state"
_MANIFEST = "manifest.json"
_NAME = re.compile(r"checkpoint-(\d+)$")


class CheckpointError(DivOPDError, RuntimeError):
    """A checkpoint could not be written."""


@contextlib.contextmanager
def writing(partial: Path) -> Iterator[None]:
    """Around everything that writes a checkpoint under its first name; a failure leaves nothing of it behind.

    Raises:
        CheckpointError: The system refuses to write, as it does on a full disk.
    """
    try:
        yield
    except Exception as error:
        shutil.rmtree(partial, ignore_errors=True)
        # torch and safetensors have errors of their own for a write that failed.
        refused = isinstance(error, OSError) or re.search("writ|No space", str(error))
        if isinstance(error, DivOPDError) or not refused:
            raise
        raise CheckpointError(
            f"The checkpoint {partial} cannot be written ({str(error).splitlines()[0][:200]}); the one before it is "
            "whole. Make room on its disk, then go on with --resume_from_checkpoint true."
        ) from error


@dataclass
class SideState:
    """Everything besides weights, optimizer, schedule and random numbers.

    Attributes:
        update: Completed updates.
        policy_version: Newest version handed to the explorer.
        env_turns: Environment turns of training episodes so far.
        wall_s: Seconds the run has taken so far.
        explorer: `ExplorerState` as JSON values, or None when there was none to ask.
        composer: `BatchComposer.state_dict()`.
        counters: Counters of the collator and the trainer.
    """

    update: int
    policy_version: int
    env_turns: int = 0
    wall_s: float = 0.0
    explorer: dict[str, Any] | None = None
    composer: dict[str, Any] = field(default_factory=dict)
    counters: dict[str, Any] = field(default_factory=dict)


def save_side_state(folder: Path, state: SideState) -> None:
    """Write ``folder/divopd_state``: ``state.json``, and the turns it speaks of as rollout records."""
    target = Path(folder) / _FOLDER
    target.mkdir(parents=True, exist_ok=True)
    composer = dict(state.composer)
    pending = composer.pop("pending", [])
    unread = composer.pop("unread", [])
    held: dict[int, Rollout] = {}
    for turn in [*(turn for _, turn in pending), *unread]:
        held.setdefault(turn.rollout_id, Rollout(turn.rollout_id)).turns.append(turn)
    record = {
        "schema": SCHEMA,
        "update": state.update,
        "policy_version": state.policy_version,
        "env_turns": state.env_turns,
        "wall_s": state.wall_s,
        "explorer": state.explorer,
        "composer": composer,
        "pending": [[seen, turn.rollout_id, turn.index] for seen, turn in pending],
        "unread": [[turn.rollout_id, turn.index] for turn in unread],
        "counters": state.counters,
    }
    with FrameLogWriter(target / "held.jsonl.zst") as log:
        for rollout in held.values():
            log.write(rollout_to_dict(rollout))
    (target / "state.json").write_text(json.dumps(record), encoding="utf-8")


def load_side_state(folder: Path) -> SideState:
    """Read what `save_side_state` wrote; turns of one segment share it again.

    Raises:
        ConfigError: The folder holds no such state, or one of another schema.
    """
    source = Path(folder) / _FOLDER
    try:
        record = json.loads((source / "state.json").read_text(encoding="utf-8"))
        if record.get("schema") != SCHEMA:
            raise ConfigError(
                f"{source} has schema {record.get('schema')!r}; expected {SCHEMA}. Resume with the version of divopd "
                "that wrote it."
            )
        held = [rollout_from_dict(item) for item in read_frames(source / "held.jsonl.zst")]
        turns = {(turn.rollout_id, turn.index): turn for rollout in held for turn in rollout.turns}
        composer = dict(record["composer"])
        composer["pending"] = [(seen, _find(turns, rid, index)) for seen, rid, index in record["pending"]]
        composer["unread"] = [_find(turns, rid, index) for rid, index in record["unread"]]
    except (OSError, ValueError, KeyError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"{folder} is no checkpoint of divopd that can be read ({type(error).__name__}: {error}); expected "
            f"{_FOLDER}/state.json in it. Pass another checkpoint, or true for the last whole one."
        ) from error
    return SideState(
        update=record["update"],
        policy_version=record["policy_version"],
        env_turns=record["env_turns"],
        wall_s=record["wall_s"],
        explorer=record["explorer"],
        composer=composer,
        counters=record["counters"],
    )


def _find(turns: dict[tuple[int, int], Turn], rollout_id: int, index: int) -> Turn:
    try:
        return turns[rollout_id, index]
    except KeyError:
        raise RecordError(f"turn {index} of rollout {rollout_id} is not among the held rollouts") from None


def _files(folder: Path) -> Iterable[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != _MANIFEST)


def publish(partial: Path, final: Path) -> None:
    """Seal a finished checkpoint with its manifest and give it its name, replacing one that has it."""
    sizes = {str(path.relative_to(partial)): path.stat().st_size for path in _files(partial)}
    for path in [*_files(partial)]:
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    (partial / _MANIFEST).write_text(json.dumps({"schema": SCHEMA, "files": sizes}), encoding="utf-8")
    final.parent.mkdir(parents=True, exist_ok=True)
    if final.exists():
        old = final.with_name(f".old-{final.name}")
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
        partial.rename(final)
        shutil.rmtree(old, ignore_errors=True)
    else:
        partial.rename(final)


def whole(folder: Path) -> str | None:
    """None when every file of the manifest is there with its size, else what is wrong with it."""
    try:
        sizes = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))["files"]
    except (OSError, ValueError, KeyError):
        return f"{_MANIFEST} is missing or unreadable"
    for name, size in sizes.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
    return None


def _numbered(checkpoints: Path) -> list[tuple[int, Path]]:
    found = [(m, path) for path in checkpoints.glob("checkpoint-*") if (m := _NAME.search(path.name))]
    return sorted((int(match.group(1)), path) for match, path in found)


def find_checkpoint(
    checkpoints: Path, wanted: str | bool | None, on_notice: Callable[[str], None] | None = None
) -> Path | None:
    """The checkpoint to go on from.

    Args:
        checkpoints: Folder of checkpoints.
        wanted: A path, True for the newest whole one, or None or False for none.
        on_notice: Told, in one sentence, of every damaged checkpoint that is passed over.

    Raises:
        ConfigError: There is none, or the one that was named is not whole.
    """
    if wanted is None or wanted is False:
        return None
    if wanted is not True:
        path = Path(wanted)
        trouble = whole(path) if path.is_dir() else "there is no such folder"
        if trouble:
            raise ConfigError(
                f"{path} is no whole checkpoint: {trouble}. Pass another one, or --resume_from_checkpoint true for "
                "the newest whole one."
            )
        return path
    for _, path in reversed(_numbered(checkpoints)):
        trouble = whole(path)
        if trouble is None:
            return path
        if on_notice is not None:
            on_notice(f"{path} is damaged ({trouble}); the one before it is used.")
    raise ConfigError(
        f"There is no whole checkpoint in {checkpoints}; expected checkpoint-N folders. Start anew in another "
        "run_dir, or delete this one."
    )


def set_aside(checkpoints: Path, resumed: Path | None, on_notice: Callable[[str], None]) -> None:
    """Rename checkpoints that are newer than the one resumed to ``abandoned-checkpoint-N``.

    They are of another course of the run, and would be resumed, or kept in place of the new ones, for their number.

    Args:
        checkpoints: Folder of checkpoints.
        resumed: The one that the run goes on from; None does nothing.
        on_notice: Told of each, in one sentence.
    """
    match = _NAME.search(resumed.name) if resumed is not None else None
    for number, path in _numbered(checkpoints) if match else ():
        if number > int(match.group(1)):
            target = path.with_name(f"abandoned-{path.name}")
            shutil.rmtree(target, ignore_errors=True)
            path.rename(target)
            on_notice(
                f"{path.name} is newer than the checkpoint that is resumed; it is called {target.name} now."
            )


def rotate(checkpoints: Path, keep: int) -> None:
    """Delete all but the newest ``keep`` whole checkpoints and what interrupted writers left; 0 keeps all."""
    for leftover in [*checkpoints.glob(".partial-*"), *checkpoints.glob(".old-*")]:
        shutil.rmtree(leftover, ignore_errors=True)
    if keep < 1:
        return
    good = [path for _, path in _numbered(checkpoints) if whole(path) is None]
    for path in good[:-keep]:
        shutil.rmtree(path, ignore_errors=True)
