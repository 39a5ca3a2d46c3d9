"""Runs one command and ends it, with all it started, when whoever started this ends: even by kill -9.

``python -m divopd_trainer.guard COMMAND ...`` with a pipe as standard input that the starter keeps open. Signals are
passed on to the command. No import of anything heavy.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ["descendants", "main"]

GRACE_S = 10.0
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def _prctl(option: int, value: int) -> None:
    if sys.platform.startswith("linux"):
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def descendants(pid: int) -> Iterator[int]:
    """Process ids of everything below a process, children first (Linux; elsewhere none)."""
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                for child in (task / "children").read_text().split():
                    yield int(child)
                    yield from descendants(int(child))


def _signal(process: subprocess.Popen, number: int) -> None:
    """To the command's group, and to whatever left it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
    for pid in list(descendants(os.getpid())):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _end(process: subprocess.Popen, grace_s: float) -> None:
    """SIGTERM, some time, then SIGKILL for what is left."""
    deadline = time.monotonic() + grace_s
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
    # Orphans of the command are our children now.
    while time.monotonic() < deadline and any(descendants(os.getpid())):
        if process.poll() is not None:
            _reap()
        _signal(process, signal.SIGTERM)
        time.sleep(0.1)
    _signal(process, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(5.0)


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def main(argv: list[str]) -> int:
    """Run the command; returns its exit status (128 + n after signal n)."""
    if not argv:
        print("usage: python -m divopd_trainer.guard COMMAND [ARGUMENT ...]", file=sys.stderr)
        return 2
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            # Should this process be killed itself.
            preexec_fn=lambda: _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),
        )
    except OSError as error:
        print(f"{argv[0]} cannot be started: {error}", file=sys.stderr)
        return 127

    def pass_on(number: int, frame: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, pass_on)
    while process.poll() is None:
        ready, _, _ = select.select([sys.stdin.fileno()], [], [], 0.2)
        if ready and not os.read(sys.stdin.fileno(), 4096):
            break
    ended = process.poll()
    _end(process, GRACE_S if ended is None else 2.0)
    code = process.returncode
    return 137 if code is None else code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
