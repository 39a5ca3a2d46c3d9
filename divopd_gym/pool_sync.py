"""`EnvPool` for programs without asyncio: the same calls, blocking; the loop runs in a thread of its own.

with SyncEnvPool("divopd_gym/ALFWorld-v0", {"split": "generated"}, workers=4) as pool, pool.lend() as env:
    observation, info = env.reset()
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

from divopd_gym.errors import PoolError
from divopd_gym.pool import EnvHandle, EnvPool

__all__ = ["SyncEnvHandle", "SyncEnvPool"]

T = TypeVar("T")
_END_S = 10.0  # for the loop's thread; a worker that hangs is the pool's close to deal with


class SyncEnvHandle:
    """`EnvHandle` with blocking calls; several threads may use one handle each."""

    def __init__(self, pool: SyncEnvPool, handle: EnvHandle) -> None:
        self._pool, self.handle = pool, handle

    @property
    def pid(self) -> int:
        """Process id of the worker."""
        return self.handle.pid

    def reset(self, task: str | None = None, seed: int | None = None) -> tuple[str, dict]:
        """See `EnvHandle.reset`."""
        return self._pool._run(self.handle.reset(task, seed))

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        """See `EnvHandle.step`."""
        return self._pool._run(self.handle.step(action))

    def expert_act(self) -> str:
        """See `EnvHandle.expert_act`."""
        return self._pool._run(self.handle.expert_act())

    def call(self, name: str, *args: Any) -> Any:
        """See `EnvHandle.call`."""
        return self._pool._run(self.handle.call(name, *args))


class SyncEnvPool:
    """An `EnvPool` with blocking calls. Takes the same arguments; as a context it starts and closes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.pool = EnvPool(*args, **kwargs)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    @property
    def counters(self) -> dict[str, int]:
        """See `EnvPool.counters`."""
        return self.pool.counters

    def start(self) -> None:
        """See `EnvPool.start`."""
        loop = asyncio.new_event_loop()
        self._loop = loop
        self._thread = threading.Thread(target=_serve, args=(loop,), name="divopd-env-pool", daemon=True)
        self._thread.start()
        try:
            self._run(self.pool.start())
        except BaseException:
            self._end_loop()
            raise

    def close(self, deadline_s: float = 10.0) -> None:
        """See `EnvPool.close`."""
        if self._loop is not None:
            try:
                self._run(self.pool.close(deadline_s))
            finally:
                self._end_loop()

    def acquire(self, timeout_s: float | None = None) -> SyncEnvHandle:
        """See `EnvPool.acquire`."""
        return SyncEnvHandle(self, self._run(self.pool.acquire(timeout_s)))

    def release(self, env: SyncEnvHandle) -> None:
        """See `EnvPool.release`."""

        async def release() -> None:
            self.pool.release(env.handle)

        self._run(release())

    @contextlib.contextmanager
    def lend(self, timeout_s: float | None = None) -> Iterator[SyncEnvHandle]:
        """See `EnvPool.lend`."""
        env = self.acquire(timeout_s)
        try:
            yield env
        finally:
            self.release(env)

    def pids(self) -> list[int]:
        """See `EnvPool.pids`."""
        return self.pool.pids()

    def __enter__(self) -> SyncEnvPool:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        if self._loop is None:
            work.close()
            raise PoolError("The pool is not running; call start(), or use it in a with statement.")
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _end_loop(self) -> None:
        if self._loop is not None:
            loop, thread, self._loop, self._thread = self._loop, self._thread, None, None
            loop.call_soon_threadsafe(loop.stop)
            thread.join(_END_S)


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    """Run the loop until it is stopped, then end its helper threads and give its descriptors back."""
    try:
        loop.run_forever()
        loop.run_until_complete(loop.shutdown_default_executor())
    finally:
        loop.close()
