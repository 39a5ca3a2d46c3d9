"""Looking over a directory of ALFWorld games: what is there, against the official counts, and what is broken."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from divopd_gym.errors import DataNotFoundError

__all__ = ["OFFICIAL_COUNTS", "TASK_TYPES", "ALFWorldReport", "SplitReport", "check_alfworld"]

TASK_TYPES = (
    "pick_and_place_simple",
    "look_at_obj_in_light",
    "pick_clean_then_place_in_recep",
    "pick_heat_then_place_in_recep",
    "pick_cool_then_place_in_recep",
    "pick_two_obj_and_place",
)
# Playable games a split and task type of the official release, in the order of TASK_TYPES.
OFFICIAL_COUNTS = {
    split: dict(zip(TASK_TYPES, counts))
    for split, counts in {
        "train": (790, 308, 650, 459, 533, 813),
        "valid_train": (46, 19, 37, 25, 28, 45),
        "valid_seen": (35, 13, 27, 16, 25, 24),
        "valid_unseen": (24, 18, 31, 23, 21, 17),
    }.items()
}
_GAME = "game.tw-pddl"
_NEEDED = ("pddl_domain", "grammar", "pddl_problem", "solvable")
_PLACING = re.compile(r"template\s*::\s*\"(put|move) \{o\} (?:in/on|to) \{r\}\"")


@dataclass
class SplitReport:
    """One split.

    Attributes:
        games: Playable games by task type.
        skipped: Trials that are no playable games, as in the official release (no game file, movable or sliced
            objects, unsolvable).
        broken: (path, what is wrong) of damaged games.
        digest: SHA-256 over the playable games' paths and contents.
    """

    games: dict[str, int] = field(default_factory=dict)
    skipped: int = 0
    broken: list[tuple[str, str]] = field(default_factory=list)
    digest: str = ""

    @property
    def total(self) -> int:
        """Playable games."""
        return sum(self.games.values())


@dataclass
class ALFWorldReport:
    """A data directory.

    Attributes:
        path: The directory with the splits in it.
        splits: What each split that is there holds.
        wording: How many playable games say "move X to Y" (release 0.4.x) and "put X in/on Y" (0.3.x).
        digest: SHA-256 over the digests of all splits.
    """

    path: str
    splits: dict[str, SplitReport]
    wording: dict[str, int]
    digest: str

    @property
    def ok(self) -> bool:
        """Whether there are games and none is broken."""
        return any(s.total for s in self.splits.values()) and not any(s.broken for s in self.splits.values())

    @property
    def complete(self) -> bool:
        """Whether every split holds exactly the official number of games of each type."""
        return self.ok and {n: s.games for n, s in self.splits.items()} == OFFICIAL_COUNTS

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON values."""
        splits = {
            name: {
                "games": split.games,
                "total": split.total,
                "official": sum(OFFICIAL_COUNTS[name].values()),
                "skipped": split.skipped,
                "broken": [list(b) for b in split.broken],
                "digest": split.digest,
            }
            for name, split in self.splits.items()
        }
        return {
            "path": self.path,
            "ok": self.ok,
            "complete": self.complete,
            "splits": splits,
            "wording": self.wording,
            "digest": self.digest,
        }

    def text(self) -> str:
        """Everything as a table for a terminal, remedies included."""
        short = ("pick", "look", "clean", "heat", "cool", "pick2")
        lines = [
            f"ALFWorld games in {self.path}",
            "",
            f"{'split':<14}{'all':>12}" + "".join(f"{s:>10}" for s in short),
        ]
        for name, official in OFFICIAL_COUNTS.items():
            split = self.splits.get(name)
            if split is None:
                lines.append(f"{name:<14}{'absent':>12}")
                continue
            cells = (f"{split.games[t]}/{official[t]}" for t in TASK_TYPES)
            whole = f"{split.total}/{sum(official.values())}"
            lines.append(f"{name:<14}{whole:>12}" + "".join(f"{cell:>10}" for cell in cells))
        said = ", ".join(f"{n} games say '{word}'" for word, n in sorted(self.wording.items())) or "unknown"
        lines += ["", f"wording of placing: {said}", f"sha256 of the games: {self.digest}"]
        broken = [b for split in self.splits.values() for b in split.broken]
        lines += [f"broken: {path}: {why}" for path, why in broken]
        if broken:
            lines.append("Delete the broken files and run `divopd data download alfworld` again.")
        elif not self.complete:
            lines.append(
                "Not the whole official release; `divopd data download alfworld` fetches what is missing."
            )
        return "\n".join(lines)


def check_alfworld(path: str | os.PathLike[str]) -> ALFWorldReport:
    """Read every game below a data directory.

    Args:
        path: A directory that holds ``json_2.1.1`` (or another release), or that release's folder itself.

    Raises:
        DataNotFoundError: There is no split in it.
    """
    root = _release_folder(Path(path).expanduser())
    wording: Counter[str] = Counter()
    splits = {name: _check_split(root / name, wording) for name in OFFICIAL_COUNTS if (root / name).is_dir()}
    lines = (f"{name} {split.digest}\n" for name, split in sorted(splits.items()))
    return ALFWorldReport(str(root), splits, dict(wording), _digest(lines))


def _check_split(folder: Path, wording: Counter[str]) -> SplitReport:
    report = SplitReport(games=dict.fromkeys(TASK_TYPES, 0))
    lines = []
    for trial in _trials(folder):
        name = trial.relative_to(folder).as_posix()
        kind = name.partition("-")[0]
        game = trial / _GAME
        if not game.exists() or "movable" in name or "Sliced" in name or kind not in TASK_TYPES:
            report.skipped += 1
            continue
        content = game.read_bytes()
        data = _parse(content)
        if isinstance(data, str):
            report.broken.append((str(game), data))
        elif not data["solvable"]:
            report.skipped += 1
        else:
            report.games[kind] += 1
            found = _PLACING.search(data["grammar"])
            wording[found[1] if found else "unknown"] += 1
            lines.append(f"{name} {hashlib.sha256(content).hexdigest()}\n")
    report.digest = _digest(iter(lines))
    return report


def _parse(content: bytes) -> dict[str, Any] | str:
    """The game, or what is wrong with it."""
    try:
        data = json.loads(content)
    except ValueError as error:
        return f"no JSON ({error}); probably written half"
    if not isinstance(data, dict):
        return "no JSON object"
    if missing := [key for key in _NEEDED if key not in data]:
        return f"lacks {', '.join(missing)}"
    if not all(isinstance(data[key], str) for key in _NEEDED[:3]):
        return f"one of {', '.join(_NEEDED[:3])} is no text"
    return data


def _trials(split: Path) -> Iterator[Path]:
    for task in sorted(p for p in split.iterdir() if p.is_dir()):
        yield from sorted(p for p in task.iterdir() if p.is_dir())


def _release_folder(path: Path) -> Path:
    releases = sorted(path.glob("json_*"), reverse=True) if path.is_dir() else []
    for root in (path / "json_2.1.1", *releases, path):
        if any((root / split).is_dir() for split in OFFICIAL_COUNTS):
            return root
    raise DataNotFoundError(
        f"There are no ALFWorld games in {path}; expected json_2.1.1/<split>/<task>/<trial>/{_GAME} with splits "
        f"{', '.join(OFFICIAL_COUNTS)}. Run `divopd data download alfworld`, or name the directory that holds json_2.1.1."
    )


def _digest(lines: Iterator[str]) -> str:
    digest = hashlib.sha256()
    for line in lines:
        digest.update(line.encode())
    return digest.hexdigest()
