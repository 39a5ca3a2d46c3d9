"""The explorer's end of the pipe, and its bond to the trainer's process."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import queue
import signal
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any

from .messages import Fatal

__all__ = ["Channel", "end_with_parent"]

_PR_SET_PDEATHSIG = 1


class Channel:
    """The pipe, with a thread to write so that a full pipe never blocks the event loop."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe
        self.broken = False
        self._outgoing: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._idle = threading.Event()
        threading.Thread(target=self._write, name="pipe-writer", daemon=True).start()

    def send(self, message: Any) -> None:
        """Send in order, without waiting."""
        self._outgoing.put(message)

    def flush(self, timeout_s: float) -> None:
        """Wait until everything sent so far is written."""
        written = threading.Event()
        self._outgoing.put(written)
        written.wait(timeout_s)

    def listen(self, loop: asyncio.AbstractEventLoop, deliver: Any) -> None:
        """Call ``deliver(message)`` on the loop for each arrival, and ``deliver(None)`` when the pipe is closed."""
        threading.Thread(target=self._read, args=(loop, deliver), name="pipe-reader", daemon=True).start()

    def _write(self) -> None:
        while True:
            message = self._outgoing.get()
            if isinstance(message, threading.Event):
                message.set()
                continue
            try:
                if not self.broken:
                    self.pipe.send(message)
            except OSError:
                self.broken = True
            except Exception as error:
                # Said instead of it; silence would look like a hang.
                what = f"{type(message).__name__} cannot be sent to the trainer ({type(error).__name__}: {error})"
                self.pipe.send(Fatal(f"{what}; what plugins put into meta and info must be picklable."))

    def _read(self, loop: asyncio.AbstractEventLoop, deliver: Any) -> None:
        message = True
        while message is not None:
            try:
                message = self.pipe.recv()
            except (EOFError, OSError):
                message = None
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(deliver, message)


def end_with_parent(parent: int) -> None:
    """Have the kernel send SIGTERM when the parent ends, where it can."""
    if sys.platform.startswith("linux"):
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(1)
