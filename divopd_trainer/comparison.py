"""A comparison: several methods, several seeds, one run after another; what is done is not done again.

Every run is a process of its own, `divopd train` with the same settings but for method, seed and run directory, so
that nothing of one run can leak into the next and each can be repeated by hand.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from divopd_gym.errors import ConfigError

from .metrics_log import read_metrics
from .run_dir import RunDir

__all__ = ["Plan", "PlannedRun", "run_all"]

_FINISHED = "finished.json"
_TAIL = 4000
_POLL_S = 0.2


@dataclass(frozen=True)
class PlannedRun:
    """One run of the comparison.

    Attributes:
        method: Preset.
        seed: Seed.
        path: Its run directory.
    """

    method: str
    seed: int
    path: Path

    @property
    def label(self) -> str:
        """Name of the method, without folder and ending where it is a file."""
        return Path(self.method).stem if self.method.endswith((".yaml", ".yml")) else self.method

    @property
    def done(self) -> bool:
        """Whether it ran to its end."""
        return (self.path / _FINISHED).exists()

    def command(self) -> list[str]:
        """Options of `divopd train` that are this run's own."""
        return ["--method", self.method, "--seed", str(self.seed), "--run_dir", str(self.path)]


@dataclass(frozen=True)
class Plan:
    """All runs, and the settings they share.

    Attributes:
        out: Directory; a run lies in ``METHOD/seed-N`` below it.
        settings: Options of `divopd train` for every run.
        runs: Seed by seed, all methods within one, so that an early stop leaves a fair comparison.
    """

    out: Path
    settings: Sequence[str]
    runs: Sequence[PlannedRun]

    @classmethod
    def of(cls, out: Path, methods: Sequence[str], seeds: Sequence[int], settings: Sequence[str]) -> Plan:
        """Lay out the runs.

        Raises:
            ConfigError: Two methods would share a directory, or the directory holds runs with other settings.
        """
        runs = [
            PlannedRun(method, seed, out / PlannedRun(method, seed, out).label / f"seed-{seed}")
            for seed in seeds
            for method in methods
        ]
        if len({run.path for run in runs}) < len(runs):
            raise ConfigError(
                f"methods {', '.join(methods)} and seeds {list(seeds)} name a run twice; list each once."
            )
        plan = cls(out, list(settings), runs)
        plan._check_settings()
        return plan

    def _noted(self) -> dict[str, object]:
        """What all runs share: the options, and what the settings file says, which may be edited between two calls."""
        path = dict(zip(self.settings, self.settings[1:])).get("--config")
        digest = (
            hashlib.sha256(Path(path).read_bytes()).hexdigest() if path and Path(path).is_file() else None
        )
        return {"settings": list(self.settings), "config_sha256": digest}

    def _check_settings(self) -> None:
        """Runs that are there must have been made with the same settings: else the comparison would compare those."""
        note = self.out / "comparison.json"
        if not note.exists():
            return
        try:
            found = json.loads(note.read_text("utf-8"))
        except ValueError as error:
            raise ConfigError(
                f"{note} cannot be read ({error}); expected the settings of the runs beside it. Use another --out."
            ) from None
        if found != self._noted():
            given, there = " ".join(self.settings), " ".join(found.get("settings", []))
            what = f"with {there or 'no settings'}, this comparison has {given or 'none'}"
            if given == there:
                what = f"with another content of the file in {given}"
            raise ConfigError(
                f"{self.out} holds runs made {what}. Use the same settings to go on, or another --out."
            )

    def write(self) -> None:
        """Make the directory and note the settings in it."""
        self.out.mkdir(parents=True, exist_ok=True)
        partial = self.out / "comparison.json.partial"
        partial.write_text(json.dumps(self._noted(), indent=1), encoding="utf-8")
        partial.replace(self.out / "comparison.json")


