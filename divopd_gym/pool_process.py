"""The parent's side of one environment process: starting it, asking it, and making sure that it ends."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import pickle
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from divopd_gym.errors import PoolError, WorkerDied, WorkerTimeout
from divopd_gym.pool_temp import PoolTemp
from divopd_gym.pool_worker import HEADER, READY, decode, encode, run_worker

__all__ = ["WorkerProcess", "end_processes"]

_EXIT_WAIT_S = 2.0
_POLL_S = 0.005
_numbers = itertools.count()
_start_lock = threading.Lock()


class WorkerProcess:
    """One environment process and the socket to it.

    Args:
        context: A `multiprocessing` context.
        env_id: See `EnvPool`.
        env_kwargs: See `EnvPool`.
        temp: Where its temporary folder is made.
        processes: Set that holds the process while it lives.
        on_death: Called once when it ended, however that came.

    Attributes:
        episodes: Episodes begun.
        started: Whether its environment was built.
        dead: Whether it ended or is being killed.
    """

    def __init__(
        self,
        context: Any,
        env_id: Any,
        env_kwargs: dict[str, Any],
        temp: PoolTemp,
        processes: set[Any],
        on_death: Callable[[WorkerProcess, WorkerDied], None],
    ) -> None:
        self._context, self._env, self._temp = context, (env_id, env_kwargs), temp
        self._processes, self._on_death = processes, on_death
        self.name = f"divopd-env-{next(_numbers)}"
        self.episodes = 0
        self.started = self.dead = False
        self.waiting: dict[int, asyncio.Future] = {}
        self._process: Any = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task | None = None
        self._requests = itertools.count(READY + 1)
        self._where = "building the environment"
        self._temp_dir = ""
        self._deadline = 0.0

    @property
    def pid(self) -> int:
        """Process id; -1 before the process was started."""
        return self._process.pid if self._process is not None and self._process.pid is not None else -1

    async def start(self, timeout_s: float) -> None:
        """Start the process and wait until its environment is built.

        Raises:
            EnvError: Building the environment raised.
            WorkerDied: The process ended meanwhile.
            WorkerTimeout: It took too long; the process was killed.
        """
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        self._temp_dir = self._temp.worker_dir()
        self._process = self._context.Process(
            target=run_worker,
            args=(theirs, *self._env, self._temp_dir, dict(os.environ)),
            name=self.name,
            daemon=True,
        )
        self._processes.add(self._process)
        try:
            if self._context.get_start_method() == "forkserver":
                # The first start waits for the server's imports, which must not hold up the loop.
                launch = loop.run_in_executor(None, self._launch, theirs)
                launch.add_done_callback(self._kill_if_dead)
                await asyncio.shield(launch)
            else:
                # The kernel ends the worker with the thread that forked it, so that must be a lasting one.
                self._launch(theirs)
        except BaseException:
            self.dead = True
            ours.close()
            raise
        reader, self._writer = await asyncio.open_connection(sock=ours)
        ready = self.waiting[READY] = loop.create_future()
        self._reading = asyncio.ensure_future(self._read(reader))
        await self._answer(READY, ready, timeout_s, self._where)
        self.started = True

    async def ask(self, name: str, args: tuple, timeout_s: float, where: str) -> Any:
        """Send a request and wait for its answer.

        Args:
            name: What to do.
            args: Its arguments.
            timeout_s: Seconds after which the process is killed.
            where: What is going on, for messages.

        Raises:
            EnvError: The environment raised.
            WorkerDied: The process ended.
            WorkerTimeout: There was no answer in time.
        """
        if self.dead or self._writer is None:
            raise self._died(where)
        number = next(self._requests)
        answer = self.waiting[number] = asyncio.get_running_loop().create_future()
        self._where = where
        try:
            self._writer.write(encode(number, True, (name, args)))
        except ConnectionError:
            pass  # the reader notices the death and says so to whoever waits
        except BaseException:
            del self.waiting[number]
            raise
        return await self._answer(number, answer, timeout_s, where)

    async def settled(self) -> bool:
        """Wait until no answer is outstanding; whether that came within the time-outs of the calls."""
        if not self.waiting:
            return True
        left_s = max(self._deadline - time.monotonic(), 0.0)
        done, late = await asyncio.wait(set(self.waiting.values()), timeout=left_s)
        for answer in done:
            _seen(answer)
        return not late

    async def shut(self, grace_s: float) -> None:
        """Ask it to close its environment and end; kill it after the grace."""
        if not self.dead and self.started:
            with contextlib.suppress(Exception):
                await self.ask("close", (), grace_s, "close()")
                await self._gone(grace_s)
        self.kill()
        if self._reading is not None:
            await asyncio.wait({self._reading}, timeout=2 * _EXIT_WAIT_S)
        else:
            await self._gone(_EXIT_WAIT_S)
            self._tidy()

    def kill(self) -> None:
        """Kill it and whatever it started; it may be dead already."""
        self.dead = True
        kill_group(self._process)

    async def _answer(self, number: int, answer: asyncio.Future, timeout_s: float, where: str) -> Any:
        self._deadline = time.monotonic() + timeout_s
        done, _ = await asyncio.wait({answer}, timeout=timeout_s)
        if not done:
            self.waiting.pop(number, None)
            self.kill()
            raise WorkerTimeout(
                f"Environment worker {self.name} (pid {self.pid}, {self._env[0]}) gave no answer within "
                f"{timeout_s:g} s in {where}; it was killed and the episode is lost. If this is normal for the "
                "environment, raise the time-out."
            )
        return answer.result()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                length, number, ok = HEADER.unpack(await reader.readexactly(HEADER.size))
                self._settle(number, ok, await reader.readexactly(length))
        except (asyncio.IncompleteReadError, OSError):
            self.dead = True
            await self._gone(_EXIT_WAIT_S)
            error = self._died(self._where)
            self._on_death(self, error)
        except BaseException as cancelled:
            # The event loop is ending and nobody closed the pool.
            error = WorkerDied(f"Environment worker {self.name} was given up: {cancelled!r}.")
            self.kill()
            raise
        finally:
            for answer in self.waiting.values():
                if not answer.done():
                    answer.set_exception(error)
                    _seen(answer)
            self.waiting.clear()
            self._tidy()

    def _settle(self, number: int, ok: bool, body: bytes) -> None:
        answer = self.waiting.pop(number, None)
        if answer is None or answer.done():
            return
        try:
            payload = decode(body)
        except Exception as error:
            answer.set_exception(
                PoolError(f"An answer of {self._env[0]} in {self._where} cannot be read: {error}")
            )
            return
        if ok:
            answer.set_result(payload)
        else:
            report, cause = payload
            report.__cause__ = cause
            answer.set_exception(report)

    async def _gone(self, timeout_s: float) -> None:
        """Wait for the process to end; kill it if it does not."""
        deadline = time.monotonic() + timeout_s
        while _exitcode(self._process) is None and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_S)
        if _exitcode(self._process) is None:
            kill_group(self._process)

    def _tidy(self) -> None:
        if self._writer is not None:
            self._writer.close()
        if _exitcode(self._process) is not None:
            self._processes.discard(self._process)
        if self._temp_dir:
            self._temp.remove(self._temp_dir)

    def _died(self, where: str) -> WorkerDied:
        code = _exitcode(self._process)
        error = WorkerDied(
            f"Environment worker {self.name} (pid {self.pid}, {self._env[0]}) ended with {_how(code)} in {where}; the "
            "episode is lost. SIGKILL from outside mostly means that memory ran out; else see its standard error."
        )
        error.exitcode = code  # type: ignore[attr-defined]
        return error

    def _kill_if_dead(self, launch: asyncio.Future) -> None:
        _seen(launch)
        if self.dead:
            self.kill()

    def _launch(self, theirs: socket.socket) -> None:
        with _start_lock, theirs, _main_hidden(self._env):
            try:
                self._process.start()
            except (EOFError, ConnectionError, OSError) as error:
                raise PoolError(
                    f"An environment process of {self._env[0]} could not be started ({type(error).__name__}: {error}); "
                    "the fork server may have failed while it imported the environment's modules, see standard error."
                ) from error


def kill_group(process: Any) -> None:
    """SIGKILL a worker and its group; nothing happens if it is gone or was never started."""
    pid = getattr(process, "pid", None)
    if pid is None or _exitcode(process) is not None:
        return
    for end in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            # Before the worker made its own group there is none of this number.
            end(pid, signal.SIGKILL)


def end_processes(processes: set[Any], temp: PoolTemp, owner: int) -> None:
    """Kill every process left and remove the temporary folder, if this process is the owner; needs no loop."""
    if os.getpid() != owner:
        return
    for process in list(processes):
        kill_group(process)
    for process in list(processes):
        with contextlib.suppress(Exception):
            process.join(_EXIT_WAIT_S)
    processes.clear()
    temp.close()


def _seen(answer: asyncio.Future) -> None:
    # Keeps asyncio from reporting an error that nobody waits for any more.
    if not answer.cancelled():
        answer.exception()


def _exitcode(process: Any) -> int | None:
    try:
        return None if process is None or process.pid is None else process.exitcode
    except (AssertionError, ValueError):  # a copy in a forked child, or a closed object
        return None


def _how(code: int | None) -> str:
    if code is None:
        return "no exit code yet"
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"exit code {code} ({signal.Signals(-code).name})"
    return f"exit code {code}"


@contextlib.contextmanager
def _main_hidden(payload: Any) -> Iterator[None]:
    """Keep a new process from importing the caller's main script, which may load far more than an environment.

    `multiprocessing` does so to be able to unpickle what the script defines; here that is rarely anything.
    """
    main = sys.modules.get("__main__")
    try:
        needed = any(name in pickle.dumps(payload) for name in (b"__main__", b"__mp_main__"))
    except Exception:
        needed = True
    if main is None or needed:
        yield
        return
    held = {name: getattr(main, name) for name in ("__spec__", "__file__") if hasattr(main, name)}
    main.__spec__ = None
    if "__file__" in held:
        del main.__file__
    try:
        yield
    finally:
        for name, value in held.items():
            setattr(main, name, value)
