"""Environments as actors on a Ray cluster, behind the interface of `EnvPool`.

Promises as `EnvPool`: no call waits longer than its time-out, what hangs or dies is replaced. A node that is lost costs
the episodes on it; they are begun again on other nodes, or when nodes return. Ray sends pickled objects between its
nodes, so its ports belong in a network that you trust.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import gymnasium

from divopd_gym.errors import ConfigError, PoolError
from divopd_gym.pool import EnvPool
from divopd_gym.ray_worker import EnvActor, NoRoom, RayWorker

__all__ = ["RayEnvPool", "import_ray"]

_CLOSE_GRACE_S = 2.0
# What fails together mostly has one cause, a lost node, and counts as one failure. Until Ray knows that the node is lost
# it also places new actors there.
_ONE_CAUSE_S = 5.0
_AGAIN_S = 0.5


class RayEnvPool(EnvPool):
    """A fixed number of environments on the nodes of a Ray cluster.

    Args:
        env_id: Gymnasium id, or a function that builds the environment; its module must be importable on the nodes.
        env_kwargs: Its keyword arguments; paths in them are those of the nodes.
        workers: Number of environments.
        address: The cluster: "host:port", "ray://host:port", "auto", or "local" for one that is started on this machine
            and ends with the pool; None: the variable RAY_ADDRESS, else "local".
        cpus: CPUs that an environment takes of its node in Ray's reckoning; they mostly wait. Not for "local".
        resources: More of what a node must have, by Ray's names, such as ``{"env": 1}``.
        room_timeout_s: Seconds until some node has room for an environment. After that the pool gives up if no
            environment is left, and goes on waiting if some are.
        watch_s: Seconds between looks whether idle environments still live.
        **options: See `EnvPool`: time-outs, recycling, restarts.

    Raises:
        ConfigError: Ray is missing, or an argument cannot work.
    """

    def __init__(
        self,
        env_id: str | Callable[..., gymnasium.Env],
        env_kwargs: dict[str, Any] | None = None,
        workers: int = 1,
        *,
        address: str | None = None,
        cpus: float = 0.25,
        resources: dict[str, float] | None = None,
        room_timeout_s: float = 300.0,
        watch_s: float = 2.0,
        **options: Any,
    ) -> None:
        super().__init__(env_id, env_kwargs, workers, **options, start_method="spawn")
        if cpus < 0 or room_timeout_s <= 0 or watch_s <= 0:
            raise ConfigError(
                f"cpus is {cpus}, room_timeout_s {room_timeout_s}, watch_s {watch_s}; expected at least 0, and seconds "
                "above 0."
            )
        import_ray()
        self.address = address or os.environ.get("RAY_ADDRESS") or "local"
        self.cpus, self.resources = cpus, dict(resources or {})
        self.room_timeout_s, self.watch_s = room_timeout_s, watch_s
        self._connected = False
        self._actors: Any = None
        self._failed_at = float("-inf")

    async def start(self) -> None:
        """Connect to the cluster and have every environment built.

        Raises:
            PoolError: The cluster cannot be reached, has no room, or an environment could not be built.
        """
        if self._state == "new":
            await self._connect()
            import ray

            self._actors = ray.remote(EnvActor).options(
                num_cpus=0 if self.address == "local" else self.cpus,
                resources=self.resources or None,
                max_restarts=0,
                scheduling_strategy="SPREAD",
            )
        await super().start()
        self._background(self._watch())

    async def close(self, deadline_s: float = 10.0) -> None:
        """End every environment, and the cluster if it was started here and nobody else uses it."""
        began = time.monotonic()
        await super().close(deadline_s)
        if self._connected:
            self._connected = False
            left_s = max(deadline_s - (time.monotonic() - began), 1.0)
            with contextlib.suppress(asyncio.TimeoutError):
                leaving = asyncio.wrap_future(_thread.submit(_disconnect))
                await asyncio.wait_for(leaving, left_s)

    def pids(self) -> list[int]:
        """None: the processes are Ray's."""
        return []

    async def _connect(self) -> None:
        try:
            joining = asyncio.wrap_future(_thread.submit(_connect, self.address))
            await asyncio.wait_for(joining, self.room_timeout_s)
        except asyncio.TimeoutError:
            raise PoolError(
                f"The Ray cluster {self.address!r} did not answer within {self.room_timeout_s:g} s. Check ray_address, "
                "that its ports can be reached, and that this process has the cluster's token (RAY_AUTH_TOKEN)."
            ) from None
        self._connected = True

    async def _spawn(self) -> Any:
        worker = RayWorker(self._actors, self.env_id, self.env_kwargs, self._on_death)
        self._live.append(worker)  # type: ignore[arg-type]
        try:
            await worker.start(self.reset_timeout_s, self.room_timeout_s)
        except BaseException:
            if worker in self._live:
                self._live.remove(worker)  # type: ignore[arg-type]
            worker.kill()
            raise
        return worker

    def _after_failure(self, error: Exception) -> None:
        if self._state != "running" or self._broken is not None:
            return
        if isinstance(error, NoRoom):
            if any(worker.started for worker in self._live):
                self._background(self._replace(0.0))
            else:
                self._broken = PoolError(
                    f"Every environment of {self.env_id} is lost and none could be placed again: {error}"
                )
                self._fail_waiting(self._broken)
            return
        if time.monotonic() - self._failed_at < _ONE_CAUSE_S:
            self.counters["restarts"] += 1
            self._background(self._replace(_AGAIN_S))
            return
        self._failed_at = time.monotonic()
        super()._after_failure(error)

    async def _watch(self) -> None:
        """Look after the idle: nobody else would notice that their node is gone."""
        while True:
            await asyncio.sleep(self.watch_s)
            pings = [w.ask("ping", (), self.step_timeout_s, "a look at it") for w in list(self._idle)]
            await asyncio.gather(*pings, return_exceptions=True)


