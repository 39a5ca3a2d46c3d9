"""Simulator processes: started when an episode needs one, shared by every process of the user, gone when unused.

A simulator ends by itself a second after its last connection closed, so it outlives no way of ending of those that
use it, and it belongs to nobody: a worker that is recycled takes no other worker's simulator along. Who serves where
is written in a folder that only the user can read, under a file lock.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import select
import signal
import socket
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from divopd_gym.envs.scienceworld.java import Simulator
from divopd_gym.envs.scienceworld.wire import Connection, Lost
from divopd_gym.errors import ConfigError, DataNotFoundError, PoolError

try:
    import fcntl
except ImportError:  # not a POSIX system: simulators are not shared
    fcntl = None  # type: ignore[assignment]

__all__ = ["connect", "end_hung", "private", "run_folder"]

START_TIMEOUT_S = 120.0
GREETING_TIMEOUT_S = 30.0
# Long enough that the next environment of a program that makes them one by one finds the simulator still there.
_GRACE_MS = 1000
_LONGEST_CALL_MS = 600_000
# Beyond this many episodes a simulator's heap could become tight, so another one is started whatever the limit.
_CROWD = 80
_MOST = 32


def run_folder() -> Path:
    """Where running simulators are listed: $DIVOPD_RUN_DIR, else a folder of the user's own for temporary things.

    Not the process's own temporary folder: workers of a pool have one each.

    Raises:
        ConfigError: the folder is not the user's own.
    """
    given = os.environ.get("DIVOPD_RUN_DIR")
    uid = os.getuid() if hasattr(os, "getuid") else 0
    if given:
        path = Path(given).expanduser()
    else:
        base = Path("/tmp") if os.access("/tmp", os.W_OK) else Path(tempfile.gettempdir())
        path = base / f"divopd-{uid}"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.stat()
    if hasattr(os, "getuid") and (found.st_uid != uid or stat.S_IMODE(found.st_mode) & 0o022):
        raise ConfigError(
            f"{path} belongs to user {found.st_uid} with mode {stat.S_IMODE(found.st_mode):o}; expected a folder that "
            f"only user {uid} can write to. Remove it, or name another by $DIVOPD_RUN_DIR."
        )
    return path


def connect(simulator: Simulator, limit: int, purpose: str = "play") -> Connection:
    """A connection to the shared simulator that has fewest, or to a new one while there are fewer than `limit`.

    Args:
        simulator: how one is started; only those started in the same way are shared.
        limit: most simulators.
        purpose: simulators of different purposes are not shared.

    Raises:
        PoolError: none could be started, or the list was locked for too long.
        DataNotFoundError: Java is too old.
    """
    if fcntl is None:
        return private(simulator)
    folder = run_folder()
    key = hashlib.sha256(repr((simulator, socket.gethostname(), purpose)).encode()).hexdigest()[:12]
    with _locked(folder / f"scienceworld-{key}.lock"):
        found: list[Connection] = []
        free = None
        try:
            for number in range(_MOST):
                entry = folder / f"scienceworld-{key}-{number}.json"
                connection = _listed(entry)
                if connection is not None:
                    found.append(connection)
                elif free is None:
                    free = entry
                if connection is None and number >= limit:
                    break
            best = min(found, key=lambda c: c.load, default=None)
            idle = best is not None and best.load == 1
            if best is not None and (idle or (len(found) >= limit and best.load < _CROWD) or free is None):
                found.remove(best)
                return best
        finally:
            for connection in found:
                connection.close()
        assert free is not None
        pid, port, token = _launch(simulator, free.with_suffix(".log"))
        _write(free, {"pid": pid, "port": port, "token": token})
        return _greet(port, token, pid)


def private(simulator: Simulator) -> Connection:
    """A connection to a new simulator that nobody else can use, and that ends with the connection."""
    with tempfile.TemporaryDirectory(prefix="divopd-scienceworld-") as folder:
        pid, port, token = _launch(simulator, Path(folder) / "start.log")
    return _greet(port, token, pid)


def end_hung(pid: int) -> None:
    """Kill a simulator that does not answer."""
    with contextlib.suppress(OSError):
        line = Path(f"/proc/{pid}/cmdline")
        if Path("/proc/self/cmdline").exists() and b"ScienceWorldHost" not in line.read_bytes():
            return
        os.kill(pid, signal.SIGKILL if hasattr(signal, "SIGKILL") else signal.SIGTERM)


def _greet(port: int, token: str, pid: int) -> Connection:
    try:
        return Connection(port, token, pid, GREETING_TIMEOUT_S)
    except Lost as lost:
        end_hung(pid)
        raise PoolError(
            f"ScienceWorld's simulator (process {pid}) was started, but {lost.why}; see whether something forbids "
            "connections on this machine itself"
        ) from None


def _listed(entry: Path) -> Connection | None:
    try:
        found = json.loads(entry.read_text())
        return Connection(found["port"], found["token"], found["pid"], GREETING_TIMEOUT_S)
    except FileNotFoundError:
        return None
    except Lost as lost:
        if lost.hung:
            end_hung(found["pid"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    for path in (entry, entry.with_suffix(".log")):
        path.unlink(missing_ok=True)
    return None


def _write(entry: Path, what: dict[str, Any]) -> None:
    handle = os.open(entry, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "w") as file:
        json.dump(what, file)


@contextlib.contextmanager
def _locked(path: Path, timeout_s: float = 2 * START_TIMEOUT_S) -> Iterator[None]:
    deadline = time.monotonic() + timeout_s
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise PoolError(
                        f"{path} was locked for {timeout_s:g} s, while another process started a simulator of "
                        "ScienceWorld; see what that process is doing, and try again"
                    ) from None
                time.sleep(0.02)
        yield
    finally:
        os.close(handle)


def _launch(simulator: Simulator, log: Path) -> tuple[int, int, str]:
    """Start a simulator; its process id, its port and the token that it wants."""
    token = secrets.token_hex(16)
    with open(log, "wb") as errors:
        process = subprocess.Popen(
            simulator.command(str(_GRACE_MS), str(_LONGEST_CALL_MS)),
            cwd=simulator.folder,
            env=simulator.environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            # A Java that ends at once breaks the pipe; what a buffer held would break it again on closing.
            bufsize=0,
            # Ctrl-C in the terminal, or the end of a worker's group, is not meant for it.
            start_new_session=True,
        )
    # So that it leaves no zombie, however long this process goes on after it.
    threading.Thread(target=process.wait, name="scienceworld-wait", daemon=True).start()
    assert process.stdin is not None and process.stdout is not None
    with process.stdin, process.stdout:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(token.encode() + b"\n")
        ready, _, _ = select.select([process.stdout], [], [], START_TIMEOUT_S)
        line = process.stdout.readline() if ready else b""
    if line.strip().isdigit():
        return process.pid, int(line), token
    process.kill()
    said = log.read_text(errors="replace").strip()[-600:]
    if "UnsupportedClassVersionError" in said:
        raise DataNotFoundError(
            f"{simulator.java} is older than Java 11, which ScienceWorld's simulator needs; install a newer one, "
            "set JAVA_HOME to it, or: pip install 'divopd[scienceworld]'"
        )
    raise PoolError(
        f"ScienceWorld's simulator did not start: {simulator.java} said {said or 'nothing'!r} and gave {line!r} for "
        f"its port within {START_TIMEOUT_S:g} s; run it by hand to see why: {' '.join(simulator.command())}"
    )
