"""Fetching the official ALFWorld games: resumable, checked, and told how to do by hand where there is no network."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from divopd_gym.data_check import ALFWorldReport, check_alfworld
from divopd_gym.errors import ConfigError, DataNotFoundError
from divopd_gym.transfer import fetch, progress_bar, sha256_of

__all__ = ["RECORD_NAME", "alfworld_urls", "check_alfworld", "download_alfworld"]

RECORD_NAME = "divopd_download.json"
_GAMES = "TW_PDDL_FILES_URL"
_EXTRAS = ("JSON_FILES_URL", "PDDL_FILES_URL")
# What alfworld 0.4.2's own download script says, for when the package is not installed.
_RELEASES = "https://github.com/alfworld/alfworld/releases/download"
_FALLBACK = {
    "TW_PDDL_FILES_URL": f"{_RELEASES}/0.4.0/json_2.1.2_tw-pddl.zip",
    "JSON_FILES_URL": f"{_RELEASES}/0.2.2/json_2.1.1_json.zip",
    "PDDL_FILES_URL": f"{_RELEASES}/0.2.2/json_2.1.1_pddl.zip",
}


def alfworld_urls() -> dict[str, str]:
    """Addresses of the official archives, as the installed alfworld's download script names them."""
    try:
        files = importlib.metadata.files("alfworld") or []
        script = next(f for f in files if f.name == "alfworld-download").locate()
        text = Path(str(script)).read_text(encoding="utf-8")
    except (importlib.metadata.PackageNotFoundError, StopIteration, OSError):
        text = ""
    found = dict(re.findall(r'^(\w+_URL)\s*=\s*["\'](\S+?)["\']', text, re.MULTILINE))
    return {name: found.get(name, url) for name, url in _FALLBACK.items()}


def download_alfworld(
    dest: str | os.PathLike[str],
    progress: bool = True,
    *,
    full: bool = False,
    urls: Mapping[str, str] | None = None,
    keep_archives: bool = False,
) -> ALFWorldReport:
    """Download and unpack the official games; what is there already is not fetched or unpacked again.

    An archive that lies in `dest` under its own name is used as it is, so it can be brought by hand. Name, address,
    size and SHA-256 of each archive are written to ``divopd_download.json`` in `dest`.

    Args:
        dest: Data directory; the games come to ``json_2.1.1/<split>/<task>/<trial>/game.tw-pddl`` in it.
        progress: Whether to show progress bars on standard error.
        full: Also fetch the trajectories and PDDL states, which playing does not need.
        urls: Addresses instead of `alfworld_urls`, by the same names.
        keep_archives: Whether archives stay in `dest` after unpacking.

    Returns:
        What `check_alfworld` finds afterwards.

    Raises:
        DataNotFoundError: An archive cannot be fetched or is damaged; the message says what to do.
        ConfigError: `dest` cannot be written to.
    """
    root = Path(dest).expanduser()
    try:
        root.mkdir(parents=True, exist_ok=True)
        if not os.access(root, os.W_OK):
            raise PermissionError(f"no permission to write to {root}")
    except OSError as error:
        raise ConfigError(
            f"The data directory {root} cannot be used: {error}. Choose a directory that can be written to."
        ) from error
    known = {**alfworld_urls(), **(urls or {})}
    for name in (_GAMES, *_EXTRAS) if full else (_GAMES,):
        _install(known[name], root, progress, keep_archives)
    return check_alfworld(root)


def _install(url: str, root: Path, progress: bool, keep: bool) -> None:
    file_name = PurePosixPath(url.partition("?")[0]).name
    archive = root / file_name
    record = _read_record(root)
    if archive.exists():
        entry = {"url": url, "bytes": archive.stat().st_size, "sha256": sha256_of(archive), "by_hand": True}
    elif file_name in record and _all_there(root, file_name):
        return
    else:
        try:
            with progress_bar(file_name, progress) as report:
                fetched = fetch(url, archive, report=report)
        except DataNotFoundError as error:
            raise DataNotFoundError(
                f"{error}\nWithout network here: fetch {url} elsewhere, put the file at {archive}, and run the same "
                "command again; what has arrived so far is kept. To go on without the official games, use "
                "split='generated', which needs no download."
            ) from error
        entry = {"url": url, "bytes": fetched.size, "sha256": fetched.sha256, "by_hand": False}
    _unpack(archive, root, progress)
    _write_record(root, {**record, file_name: entry})
    if not keep and not entry["by_hand"]:
        archive.unlink()


def _unpack(archive: Path, root: Path, progress: bool) -> None:
    try:
        with (
            zipfile.ZipFile(archive) as zipped,
            progress_bar(f"unpacking {archive.name}", progress) as report,
        ):
            members = [m for m in zipped.infolist() if not m.is_dir()]
            total, done = sum(m.file_size for m in members), 0
            for member in members:
                target = _inside(root, member.filename, archive)
                done += member.file_size
                if not (target.exists() and target.stat().st_size == member.file_size):
                    target.parent.mkdir(parents=True, exist_ok=True)
                    half = target.with_name(target.name + ".part")
                    half.write_bytes(zipped.read(member))
                    half.replace(target)
                report(done, total)
    except (zipfile.BadZipFile, EOFError, NotImplementedError) as error:
        raise DataNotFoundError(
            f"{archive} is damaged or no zip archive ({error}); expected the official one. "
            "Delete it and run the same command again."
        ) from error
    listing = _listing(root, archive.name)
    listing.parent.mkdir(exist_ok=True)
    listing.write_text("".join(f"{m.file_size} {m.filename}\n" for m in members), encoding="utf-8")


def _all_there(root: Path, archive_name: str) -> bool:
    """Whether everything that an archive held still lies where it was unpacked to."""
    try:
        lines = _listing(root, archive_name).read_text(encoding="utf-8").splitlines()
    except OSError:
        return False
    held = (line.partition(" ") for line in lines)
    return all(
        (root / name).is_file() and (root / name).stat().st_size == int(size) for size, _, name in held
    )


def _listing(root: Path, archive_name: str) -> Path:
    return root / ".divopd" / f"{archive_name}.txt"


def _inside(root: Path, member: str, archive: Path) -> Path:
    path = PurePosixPath(member.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts:
        raise DataNotFoundError(
            f"{archive} wants to write to {member!r}, outside the data directory; expected the official archive. "
            "Delete it and fetch it again."
        )
    return root.joinpath(*path.parts)


def _read_record(root: Path) -> dict[str, dict]:
    try:
        found = json.loads((root / RECORD_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _write_record(root: Path, record: dict[str, dict]) -> None:
    half = root / f"{RECORD_NAME}.part"
    half.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    half.replace(root / RECORD_NAME)
