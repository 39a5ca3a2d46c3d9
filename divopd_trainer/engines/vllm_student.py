"""The student on vLLM servers: samples over HTTP with weights that are replaced while the run goes on.

Every response is of one version, and says which. `VLLMStudent.policy_version` rises only when every live server has
the new weights; a server that comes back later gets them before it serves.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from divopd_trainer.engines.base import EngineError, GenerateRequest, Generation
from divopd_trainer.engines.completions import (
    generate_body,
    no_room,
    read_completion,
    refuse_unfinished,
    room_for,
)
from divopd_trainer.engines.http import Server, ServerRefusal, ServerUnavailable
from divopd_trainer.engines.replicas import Replica, Replicas
from divopd_trainer.engines.sync import WeightSync
from divopd_trainer.explorer.deadline import within

__all__ = ["VLLMStudent"]

_PATH = "/v1/completions"
# Restarts of its server that one request outlives.
_MOST_LIVES = 4


@dataclass(frozen=True, eq=False)
class _Load:
    """Weights that were asked for; a version may be loaded twice with different weights."""

    number: int
    source: Any
    version: int


class VLLMStudent:
    """The policy behind one or more servers.

    Args:
        servers: All of the same model.
        max_model_len: Most tokens of prompt and response together; at most what the servers were started with.
        stop_ids: Ids that end a response where a request names none.
        sync: How weights get to a server; None: they never change.
        policy_version: Version of the weights that the servers were started with.
        per_server: Requests that one server is given at once.
        request_timeout_s: Deadline of a request, all attempts together.
        load_timeout_s: Deadline of bringing weights to one server.
        silent_s: See `Replicas`.

    Raises:
        ConfigError: No server.
    """

    name = "student"

    def __init__(
        self,
        servers: Sequence[Server],
        *,
        max_model_len: int,
        stop_ids: Sequence[int],
        sync: WeightSync | None = None,
        policy_version: int = 0,
        per_server: int = 64,
        request_timeout_s: float = 600.0,
        load_timeout_s: float = 300.0,
        silent_s: float = 30.0,
    ) -> None:
        self.max_model_len, self.stop_ids = max_model_len, tuple(int(i) for i in stop_ids)
        self.sync = sync
        # What every live server has, and what each is to have: the number of a load, its source and version. The
        # first weights are those that the servers were started with.
        self._common = self._wanted = _Load(0, None, policy_version)
        self._load_timeout_s = load_timeout_s
        self._loading = asyncio.Lock()
        self._retiring: set[asyncio.Task] = set()
        # Versions count anew in every run, and a server may keep what it cached for an earlier one.
        self._salt = secrets.token_hex(8)
        self.replicas = Replicas(
            servers,
            "student",
            per_server=per_server,
            on_start=self._provide,
            timeout_s=request_timeout_s,
            silent_s=silent_s,
        )
        self._tokens: dict[str, float] = dict.fromkeys(("generated_tokens", "prefill_tokens"), 0)

    @property
    def policy_version(self) -> int:
        """Version that every live server has."""
        return self._common.version

    @property
    def counters(self) -> dict[str, float]:
        """Totals since the start: tokens, requests, retries, restarts seen, seconds with a request in flight."""
        return {**self._tokens, **self.replicas.counters, "generate_s": self.replicas.busy_s}

    @property
    def gauges(self) -> dict[str, float]:
        """The largest difference between served and trained log-probs that was measured, in nats."""
        gaps = getattr(self.sync, "gaps", None)
        return {"served_gap": max(gaps)} if gaps else {}

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one response.

        Prompt plus response stay within `max_model_len`; a prompt that leaves no room is not sent at all. Greedy
        responses carry the log-probs of temperature 1, and none (NaN) where another temperature is asked for, which
        servers cannot report.

        Raises:
            EngineTimeout: No answer within the deadline.
            EngineError: The servers refuse it, or keep failing; or more draws a position are asked for.
        """
        begun, prompt = time.monotonic(), request.prompt_ids
        room = room_for(request, self.max_model_len)
        if not room:
            return no_room(self.policy_version)
        stops = request.stop_ids or self.stop_ids
        used: list[tuple[Replica, int]] = []
        version = self.policy_version

        def body(replica: Replica) -> dict[str, Any]:
            nonlocal version
            self._done_with(used)
            load = self._served(replica)
            used.append((replica, load))
            replica.named[load] = replica.named.get(load, 0) + 1
            version, model = replica.loaded[load]
            return generate_body(request, room, stops, model=model, cache_salt=f"{self._salt}-{load}")

        try:
            answer, replica = await self._ask(body, request.cache_key, used)
        finally:
            self._done_with(used)
        found = read_completion(answer, prompt, room, replica.server.url)
        self._tokens["generated_tokens"] += len(found.token_ids)
        self._tokens["prefill_tokens"] += found.prompt_tokens - found.cached_tokens
        logprobs = found.logprobs
        if request.greedy and request.temperature != 1:
            logprobs = np.full_like(logprobs, np.nan)
        return Generation(
            found.token_ids,
            logprobs,
            found.stop_reason,
            version,
            found.cached_tokens,
            time.monotonic() - begun,
        )

    async def _ask(
        self, body: Any, key: Hashable | None, used: list[tuple[Replica, int]]
    ) -> tuple[Any, Replica]:
        for attempt in range(_MOST_LIVES):
            try:
                return await self.replicas.ask(_PATH, body, refuse_unfinished, key=key)
            except ServerRefusal as error:
                # A restarted server knows no adapter; it is given it again.
                last = attempt == _MOST_LIVES - 1
                if error.status != 404 or not self._adapters or last or not used:
                    raise
                replica = used[-1][0]
                replica.forget_weights()
                self.replicas.mark_down(replica, str(error))
        raise AssertionError

    async def probe(self, request: GenerateRequest) -> list[Generation]:
        """The same response from every live server, to compare what they serve; in the order of the servers."""
        found = []
        for replica in self.replicas.members:
            if replica.state != "up":
                continue
            version, model = replica.loaded[self._served(replica)]
            room = room_for(request, self.max_model_len)
            # A salt of its own: what is cached must not answer.
            salt, stops = secrets.token_hex(8), request.stop_ids or self.stop_ids
            body = generate_body(request, room, stops, model=model, cache_salt=salt)
            reply = await replica.server.post(_PATH, body, self.replicas.timeout_s)
            done = read_completion(reply.body, request.prompt_ids, room, replica.server.url)
            found.append(Generation(done.token_ids, done.logprobs, done.stop_reason, version))
        return found

    async def load_weights(self, source: str | Path | Mapping[str, Any], version: int) -> None:
        """Bring weights to every live server, at the same time.

        A server that fails while it is given them is left out, and gets them when it is back.

        Raises:
            EngineError: No server has them; the version stays.
        """
        if self.sync is None:
            raise EngineError(
                f"Version {version} is to be loaded, but there is no way to bring weights to the vLLM servers; set "
                "weight_sync."
            )
        async with self._loading:
            await self.replicas.start()
            self._wanted = _Load(self._wanted.number + 1, source, version)
            live = [replica for replica in self.replicas.members if replica.state == "up"]
            outcomes = await asyncio.gather(*map(self._replace, live), return_exceptions=True)
            for outcome in outcomes:
                if isinstance(outcome, BaseException) and not isinstance(outcome, ServerUnavailable):
                    raise outcome
            if not any(outcome is None for outcome in outcomes):
                raise outcomes[0]
            self._common = self._wanted
            self._retire_old()

    async def _replace(self, replica: Replica) -> None:
        """Weights of a server that is up; it serves nothing meanwhile, unless it holds several beside each other."""
        replica.closed = not self._adapters
        try:
            await self._push(replica, self._wanted)
        except BaseException as error:
            # It may have part of the new weights: whoever looks at it next gives it all of them.
            replica.load = None
            self.replicas.mark_down(replica, str(error) or type(error).__name__)
            raise
        finally:
            replica.closed = False
            self.replicas.opened()

    async def _provide(self, replica: Replica, restarted: bool) -> None:
        """What a server needs before it serves: the newest weights, unless it was started with them or has them."""
        # Newer ones may come meanwhile, and are not brought here, for it is not up.
        while replica.load != self._wanted.number:
            await self._push(replica, self._wanted)

    async def _push(self, replica: Replica, wanted: _Load) -> None:
        async def push() -> None:
            # A load and a look at the server may both find that it needs them.
            async with replica.pushing:
                if replica.load == wanted.number:
                    return
                model = None
                if wanted.source is not None:
                    if not self._adapters:
                        await self.replicas.empty(replica)
                        replica.forget_weights()
                    model = await self.sync.push(replica.server, wanted.source, wanted.version, wanted.number)
                replica.load = wanted.number
                replica.loaded[wanted.number] = wanted.version, model

        try:
            await within(self._load_timeout_s, push())
        except asyncio.TimeoutError:
            raise ServerUnavailable(
                f"{replica.server.url} did not take version {wanted.version} within {self._load_timeout_s:.0f} s; see "
                "its log, or raise weight_sync_timeout.",
                down=True,
            ) from None

    def forget(self, cache_key: Hashable) -> None:
        """The conversation is over."""
        self.replicas.forget(cache_key)

    async def aclose(self) -> None:
        """Close every connection."""
        for task in self._retiring:
            task.cancel()
        await self.replicas.aclose()

    # --- adapters ----------------------------------------------------------------------------------------------

    @property
    def _adapters(self) -> bool:
        return self.sync is not None and self.sync.adapters

    def _served(self, replica: Replica) -> int:
        """Number of the weights that the next request to a server is answered by."""
        common = self._common.number
        return common if self._adapters and common in replica.loaded else replica.load

    def _done_with(self, used: list[tuple[Replica, int]]) -> None:
        """The request's last attempt is over."""
        if used:
            replica, load = used[-1]
            replica.named[load] -= 1
            if replica.named[load] <= 0:
                del replica.named[load]
            used.clear()
            self._retire_old()

    def _retire_old(self) -> None:
        if not self._adapters:
            return
        for replica in self.replicas.members:
            old = [n for n in replica.loaded if n < self._common.number and not replica.named.get(n)]
            for number in old:
                _, model = replica.loaded.pop(number)
                if model is None:
                    continue
                task = asyncio.ensure_future(self._retire(replica.server, model))
                self._retiring.add(task)
                task.add_done_callback(self._retiring.discard)

    async def _retire(self, server: Server, model: str) -> None:
        # A server that is gone has forgotten it anyway.
        with contextlib.suppress(EngineError):
            await self.sync.retire(server, model)
