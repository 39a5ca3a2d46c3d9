"""Headless Chromium over its debugging pipe: opens a page, evaluates, clicks, takes pictures. For the report's tests."""

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path


def find_chromium():
    """The browser's path, or None."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """One headless browser with one page; a context manager that leaves no process behind.

    Attributes:
        requests: Addresses that the page asked for, itself included.
        errors: Exceptions and refused scripts that the page reported.
    """

    def __init__(self, profile: Path, width=1280, height=800, dark=False, patience_s=60.0):
        self.patience_s = patience_s
        self.requests, self.errors = [], []
        self._number, self._buffer, self._events = 0, b"", []
        # The browser reads commands from its descriptor 3 and answers on 4; when the pipe closes, as it does when
        # this process dies, it quits.
        read_end, self._write = os.pipe()
        self._read, write_end = os.pipe()

        def place():
            a, b = os.dup(read_end), os.dup(write_end)
            os.dup2(a, 3)
            os.dup2(b, 4)
            os.set_inheritable(3, True)
            os.set_inheritable(4, True)

        self.process = subprocess.Popen(
            [
                find_chromium(), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                "--no-first-run", "--disable-extensions", "--disable-background-networking", "--hide-scrollbars",
                f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank",
            ],
            close_fds=False, preexec_fn=place, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(read_end)
        os.close(write_end)
        self._session = None
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.send(f"{domain}.enable")
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.send("Emulation.setEmulatedMedia", features=features)

    def send(self, method, **params):
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + self.patience_s
        while True:
            answer = self._receive(until)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def _receive(self, until):
        while b"\0" not in self._buffer:
            left = until - time.monotonic()
            if left <= 0 or not select.select([self._read], [], [], left)[0]:
                raise TimeoutError(f"Chromium did not answer within {self.patience_s:g} s.")
            data = os.read(self._read, 1 << 20)
            if not data:
                raise RuntimeError("Chromium has ended.")
            self._buffer += data
        text, self._buffer = self._buffer.split(b"\0", 1)
        message = json.loads(text)
        method, params = message.get("method"), message.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(
                params["exceptionDetails"].get("exception", {}).get("description", "exception")
            )
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])
        return message

    def open(self, page: Path):
        """Load a page and wait until its script says that it is drawn; returns milliseconds since navigation."""
        self.send("Page.navigate", url=Path(page).resolve().as_uri())
        marks = "document.documentElement?.dataset ?? {}"
        episodes = "document.getElementById('episode-data')"
        return int(
            self.until(f"(({{ready, drawn}}) => ready ?? (drawn && !{episodes} ? drawn : 0))({marks})")
        )

    def until(self, expression):
        """Wait for an expression to become true; returns its value."""
        end = time.monotonic() + self.patience_s
        while time.monotonic() < end:
            value = self.js(expression)
            if value:
                return value
            time.sleep(0.02)
        raise TimeoutError(f"{expression} did not become true within {self.patience_s:g} s.")

    def js(self, expression):
        result = self.send("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in result:
            raise RuntimeError(result["exceptionDetails"]["exception"]["description"])
        return result["result"].get("value")

    def picture(self, path: Path):
        """What is in the window, as PNG."""
        data = self.send("Page.captureScreenshot", format="png")["data"]
        Path(path).write_bytes(base64.b64decode(data))

    def close(self):
        """Ask it to end, and see to it that it does."""
        if self.process.poll() is None:
            try:
                self._session = None
                os.write(self._write, json.dumps({"id": 0, "method": "Browser.close"}).encode() + b"\0")
                self.process.wait(10)
            except (OSError, subprocess.TimeoutExpired):
                self.process.kill()
                self.process.wait(10)
        for descriptor in (self._read, self._write):
            os.close(descriptor)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()