class _LastingThread:
    """Runs one call after another; Ray's processes end with the thread that started them, so this one never ends."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Future, Callable[..., None], tuple]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, call: Callable[..., None], *args: Any) -> Future:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="divopd-ray", daemon=True)
            self._thread.start()
        done: Future = Future()
        self._calls.put((done, call, args))
        return done

    def _run(self) -> None:
        while True:
            done, call, args = self._calls.get()
            if not done.set_running_or_notify_cancel():
                continue
            try:
                done.set_result(call(*args))
            except BaseException as error:
                done.set_exception(error)


_thread = _LastingThread()
_users = 0
_ours = False


def _connect(address: str) -> None:
    """Join the cluster, or start one; pools of one process share the connection."""
    global _users, _ours
    ray = import_ray()
    if not ray.is_initialized():
        options: dict[str, Any] = {"address": address, "log_to_driver": False, "logging_level": logging.ERROR}
        if address == "local":
            if not (os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH")):
                # Otherwise Ray writes one into the user's home. Nobody else may send it anything to unpickle.
                os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
            # Nothing is scheduled by CPUs there, and each would be a process started ahead.
            options |= {"num_cpus": 1, "num_gpus": 0, "include_dashboard": False}
            options |= {"object_store_memory": 80 * 1024**2}
        try:
            ray.init(**options)
        except Exception as error:
            raise PoolError(
                f"The Ray cluster {address!r} cannot be used ({type(error).__name__}: {error}). Check ray_address and "
                "that the same version of Ray runs there, or use pool: processes."
            ) from error
        _ours = True
    _users += 1


def _disconnect() -> None:
    global _users, _ours
    _users -= 1
    if _users == 0 and _ours:
        _ours = False
        import_ray().shutdown()


def import_ray() -> Any:
    """The module, without its reports of use.

    Raises:
        ConfigError: Ray is not installed.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise ConfigError(
            f"Environments on a Ray cluster need Ray, which cannot be imported ({error}). Install it with "
            "pip install 'divopd[ray]', or use pool: processes."
        ) from error
    return ray
