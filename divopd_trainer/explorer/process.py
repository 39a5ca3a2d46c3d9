"""The trainer's side of the explorer: start it, read from it, notice its death, start it again, end it.

One thread owns the child process and reads its pipe to the end, whatever the trainer is busy with. It also keeps its
own copy of which tasks are finished, so a dead explorer is replaced by one that goes on exactly where the received
rollouts end: nothing received is lost, and what was in flight is played again.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import queue
import signal
import threading
import time
from collections import deque
from multiprocessing.connection import Connection
from typing import Any

from .buffer import RolloutBuffer
from .config import ExplorerConfig
from .messages import (
    EpisodeFailed,
    EvalDone,
    Evaluate,
    ExplorerDied,
    ExplorerError,
    ExplorerHung,
    ExplorerState,
    Fatal,
    GetState,
    GroupDone,
    Heartbeat,
    PolicyLoaded,
    PoolStatus,
    Ready,
    RolloutDone,
    SetPolicy,
    StateReply,
    Stop,
)
from .tasks import Frontier
from .worker import explorer_main

__all__ = ["ExplorerProcess"]


class ExplorerProcess:
    """An explorer in a child process, restarted when it dies.

    Satisfies TRL's ``RolloutWorkerProtocol``.

    Args:
        config: What it does.
        state: From where it goes on; None = from the beginning.
        max_restarts: Deaths that are mended in the whole run.
        buffer: Takes the rollouts in place of a `RolloutBuffer` of its own.

    Attributes:
        rollout_buffer: Received rollouts.
        lock: While it is held, no rollout is taken in and `state` does not change.
        metrics_queue: One dict of gauges a heartbeat, oldest thrown away when nobody reads.
        eval_results: `EvalDone` of evaluations that were sent, not requested.
        failures: The latest `EpisodeFailed`.
        ready: The latest `Ready`, or None.
        heartbeat: The latest `Heartbeat`, or None.
        loaded_version: The latest policy version that the explorer has loaded.
        restarts: Times it was started again.
    """

    def __init__(
        self,
        config: ExplorerConfig,
        *,
        state: ExplorerState | dict | None = None,
        max_restarts: int = 2,
        buffer: Any = None,
    ) -> None:
        self.config = config
        self.max_restarts = max_restarts
        self.rollout_buffer: Any = RolloutBuffer() if buffer is None else buffer
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue(maxsize=1000)
        self.eval_results: queue.Queue[EvalDone] = queue.Queue()
        self.failures: deque[EpisodeFailed] = deque(maxlen=100)
        self.ready: Ready | None = None
        self.heartbeat: Heartbeat | None = None
        self.loaded_version = config.policy_version
        self.model_version = config.policy_version
        self.restarts = 0
        self._state = ExplorerState.from_dict(state) if isinstance(state, dict) else state or ExplorerState()
        self._frontier: Frontier | None = None
        self._process: multiprocessing.process.BaseProcess | None = None
        self._pipe: Connection | None = None
        self.lock = self._lock = threading.RLock()
        # What is remembered for a restart and what is sent keep one order.
        self._send_lock = threading.RLock()
        self._ready_event = threading.Event()
        self._ended = threading.Event()
        self._stopping = False
        self._error: ExplorerError | None = None
        self._heard = self._spawned = time.monotonic()
        self._received = 0
        self._last_policy: SetPolicy | None = None
        self._last_pool: PoolStatus | None = None
        self._waiters: dict[int, tuple[Any, threading.Event, list[Any]]] = {}
        self._evaluations: dict[int, Evaluate] = {}
        self._request_ids = 0
        self._env_pids: dict[int, str] = {}
        self._supervisor: threading.Thread | None = None

    # --- life --------------------------------------------------------------------------------------------------

    def start(self, wait: bool = True) -> None:
        """Start the process; with `wait`, return when it is ready to play. Does nothing when it was started.

        Raises:
            ExplorerDied: It could not start; the message holds its reason.
        """
        if self._supervisor is None:
            self._supervisor = threading.Thread(
                target=self._supervise, name="explorer-supervisor", daemon=True
            )
            atexit.register(self.stop, 2.0)
            self._supervisor.start()
        if wait:
            while not self._ready_event.wait(0.1):
                self._raise_error()
                if self._ended.is_set():
                    raise ExplorerDied("The explorer was stopped before it was ready.")

    def stop(self, grace_s: float = 10.0) -> None:
        """End it: politely for `grace_s` seconds, then by force. No process of it survives. May be called twice.

        With 0 seconds nothing is said, so that a signal handler may call it while a message is being sent.
        """
        if self._supervisor is None:
            return
        self._stopping = True
        if grace_s > 0:
            self._send(Stop(grace_s))
            self._ended.wait(grace_s + 1.0)
        if not self._ended.is_set():
            self.kill()
            self._ended.wait(10.0)
        self._fail_waiters(ExplorerDied("The explorer was stopped."))
        self.rollout_buffer.wake()
        atexit.unregister(self.stop)

    def kill(self) -> None:
        """End the running process at once; unless stopping, it counts as a death and is restarted."""
        process = self._process
        if process is not None and process.pid is not None:
            with contextlib.suppress(ProcessLookupError, ValueError):
                process.kill()

    @property
    def pid(self) -> int | None:
        """Of the running process."""
        return self._process.pid if self._process is not None else None

    @property
    def env_pids(self) -> tuple[int, ...]:
        """Of its environment workers, as last reported."""
        return tuple(self._env_pids)

    @property
    def exhausted(self) -> bool:
        """Whether every task of every epoch is finished and received: no further rollout will come."""
        # Without the lock: explorers of a fleet ask each other while each holds its own.
        frontier, epochs = self._frontier, self.config.epochs
        return frontier is not None and epochs is not None and frontier.epoch >= epochs

    @property
    def able(self) -> bool:
        """Whether it can deliver now: it is ready and not exhausted."""
        return self._ready_event.is_set() and not self.exhausted

    @property
    def idle(self) -> bool:
        """Whether nothing comes any more: exhausted, stopped or dead."""
        return self.exhausted or self._ended.is_set()

    def check_health(self, stale_after_s: float = 60.0) -> None:
        """Raise if nothing more is to be expected of the explorer.

        A death is mended by itself, as often as `max_restarts` says; a hanging process is killed, which counts as one.

        Args:
            stale_after_s: Seconds without a heartbeat that count as hanging.

        Raises:
            ExplorerDied: It ended for good, or gave up; the message holds the cause.
            ExplorerHung: It hangs, and no restart is left.
        """
        self._raise_error()
        if self._supervisor is None:
            raise ExplorerDied("The explorer was not started; call start() first.")
        if self._stopping or not self._ready_event.is_set():
            return
        silent = time.monotonic() - self._heard
        if silent > stale_after_s:
            if self.restarts >= self.max_restarts:
                self._error = ExplorerHung(
                    f"The explorer has been silent for {silent:.0f} s (limit {stale_after_s:.0f} s) and "
                    f"{self.restarts} of {self.max_restarts} restarts are used; look for a blocked call or a machine "
                    "without memory, or raise heartbeat_stale_after_s."
                )
                self.kill()
                raise self._error
            self._heard = time.monotonic()
            self.kill()

    def update_model_version(self, model_version: int) -> None:
        """TRL tells which version the learner holds now; the weights themselves go by `SetPolicy`."""
        self.model_version = model_version

    # --- talk --------------------------------------------------------------------------------------------------

    def send(self, message: SetPolicy | PoolStatus | Evaluate | GetState | Stop) -> None:
        """Send without waiting, also before it is ready.

        A restarted explorer begins with the latest policy and is told the latest pool status and the evaluations still
        open again; the file of the latest policy must therefore stay in place.
        """
        with self._send_lock:
            if isinstance(message, SetPolicy):
                self._last_policy = message
            elif isinstance(message, Evaluate):
                with self._lock:
                    self._evaluations[message.request_id] = message
            elif isinstance(message, PoolStatus):
                with self._lock:
                    message = PoolStatus(
                        message.update,
                        message.available,
                        message.wanted,
                        message.unread,
                        self.rollout_buffer.valid_turns,
                        self._received,
                    )
                    self._last_pool = message
            if self._ready_event.is_set() or isinstance(message, Stop):
                self._send(message)

    def new_request_id(self) -> int:
        """A number for `Evaluate` or `GetState`."""
        with self._lock:
            self._request_ids += 1
            return self._request_ids

    def request(self, message: Evaluate | GetState, timeout: float) -> Any:
        """Send and wait for the answer (`EvalDone` or `StateReply`); survives a restart in between.

        Raises:
            ExplorerDied: The explorer ended for good.
            ExplorerHung: No answer within `timeout` seconds.
        """
        self._raise_error()
        answered, answers = threading.Event(), []
        with self._lock:
            self._waiters[message.request_id] = (message, answered, answers)
        try:
            if self._ended.is_set():
                raise ExplorerDied("The explorer has ended; nothing answers.")
            self.send(message)
            if not answered.wait(timeout):
                raise ExplorerHung(
                    f"The explorer did not answer {type(message).__name__} within {timeout:.0f} s; raise the time-out, "
                    "or see what it is busy with."
                )
        finally:
            with self._lock:
                self._waiters.pop(message.request_id, None)
                self._evaluations.pop(message.request_id, None)
        if isinstance(answers[0], ExplorerError):
            raise answers[0]
        return answers[0]

    def state(self) -> ExplorerState:
        """Where the received rollouts end, without asking: to be saved together with what was received so far.

        A consistent cut by itself, even when the explorer is dead.
        """
        with self._lock:
            schedule = self._state.schedule
            if self._frontier is not None:
                schedule = {**(schedule or {}), **self._frontier.state_dict()}
            state = self._state
            return ExplorerState(schedule, state.next_rollout_id, dict(state.counters), state.depth)

    # --- the supervisor's thread -------------------------------------------------------------------------------

    def _supervise(self) -> None:
        # The child inherits the mask: Ctrl-C is the trainer's to decide on, also while the child still imports.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            while not self._stopping:
                cause, hopeless = self._live_once()
                if self._stopping:
                    break
                if hopeless or self.restarts >= self.max_restarts:
                    used = "" if hopeless else f" ({self.restarts} of {self.max_restarts} restarts used)"
                    self._error = self._error or ExplorerDied(f"The explorer ended: {cause}{used}")
                    break
                self.restarts += 1
        except BaseException as error:
            self._error = ExplorerDied(
                f"The explorer could not be kept running: {type(error).__name__}: {error}"
            )
        finally:
            self._ended.set()
            self._fail_waiters(self._error or ExplorerDied("The explorer has ended."))
            self.rollout_buffer.wake()

    def _live_once(self) -> tuple[str, bool]:
        """Start one process and serve it until it is gone: why it ended, and whether a restart is pointless."""
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe(duplex=True)
        with self._lock:
            state = self.state()
            self._ready_event.clear()
            self._received = 0
            self._pipe = ours
        policy = self._last_policy
        process = context.Process(
            target=explorer_main,
            args=(self.config, state.to_dict(), policy, theirs, os.getpid()),
            name="divopd-explorer",
        )
        self._heard = self._spawned = time.monotonic()
        process.start()
        self._process = process
        if self._stopping:
            process.kill()  # stop() came while it was being started and may have found nothing to end
        theirs.close()
        cause, hopeless = None, False
        try:
            while cause is None:
                try:
                    message = ours.recv() if ours.poll(0.5) else None
                except (EOFError, OSError):
                    break
                if message is not None:
                    fatal = self._receive(message, policy)
                    if fatal:
                        cause, hopeless = fatal, True
                elif not process.is_alive():
                    break
                elif (
                    not self._ready_event.is_set()
                    # The explorer has this deadline too, and knows better what was late.
                    and time.monotonic() - self._spawned > self.config.start_timeout_s + 5.0
                ):
                    cause = (
                        f"not ready after {self.config.start_timeout_s:.0f} s; raise start_timeout_s, or see whether "
                        "models and environments can load"
                    )
        finally:
            process.join(3.0 if cause is None or hopeless else 0.0)
            if process.is_alive():
                process.kill()
                process.join(10.0)
            code = process.exitcode
            with self._lock:
                self._pipe = None
            ours.close()
            self._end_orphans()
        if cause is None:
            name = ""
            if code is not None and code < 0:
                with contextlib.suppress(ValueError):
                    name = f", {signal.Signals(-code).name}"
            cause = f"its process ended unexpectedly with exit code {code}{name}; see its messages above"
        return cause, hopeless

    def _receive(self, message: Any, begun_with: SetPolicy | None) -> str | None:
        """Take in one message; the reason if it says that the explorer gives up."""
        self._heard = time.monotonic()
        if isinstance(message, (RolloutDone, GroupDone)):
            with self._lock:  # of a group all or none is in a state
                for done in message.members if isinstance(message, GroupDone) else (message,):
                    self._state.next_rollout_id = done.rollout.rollout_id + 1
                    self._state.depth = done.depth or self._state.depth
                    self._received += done.usable
                    self.rollout_buffer.put(done.rollout)
                    # Last, for `exhausted` is asked without the lock: what it speaks of must be in the buffer.
                    self._frontier.finish(done.ticket)
        elif isinstance(message, Heartbeat):
            with self._lock:
                self.heartbeat = message
                self._state.counters = dict(message.counters)
                for pid in message.pids:
                    if pid not in self._env_pids:
                        self._env_pids[pid] = _birth(pid)
                for pid in set(self._env_pids) - set(message.pids):
                    del self._env_pids[pid]
            if self.metrics_queue.full():
                with contextlib.suppress(queue.Empty):
                    self.metrics_queue.get_nowait()
            self.metrics_queue.put_nowait({f"explorer/{k}": float(v) for k, v in message.gauges.items()})
        elif isinstance(message, EpisodeFailed):
            with self._lock:
                self._frontier.finish(message.ticket, dropped=True)
                self.failures.append(message)
                self.rollout_buffer.wake()
        elif isinstance(message, PolicyLoaded):
            self.loaded_version = message.version
        elif isinstance(message, (EvalDone, StateReply)):
            with self._lock:
                waiter = self._waiters.get(message.request_id)
                self._evaluations.pop(message.request_id, None)
                if waiter is not None:
                    waiter[2].append(message)
                    waiter[1].set()
                elif isinstance(message, EvalDone):
                    self.eval_results.put(message)
        elif isinstance(message, Ready):
            with self._send_lock:
                with self._lock:
                    self.ready = message
                    self._state.schedule = message.state["schedule"]
                    self._state.depth = message.state["depth"]
                    self._frontier = Frontier.from_state(self._state.schedule)
                    self._ready_event.set()
                    states = [w[0] for w in self._waiters.values() if isinstance(w[0], GetState)]
                    policy = None if self._last_policy is begun_with else self._last_policy
                    again = [policy, self._last_pool, *states, *self._evaluations.values()]
                for unsent in again:
                    if unsent is not None:
                        self.send(unsent)
        elif isinstance(message, Fatal):
            return message.message
        return None

    def _send(self, message: Any) -> None:
        """Send if anybody is there; a dead explorer's successor is told what matters when it is ready."""
        with self._send_lock:
            pipe = self._pipe
            if pipe is not None:
                with contextlib.suppress(OSError, ValueError):
                    pipe.send(message)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _fail_waiters(self, error: ExplorerError) -> None:
        with self._lock:
            for _, answered, answers in self._waiters.values():
                if not answered.is_set():
                    answers.append(error)
                    answered.set()

    def _end_orphans(self) -> None:
        """Environment workers leave by themselves; those that do not within two seconds are killed."""
        deadline = time.monotonic() + 2.0
        left = dict(self._env_pids)
        while left:
            left = {pid: birth for pid, birth in left.items() if birth and _birth(pid) == birth}
            if left and time.monotonic() > deadline:
                for pid in left:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, signal.SIGKILL)
                break
            time.sleep(0.05 if left else 0.0)
        self._env_pids.clear()


def _birth(pid: int) -> str:
    """Something that tells a living process from a later one of the same number; empty when there is none."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        return "" if fields[0] == "Z" else fields[19]
    except (OSError, IndexError):
        return ""
