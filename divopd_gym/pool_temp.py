"""Temporary folders of an environment pool: one a worker, removed with it, even after a kill.

A pool whose own process was killed leaves its folder behind; the next pool removes it, told apart from a folder in
use by a file lock.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

try:
    import fcntl
except ImportError:  # not a POSIX system: nothing is swept
    fcntl = None  # type: ignore[assignment]

__all__ = ["PoolTemp"]

_PREFIX = "divopd-pool-"


class PoolTemp:
    """The temporary folder of one pool."""

    def __init__(self) -> None:
        base = Path(tempfile.gettempdir())
        _sweep(base)
        self._count = 0
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
            self._lock = os.open(self.path / "lock", os.O_CREAT | os.O_RDWR, 0o600)
            if fcntl is not None:
                fcntl.flock(self._lock, fcntl.LOCK_EX)
            # Another pool may have swept the folder away before it was locked.
            if (self.path / "lock").exists():
                break
            os.close(self._lock)

    def worker_dir(self) -> str:
        """A new empty folder."""
        self._count += 1
        path = self.path / str(self._count)
        path.mkdir()
        return str(path)

    @staticmethod
    def remove(path: str) -> None:
        """Remove a worker's folder and all in it; it may be gone already."""
        shutil.rmtree(path, ignore_errors=True)

    def close(self) -> None:
        """Remove everything; calling it again does nothing."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def _sweep(base: Path) -> None:
    if fcntl is None:
        return
    for path in base.glob(f"{_PREFIX}*"):
        # Folders of other users, or gone meanwhile. One without a lock file may be just being made.
        with contextlib.suppress(OSError):
            lock = os.open(path / "lock", os.O_RDWR)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)
