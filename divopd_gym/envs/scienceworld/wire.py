"""One connection to a simulator: requests, replies, deadlines. A connection is one episode's world."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import weakref
from dataclasses import dataclass

from divopd_gym.errors import ConfigError, PoolError, ResetNeeded, WorkerDied

__all__ = ["Connection", "Lost", "SimulatorDied", "SimulatorFault", "State"]

_OK, _REFUSED, _FAULT = 0, 1, 2
_HEAD = struct.Struct(">iB")
_STATE = struct.Struct(">diiB")
_LENGTH = struct.Struct(">i")
_MAX_ACTION_BYTES = 1 << 18


class SimulatorDied(WorkerDied):
    """ScienceWorld's simulator process ended, or was ended because it did not answer; the episode is lost.

    It says nothing about the task. The next `reset` starts another simulator.
    """


class SimulatorFault(PoolError):
    """ScienceWorld's simulator raised an exception in the middle of a call; the episode is lost, the process lives."""


class Lost(Exception):
    """A connection broke: `why` in words; `hung` when there was no answer in time."""

    def __init__(self, why: str, hung: bool = False):
        super().__init__(why)
        self.why, self.hung = why, hung


@dataclass(frozen=True)
class State:
    """What a world says after a turn.

    Attributes:
        score: the simulator's own, -1 to 1.
        moves: the simulator's count of moves, which is not that of turns.
        options: answers of an open question which of several things was meant; 0 when none is open.
        completed: whether the simulator takes the task for ended.
        broken: whether the simulator caught an exception in its own code; the observation is its text.
        observation: the text.
        objects: names of the visible objects, sorted, each once.
        description: the task in words, after a load.
        templates: forms of the actions, after a load.
    """

    score: float
    moves: int
    options: int
    completed: bool
    broken: bool
    observation: str
    objects: tuple[str, ...]
    description: str = ""
    templates: tuple[str, ...] = ()


_open: weakref.WeakSet[Connection] = weakref.WeakSet()


class Connection:
    """A socket to a simulator.

    Args:
        port: where it listens on this machine.
        token: what it wants to hear first.
        pid: its process.
        timeout_s: seconds that its greeting may take.

    Attributes:
        load: connections that the simulator has, this one among them.

    Raises:
        Lost: there is none, or it is about to end.
    """

    def __init__(self, port: int, token: str, pid: int, timeout_s: float):
        self.pid = pid
        self._owner = os.getpid()
        try:
            self._socket: socket.socket | None = socket.create_connection(("127.0.0.1", port), timeout_s)
        except OSError as error:
            raise Lost(f"it could not be reached ({error})") from None
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _open.add(self)
        self.load = int(self._exchange(token.encode(), timeout_s))

    @property
    def usable(self) -> bool:
        """Whether it is open, and this process's own."""
        return self._socket is not None and self._owner == os.getpid()

    def load_task(self, task: str, variation: int, simplifications: str, way: str, timeout_s: float) -> State:
        """Begin a task.

        Args:
            task: its name.
            variation: its variation.
            simplifications: their names, with commas between.
            way: ``lean``, or ``plain`` to run through the simulator's own front (slower; for comparisons).
            timeout_s: seconds that it may take.
        """
        return _state(self.ask("L", "\n".join((task, str(variation), simplifications, way)), timeout_s))

    def turn(self, action: str, timeout_s: float) -> State:
        """Play one turn."""
        return _state(self.ask("S", action, timeout_s))

    def ask(self, operation: str, argument: str, timeout_s: float) -> bytes:
        """Send a request and wait for the reply.

        Raises:
            Lost: the simulator ended or did not answer in time.
            ConfigError: it refused the request.
            SimulatorFault: it raised an exception.
            ResetNeeded: the episode is another process's.
        """
        if self._owner != os.getpid():
            raise ResetNeeded(
                "this episode was begun in another process, before a fork; call reset() in this one"
            )
        if self._socket is None:
            raise Lost("the connection was closed")
        text = argument.encode("utf-8", "replace")[:_MAX_ACTION_BYTES]
        return self._exchange(operation.encode() + text, timeout_s)

    def close(self) -> None:
        """End the episode; the simulator ends with its last one. May be repeated."""
        _open.discard(self)
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.close()
            self._socket = None

    def _exchange(self, body: bytes, timeout_s: float) -> bytes:
        assert self._socket is not None
        try:
            self._socket.settimeout(timeout_s)
            self._socket.sendall(_LENGTH.pack(len(body)) + body)
            length, status = _HEAD.unpack(self._exactly(_HEAD.size))
            reply = self._exactly(length - 1)
        except TimeoutError:
            self.close()
            raise Lost(f"it did not answer within {timeout_s:g} s", hung=True) from None
        except OSError as error:
            self.close()
            raise Lost(f"the connection broke ({error})") from None
        if status == _OK:
            return reply
        message = reply.decode("utf-8", "replace")
        if status == _REFUSED:
            raise ConfigError(f"ScienceWorld's simulator refused: {message}; give a task that it has")
        raise SimulatorFault(
            f"ScienceWorld's simulator raised {message}; the episode is lost, but the task was not failed. "
            "Call reset(); if this comes again, report the task and the actions."
        )

    def _exactly(self, size: int) -> bytes:
        assert self._socket is not None
        parts, missing = [], size
        while missing:
            part = self._socket.recv(missing)
            if not part:
                raise ConnectionResetError("end of stream")
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)


def _state(reply: bytes) -> State:
    score, moves, options, flags = _STATE.unpack_from(reply)
    texts, at = [], _STATE.size
    while at < len(reply):
        (length,) = _LENGTH.unpack_from(reply, at)
        at += _LENGTH.size
        texts.append(reply[at : at + length].decode("utf-8", "replace"))
        at += length
    observation, objects, *rest = texts
    return State(
        score,
        moves,
        options,
        bool(flags & 1),
        bool(flags & 2),
        observation,
        tuple(dict.fromkeys(objects.split("\n"))) if objects else (),
        rest[0] if rest else "",
        tuple(rest[1].split("\n")) if rest else (),
    )


def _after_fork() -> None:
    # A child that keeps its parent's sockets open would keep the simulators alive after the parent's death.
    for connection in list(_open):
        connection.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
