"""Runs the parts of the benchmark suite one at a time, each under a deadline, and keeps what they print.

A part is a program that prints one JSON object. It runs under `divopd_trainer.guard`, so that it ends with all that it
started when its time is up, on Ctrl-C, and when this process is killed. After every part bench.json is whole.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from suite_machine import commit, load_average, now

ROOT = Path(__file__).resolve().parents[1]
JSON_FILE = "bench.json"
_END_S = 25.0
_POLL_S = 0.2
_ERROR_CHARACTERS = 400


@dataclass(frozen=True)
class Part:
    """One benchmark of the suite.

    Attributes:
        name: What ``--only`` calls it.
        title: Heading on the page.
        about: What is compared, in a sentence or two of Markdown.
        command: The program, relative to the folder of benchmarks, and its arguments.
        deadline_s: Seconds after which it is ended.
        table: Its JSON object to Markdown.
    """

    name: str
    title: str
    about: str
    command: Sequence[str]
    deadline_s: float
    table: Callable[[dict[str, Any]], str]


class Suite:
    """Runs parts and keeps bench.json.

    Args:
        folder: Where bench.json and what the parts print go; made if missing.
        facts: Machine, versions and the like; written into bench.json.
        hidden: What must not be recorded (folders of this machine) and what stands for it.
        say: Takes one line of progress.
        keep: Keep the parts of a bench.json that is already there.
    """

    def __init__(
        self,
        folder: Path,
        facts: Mapping[str, Any],
        *,
        hidden: Mapping[str, str] | None = None,
        say: Callable[[str], None] = print,
        keep: bool = False,
    ) -> None:
        self.folder, self.say = folder, say
        self.hidden = {**(hidden or {}), str(ROOT): ".", str(Path.home()): "~"}
        folder.mkdir(parents=True, exist_ok=True)
        self.report: dict[str, Any] = {"suite": 1, **facts, "finished": False, "parts": {}}
        path = folder / JSON_FILE
        if keep and path.exists():
            self.report["parts"] = json.loads(path.read_text("utf-8"))["parts"]

    def run(self, parts: Sequence[Part], at_most_s: float = float("inf")) -> list[str]:
        """Run the parts in their order.

        Args:
            parts: What to run.
            at_most_s: Seconds for all of them; what would begin later is left out, what is running then is ended.

        Returns:
            Names of the parts that failed.

        Raises:
            KeyboardInterrupt: Ctrl-C or SIGTERM; the running part has ended and is recorded as interrupted.
        """
        began, failed = time.monotonic(), []
        for number, part in enumerate(parts, 1):
            left = at_most_s - (time.monotonic() - began)
            self.say(
                f"[{number}/{len(parts)}] {part.name} (at most {max(0, min(part.deadline_s, left)):.0f} s)"
            )
            record = self._record(part)
            try:
                if left <= 0:
                    record |= {
                        "status": "failed",
                        "why": f"not begun, the suite's {at_most_s:.0f} s were used up",
                    }
                else:
                    record |= self._run(part, min(part.deadline_s, left))
            except BaseException:
                record |= {"status": "interrupted", "why": "the suite was stopped while it ran"}
                raise
            finally:
                self.report["parts"][part.name] = record
                self.report["load_average_end"] = load_average()
                self.write()
            self.say(f"[{number}/{len(parts)}] {part.name}: {_said(record)}")
            if record["status"] == "failed":
                failed.append(part.name)
        self.report["finished"] = True
        self.write()
        return failed

    def write(self) -> Path:
        """Write bench.json whole or not at all."""
        path = self.folder / JSON_FILE
        part = path.with_suffix(".part")
        part.write_text(json.dumps(self.report, indent=1) + "\n", "utf-8")
        os.replace(part, path)
        return path

    def _record(self, part: Part) -> dict[str, Any]:
        return {
            "command": self._hide("python benchmarks/" + shlex.join(part.command)),
            "date": now(),
            "commit": commit(),
            "load_average": load_average(),
        }

    def _hide(self, text: str) -> str:
        for found, instead in self.hidden.items():
            if found not in ("", "/"):
                text = text.replace(found, instead)
        return text

    def _run(self, part: Part, deadline_s: float) -> dict[str, Any]:
        printed, said = (self.folder / f"{part.name}.{end}" for end in ("json", "log"))
        script = Path(__file__).parent / part.command[0]
        command = [sys.executable, "-m", "divopd_trainer.guard", sys.executable, script, *part.command[1:]]
        began = time.monotonic()
        with open(printed, "wb") as out, open(said, "wb") as errors:
            code = run_guarded(command, deadline_s, out, errors)
        seconds = round(time.monotonic() - began, 1)
        if code is None:
            why = f"not done after {deadline_s:.0f} s and ended, with all that it had started"
            return {"status": "failed", "seconds": seconds, "why": why}
        if code:
            why = f"exit status {code}: {_last_line(said) or 'it said nothing'}"
            return {"status": "failed", "seconds": seconds, "why": self._hide(why)}
        try:
            result = read_object(printed.read_text("utf-8", "replace"))
            if "left_out" in result:
                return {"status": "left out", "seconds": seconds, "why": self._hide(result["left_out"])}
            # A table that cannot be made is found out now, not when all has been measured.
            part.table(result)
        except Exception as error:
            why = f"what it printed is of no use ({type(error).__name__}: {error}); expected one JSON object of its figures"
            return {"status": "failed", "seconds": seconds, "why": self._hide(why)}
        return {"status": "done", "seconds": seconds, "result": result}


def run_guarded(command: Sequence[Any], deadline_s: float, out: Any, errors: Any) -> int | None:
    """Run a command that `divopd_trainer.guard` guards; its exit status, None when its time was up."""
    environ = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    environ.setdefault("OMP_NUM_THREADS", "1")
    # A session of its own: Ctrl-C reaches this process alone, which then ends the part.
    process = subprocess.Popen(
        [str(word) for word in command], cwd=ROOT, env=environ, stdin=subprocess.PIPE, stdout=out, stderr=errors,
        start_new_session=True,
    )  # fmt: skip
    until = time.monotonic() + deadline_s
    try:
        while process.poll() is None:
            if time.monotonic() >= until:
                return None
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_POLL_S)
        return process.returncode
    finally:
        _end(process)


def _end(process: subprocess.Popen) -> None:
    # The guard ends the command and all its descendants when its standard input closes.
    with contextlib.suppress(OSError):
        process.stdin.close()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(_END_S)


def read_object(text: str) -> dict[str, Any]:
    """The JSON object in what a part printed; lines before it are passed over.

    Raises:
        ValueError: There is none, or more follows.
    """
    lines = text.splitlines(keepends=True)
    start = next((number for number, line in enumerate(lines) if line.startswith("{")), None)
    if start is None:
        raise ValueError(f"no line begins with '{{' in {len(text)} characters")
    return json.loads("".join(lines[start:]))


def _last_line(path: Path) -> str:
    lines = [line.strip() for line in path.read_text("utf-8", "replace").splitlines() if line.strip()]
    return lines[-1][:_ERROR_CHARACTERS] if lines else ""


def _said(record: Mapping[str, Any]) -> str:
    seconds = f" after {record['seconds']:.0f} s" if "seconds" in record else ""
    return f"{record['status']}{seconds}" + (f": {record['why']}" if "why" in record else "")
