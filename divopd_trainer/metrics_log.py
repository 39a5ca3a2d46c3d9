"""metrics.jsonl: one writer, and every line says when it was.

Each line carries ``kind``, ``update`` (completed updates), ``policy_version``, ``wall_s`` (seconds since the run
began, pauses left out) and ``env_turns`` (environment turns of training episodes so far), so that any metric
can be drawn over any of them.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from .framelog import RecordError, append, plain

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None

__all__ = ["METRICS_FILE", "REQUIRED", "MetricsWriter", "read_metrics"]

METRICS_FILE = "metrics.jsonl"
REQUIRED = ("kind", "update", "policy_version", "wall_s", "env_turns")
"""What every line must carry."""


class MetricsWriter:
    """The one writer of a run's metrics.jsonl.

    Args:
        run_dir: Made if missing.
        start_time: What ``clock`` showed when the run began; a resumed run passes ``now - seconds already run``.
            Defaults to now.
        clock: Seconds; only differences count.

    Raises:
        RecordError: Another writer holds the file.
    """

    def __init__(
        self, run_dir: str | Path, start_time: float | None = None, clock: Callable[[], float] = time.time
    ):
        self.path = Path(run_dir) / METRICS_FILE
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._clock = clock
        self.start_time = clock() if start_time is None else start_time
        self._lock = threading.Lock()
        self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115
        if fcntl is not None:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                self._file.close()
                raise RecordError(
                    f"{self.path} already has a writer; expected one writer a run; stop the other process, close "
                    "the other writer, or use another run directory."
                ) from None
        self._mend_tail()

    def _mend_tail(self) -> None:
        """A line torn by a kill is cut off; a whole line without its line break gets one."""
        data = self.path.read_bytes()
        tail = data[data.rfind(b"\n") + 1 :]
        if not tail:
            return
        try:
            json.loads(tail)
        except ValueError:
            self._file.truncate(len(data) - len(tail))
        else:
            self._file.write(b"\n")

    @property
    def wall_s(self) -> float:
        """Seconds since the run began."""
        return self._clock() - self.start_time

    def write(self, line: Mapping[str, Any] | None = None, /, **fields: Any) -> dict[str, Any]:
        """Append one line, given as a mapping, as keywords, or both; returns the line as written.

        ``wall_s`` is filled in when absent. Numbers that are not finite become null.

        Raises:
            RecordError: A required field is missing or has no usable value (the message names it), the writer is
                closed, or the disk is full.
        """
        record = {**(line or {}), **fields}
        record.setdefault("wall_s", round(self.wall_s, 4))
        for name in REQUIRED:
            value = record.get(name)
            fits = (
                isinstance(value, str) and value != ""
                if name == "kind"
                else _is_number(value) and (name == "wall_s" or float(value).is_integer())
            )
            if not fits:
                found = f"{name}={value!r}" if name in record else f"no field {name!r}"
                raise RecordError(
                    f"A line for {METRICS_FILE} has {found}; every line must carry {', '.join(REQUIRED)}; "
                    f"pass {name} where the line is written (fields given: {', '.join(map(str, record))})."
                )
        ordered = {name: record.pop(name) for name in REQUIRED} | record
        ordered = json.loads(json.dumps(ordered, default=plain))
        ordered = _finite(ordered)
        data = (json.dumps(ordered, separators=(",", ":")) + "\n").encode("ascii")
        with self._lock:
            if self._file.closed:
                raise RecordError(
                    f"{self.path} is closed; expected an open writer; make a new MetricsWriter."
                )
            append(self._file, data, self.path)
        return ordered

    def close(self) -> None:
        """Idempotent; lets the next writer have the file."""
        with self._lock:
            self._file.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _is_number(value: Any) -> bool:
    try:
        return not isinstance(value, str | bool) and math.isfinite(float(value))
    except (TypeError, ValueError):
        return False


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return value


def read_metrics(
    run_dir: str | Path,
    kinds: Iterable[str] | None = None,
    on_notice: Callable[[str], None] | None = None,
) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl, oldest first; an absent file gives none.

    After a resume the lines that the interrupted run wrote beyond the checkpoint are left out: a "resume"
    line at update u takes back every earlier line with a later update.

    Args:
        run_dir: The run.
        kinds: Keep only these.
        on_notice: Called with one sentence if lines had to be skipped.
    """
    path = Path(run_dir) / METRICS_FILE
    if not path.exists():
        return []
    lines: list[dict[str, Any]] = []
    skipped = 0
    for text in path.read_bytes().split(b"\n"):
        if not text.strip():
            continue
        try:
            line = json.loads(text)
            update = line["update"]
        except (ValueError, KeyError, TypeError):
            skipped += 1
            continue
        if line.get("kind") == "resume":
            lines = [old for old in lines if old["update"] <= update]
        lines.append(line)
    if skipped and on_notice is not None:
        on_notice(f"{path}: {skipped} unreadable line(s) skipped (a writer was killed while writing).")
    wanted = None if kinds is None else set(kinds)
    return [line for line in lines if wanted is None or line.get("kind") in wanted]
