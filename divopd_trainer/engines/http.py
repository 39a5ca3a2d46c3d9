"""One vLLM server over HTTP: each call has a deadline, each failure says whether it may pass, and a restart shows.

Keys come from environment variables when a request is made; they are kept in no object and shown in no message.
Nothing here tries again: `divopd_trainer.engines.replicas` does.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import weakref
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from divopd_gym.errors import ConfigError
from divopd_trainer.engines.addresses import check_url
from divopd_trainer.engines.base import EngineError
from divopd_trainer.explorer.deadline import within

__all__ = [
    "BadAnswer",
    "PASSING_STATUS",
    "Reply",
    "Server",
    "ServerRefusal",
    "ServerUnavailable",
]

PASSING_STATUS = frozenset({408, 429, 500, 502, 503, 504})
"""Answers after which the same request may succeed; any other from 300 on will be given again."""

# vLLM closes connections that were idle for 5 s; a request on one that is just being closed would fail for nothing.
_KEEP_IDLE_S = 3.0
_LARGE_BODY = 1 << 18


class ServerUnavailable(EngineError):
    """A request that failed for a reason that may pass.

    Attributes:
        down: The server could not be reached, or is another one than before: ask no more before it is looked at.
        retry_after_s: How long the server asked to be left alone.
    """

    def __init__(self, message: str, *, down: bool = False, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.down, self.retry_after_s = down, retry_after_s


class ServerRefusal(EngineError):
    """A request that the server will never serve.

    Attributes:
        status: HTTP status.
    """

    def __init__(self, message: str, *, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class BadAnswer(EngineError):
    """An answer that is not about what was asked, or lacks what was asked for."""


@dataclass(frozen=True)
class Reply:
    """What a server answered.

    Attributes:
        body: Parsed JSON; the text where it is none.
        new_connection: Whether this request opened a connection.
    """

    body: Any
    new_connection: bool


class Server:
    """One address.

    Args:
        url: Such as ``http://127.0.0.1:8000``.
        key_variables: Environment variables that may hold the key, the first that is set being used.
        field: Setting that the address comes from, for messages.
        connect_timeout_s: Seconds to open a connection.

    Raises:
        ConfigError: The address is none, or httpx is not installed.

    Attributes:
        opened: Connections opened so far. A restarted server has none of its old ones.
    """

    def __init__(
        self,
        url: str,
        *,
        key_variables: tuple[str, ...] = ("VLLM_API_KEY",),
        field: str = "student_urls",
        connect_timeout_s: float = 5.0,
    ) -> None:
        if find_spec("httpx") is None:
            raise ConfigError(
                "The package httpx is not installed, and vLLM servers are asked through it. Install divopd[vllm]."
            )
        self.url = check_url(url, field)
        self.opened = 0
        self._key_variables = key_variables
        self._connect_timeout_s = connect_timeout_s
        # A client belongs to one event loop; checks at the start and the explorer have different ones.
        self._clients: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    def __repr__(self) -> str:
        return f"Server({self.url!r})"

    async def get(self, path: str, timeout_s: float = 10.0) -> Reply:
        """GET; see `request`."""
        return await self.request("GET", path, None, timeout_s)

    async def post(self, path: str, body: Any = None, timeout_s: float = 60.0) -> Reply:
        """POST of a JSON body; see `request`."""
        return await self.request("POST", path, body, timeout_s)

    async def request(self, method: str, path: str, body: Any, timeout_s: float) -> Reply:
        """One attempt at one call.

        Args:
            method: "GET" or "POST".
            path: Such as ``/v1/models``.
            body: To be sent as JSON; None sends none.
            timeout_s: Seconds for all of it.

        Raises:
            ServerUnavailable: No connection, no answer in time, an answer cut short, or a status that may pass.
            ServerRefusal: Any other status from 300 on.
        """
        import httpx

        opened = False

        async def trace(event: str, _: dict[str, Any]) -> None:
            nonlocal opened
            if event == "connection.connect_tcp.complete":
                opened = True
                self.opened += 1

        content = None if body is None else json.dumps(body, separators=(",", ":")).encode()
        headers = {"content-type": "application/json"} if body is not None else {}
        if key := next((v for name in self._key_variables if (v := os.environ.get(name))), None):
            headers["authorization"] = f"Bearer {key}"
        call = self._client().request(
            method, self.url + path, content=content, headers=headers, extensions={"trace": trace}
        )
        try:
            answer = await within(timeout_s, call)
        except asyncio.TimeoutError:
            raise ServerUnavailable(
                f"{method} {self.url}{path} was not answered within {timeout_s:.0f} s."
            ) from None
        except httpx.HTTPError as error:
            # The cause is not chained: its request object would carry the key into a traceback's locals.
            what = f"{type(error).__name__}: {error}".rstrip(": ")
            raise ServerUnavailable(f"{method} {self.url}{path} failed ({what}).", down=True) from None
        if answer.status_code >= 300:
            self._refuse(method, path, answer)
        return Reply(await self._parse(path, answer), opened)

    async def healthy(self, timeout_s: float = 5.0) -> bool:
        """Whether it answers and its engine lives."""
        try:
            await self.get("/health", timeout_s)
        except EngineError:
            return False
        return True

    async def identity(self, timeout_s: float = 10.0) -> tuple[str | None, int]:
        """What distinguishes this life of the server from its next, and which connections are known to be to it.

        Returns:
            Its start time (None where it does not say), and how many of the connections opened so far cannot be to
            a later life of it.
        """
        before = self.opened
        try:
            reply = await self.get("/metrics", timeout_s)
        except ServerRefusal:
            return None, before
        known = before + (reply.new_connection and self.opened == before + 1)
        found = re.search(r"^process_start_time_seconds\S*\s+(\S+)", str(reply.body), re.MULTILINE)
        return (found.group(1) if found else None), known

    async def model_length(self, timeout_s: float = 10.0) -> int:
        """Tokens of prompt and response together that the served model takes.

        Raises:
            BadAnswer: It does not say.
        """
        reply = await self.get("/v1/models", timeout_s)
        cards = reply.body.get("data") if isinstance(reply.body, dict) else None
        length = next((c["max_model_len"] for c in cards or () if c.get("max_model_len")), None)
        if not length:
            raise BadAnswer(
                f"{self.url}/v1/models names no model with max_model_len; expected a vLLM server. Check the address."
            )
        return int(length)

    async def aclose(self) -> None:
        """Close the connections of this event loop."""
        client = self._clients.pop(asyncio.get_running_loop(), None)
        if client is not None:
            await client.aclose()

    def _client(self) -> Any:
        import httpx

        loop = asyncio.get_running_loop()
        if loop not in self._clients:
            # How much runs at once is bounded elsewhere. Proxies of the environment are not meant for these servers.
            limits = httpx.Limits(
                max_connections=None, max_keepalive_connections=None, keepalive_expiry=_KEEP_IDLE_S
            )
            timeout = httpx.Timeout(None, connect=self._connect_timeout_s)
            self._clients[loop] = httpx.AsyncClient(limits=limits, timeout=timeout, trust_env=False)
        return self._clients[loop]

    def _refuse(self, method: str, path: str, answer: Any) -> None:
        status, said = answer.status_code, _message(answer.text)
        where = f"{method} {self.url}{path} was answered with {status}"
        if status in PASSING_STATUS:
            try:
                wait = float(answer.headers.get("retry-after", 0))
            except ValueError:
                wait = 0.0
            raise ServerUnavailable(f"{where}: {said}", down=status == 503, retry_after_s=max(0.0, wait))
        hint = ""
        if status in (401, 403):
            hint = f" Set the environment variable {self._key_variables[0]} to the server's --api-key."
        elif status == 404:
            hint = " Check the address, and the model's name with GET /v1/models."
        raise ServerRefusal(f"{where}: {said}{hint}", status=status)

    async def _parse(self, path: str, answer: Any) -> Any:
        content = answer.content
        if "json" not in answer.headers.get("content-type", ""):
            return answer.text
        try:
            if len(content) > _LARGE_BODY:
                return await asyncio.to_thread(json.loads, content)
            return json.loads(content)
        except ValueError as error:
            raise ServerUnavailable(
                f"{self.url}{path} answered with {len(content)} bytes that are no JSON ({error}); the answer may have "
                "been cut short."
            ) from None


def _message(text: str) -> str:
    """What an error body says, in at most 300 characters."""
    try:
        found = json.loads(text)
        error = found.get("error", found)
        text = error.get("message", text) if isinstance(error, dict) else str(error)
    except (ValueError, AttributeError):
        pass
    text = " ".join(str(text).split())
    return text[:300] + ("..." if len(text) > 300 else "") or "no message"
