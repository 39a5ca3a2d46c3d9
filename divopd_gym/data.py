"""Where benchmark data lies on this machine. Downloading is another module's business."""

from __future__ import annotations

import os
from pathlib import Path

from divopd_gym.errors import DataNotFoundError

__all__ = ["candidate_roots", "default_root", "locate"]


def default_root() -> Path:
    """The folder that `divopd data download` fills when it is told no other."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "divopd"


def candidate_roots(
    benchmark: str, data_dir: str | os.PathLike[str] | None = None, variable: str | None = None
) -> list[tuple[str, Path]]:
    """Folders to look in, first to last, each with the reason why.

    Args:
        benchmark: name of the benchmark's own folder under a common one, e.g. ``alfworld``.
        data_dir: a folder named by the caller; then no other is looked in.
        variable: the benchmark's own environment variable.
    """
    if data_dir is not None:
        given = Path(os.path.expandvars(os.fspath(data_dir))).expanduser()
        return [("data_dir", given), ("data_dir", given / benchmark)]
    roots = []
    for name in ("DIVOPD_DATA", variable):
        value = os.environ.get(name) if name else None
        if value:
            root = Path(value).expanduser()
            if name == "DIVOPD_DATA":
                roots.append((f"${name}", root / benchmark))
            roots.append((f"${name}", root))
    roots.append(("default", default_root() / benchmark))
    return roots


def locate(
    what: str,
    relative: list[str],
    benchmark: str,
    data_dir: str | os.PathLike[str] | None = None,
    variable: str | None = None,
    remedy: str = "",
) -> Path:
    """The first of some relative paths that exists under the roots of a benchmark.

    Args:
        what: what is looked for, in words, for the message.
        relative: paths below a root, tried in order; ``*`` stands for anything.
        benchmark: see `candidate_roots`.
        data_dir: see `candidate_roots`.
        variable: see `candidate_roots`.
        remedy: what else the user can do.

    Raises:
        DataNotFoundError: nothing is there; the message lists what was looked for and where.
    """
    roots = candidate_roots(benchmark, data_dir, variable)
    for _, root in roots:
        for path in relative:
            # The last match is the newest release where folders carry version numbers.
            found = sorted(root.glob(path)) if root.is_dir() else []
            if found:
                return found[-1]
    places = "; ".join(f"{root} (from {reason})" for reason, root in roots)
    variables = " or ".join(f"${name}" for name in ("DIVOPD_DATA", variable) if name)
    raise DataNotFoundError(
        f"{what} was not found: looked for {' or '.join(relative)} in {places}. Fetch it with "
        f"`divopd data download {benchmark}`, or name its folder by data_dir= or {variables}{remedy}."
    )
