"""Policy weights on their way from the learner to the explorer, as files.

`PolicyFiles` is the weight-transfer object that TRL's trainer is given: each sync writes one safetensors file, in
shared memory where there is some, and files that nobody needs any more are deleted.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Any

from safetensors import SafetensorError

from divopd_gym.errors import DivOPDError

__all__ = ["PolicyFiles", "PolicyWriteError"]

_MEMORY = Path("/dev/shm")
_PREFIX = "divopd-policies-"
_MAKING_S = 60.0


class PolicyWriteError(DivOPDError, RuntimeError):
    """Weights could not be handed to the explorer."""


class PolicyFiles:
    """Writes policy versions, remembers where they lie, and deletes them in time.

    Args:
        run_dir: Fallback place (``run_dir/.weights``) when there is no shared memory or too little of it.
        version: Called when weights are sent; gives the version that they are.
        write: ``write(tensors, folder, version) -> path``; a reader must see all of it or nothing.
        size_bytes: What one file will take; shared memory is used only if eight of them fit.
    """

    def __init__(
        self,
        run_dir: str | Path,
        version: Callable[[], int],
        *,
        write: Callable[[Iterable[tuple[str, Any]], Path, int], Path],
        size_bytes: int = 0,
    ) -> None:
        self._version = version
        self._write = write
        self.size_bytes = size_bytes
        self._run_dir = Path(run_dir)
        self._paths: dict[int, Path] = {}
        self._pins: dict[int, int] = {}
        self._loaded = -1
        self._folder: Path | None = None
        self._lock: IO[str] | None = None

    @property
    def folder(self) -> Path:
        """Where the files lie; made when first asked for, readable by this user only."""
        if self._folder is None:
            parent = self._run_dir / ".weights"
            if os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free > 8 * self.size_bytes:
                parent = _MEMORY
            parent.mkdir(parents=True, exist_ok=True)
            _clear_abandoned(parent)
            self._folder, self._lock = _make_folder(parent)
        return self._folder

    def path(self, version: int) -> Path:
        """The file of a version that was written and not yet deleted."""
        return self._paths[version]

    def __contains__(self, version: int) -> bool:
        """Whether the version was written and not yet deleted."""
        return version in self._paths

    @property
    def newest(self) -> int | None:
        """Newest version written, or None."""
        return max(self._paths, default=None)

    def pin(self, version: int) -> Path:
        """Keep a version until `unpin`; returns its file."""
        self._pins[version] = self._pins.get(version, 0) + 1
        return self._paths[version]

    def unpin(self, version: int) -> None:
        """Undo one `pin`."""
        self._pins[version] = self._pins.get(version, 1) - 1
        if self._pins[version] <= 0:
            del self._pins[version]
        self._sweep()

    def loaded(self, version: int) -> None:
        """The explorer has loaded this version, so no older file is read any more unless pinned."""
        self._loaded = max(self._loaded, version)
        self._sweep()

    def _sweep(self) -> None:
        newest = self.newest
        for version in list(self._paths):
            if version not in self._pins and version < self._loaded and version != newest:
                _delete(self._paths.pop(version))

    # TRL's weight-transfer protocol.

    def init_weight_transfer(self) -> None:
        """Nothing to set up."""

    def pause(self) -> None:
        """The explorer decides for itself when it loads."""

    def send_weights(self, iterator: Iterable[tuple[str, Any]]) -> None:
        """Write the file of the version that is being synced.

        Raises:
            PolicyWriteError: There is no room for it.
        """
        version = self._version()
        try:
            self._paths[version] = self._write(iterator, self.folder, version)
        except (OSError, SafetensorError) as error:
            raise PolicyWriteError(
                f"The weights of update {version} cannot be written to {self.folder} ({error}); expected room for "
                f"{self.size_bytes / 1e6:.0f} MB there. Make room, then go on with --resume_from_checkpoint true."
            ) from error
        self._sweep()

    def resume(self) -> None:
        """See `pause`."""

    def destroy(self) -> None:
        """Delete every file."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._lock.close()
            weights = self._run_dir / ".weights"
            if weights.is_dir() and not any(weights.iterdir()):
                weights.rmdir()
        self._folder = None
        self._paths.clear()


def _delete(policy: Path) -> None:
    """A policy is a file or, of an adapter, a folder; a probe may lie beside it."""
    from .engines.sync_probe import probe_file

    if policy.is_dir():
        shutil.rmtree(policy, ignore_errors=True)
    else:
        policy.unlink(missing_ok=True)
    probe_file(policy).unlink(missing_ok=True)


def _make_folder(parent: Path) -> tuple[Path, IO[str]]:
    """A new folder and its held lock; it gets the name that `_clear_abandoned` looks for once the lock is held."""
    making = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=parent))
    lock = open(making / "lock", "w")  # noqa: SIM115
    fcntl.flock(lock, fcntl.LOCK_EX)
    return making.rename(parent / making.name[1:]), lock


def _clear_abandoned(parent: Path) -> None:
    """Delete what killed trainers left: nobody holds the lock of their folders any more."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError), open(folder / "lock", "a") as held:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
    for making in parent.glob(f".{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if time.time() - making.stat().st_mtime > _MAKING_S:
                shutil.rmtree(making, ignore_errors=True)