def run_all(
    plan: Plan,
    *,
    note: Callable[[str], None] = print,
    timeout_s: float | None = None,
    jobs: int = 1,
) -> dict[Path, str]:
    """Run what is not done yet, each in a process of its own; interrupted runs go on from their last checkpoint.

    Args:
        plan: The runs.
        note: Takes a line of progress.
        timeout_s: Seconds a run may take; None: without limit.
        jobs: How many run at once.

    Returns:
        Run directory -> why it failed.

    Raises:
        KeyboardInterrupt: Ctrl-C; the runs in progress have then written a checkpoint each.
    """
    plan.write()
    failures: dict[Path, str] = {}
    seconds: list[float] = []
    waiting = [run for run in plan.runs if not run.done]
    if len(waiting) < len(plan.runs):
        note(f"{len(plan.runs) - len(waiting)} of {len(plan.runs)} runs are done already.")
    to_come, active = list(waiting), []
    try:
        while to_come or active:
            while to_come and len(active) < jobs:
                left = ""
                if seconds:
                    turns = math.ceil((len(to_come) + len(active)) / jobs)
                    left = f", about {sum(seconds) / len(seconds) * turns / 60:.0f} min to go"
                run = to_come.pop(0)
                place = len(plan.runs) - len(to_come)
                note(f"[{place}/{len(plan.runs)}] {run.label}, seed {run.seed}{left}")
                active.append(_Running(plan, run, timeout_s))
            ended = [running for running in active if running.ended()]
            for running in ended:
                active.remove(running)
                why, run = running.finish(), running.run
                seconds.append(time.monotonic() - running.began)
                who = f"{run.label}, seed {run.seed}: " if jobs > 1 else ""
                if why is None:
                    note(f"    {who}{_outcome(run)}, {seconds[-1] / 60:.1f} min")
                    continue
                failures[run.path] = why
                last = why.splitlines()[-1] if why else "no message"
                note(f"    {who}failed: {last} (log: {run.path / 'train.log'})")
            if not ended:
                time.sleep(_POLL_S)
    finally:
        # Ctrl-C: all are asked before any is waited for.
        for running in active:
            running.interrupt()
        for running in active:
            running.finish()
    return failures


class _Running:
    """One run's process."""

    def __init__(self, plan: Plan, run: PlannedRun, timeout_s: float | None) -> None:
        self.run, self.began = run, time.monotonic()
        self._timeout_s, self._log = timeout_s, run.path / "train.log"
        command = _command(plan, run)
        with self._log.open("ab") as out:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )

    def ended(self) -> bool:
        """Whether its process ended, or has to."""
        return self._process.poll() is not None or self._too_long()

    def _too_long(self) -> bool:
        return self._timeout_s is not None and time.monotonic() - self.began > self._timeout_s

    def interrupt(self) -> None:
        """Ask it to write its checkpoint and end."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                # The guard passes it on to the run alone: a second Ctrl-C would end that at once.
                self._process.send_signal(signal.SIGINT)

    def finish(self, grace_s: float = 60.0) -> str | None:
        """Why it failed, or None; a process that still runs gets the chance to write its checkpoint, once."""
        code, run = self._process.poll(), self.run
        try:
            if code is None and self._too_long():
                self.interrupt()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(grace_s)
        finally:
            self._process.kill()
            self._process.wait(10.0)
            self._process.stdin.close()
        if code == 0:
            (run.path / _FINISHED).write_text(json.dumps({"method": run.method, "seed": run.seed}), "utf-8")
            return None
        if code is None:
            return (
                f"it took longer than {self._timeout_s:.0f} s" if self._too_long() else "it was interrupted"
            )
        with self._log.open("rb") as text:
            text.seek(max(0, self._log.stat().st_size - _TAIL))
            last = text.read().decode("utf-8", "replace").strip()
        return last or f"exit code {code}"


def _command(plan: Plan, run: PlannedRun) -> list[str]:
    """The command of a run; makes its directory."""
    extra = []
    if RunDir(run.path).holds_run:
        if any(RunDir(run.path).checkpoints.glob("checkpoint-*")):
            extra = ["--resume_from_checkpoint", "true"]
        else:
            _set_aside(run.path)
    run.path.mkdir(parents=True, exist_ok=True)
    # The guard ends the run when this process ends, however it ends.
    command = [
        sys.executable,
        "-m",
        "divopd_trainer.guard",
        sys.executable,
        "-m",
        "divopd_trainer.cli",
        "train",
    ]
    return [*command, *plan.settings, *run.command(), *extra]


def _set_aside(path: Path) -> None:
    """What was recorded stays, under another name: a run without a checkpoint cannot go on."""
    number = 1
    while (aside := path.with_name(f"{path.name}.unfinished-{number}")).exists():
        number += 1
    path.rename(aside)


def _outcome(run: PlannedRun) -> str:
    lines = read_metrics(run.path, ["eval"])
    if not lines:
        return "no evaluation"
    points = sorted((line["update"], line["success_rate"]) for line in lines)
    return f"success {points[0][1]:.1%} -> {points[-1][1]:.1%} after {points[-1][0]} updates"
