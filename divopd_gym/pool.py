"""Processes that run environments, one each, behind an asyncio front.

Promises: no call waits longer than its time-out; a worker that hangs is killed and one that dies is noticed at once,
and either is replaced (up to a cap); workers are renewed after a number of episodes; `close`, the end of the
process and its sudden death all end every worker and leave no temporary file.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import pickle
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

import gymnasium

from divopd_gym.errors import ConfigError, PoolError, WorkerDied, WorkerTimeout
from divopd_gym.pool_process import WorkerProcess, end_processes
from divopd_gym.pool_temp import PoolTemp
from divopd_gym.pool_worker import EnvError

__all__ = ["EnvError", "EnvHandle", "EnvPool"]

_CLOSE_GRACE_S = 2.0
_MAX_BACKOFF_S = 5.0
# What the environments import only when they are built: about a second of CPU that the fork server pays once.
_LATE_IMPORTS = {
    "divopd_gym/ALFWorld-v0": (
        "textworld.envs.pddl.logic",
        "textworld.envs.pddl.textgen",
        "fast_downward.interface",
    ),
}


class EnvHandle:
    """One worker, lent for one or more episodes; from `EnvPool.acquire`, back with `EnvPool.release`.

    Attributes:
        task: Task of the running episode.
        turns: Turns played in it.
    """

    def __init__(self, pool: EnvPool, worker: WorkerProcess) -> None:
        self._pool, self._worker = pool, worker
        self._released = False
        self.task: str | None = None
        self.turns = 0

    @property
    def pid(self) -> int:
        """Process id of the worker."""
        return self._worker.pid

    async def reset(self, task: str | None = None, seed: int | None = None) -> tuple[str, dict]:
        """Begin an episode.

        Args:
            task: Its task; None lets the seed decide.
            seed: Seed of the reset.

        Returns:
            Observation and info.

        Raises:
            EnvError: The environment raised; the worker can go on with another reset.
            WorkerDied: The process ended; release the handle and acquire another.
            WorkerTimeout: No answer in time; the process was killed. Release and acquire another.
        """
        self.task, self.turns = task, 0
        observation, info = await self._ask("reset", (task, seed), self._pool.reset_timeout_s)
        self.task = info.get("task", task)
        self._worker.episodes += 1
        self._pool.counters["episodes"] += 1
        return observation, info

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        """Play one turn; Gymnasium's five values. Raises as `reset` does."""
        outcome = await self._ask("step", (action,), self._pool.step_timeout_s)
        self.turns += 1
        self._pool.counters["turns"] += 1
        return outcome

    async def expert_act(self) -> str:
        """What the environment's expert would do now; told of everything played. Raises as `reset` does."""
        return await self._ask("expert_act", (), self._pool.step_timeout_s)

    async def call(self, name: str, *args: Any) -> Any:
        """The result of a method of the environment, or the value of an attribute. Raises as `reset` does."""
        return await self._ask("call", (name, *args), self._pool.reset_timeout_s)

    async def _ask(self, name: str, args: tuple, timeout_s: float) -> Any:
        if self._released:
            raise PoolError(f"{name}() on a released handle; acquire the environment again before using it.")
        where = f"{name}(), task {self.task!r}, turn {self.turns}"
        try:
            return await self._worker.ask(name, args, timeout_s, where)
        except WorkerTimeout:
            self._pool.counters["timeouts"] += 1
            raise
        except EnvError:
            self._pool.counters["env_errors"] += 1
            raise


