"""`divopd launch`: a run's servers and its trainer, started together and ended together.

Every part runs under a guard (`divopd_trainer.guard`), so none survives the launcher, whatever ends it. Logs go to
``run_dir/logs``. The first part that fails ends the run, with the end of its log as the reason.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from divopd_gym.errors import ConfigError, DivOPDError

from .run_dir import RunDir
from .serve import LaunchSettings, ServerCommand, learner_gpus, server_commands

__all__ = ["LaunchError", "Launcher", "Part", "plan_run"]

_LOOK_S = 0.25
_ASK_S = 2.0
_VIEW_S = 15.0
_TAIL_LINES = 15
_STOP_SERVERS_S = 20.0


class LaunchError(DivOPDError, RuntimeError):
    """A part of the run failed."""


@dataclass
class Part:
    """One process of the run.

    Attributes:
        name: Also of its log file.
        argv: Its command.
        env: What is set for it beside the launcher's environment.
        url: Where a server answers; None for the trainer.
        state: "waiting", "starting", "running" or "ended".
        code: Exit status once it has ended.
    """

    name: str
    argv: list[str]
    env: dict[str, str] = field(default_factory=dict)
    url: str | None = None
    state: str = "waiting"
    code: int | None = None
    process: subprocess.Popen | None = None
    log: Path | None = None
    began: float = 0.0

    def shell(self) -> str:
        """The command as a shell would read it."""
        return ServerCommand(self.name, "", "", "", self.argv, self.env).shell()


def plan_run(config: Any, train_argv: Sequence[str]) -> tuple[list[Part], Part]:
    """The servers and the trainer of a run.

    Args:
        config: Its `DivOPDConfig`.
        train_argv: Options of ``divopd train`` that lead to this config.

    Raises:
        ConfigError: See `divopd_trainer.serve.server_commands`.
    """
    settings = LaunchSettings.of(config)
    commands = server_commands(config, settings)
    servers = [Part(c.name, c.argv, c.env, c.url) for c in commands]
    options = list(train_argv)
    for role in ("student", "teacher", "eval"):
        if addresses := [c.address for c in commands if c.role == role]:
            options += [f"--{role}_urls", *addresses]
    gpus = learner_gpus(settings, commands)
    _check_broadcast(config, gpus, commands)
    command = [sys.executable, "-m", "divopd_trainer.cli", "train", *options]
    if len(gpus) > 1:
        # Said, not left to the user's own accelerate configuration, which may be for something else.
        accelerate = [
            *(sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_machines", "1"),
            *("--num_processes", str(len(gpus)), "--machine_rank", "0", "--gpu_ids", "all"),
            *("--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"),
        ]
        command = [*accelerate, "-m", "divopd_trainer.cli", "train", *options]
    env = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))} if gpus else {}
    if len(gpus) > 1:
        # An interrupted update is finished and a checkpoint written before ranks are killed.
        env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(int(settings.stop_timeout_s))
    return servers, Part("trainer", command, env)


def _waves(servers: Sequence[Part]) -> list[list[Part]]:
    """Which servers start together: vLLM takes what a neighbour on its GPU loads meanwhile for its own."""
    waves: list[list[Part]] = []
    for part in servers:
        gpus = set(part.env.get("CUDA_VISIBLE_DEVICES", "").split(",")) - {""}
        free = [
            w
            for w in waves
            if not any(gpus & set(p.env.get("CUDA_VISIBLE_DEVICES", "").split(",")) for p in w)
        ]
        if free:
            free[0].append(part)
        else:
            waves.append([part])
    return waves


def _check_broadcast(config: Any, gpus: Sequence[int | str], servers: Sequence[ServerCommand]) -> None:
    """NCCL takes a GPU once: the one that weights are sent from must be no server's that receives them."""
    if config.weight_sync != "nccl":
        return
    receiving = {s.env.get("CUDA_VISIBLE_DEVICES") for s in servers if s.role != "teacher"}
    if not gpus or str(gpus[0]) in receiving:
        what = f"learner and students share GPU {gpus[0]}" if gpus else "there is no GPU"
        raise ConfigError(
            f"weight_sync is 'nccl', but {what}; expected the learner's first GPU to be no student's. Give the learner "
            "one of its own (launch.gpus, launch.learner_gpus), or set weight_sync to file."
        )


