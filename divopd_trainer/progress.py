"""What a run looks like in a terminal: a live table, or one line per update where there is no terminal.

Everything shown is also in metrics.jsonl; nothing is computed here that a report would need.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from typing import Any, Protocol, TextIO

__all__ = ["LiveProgress", "PlainProgress", "Progress", "SilentProgress", "make_progress"]


class Progress(Protocol):
    """Receives lines of metrics as they are written."""

    def train(self, line: dict[str, Any]) -> None: ...  # noqa: D102
    def evaluation(self, line: dict[str, Any]) -> None: ...  # noqa: D102
    def explorer(self, values: dict[str, float]) -> None: ...  # noqa: D102
    def waiting(self, available: int, wanted: int) -> None: ...  # noqa: D102
    def note(self, text: str) -> None: ...  # noqa: D102
    def close(self) -> None: ...  # noqa: D102


def make_progress(mode: str, total: int, stream: TextIO | None = None) -> Progress:
    """The view for a mode.

    Args:
        mode: "live", "plain", "none", or "auto": live in a terminal, plain elsewhere.
        total: Updates of the run.
        stream: Where to; standard error by default.
    """
    stream = stream or sys.stderr
    if mode == "none":
        return SilentProgress()
    if mode == "live" or (mode == "auto" and stream.isatty()):
        return LiveProgress(total, stream)
    return PlainProgress(total, stream)


class SilentProgress:
    """Shows nothing."""

    def train(self, line: dict[str, Any]) -> None:
        """See `Progress`."""

    def evaluation(self, line: dict[str, Any]) -> None:
        """See `Progress`."""

    def explorer(self, values: dict[str, float]) -> None:
        """See `Progress`."""

    def waiting(self, available: int, wanted: int) -> None:
        """See `Progress`."""

    def note(self, text: str) -> None:
        """See `Progress`."""

    def close(self) -> None:
        """See `Progress`."""


class PlainProgress(SilentProgress):
    """One line an update, at most one every ``every_s`` seconds; notes and evaluations always.

    Args:
        total: Updates of the run.
        stream: Where to.
        every_s: Seconds between lines of updates.
    """

    def __init__(self, total: int, stream: TextIO, every_s: float = 5.0) -> None:
        self.total, self.stream, self.every_s = total, stream, every_s
        self._began = time.monotonic()
        self._last = float("-inf")
        self._explorer: dict[str, float] = {}

    def _print(self, text: str) -> None:
        print(f"[{_clock(time.monotonic() - self._began)}] {text}", file=self.stream, flush=True)

    def train(self, line: dict[str, Any]) -> None:
        """See `Progress`."""
        now = time.monotonic()
        if now - self._last < self.every_s and line["update"] not in (1, self.total):
            return
        self._last = now
        parts = [f"update {line['update']}/{self.total}"]
        parts += [f"{label} {text}" for label, text in _figures(line, self._explorer)]
        self._print("  ".join(parts))

    def evaluation(self, line: dict[str, Any]) -> None:
        """See `Progress`."""
        self._print(f"evaluation of update {line['update']}: {_evaluation(line)}")

    def explorer(self, values: dict[str, float]) -> None:
        """See `Progress`."""
        self._explorer = values

    def note(self, text: str) -> None:
        """See `Progress`."""
        self._print(text)


class LiveProgress(SilentProgress):
    """A table that is drawn again four times a second by a thread of rich's.

    Args:
        total: Updates of the run.
        stream: A terminal.
    """

    def __init__(self, total: int, stream: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        self.total = total
        self._began = time.monotonic()
        self._line: dict[str, Any] = {}
        self._explorer: dict[str, float] = {}
        self._evaluations: deque[dict[str, Any]] = deque(maxlen=4)
        self._waiting: tuple[int, int] | None = None
        self._live = Live(
            console=Console(file=stream), get_renderable=self._draw, refresh_per_second=4, transient=False
        )
        self._started = False

    def _start(self) -> None:
        # Not in the constructor: checks that print and refuse come between.
        if not self._started:
            self._started = True
            self._live.start()

    def train(self, line: dict[str, Any]) -> None:
        """See `Progress`."""
        self._start()
        self._line, self._waiting = line, None

    def evaluation(self, line: dict[str, Any]) -> None:
        """See `Progress`."""
        self._start()
        self._evaluations.append(line)

    def explorer(self, values: dict[str, float]) -> None:
        """See `Progress`."""
        self._start()
        self._explorer = values

    def waiting(self, available: int, wanted: int) -> None:
        """See `Progress`."""
        self._waiting = (available, wanted)

    def note(self, text: str) -> None:
        """See `Progress`."""
        self._live.console.print(f"[{_clock(time.monotonic() - self._began)}] {text}", markup=False)

    def close(self) -> None:
        """See `Progress`."""
        if self._started:
            self._live.stop()
            self._started = False

    def _draw(self) -> Any:
        from rich.panel import Panel
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        update = self._line.get("update", 0)
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="bold")
        grid.add_column()
        grid.add_row(
            f"update {update}/{self.total}", ProgressBar(total=self.total, completed=update, width=40)
        )
        grid.add_row("time", _clock(time.monotonic() - self._began))
        for label, text in _figures(self._line, self._explorer):
            grid.add_row(label, text)
        if self._waiting is not None:
            grid.add_row("learner", f"waits for turns ({self._waiting[0]} of {self._waiting[1]})")
        for line in self._evaluations:
            grid.add_row(f"evaluation, update {line['update']}", _evaluation(line))
        return Panel(grid, title="divopd", title_align="left", width=100)


def _figures(line: dict[str, Any], explorer: dict[str, float]) -> list[tuple[str, str]]:
    figures = []
    recent = explorer.get("success_rate")
    if recent is not None:
        figures.append(("success", f"{recent:.0%} of recent episodes"))
    if "loss" in line:
        figures.append(("kl/token", f"{line['kl_per_token']:.4f}"))
        figures.append(("pool", f"{line['pool']} turns, {line['unread']} unread"))
        ages = {int(age): n for age, n in line["staleness"].items()}
        mean = sum(age * n for age, n in ages.items()) / max(sum(ages.values()), 1)
        figures.append(("staleness", f"{mean:.2f} updates, {line['dropped_stale']} dropped"))
        figures.append(("rollouts", f"{line['effective_rollouts']:.1f} effective of {line['rollouts']}"))
        busy = line["learner_s"] + line["wait_s"]
        rate = line["forwarded_tokens"] / busy if busy > 0 else 0.0
        figures.append(("tokens/s", f"{rate:,.0f} learner"))
        figures.append(("seconds", f"{line['learner_s']:.2f} learning, {line['wait_s']:.2f} waiting"))
    return figures


def _evaluation(line: dict[str, Any]) -> str:
    text = f"{line.get('success_rate', float('nan')):.1%} success"
    if "success_low" in line:
        text += f" [{line['success_low']:.1%}, {line['success_high']:.1%}]"
    return text + f", {line.get('episodes', '?')} episodes"


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes:02d}:{seconds:02d}"
