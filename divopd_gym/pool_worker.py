"""The process that runs one environment for `EnvPool`: one request at a time over a socket, in order.

It ends when its parent ends, when the socket closes, or when told to; it ignores Ctrl-C, which is the parent's to
decide on. An exception of the environment is sent back and the process lives on. No torch, no asyncio.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import socket
import struct
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from typing import Any

import gymnasium

from divopd_gym.errors import ConfigError, PoolError

__all__ = [
    "HEADER",
    "READY",
    "EnvError",
    "EnvServer",
    "decode",
    "encode",
    "error_answer",
    "make_env",
    "run_worker",
]

# Length of the body, request number, whether the body is an answer (else an error).
HEADER = struct.Struct(">QQ?")
READY = 0
_PR_SET_PDEATHSIG = 1


class EnvError(PoolError):
    """An environment raised an exception inside a worker; the worker is still usable.

    Attributes:
        task: The task of the episode, if one was given or known.
        cause: Type name of the exception.
        trace: Its traceback in the worker.
    """

    def __init__(self, message: str, task: str | None = None, cause: str = "", trace: str = "") -> None:
        super().__init__(message)
        self.task, self.cause, self.trace = task, cause, trace

    def __reduce__(self) -> tuple:
        return type(self), (self.args[0], self.task, self.cause, self.trace)


def encode(request: int, ok: bool, payload: Any) -> bytes:
    """One message as bytes, header first."""
    body = pickle.dumps(payload, protocol=pickle.HIGHEST_PROTOCOL)
    return HEADER.pack(len(body), request, ok) + body


def decode(body: bytes) -> Any:
    """The payload of a message."""
    return pickle.loads(body)


def run_worker(
    sock: socket.socket, env_id: Any, env_kwargs: dict[str, Any], temp_dir: str, environ: dict[str, str]
) -> None:
    """Build the environment and serve requests until the socket closes.

    Args:
        sock: The worker's end of a socket pair.
        env_id: A Gymnasium id, or a picklable function that builds the environment.
        env_kwargs: Its keyword arguments.
        temp_dir: Where this process puts temporary files; the parent removes it afterwards.
        environ: The caller's environment variables now; the fork server's are those of the first pool's day.
    """
    os.environ.clear()
    os.environ.update(environ)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _end_with_parent()
    os.environ["TMPDIR"] = tempfile.tempdir = temp_dir
    # A parent that gave up on this worker, or was killed, is no error of the worker's.
    with sock, contextlib.suppress(ConnectionError):
        try:
            env = make_env(env_id, env_kwargs)
        except Exception as error:
            sock.sendall(error_answer(READY, error, f"building {env_id}", None))
            return
        sock.sendall(encode(READY, True, os.getpid()))
        EnvServer(env, env_id).serve(sock)


class EnvServer:
    """Does what is asked of one environment; answers and errors alike become bytes.

    Args:
        env: The environment.
        env_id: How messages call it.
    """

    def __init__(self, env: gymnasium.Env, env_id: Any) -> None:
        self.env, self.env_id = env, env_id
        self.task: str | None = None
        self.calls: dict[str, Callable[..., Any]] = {
            "reset": self.reset,
            "step": self.step,
            "expert_act": self.expert_act,
            "call": self.call,
            "close": self.close,
        }
        self._forget()

    def serve(self, sock: socket.socket) -> None:
        """Answer requests in order until told to close."""
        while (message := _receive(sock)) is not None:
            request, (name, args) = message
            sock.sendall(self.answer(request, name, args))
            if name == "close":
                return

    def answer(self, request: int, name: str, args: tuple) -> bytes:
        """One request's answer; see `encode` and `error_answer`."""
        try:
            return encode(request, True, self.calls[name](*args))
        except Exception as error:
            return error_answer(request, error, f"{self.env_id}, in {name}()", self.task)

    def close(self) -> None:
        """Close the environment."""
        self.env.close()

    def reset(self, task: str | None, seed: int | None) -> tuple[str, dict]:
        """Begin an episode."""
        self.task = task
        self._forget()
        self.first = self.env.reset(seed=seed, options=None if task is None else {"task": task})
        self.task = self.first[1].get("task", task)
        return self.first

    def step(self, action: str) -> tuple:
        """Play one turn."""
        outcome = self.env.step(action)
        self.played.append((action, outcome[0], outcome[4]))
        return outcome

    def expert_act(self) -> str:
        """What the environment's expert would do now."""
        # The expert is built only when asked for, and then told what has been played so far.
        if self.expert is None:
            build = getattr(self.env.unwrapped, "expert", None)
            self.expert = build() if build is not None else None
            if self.expert is None or self.first is None:
                found = "before reset()" if self.expert is not None else "and the environment has none"
                raise ConfigError(
                    f"An expert was asked for {found}; expected an environment whose expert() gives one, "
                    "after reset()."
                )
            self.expert.reset(*self.first)
        for turn in self.played[self.told :]:
            self.expert.observe(*turn)
        self.told = len(self.played)
        return self.expert.act()

    def call(self, name: str, *args: Any) -> Any:
        """What a method returns, or an attribute's value."""
        value = self.env.get_wrapper_attr(name)
        return value(*args) if callable(value) else value

    def _forget(self) -> None:
        self.first: tuple[str, dict] | None = None
        self.played: list[tuple[str, str, dict]] = []
        self.expert: Any = None
        self.told = 0


def _receive(sock: socket.socket) -> tuple[int, tuple[str, tuple]] | None:
    head = _exactly(sock, HEADER.size)
    if head is None:
        return None
    length, request, _ = HEADER.unpack(head)
    body = _exactly(sock, length)
    return None if body is None else (request, decode(body))


def _exactly(sock: socket.socket, size: int) -> bytes | None:
    parts, missing = [], size
    while missing:
        try:
            part = sock.recv(missing)
        except ConnectionError:
            return None
        if not part:
            return None
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)


def make_env(env_id: Any, env_kwargs: dict[str, Any]) -> gymnasium.Env:
    """The environment of a Gymnasium id, or of a function that builds it."""
    if callable(env_id):
        return env_id(**env_kwargs)
    if env_id.startswith("divopd_gym/"):
        importlib.import_module("divopd_gym")
    # The passive checker costs time at every turn, and `check_text_env` holds the environments to more.
    return gymnasium.make(env_id, disable_env_checker=True, **env_kwargs)


def error_answer(request: int, error: Exception, where: str, task: str | None) -> bytes:
    """An exception as a message: an `EnvError`, and the exception itself if it can be sent."""
    name = type(error).__name__
    about = f" (task {task!r})" if task is not None else ""
    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    try:
        said = str(error)
    except Exception:
        said = "<its text cannot be shown>"
    report = EnvError(f"{where}{about}: {name}: {said}", task, name, trace)
    try:
        cause: Exception | None = error
        decode(pickle.dumps(error))
    except Exception:
        cause = None
    return encode(request, False, (report, cause))


def _end_with_parent() -> None:
    # A group of its own: Ctrl-C in the terminal does not reach it, and killing the group takes its children along.
    os.setsid()
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    # With a fork server the process that asked for this one is not the one that forked it.
    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