class Launcher:
    """Starts, watches and ends the parts of one run.

    Args:
        servers: Started first, together, but one after another on one GPU.
        trainer: Started when all of them are healthy.
        logs: Folder of the log files.
        start_timeout_s: Seconds the servers may take.
        stop_timeout_s: Seconds the trainer gets to end by itself.
        show: Called with the parts whenever something changed, and now and then.
    """

    def __init__(
        self,
        servers: Sequence[Part],
        trainer: Part,
        logs: str | Path,
        *,
        start_timeout_s: float = 900.0,
        stop_timeout_s: float = 120.0,
        show: Callable[[list[Part]], None] = lambda parts: None,
    ) -> None:
        self.servers, self.trainer, self.logs = list(servers), trainer, Path(logs)
        self.start_timeout_s, self.stop_timeout_s = start_timeout_s, stop_timeout_s
        self._show = show
        self._asked_to_stop: str | None = None
        self._hurry = False
        self._files: list[IO[bytes]] = []
        self._shown, self._shown_at = None, 0.0

    @property
    def parts(self) -> list[Part]:
        """Servers, then the trainer."""
        return [*self.servers, self.trainer]

    def run(self) -> int:
        """From the first server to the last process gone.

        Returns:
            The trainer's exit status; 130 after Ctrl-C.

        Raises:
            ConfigError: A port is taken.
            LaunchError: A part failed, or the servers were not healthy in time.
        """
        for part in self.servers:
            _check_port(part)
        self.logs.mkdir(parents=True, exist_ok=True)
        with self._signals():
            try:
                if all(self._wait_for_health(wave) for wave in _waves(self.servers)):
                    self._start(self.trainer)
                    self.trainer.state = "running"
                    self._watch()
                return 130 if self._asked_to_stop else int(self.trainer.code or 0)
            finally:
                self.stop()

    # Starting and watching.

    def _start(self, part: Part) -> None:
        part.log = self.logs / f"{part.name}.log"
        log = open(part.log, "ab", buffering=0)  # noqa: SIM115
        self._files.append(log)
        # The guard ends the part when this pipe closes, which it does however the launcher ends. A session of its own
        # keeps the terminal's Ctrl-C away from the servers, which would end before the trainer's last update.
        part.process = subprocess.Popen(
            [sys.executable, "-m", "divopd_trainer.guard", *part.argv],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **part.env},
            start_new_session=True,
        )
        part.state, part.began = "starting", time.monotonic()
        self._view()

    def _wait_for_health(self, servers: Sequence[Part]) -> bool:
        for part in servers:
            self._start(part)
        deadline = time.monotonic() + self.start_timeout_s
        while waiting := [part for part in servers if part.state != "running"]:
            if self._asked_to_stop:
                return False
            if time.monotonic() > deadline:
                names = ", ".join(part.name for part in waiting)
                raise LaunchError(
                    f"{names} did not become healthy within {self.start_timeout_s:.0f} s; raise launch.start_timeout_s if "
                    f"the model is large. The end of {waiting[0].log}:\n{_tail(waiting[0].log)}"
                )
            for part in self.servers:
                self._look(part)
            for part in waiting:
                if _healthy(part.url):
                    part.state = "running"
            self._view()
            time.sleep(_LOOK_S)
        return True

    def _watch(self) -> None:
        while True:
            for part in self.parts:
                self._look(part)
            self._view()
            if self.trainer.state == "ended" or self._asked_to_stop:
                return
            time.sleep(_LOOK_S)

    def _look(self, part: Part) -> None:
        """Notice an end.

        Raises:
            LaunchError: It was none that should be.
        """
        part.code = part.process.poll() if part.process else None
        if part.code is None:
            return
        part.state = "ended"
        if part is self.trainer and part.code in (0, 130):
            return
        raise LaunchError(
            f"{part.name} ended with status {part.code}, and the run with it. The end of {part.log}:\n{_tail(part.log)}"
        )

    # Stopping.

    def stop(self) -> None:
        """End everything: the trainer first, with time for its checkpoint, then the servers."""
        trainer = self.trainer
        if trainer.process is not None and trainer.process.poll() is None:
            self._send(trainer, signal.SIGINT)
            self._wait([trainer], self.stop_timeout_s)
        running = [part for part in self.parts if part.process is not None and part.process.poll() is None]
        for part in running:
            # Closing the pipe ends what a signal does not.
            with contextlib.suppress(OSError):
                part.process.stdin.close()
        self._wait(running, _STOP_SERVERS_S)
        for part in self.parts:
            if part.process is None:
                continue
            if part.process.poll() is None:
                part.process.kill()
                part.process.wait(5.0)
            part.code, part.state = part.process.returncode, "ended"
        for log in self._files:
            log.close()
        self._files.clear()
        self._view()

    def _send(self, part: Part, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            part.process.send_signal(number)

    def _wait(self, parts: Sequence[Part], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and not self._hurry:
            if all(part.process.poll() is not None for part in parts):
                return
            time.sleep(0.05)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        def handler(number: int, frame: object) -> None:
            self._hurry = self._asked_to_stop is not None
            self._asked_to_stop = self._asked_to_stop or signal.Signals(number).name

        numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
        if threading.current_thread() is not threading.main_thread():
            numbers = []
        # What nohup has switched off stays off.
        numbers = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
        old = {number: signal.signal(number, handler) for number in numbers}
        try:
            yield
        finally:
            for number, previous in old.items():
                signal.signal(number, previous)

    def _view(self) -> None:
        states = [part.state for part in self.parts]
        now = time.monotonic()
        if states != self._shown or now - self._shown_at > _VIEW_S:
            self._shown, self._shown_at = states, now
            self._show(self.parts)


def logs_of(run_dir: str | Path) -> Path:
    """Folder of a run's log files."""
    return RunDir(run_dir).path / "logs"


def _check_port(part: Part) -> None:
    """Another server that answers at this address would be taken for ours."""
    host, port = urlsplit(part.url).hostname, urlsplit(part.url).port
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"{part.name} is to answer at {part.url}, but that port is taken ({error.strerror}). Set launch.port to the "
                "first of as many free ports as there are servers, or stop what runs there."
            ) from error


def _healthy(url: str) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{url}/health", timeout=_ASK_S) as answer:
            return answer.status == 200
    except (OSError, urllib.error.URLError):
        return False


def _tail(log: Path | None) -> str:
    """The end of a log, indented."""
    if log is None or not log.exists():
        return "  (no log)"
    with open(log, "rb") as file:
        file.seek(max(0, log.stat().st_size - 20_000))
        lines = file.read().decode("utf-8", "replace").splitlines()
    return "\n".join(f"  {line[:300]}" for line in lines[-_TAIL_LINES:]) or "  (empty)"
