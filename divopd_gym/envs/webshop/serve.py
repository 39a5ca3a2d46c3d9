"""`serve`: a person shops in the browser, for one episode, on this machine only."""

from __future__ import annotations

import html
import threading
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs

from divopd_gym.envs.webshop.env import WebShopEnv
from divopd_gym.envs.webshop.html import html_page
from divopd_gym.errors import ConfigError

__all__ = ["serve"]

_MOST_BYTES = 1 << 20
_MOST_CHARS = 1 << 16
_REQUEST_S = 10.0


class _Server(ThreadingHTTPServer):
    """The server of one episode.

    Args:
        address: host and port.
        env: the environment, reset.
        info: what its reset gave.
    """

    # Browsers open connections that they do not use; none of them may hold up the end.
    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], env: WebShopEnv, info: dict[str, Any]):
        super().__init__(address, _Handler)
        self.env, self.info = env, info
        self.over = self.shown = False
        self.used = time.monotonic()
        self.turn = threading.Lock()

    def page(self) -> str:
        """The page as it is now, with the episode's state under it."""
        note = f"Turn {self.info['turns']}."
        if self.over:
            note = f"The visit is over ({self.info['done_reason']}). Score: {self.info['score']:.3f}. You can close this."
        elif not self.info["valid_action"]:
            note += " The last action did nothing."
        visit = self.env.visit
        return html_page(
            visit.page, visit.clicked, f'<footer id="state"><small>{html.escape(note)}</small></footer>'
        )

    def play(self, form: Mapping[str, list[str]]) -> None:
        """Play what was posted."""
        query = form.get("query")
        action = f"search[{query[0]}]" if query else form.get("action", [""])[0]
        if not self.over:
            _, _, terminated, truncated, self.info = self.env.step(action)
            self.over = terminated or truncated


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _REQUEST_S

    def _allowed(self) -> bool:
        # Pages of other origins must not shop here by way of the person's browser.
        host, port = self.server.server_address[:2]
        hosts = {f"{name}:{port}" for name in (host, "localhost", "127.0.0.1")}
        origin = self.headers.get("Origin")
        return self.headers.get("Host") in hosts and (origin is None or origin.partition("://")[2] in hosts)

    def do_GET(self) -> None:
        """Show the page."""
        self.server.used = time.monotonic()
        if not self._allowed():
            self.send_error(403)
        elif self.path != "/":
            self.send_error(404)
        else:
            with self.server.turn:
                body, last = self.server.page().encode("utf-8", "replace"), self.server.over
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(body)
            self.server.shown = self.server.shown or last

    def do_POST(self) -> None:
        """Play an action, then lead back to the page."""
        self.server.used = time.monotonic()
        length = self.headers.get("Content-Length", "")
        if not self._allowed():
            self.send_error(403)
        elif self.path != "/act" or not length.isdigit() or int(length) > _MOST_BYTES:
            self.send_error(400)
        else:
            text = self.rfile.read(int(length)).decode("utf-8", "replace")
            with self.server.turn:
                self.server.play(parse_qs(text[:_MOST_CHARS], keep_blank_values=True))
            self.send_response(303)
            self.send_header("Location", "/")
            self.send_header("Content-Length", "0")
            self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


def serve(
    env_kwargs: Mapping[str, Any] | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    task: str | None = None,
    seed: int | None = None,
    ready: Callable[[str], None] | None = None,
    idle_s: float = 3600.0,
) -> dict[str, Any]:
    """Serve one episode; returns when it is over and its last page was shown.

    Args:
        env_kwargs: of `WebShopEnv`.
        host: address to listen at.
        port: port; 0 takes a free one.
        task: the task; without it the seed decides.
        seed: of the environment.
        ready: told the address to open; by default it is printed.
        idle_s: give up after so long without a request.

    Returns:
        The last info.

    Raises:
        ConfigError: the address cannot be used; and see `WebShopEnv`.
    """
    env = WebShopEnv(**dict(env_kwargs or {}))
    _, info = env.reset(seed=seed, options=None if task is None else {"task": task})
    try:
        server = _Server((host, port), env, info)
    except (OSError, OverflowError) as error:
        env.close()
        raise ConfigError(
            f"cannot listen at {host}:{port} ({error}); choose another port, 0 for any"
        ) from error
    with server:
        server.timeout = 0.5
        (ready or _tell)(f"http://{host}:{server.server_address[1]}/")
        while not server.shown and time.monotonic() - server.used < idle_s:
            server.handle_request()
    env.close()
    return server.info


def _tell(url: str) -> None:
    print(f"Shop at {url} (Ctrl-C leaves)", flush=True)
