"""One file over HTTP: resumed where it stopped, never half-written under its own name, its SHA-256 reported.

What has arrived lies beside the target as ``<name>.part``; it becomes the target when all of it is there.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from divopd_gym.errors import DataNotFoundError

__all__ = ["Fetched", "fetch", "progress_bar", "sha256_of"]

_CHUNK = 1 << 18
_RETRIED = {408, 425, 429, 500, 502, 503, 504}
Report = Callable[[int, "int | None"], None]


@dataclass(frozen=True)
class Fetched:
    """A file that was fetched, or was there already.

    Attributes:
        path: Where it lies.
        size: Its bytes.
        sha256: Hexadecimal digest.
        resumed_at: Byte at which the last request began; 0 for the start.
    """

    path: Path
    size: int
    sha256: str
    resumed_at: int


class _TryAgainError(Exception):
    """The transfer stopped early in a way that another request may mend."""


def fetch(
    url: str,
    target: Path,
    *,
    report: Report | None = None,
    tries: int = 5,
    timeout_s: float = 30.0,
    pause_s: float = 1.0,
) -> Fetched:
    """Download a file, going on from what an earlier call left.

    Args:
        url: Where from.
        target: Where to.
        report: Called with the bytes that have arrived and the total, if known.
        tries: Requests in a row that bring nothing before it gives up.
        timeout_s: Seconds of silence that end a request.
        pause_s: Seconds before the second request; doubled each time.

    Raises:
        DataNotFoundError: The server refuses, or cannot be reached; what arrived is kept for the next call.
    """
    part = target.with_name(target.name + ".part")
    target.parent.mkdir(parents=True, exist_ok=True)
    failed, begun_at = 0, 0
    while True:
        had = part.stat().st_size if part.exists() else 0
        begun_at = had
        try:
            begun_at = _request(url, part, report, timeout_s)
            break
        except urllib.error.HTTPError as error:
            error.close()
            if error.code not in _RETRIED:
                raise DataNotFoundError(
                    f"{url} answered {error.code} {error.reason}; expected the file."
                ) from error
            cause: Exception = error
        except (_TryAgainError, OSError, http.client.HTTPException) as error:
            cause = error
        failed = 0 if part.exists() and part.stat().st_size > had else failed + 1
        if failed >= tries:
            reason = getattr(cause, "reason", None) or cause
            raise DataNotFoundError(
                f"{url} could not be fetched: {reason}. {had:,} bytes are kept in {part}."
            ) from cause
        time.sleep(min(pause_s * 2**failed, 30.0))
    digest = sha256_of(part)
    part.replace(target)
    _notes(part).unlink(missing_ok=True)
    return Fetched(target, target.stat().st_size, digest, begun_at)


def sha256_of(path: Path) -> str:
    """Hexadecimal SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


@contextlib.contextmanager
def progress_bar(label: str, shown: bool) -> Iterator[Report]:
    """A progress bar on standard error, or nothing; gives a function of (bytes done, total or None)."""
    if not shown:
        yield lambda done, total: None
        return
    from rich import progress
    from rich.console import Console

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _request(url: str, part: Path, report: Report | None, timeout_s: float) -> int:
    """One request that goes on at the end of `part`; returns the byte at which it began."""
    at = part.stat().st_size if part.exists() else 0
    known = _read_notes(part)
    if known.get("url") != url:
        at = 0
    headers = {"User-Agent": "divopd"}
    if at:
        headers["Range"] = f"bytes={at}-"
        # Without it a file that changed on the server would be sewn together from two.
        if known.get("validator"):
            headers["If-Range"] = known["validator"]
    try:
        response = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=timeout_s)
    except urllib.error.HTTPError as error:
        if error.code != 416 or not at:
            raise
        total = _total_of(error.headers.get("Content-Range"))
        error.close()
        if total == at:
            return at
        part.unlink()
        raise _TryAgainError(f"the server has {total} bytes, {at} were here; starting anew") from error
    with response:
        total = _total_of(response.headers.get("Content-Range"))
        if response.status == 206 and known.get("total") not in (None, total):
            part.unlink()
            raise _TryAgainError("the file changed on the server; starting anew")
        if response.status != 206:
            at = 0
            length = response.headers.get("Content-Length")
            total = int(length) if length and length.isdigit() else None
        etag = response.headers.get("ETag") or ""
        strong = etag if etag and not etag.startswith("W/") else response.headers.get("Last-Modified")
        _notes(part).write_text(
            json.dumps({"url": url, "validator": strong, "total": total}), encoding="utf-8"
        )
        begun_at = at
        with part.open("r+b" if at else "wb") as file:
            file.seek(at)
            file.truncate()
            while block := response.read(_CHUNK):
                file.write(block)
                at += len(block)
                if report is not None:
                    report(at, total)
    if total is not None and at != total:
        raise _TryAgainError(f"the connection ended after {at:,} of {total:,} bytes")
    return begun_at


def _total_of(content_range: str | None) -> int | None:
    total = (content_range or "").rpartition("/")[2]
    return int(total) if total.isdigit() else None


def _notes(part: Path) -> Path:
    return part.with_name(part.name + ".json")


def _read_notes(part: Path) -> dict:
    try:
        found = json.loads(_notes(part).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
