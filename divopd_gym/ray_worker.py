"""One environment in an actor of a Ray cluster: the actor, and the pool's side of it.

`RayWorker` has what `EnvPool` asks of a worker. Ray never starts an actor again by itself; the pool does.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

from divopd_gym.errors import PoolError, WorkerDied, WorkerTimeout
from divopd_gym.pool_temp import PoolTemp
from divopd_gym.pool_worker import HEADER, READY, EnvServer, decode, encode, error_answer, make_env

__all__ = ["EnvActor", "NoRoom", "RayWorker"]

_numbers = itertools.count()


class NoRoom(PoolError):
    """No node of the cluster had room for an environment in time."""


class EnvActor:
    """Runs one environment on some node; one request at a time, in order."""

    def __init__(self) -> None:
        # Of its own and swept by the next one on this node, whatever becomes of this process.
        self._temp = PoolTemp()
        os.environ["TMPDIR"] = tempfile.tempdir = self._temp.worker_dir()
        self._server: EnvServer | None = None

    def node(self) -> str:
        """The id of the node it runs on."""
        import ray

        return ray.get_runtime_context().get_node_id()

    def ask(self, name: str, args: tuple) -> bytes:
        """The answer to a request as `pool_worker.encode` writes it, errors of the environment included."""
        if name == "ping":
            return encode(READY, True, None)
        if name == "build":
            try:
                self._server = EnvServer(make_env(*args), args[0])
            except Exception as error:
                return error_answer(READY, error, f"building {args[0]}", None)
            return encode(READY, True, None)
        assert self._server is not None
        answer = self._server.answer(READY, name, args)
        if name == "close":
            self._temp.close()
        return answer


class RayWorker:
    """The pool's side of one actor.

    Args:
        actor_class: `EnvActor` as a Ray actor class, resources set.
        env_id: See `RayEnvPool`.
        env_kwargs: See `RayEnvPool`.
        on_death: Called once when it ended, however that came.

    Attributes:
        episodes: Episodes begun.
        started: Whether its environment was built.
        dead: Whether it ended or is being killed.
        node: Id of the node it runs on; empty before it has one.
        waiting: Answers that have not come yet.
    """

    # A process id means nothing on another machine, and nobody here may kill by it.
    pid = -1

    def __init__(
        self,
        actor_class: Any,
        env_id: Any,
        env_kwargs: dict[str, Any],
        on_death: Callable[[Any, WorkerDied], None],
    ) -> None:
        self._class, self._env, self._on_death = actor_class, (env_id, env_kwargs), on_death
        self.name = f"divopd-ray-env-{next(_numbers)}"
        self.episodes = 0
        self.started = self.dead = self._told = False
        self.node = ""
        self.waiting: set[asyncio.Future] = set()
        self._actor: Any = None
        self._deadline = 0.0

    async def start(self, timeout_s: float, room_s: float) -> None:
        """Have the actor placed on a node and the environment built there.

        Args:
            timeout_s: Seconds for building the environment.
            room_s: Seconds until some node has room for it.

        Raises:
            NoRoom: No node had.
            EnvError: Building the environment raised.
            WorkerDied: The actor or its node ended meanwhile.
            WorkerTimeout: Building took too long.
        """
        self._actor = self._class.remote()
        where = "finding a node"
        placed = self._sent(self._actor.node.remote())
        done, _ = await asyncio.wait({placed}, timeout=room_s)
        if not done:
            self.kill()
            raise NoRoom(
                f"No node of the Ray cluster had room for an environment of {self._env[0]} within {room_s:g} s. "
                "See 'ray status' for what the nodes have; add nodes, use fewer env_workers, or ask for less each."
            )
        self.node = self._result(placed, where)
        await self.ask("build", self._env, timeout_s, "building the environment")
        self.started = True

    async def ask(self, name: str, args: tuple, timeout_s: float, where: str) -> Any:
        """Send a request and wait for its answer.

        Args:
            name: What to do.
            args: Its arguments.
            timeout_s: Seconds after which the actor is killed.
            where: What is going on, for messages.

        Raises:
            EnvError: The environment raised.
            WorkerDied: The actor or its node ended.
            WorkerTimeout: There was no answer in time.
        """
        if self.dead or self._actor is None:
            raise self._died(where, "it had ended before")
        answer = self._sent(self._actor.ask.remote(name, args))
        self._deadline = time.monotonic() + timeout_s
        done, _ = await asyncio.wait({answer}, timeout=timeout_s)
        if not done:
            self.kill()
            raise WorkerTimeout(
                f"Environment worker {self.name} (Ray node {self.node[:8]}, {self._env[0]}) gave no answer within "
                f"{timeout_s:g} s in {where}; it was killed and the episode is lost. If this is normal for the "
                "environment, raise the time-out."
            )
        message = self._result(answer, where)
        _, _, ok = HEADER.unpack(message[: HEADER.size])
        try:
            payload = decode(message[HEADER.size :])
        except Exception as error:
            raise PoolError(f"An answer of {self._env[0]} in {where} cannot be read: {error}") from error
        if ok:
            return payload
        report, cause = payload
        raise report from cause

    async def settled(self) -> bool:
        """Wait until no answer is outstanding; whether that came within the time-outs of the calls."""
        if not self.waiting:
            return True
        _, late = await asyncio.wait(set(self.waiting), timeout=max(self._deadline - time.monotonic(), 0.0))
        return not late

    async def shut(self, grace_s: float) -> None:
        """Ask it to close its environment; kill it afterwards, or when the grace is over."""
        if not self.dead and self.started:
            with contextlib.suppress(Exception):
                await self.ask("close", (), grace_s, "close()")
        self.kill()

    def kill(self) -> None:
        """End the actor at once; it may be gone already."""
        if self._actor is not None:
            import ray

            with contextlib.suppress(Exception):
                ray.kill(self._actor)
        self._lost("it was killed")

    def _sent(self, reference: Any) -> asyncio.Future:
        answer = asyncio.wrap_future(reference.future())
        self.waiting.add(answer)
        answer.add_done_callback(self._ended)
        return answer

    def _ended(self, answer: asyncio.Future) -> None:
        self.waiting.discard(answer)
        if not answer.cancelled() and answer.exception() is not None:
            self._lost(str(answer.exception()))

    def _result(self, answer: asyncio.Future, where: str) -> Any:
        try:
            return answer.result()
        except Exception as error:
            self._lost(str(error))
            raise self._died(where, str(error)) from error

    def _lost(self, why: str) -> None:
        self.dead = True
        if not self._told:
            self._told = True
            self._on_death(self, self._died("an episode or between two", why))

    def _died(self, where: str, why: str) -> WorkerDied:
        lines = [line.strip() for line in why.splitlines() if line.strip()]
        return WorkerDied(
            f"Environment worker {self.name} (Ray node {self.node[:8] or 'none'}, {self._env[0]}) ended in {where}; the "
            f"episode is lost. Ray says: {' '.join(lines[:3])}"
        )
