"""Several servers of one model: the least loaded live one is asked, and what may pass is tried again elsewhere.

A server that cannot be reached is left out until it answers again. One that was restarted meanwhile is first given
back what it forgot (`on_restart`), and serves only then. Every wait ends with the deadline of its request.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from divopd_gym.errors import ConfigError
from divopd_trainer.engines.base import EngineClosed, EngineError, EngineTimeout
from divopd_trainer.engines.http import Server, ServerUnavailable
from divopd_trainer.explorer.deadline import within

__all__ = ["Replica", "Replicas"]

_MOST_ATTEMPTS = 6
_MOST_DEATHS = 4
_LOOK_AGAIN_S = (0.25, 15.0)
_BACKOFF_S = (0.2, 8.0)
_SILENT_S = 30.0
_STICKY = 4


@dataclass(eq=False)
class Replica:
    """One server and what is known of it.

    Attributes:
        server: Where.
        state: "new" (not looked at yet), "up", or "down".
        closed: Takes no new request, because its weights are being replaced.
        in_flight: Requests that it is serving.
        identity: Of the server's present life; None where it does not tell.
        vouched: Connections to it that are known to be to this life.
        found: Identity of the life that was found last, whether or not it came to serve.
        load: Number of the newest weights it has; None: unknown.
        loaded: Weights it holds beside each other by that number: their version, and the model that requests name
            (None: its own).
        named: Requests in flight by the number of the weights they name.
    """

    server: Server
    state: str = "new"
    closed: bool = False
    in_flight: int = 0
    identity: str | None = None
    vouched: int = 0
    found: str | None = None
    load: int | None = None
    loaded: dict[int, tuple[int, str | None]] = field(default_factory=dict)
    named: dict[int, int] = field(default_factory=dict)
    looking: asyncio.Task | None = None
    checking: asyncio.Lock = field(default_factory=asyncio.Lock)
    pushing: asyncio.Lock = field(default_factory=asyncio.Lock)
    why: str = ""

    def forget_weights(self) -> None:
        """What it serves is not known any more."""
        self.load = None
        self.loaded.clear()


class Replicas:
    """The servers of one model.

    Args:
        servers: At least one.
        role: "student" or "teacher", for messages.
        per_server: Requests that one server is given at once.
        on_start: Awaited with a replica before it serves for the first time, and whenever it was looked at again;
            ``restarted`` says that its server is another one than before. An error keeps it out. Nothing is awaited
            between its end and the replica's first request.
        timeout_s: Deadline of a request, all attempts together, in seconds.
        silent_s: Seconds without an answer after which a server is asked whether it is still alive.

    Raises:
        ConfigError: No server.
    """

    def __init__(
        self,
        servers: Sequence[Server],
        role: str,
        *,
        per_server: int = 64,
        on_start: Callable[[Replica, bool], Awaitable[None]] | None = None,
        timeout_s: float = 600.0,
        silent_s: float = _SILENT_S,
    ) -> None:
        if not servers:
            raise ConfigError(f"A {role} was made without a server; expected at least one. Give {role}_urls.")
        self.members = [Replica(server) for server in servers]
        self.role, self.per_server, self.timeout_s = role, per_server, timeout_s
        self._on_start, self._silent_s = on_start, silent_s
        self._places: dict[Hashable, Replica] = {}
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task] = set()
        self._closed = False
        self.counters: dict[str, float] = dict.fromkeys(("requests", "retries", "restarts"), 0)
        self._running, self._busy_s, self._busy_since = 0, 0.0, 0.0

    @property
    def in_flight(self) -> int:
        """Requests being served."""
        return sum(replica.in_flight for replica in self.members)

    @property
    def busy_s(self) -> float:
        """Seconds during which at least one request was being served."""
        return self._busy_s + (time.monotonic() - self._busy_since if self._running else 0.0)

    def forget(self, key: Hashable) -> None:
        """A conversation is over."""
        self._places.pop(key, None)

    async def ask(
        self,
        path: str,
        body: Callable[[Replica], dict[str, Any]],
        check: Callable[[Any], Any] = lambda answer: None,
        *,
        key: Hashable | None = None,
    ) -> tuple[Any, Replica]:
        """POST to one of the servers, and again, to another if there is one, after a failure that may pass.

        Args:
            path: Such as ``/v1/completions``.
            body: Makes the request for the server that will get it.
            check: Called with an answer; it may raise `ServerUnavailable`, which is tried again.
            key: Names a conversation; it stays where it was while that server is not much busier than the others,
                because its prefix is cached there.

        Returns:
            The answer and who gave it.

        Raises:
            EngineTimeout: The deadline passed; the message holds the last failure.
            ServerUnavailable: It failed too often.
            ServerRefusal: The server will never serve this.
        """
        deadline = time.monotonic() + self.timeout_s
        attempts, deaths, avoid, last = 0, 0, None, None
        while True:
            replica = await self._take(deadline, key, avoid, last)
            try:
                answer = await self._attempt(replica, path, body, deadline)
                check(answer)
                return answer, replica
            except ServerUnavailable as error:
                last, avoid = error, replica
            finally:
                self._give_back(replica)
            if last.down:
                self.mark_down(replica, str(last))
                deaths += 1
                if deaths >= _MOST_DEATHS:
                    # It may be the request that kills them.
                    raise ServerUnavailable(f"{last} Servers were lost {deaths} times over this one request.")
                wait = 0.0
            else:
                attempts += 1
                if attempts >= _MOST_ATTEMPTS:
                    raise ServerUnavailable(f"{last} This was attempt {attempts}; no more are made.")
                wait = min(_BACKOFF_S[1], _BACKOFF_S[0] * 2**attempts) * random.uniform(0.75, 1.25)
                wait = max(wait, min(last.retry_after_s, 30.0))
            if time.monotonic() + wait >= deadline:
                raise self._too_late(last)
            self.counters["retries"] += 1
            await asyncio.sleep(wait)

    async def _attempt(
        self, replica: Replica, path: str, body: Callable[[Replica], dict[str, Any]], deadline: float
    ) -> Any:
        left = max(0.05, deadline - time.monotonic())
        self.counters["requests"] += 1
        call = asyncio.ensure_future(replica.server.post(path, body(replica), left))
        try:
            while not call.done():
                await asyncio.wait({call}, timeout=self._silent_s)
                if not call.done() and not await replica.server.healthy(min(10.0, self._silent_s)):
                    raise ServerUnavailable(
                        f"{replica.server.url} has not answered for {self._silent_s:.0f} s, nor does it say that it "
                        "is healthy.",
                        down=True,
                    )
        finally:
            call.cancel()
        reply = call.result()
        # Connections do not outlive a server: while no new one was opened it is the server that was looked at.
        if replica.server.opened > replica.vouched and not await self._is_the_same(replica):
            raise ServerUnavailable(
                f"{replica.server.url} was restarted; what it answered may be of other weights.", down=True
            )
        return reply.body

    async def _is_the_same(self, replica: Replica) -> bool:
        # One look answers for all that wait.
        async with replica.checking:
            if replica.server.opened <= replica.vouched:
                return True
            try:
                identity, vouched = await replica.server.identity()
            except EngineError:
                return False
            if identity == replica.identity:
                replica.vouched = max(replica.vouched, vouched)
            return identity == replica.identity

    async def _take(
        self, deadline: float, key: Hashable | None, avoid: Replica | None, last: EngineError | None
    ) -> Replica:
        """Wait for a server with room, and count a request in."""
        while True:
            if self._closed:
                raise EngineClosed(f"The {self.role}'s servers are not used any more.")
            for replica in self.members:
                if replica.state != "up":
                    self._look(replica)
            open_ = [r for r in self.members if r.state == "up" and not r.closed]
            free = [r for r in open_ if r.in_flight < self.per_server]
            if others := [r for r in free if r is not avoid]:
                chosen = min(others, key=lambda r: r.in_flight)
                place = self._places.get(key) if key is not None else None
                if place in others and place.in_flight <= chosen.in_flight + _STICKY:
                    chosen = place
            else:
                # The one that just failed is better than none.
                chosen = next(iter(free), None)
            if chosen is not None:
                if key is not None:
                    self._places[key] = chosen
                chosen.in_flight += 1
                if self._running == 0:
                    self._busy_since = time.monotonic()
                self._running += 1
                return chosen
            left = deadline - time.monotonic()
            if left <= 0:
                raise self._too_late(last)
            self._changed.clear()
            try:
                await within(min(1.0, left), self._changed.wait())
            except asyncio.TimeoutError:
                continue

    def _give_back(self, replica: Replica) -> None:
        replica.in_flight -= 1
        self._running -= 1
        if self._running == 0:
            self._busy_s += time.monotonic() - self._busy_since
        self._changed.set()

    def _too_late(self, last: EngineError | None) -> EngineTimeout:
        reasons = [str(last)] if last else [r.why for r in self.members if r.why]
        return EngineTimeout(
            f"No {self.role} server answered within {self.timeout_s:.0f} s"
            f"{': ' + reasons[-1] if reasons else ' (all were busy)'} Raise request_timeout, or see that the "
            f"servers run: {', '.join(r.server.url for r in self.members)}."
        )

    # --- servers that come and go ------------------------------------------------------------------------------

    def mark_down(self, replica: Replica, why: str) -> None:
        """Use it no more until it was looked at."""
        replica.why = why
        if replica.state == "up":
            replica.state = "down"
        self._look(replica)

    async def start(self) -> None:
        """Look at every server once; those that do not answer are left out until they do.

        Raises:
            EngineTimeout: None answered before the deadline.
        """
        deadline = time.monotonic() + self.timeout_s
        while not any(replica.state == "up" for replica in self.members):
            replica = await self._take(deadline, None, None, None)
            self._give_back(replica)

    def _look(self, replica: Replica) -> None:
        if replica.looking is None or replica.looking.done():
            replica.looking = asyncio.ensure_future(self._bring_up(replica))
            self._tasks.add(replica.looking)
            replica.looking.add_done_callback(self._tasks.discard)

    async def _bring_up(self, replica: Replica) -> None:
        """Look at a server until it is well, and give it what it needs."""
        pause = _LOOK_AGAIN_S[0]
        while not self._closed:
            try:
                await replica.server.get("/health", 5.0)
                identity, vouched = await replica.server.identity()
                known = replica.state != "new"
                # One that does not tell its lives apart may have been restarted.
                restarted = known and (identity is None or identity != replica.identity)
                if restarted:
                    replica.forget_weights()
                    # Once a life, however often it is looked at before it serves.
                    if identity is None or identity != replica.found:
                        self.counters["restarts"] += 1
                replica.found = identity
                if self._on_start is not None:
                    await self._on_start(replica, restarted)
                replica.identity, replica.vouched = identity, vouched
                replica.state, replica.why = "up", ""
                self._changed.set()
                return
            except Exception as error:
                # Whatever it is, the next look may find it mended; requests say it when their time is up.
                replica.why = (
                    str(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"
                )
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LOOK_AGAIN_S[1])

    async def empty(self, replica: Replica) -> None:
        """Wait until a closed replica serves nothing."""
        while replica.in_flight:
            self._changed.clear()
            try:
                await within(0.5, self._changed.wait())
            except asyncio.TimeoutError:
                continue

    def opened(self) -> None:
        """Say that a replica may have room again."""
        self._changed.set()

    async def aclose(self) -> None:
        """Give up looking and close all connections."""
        self._closed = True
        for task in list(self._tasks):
            task.cancel()
        for replica in self.members:
            await replica.server.aclose()