class EnvPool:
    """A fixed number of environment processes.

    Use it within one event loop. `divopd_gym.pool_sync.SyncEnvPool` (also ``EnvPool.sync``) is the same without asyncio.

    Args:
        env_id: Gymnasium id, or a picklable function that builds the environment.
        env_kwargs: Its keyword arguments.
        workers: Number of processes.
        step_timeout_s: Seconds that a turn may take.
        reset_timeout_s: Seconds that building the environment, a reset or a call may take.
        recycle_after: Episodes after which a process is renewed; None for never.
        max_restarts: Replacements without an episode in between that went well, after which the pool gives up.
        start_method: "forkserver" (a new worker costs milliseconds, since the modules are loaded already),
            "spawn" or "fork". The last two start a worker on the event loop's own thread.
        preload: Modules for the fork server to import; None takes those of the environment. The first pool of a
            process decides.

    Attributes:
        counters: deaths, timeouts, restarts, recycled, episodes, turns, env_errors. Deaths include
            workers killed after a time-out.

    Raises:
        ConfigError: An argument cannot work.
    """

    def __init__(
        self,
        env_id: str | Callable[..., gymnasium.Env],
        env_kwargs: dict[str, Any] | None = None,
        workers: int = 1,
        *,
        step_timeout_s: float = 30.0,
        reset_timeout_s: float = 120.0,
        recycle_after: int | None = 500,
        max_restarts: int = 10,
        start_method: str = "forkserver",
        preload: tuple[str, ...] | None = None,
    ) -> None:
        self.env_id, self.env_kwargs, self.workers = env_id, dict(env_kwargs or {}), workers
        self.step_timeout_s, self.reset_timeout_s = step_timeout_s, reset_timeout_s
        self.recycle_after, self.max_restarts = recycle_after, max_restarts
        self._check(start_method)
        self._context: Any = multiprocessing.get_context(start_method)
        if start_method == "forkserver":
            self._context.set_forkserver_preload(list(_modules_of(env_id) if preload is None else preload))
        self.counters: dict[str, int] = dict.fromkeys(
            ("deaths", "timeouts", "restarts", "recycled", "episodes", "turns", "env_errors"), 0
        )
        self._live: list[WorkerProcess] = []
        self._idle: deque[WorkerProcess] = deque()
        self._waiting: deque[asyncio.Future] = deque()
        self._tasks: set[asyncio.Task] = set()
        self._failures = 0
        self._broken: PoolError | None = None
        self._state = "new"
        self._temp: PoolTemp | None = None
        # Kept apart from the pool, so that they can be ended when the pool itself is gone.
        self._processes: set[Any] = set()
        self._finalizer: weakref.finalize | None = None

    @classmethod
    def sync(cls, *args: Any, **kwargs: Any) -> Any:
        """A `SyncEnvPool` with these arguments."""
        from divopd_gym.pool_sync import SyncEnvPool

        return SyncEnvPool(*args, **kwargs)

    async def start(self) -> None:
        """Start every worker and wait until each has built its environment.

        Raises:
            PoolError: A worker could not; the cause is in the message, and nothing is left running.
        """
        if self._state != "new":
            raise PoolError(
                f"start() on a pool that is {self._state}; expected a new one. Make another pool."
            )
        self._state = "starting"
        self._temp = PoolTemp()
        self._finalizer = weakref.finalize(self, end_processes, self._processes, self._temp, os.getpid())
        starts = [asyncio.ensure_future(self._spawn()) for _ in range(self.workers)]
        try:
            for worker in await asyncio.gather(*starts):
                self._offer(worker)
            self._state = "running"
        except BaseException as error:
            for start in starts:
                start.cancel()
            await asyncio.gather(*starts, return_exceptions=True)
            await self.close()
            if isinstance(error, Exception) and not isinstance(error, PoolError):
                raise PoolError(f"The workers of {self.env_id} could not be started: {error}") from error
            raise

    async def close(self, deadline_s: float = 10.0) -> None:
        """End every worker: asked first, killed after two seconds, all within the deadline. May be repeated."""
        if self._state == "closed":
            return
        self._state = "closed"
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        self._fail_waiting(PoolError("The pool was closed while an environment was awaited."))
        with contextlib.suppress(asyncio.TimeoutError):
            ends = (w.shut(_CLOSE_GRACE_S) for w in list(self._live))
            await asyncio.wait_for(asyncio.gather(*tasks, *ends, return_exceptions=True), deadline_s)
        self._live.clear()
        self._idle.clear()
        if self._finalizer is not None:
            self._finalizer()

    async def __aenter__(self) -> EnvPool:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def acquire(self, timeout_s: float | None = None) -> EnvHandle:
        """Wait for a free worker, first come first served.

        Args:
            timeout_s: Seconds to wait at most; None waits as long as the pool is whole.

        Raises:
            PoolError: The pool is not running, it gave up on restarting workers, or the wait was too long.
        """
        if self._broken is not None:
            raise self._broken
        if self._state != "running":
            raise PoolError(
                f"acquire() on a pool that is {self._state}; expected a running one. Call start()."
            )
        if self._idle:
            return EnvHandle(self, self._idle.popleft())
        turn: asyncio.Future[WorkerProcess] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            done, _ = await asyncio.wait({turn}, timeout=timeout_s)
        except asyncio.CancelledError:
            self._withdraw(turn)
            raise
        if not done:
            self._withdraw(turn)
            raise PoolError(
                f"No environment of {self.env_id} became free within {timeout_s:g} s; all {self.workers} workers are "
                "in use or restarting. Use more workers, or wait longer."
            )
        return EnvHandle(self, turn.result())

    def release(self, handle: EnvHandle) -> None:
        """Give a worker back, whatever state its episode is in; a second time does nothing."""
        if handle._released:
            return
        handle._released = True
        worker = handle._worker
        if self._state != "running" or worker.dead or worker not in self._live:
            return
        if handle.turns:
            self._failures = 0
        if self.recycle_after is not None and worker.episodes >= self.recycle_after:
            self.counters["recycled"] += 1
            self._retire(worker)
            self._background(self._replace(0.0))
        elif worker.waiting:
            # A call was given up half-way; its answer must have come before the next one is asked.
            self._background(self._settle(worker))
        else:
            self._offer(worker)

    @contextlib.asynccontextmanager
    async def lend(self, timeout_s: float | None = None) -> AsyncIterator[EnvHandle]:
        """`acquire` and `release` as a context."""
        handle = await self.acquire(timeout_s)
        try:
            yield handle
        finally:
            self.release(handle)

    def pids(self) -> list[int]:
        """Process ids of the live workers."""
        return [w.pid for w in self._live if not w.dead]

    async def _spawn(self) -> WorkerProcess:
        assert self._temp is not None
        worker = WorkerProcess(
            self._context, self.env_id, self.env_kwargs, self._temp, self._processes, self._on_death
        )
        self._live.append(worker)
        try:
            await worker.start(self.reset_timeout_s)
        except BaseException:
            if worker in self._live:
                self._live.remove(worker)
            worker.kill()
            raise
        return worker

    async def _replace(self, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        try:
            worker = await self._spawn()
        except Exception as error:
            self._after_failure(error)
        else:
            self._offer(worker)

    def _on_death(self, worker: WorkerProcess, error: WorkerDied) -> None:
        # Retired workers and those still starting are no longer, or not yet, anybody's loss.
        if worker not in self._live or not worker.started:
            return
        self._live.remove(worker)
        with contextlib.suppress(ValueError):
            self._idle.remove(worker)
        if self._state == "running":
            self.counters["deaths"] += 1
            self._after_failure(error)

    def _after_failure(self, error: Exception) -> None:
        if self._state != "running" or self._broken is not None:
            return
        self._failures += 1
        if self._failures > self.max_restarts:
            self._broken = PoolError(
                f"Workers of {self.env_id} failed {self._failures} times without an episode in between that went well; "
                f"expected at most {self.max_restarts} (max_restarts). The last failure: {error} "
                "Mend its cause, or raise max_restarts."
            )
            self._fail_waiting(self._broken)
            return
        self.counters["restarts"] += 1
        delay_s = 0.0 if self._failures == 1 else min(0.05 * 2**self._failures, _MAX_BACKOFF_S)
        self._background(self._replace(delay_s))

    def _retire(self, worker: WorkerProcess) -> None:
        self._live.remove(worker)
        self._background(worker.shut(_CLOSE_GRACE_S))

    async def _settle(self, worker: WorkerProcess) -> None:
        if not await worker.settled():
            self.counters["timeouts"] += 1
            worker.kill()
        elif not worker.dead:
            self._offer(worker)

    def _offer(self, worker: WorkerProcess) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(worker)
                return
        self._idle.append(worker)

    def _withdraw(self, turn: asyncio.Future) -> None:
        with contextlib.suppress(ValueError):
            self._waiting.remove(turn)
        if turn.done() and not turn.cancelled() and turn.exception() is None and not turn.result().dead:
            self._offer(turn.result())
        turn.cancel()

    def _fail_waiting(self, error: PoolError) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_exception(error)

    def _background(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _check(self, start_method: str) -> None:
        if self.workers < 1:
            raise ConfigError(f"workers is {self.workers}; expected at least 1.")
        if self.step_timeout_s <= 0 or self.reset_timeout_s <= 0:
            raise ConfigError(
                f"step_timeout_s is {self.step_timeout_s}, reset_timeout_s {self.reset_timeout_s}; expected seconds > 0."
            )
        if self.recycle_after is not None and self.recycle_after < 1:
            raise ConfigError(
                f"recycle_after is {self.recycle_after}; expected at least 1 episode, or None for never."
            )
        known = multiprocessing.get_all_start_methods()
        if start_method not in known:
            raise ConfigError(f"start_method is {start_method!r}; this system has {', '.join(known)}.")
        if start_method != "fork":
            try:
                pickle.dumps((self.env_id, self.env_kwargs))
            except Exception as error:
                raise ConfigError(
                    f"The environment's id or arguments cannot be sent to another process: {error}. "
                    "Use a Gymnasium id or a function at the top of a module, and plain values."
                ) from error


def _modules_of(env_id: str | Callable[..., gymnasium.Env]) -> list[str]:
    """Modules whose import in the fork server makes a new worker cheap."""
    modules = ["divopd_gym", "divopd_gym.pool_worker"]
    if callable(env_id):
        modules.append(env_id.__module__)
    elif ":" in env_id:
        modules.append(env_id.partition(":")[0])
    else:
        import divopd_gym  # noqa: F401  (registers the ids)

        spec = gymnasium.registry.get(env_id)
        if spec is not None and isinstance(spec.entry_point, str):
            modules.append(spec.entry_point.partition(":")[0])
        modules.extend(_LATE_IMPORTS.get(env_id, ()))
    return modules
