"""The main process's side of a run: the explorer's messages, evaluations, metric lines, signals, checkpoint state.

Only here is anything written to metrics.jsonl, always from the main thread. `RunSession` knows the trainer by a few
attributes and no transformers or TRL name.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from divopd_gym.errors import DivOPDError

from . import checkpoint as checkpoints
from .collator import PackOptions, TurnCollator
from .composer import BatchComposer
from .config import DivOPDConfig
from .config_files import save_config
from .costs import TROUBLES, CostMeter
from .explorer.messages import EvalDone, Evaluate, PoolStatus, SetPolicy
from .metrics_log import read_metrics
from .progress import make_progress
from .records import RunWriter

__all__ = ["RunSession", "TrainingError", "deaf_to_signals"]

# Signals that come so soon after another are the same one.
_SAME_SIGNAL_S = 1.0
# Evaluations in flight; shared memory is taken for the weights of eight policies.
_MOST_EVALUATIONS = 6


class TrainingError(DivOPDError, RuntimeError):
    """Training cannot go on."""


class RunSession:
    """What happens around the updates, on the main process.

    Args:
        trainer: Has ``args``, ``run_dir``, ``rollout_worker``, ``policy_files``, ``composer`` and ``state``.
        resumed: The checkpoint that the run goes on from, and its state; None for a new run.
        progress: See `divopd_trainer.progress`; None: as ``args.progress`` says.

    Attributes:
        stop_reason: Why the run is to end early ("SIGINT" ...), or None.
        last_line: The newest train line.
        lost_evaluations: Evaluations that were asked for and failed.
        awaited: Requests that somebody else waits for; their answers are put here and are no evaluation of the run.
    """

    explorer_line_every_s = 5.0
    trouble_note_every_s = 30.0

    def __init__(
        self,
        trainer: Any,
        resumed: tuple[Path, checkpoints.SideState] | None = None,
        progress: Any = None,
    ) -> None:
        self.trainer = trainer
        self.args: DivOPDConfig = trainer.args
        self.explorer = trainer.rollout_worker
        self.progress = progress or make_progress(self.args.progress, total=self.args.updates)
        self.stop_reason: str | None = None
        self.last_line: dict[str, Any] = {}
        self.lost_evaluations = 0
        self.writer: RunWriter | None = None
        self.collator: TurnCollator | None = None
        self._resumed = resumed
        self.awaited: dict[int, EvalDone | None] = {}
        self._evaluations: dict[int, dict[str, Any]] = {}
        self._done_evaluations: set[int] = set()
        self._last_explorer_line = 0.0
        self._troubles: dict[str, float] = {}
        self._last_trouble_note = float("-inf")
        self._seen: dict[str, Any] = {"ready": None, "heartbeat": None, "failure": None}
        self._playing = False
        self._costs = CostMeter()

    # What the trainer calls.

    @property
    def stopping(self) -> bool:
        """Whether somebody asked the run to end."""
        return self.stop_reason is not None

    def make_collator(self, composer: BatchComposer, options: PackOptions, weighting: Any) -> TurnCollator:
        """The collator of this run, restored from the checkpoint that is resumed."""
        self.collator = TurnCollator(
            self.explorer,
            composer,
            options,
            stale_after_s=self.args.heartbeat_stale_after_s,
            writer=self.writer,
            record_rollouts=self.args.record_rollouts,
            weighting=weighting,
            on_status=self._tell_pool,
            on_wake=self.handle_messages,
            stopping=lambda: self.stopping,
        )
        if self._resumed is not None:
            state = self._resumed[1]
            composer.load_state_dict(state.composer)
            self.collator.load_state_dict(state.counters["collator"])
        return self.collator

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Open the records, restore a checkpoint's state, take over signals; close everything at the end."""
        self._open()
        try:
            with self._signals():
                yield
        finally:
            self._close()

    def policy_written(self, version: int) -> None:
        """Tell the explorer where the weights of a version lie."""
        path = self.trainer.policy_files.path(version)
        self.explorer.send(SetPolicy(version, str(path), self.update))

    def began(self) -> None:
        """The explorer has just been started."""
        self._playing = True
        self.handle_messages()
        # A resumed run makes up for the evaluation that the interrupted one did not finish.
        if self._evaluation_due() and self.update not in self._done_evaluations:
            self.evaluate()

    def update_ended(self) -> None:
        """An update is done and its weights are written."""
        self.collator.trained()
        self.handle_messages()
        if self._evaluation_due():
            self.evaluate()

    def _evaluation_due(self) -> bool:
        every = self.args.eval_every
        if self.update == 0:
            return self.args.eval_at_start
        return bool(every) and self.update % every == 0 and self.update < self.args.updates

    def ended(self) -> None:
        """The last update is done; wait for the evaluations unless somebody wants to leave."""
        if self.args.eval_at_end and not self.stopping and self.update not in self._evaluated():
            self.evaluate()
        reason = "it took longer than eval_timeout_s"
        # With more ranks the others wait in a collective, which has a deadline of its own.
        rounds = max(1, len(self._evaluations)) if self.args.world_size == 1 else 1
        deadline = time.monotonic() + rounds * self.args.eval_timeout_s
        while self._evaluations and not self.stopping and time.monotonic() < deadline:
            try:
                self.explorer.check_health(self.args.heartbeat_stale_after_s)
            except DivOPDError as error:
                reason = str(error)  # the student is trained: its weights must still be saved
                break
            self.handle_messages()
            time.sleep(0.05)
        for request in list(self._evaluations):
            self._evaluation_lost(request, "the run was stopped" if self.stopping else reason)
        if self.collator is not None:
            self.collator.drain()

    def train_line(self, line: dict[str, Any]) -> None:
        """Write the line of the update that has just ended."""
        if self.explorer.heartbeat is not None:
            line |= self._costs.since_last(self.explorer.heartbeat.counters)
        weighting = self.trainer.weighting
        if observe := getattr(weighting, "observe", None):
            observe({**line, "update": self.update})
        self.last_line = self._write("train", self.update, self.trainer.model_version, line)
        self.progress.train(self.last_line)

    # Evaluations.

    def evaluate(self) -> None:
        """Ask for an evaluation of the newest weights; training goes on meanwhile."""
        version = self.update
        if (
            version not in self.trainer.policy_files
        ):  # weight_sync_steps above 1, and the run ended in between
            self.lost_evaluations += 1
            self.progress.note(
                f"The evaluation of update {version} is lost: its weights were not handed over."
            )
            return
        if len(self._evaluations) >= _MOST_EVALUATIONS:
            self.lost_evaluations += 1
            self.progress.note(
                f"The evaluation of update {version} is left out: {len(self._evaluations)} are not done yet, each of which keeps "
                "its weights. Raise eval_every, lower eval_episodes, or give evaluations more workers or servers."
            )
            return
        message = self.evaluation_of(version, self.trainer.policy_files.pin(version), self.args.eval_episodes)
        self._evaluations[message.request_id] = {"update": version, "asked_s": self.writer.metrics.wall_s}
        self.explorer.send(message)

    def evaluation_of(self, version: int, path: Path, episodes: int | None) -> Evaluate:
        """The request to play a file of weights as this run evaluates; sends nothing."""
        return Evaluate(
            self.explorer.new_request_id(),
            version,
            str(path),
            episodes=episodes,
            temperature=self.args.eval_temperature or 1.0,
            max_turns=self.args.max_turns,
            greedy=self.args.eval_temperature == 0,
            seed=self.args.seed,
        )

    @property
    def open_evaluations(self) -> int:
        """Evaluations asked for and not yet answered."""
        return len(self._evaluations)

    def _evaluated(self) -> set[int]:
        return {item["update"] for item in self._evaluations.values()} | self._done_evaluations

    def _evaluation_done(self, message: EvalDone) -> None:
        if message.request_id in self.awaited:
            self.awaited[message.request_id] = message
            return
        asked = self._evaluations.get(message.request_id)
        if asked is None:
            return
        if message.result is None:
            self._evaluation_lost(message.request_id, message.error or "no reason given")
            return
        version = asked["update"] if message.version is None else message.version
        if version != asked["update"]:
            self._evaluation_lost(
                message.request_id, f"it played version {version} instead of {asked['update']}"
            )
            return
        del self._evaluations[message.request_id]
        self.trainer.policy_files.unpin(version)
        self._done_evaluations.add(version)
        if observe := getattr(self.trainer.weighting, "observe_eval", None):
            observe({**message.result, "update": version})
        line = self._write("eval", version, version, {**message.result, "asked_s": asked["asked_s"]})
        self.progress.evaluation(line)

    def _evaluation_lost(self, request: int, why: str) -> None:
        asked = self._evaluations.pop(request)
        self.trainer.policy_files.unpin(asked["update"])
        self.lost_evaluations += 1
        self.progress.note(f"The evaluation of update {asked['update']} is lost: {why}.")

    # Messages.

    def handle_messages(self) -> None:
        """Deal with everything the explorer said since the last time."""
        explorer = self.explorer
        if self._news("ready", explorer.ready):
            restarted = explorer.restarts > 0
            self.progress.note("The explorer was started again." if restarted else "The explorer is ready.")
        if self._news("heartbeat", explorer.heartbeat):
            self._heartbeat({**explorer.heartbeat.counters, **explorer.heartbeat.gauges})
        failure = explorer.failures[-1] if explorer.failures else None
        if self._news("failure", failure):
            self.progress.note(f"An episode of {failure.task} failed: {failure.why}")
        self.trainer.policy_files.loaded(explorer.loaded_version)
        with contextlib.suppress(queue.Empty):
            while True:
                self._evaluation_done(explorer.eval_results.get_nowait())
        with contextlib.suppress(queue.Empty):
            while True:
                explorer.metrics_queue.get_nowait()

    def _news(self, name: str, value: Any) -> bool:
        new = value is not None and value is not self._seen[name]
        self._seen[name] = value
        return new

    def _heartbeat(self, values: dict[str, float]) -> None:
        now = time.monotonic()
        self.progress.explorer(values)
        if now - self._last_trouble_note >= self.trouble_note_every_s:
            self._note_troubles(values, now)
        if now - self._last_explorer_line >= self.explorer_line_every_s:
            self._last_explorer_line = now
            self._write("explorer", self.update, self.update, {**values, "restarts": self.explorer.restarts})

    def _note_troubles(self, values: dict[str, float], now: float) -> None:
        """Say what servers did that the run put up with; whoever watches learns of it before it becomes too much."""
        for name, meaning in TROUBLES.items():
            total, before = values.get(name, 0), self._troubles.get(name, 0)
            self._troubles[name] = total
            # A restarted explorer counts anew.
            more = total - before if total >= before else total
            if more > 0:
                self._last_trouble_note = now
                self.progress.note(f"{meaning[0].upper()}{meaning[1:]}: {more:.0f}.")

    def _tell_pool(self, update: int, available: int, wanted: int, unread: int) -> None:
        if wanted:
            self.progress.waiting(available, wanted)
        self.explorer.send(PoolStatus(update, available, wanted, unread))

    # State.

    @property
    def update(self) -> int:
        """Completed updates."""
        return int(self.trainer.state.global_step)

    @property
    def env_turns(self) -> int:
        """Environment turns of training episodes that have arrived."""
        return 0 if self.collator is None else int(self.collator.counters["env_turns"])

    def side_state(self) -> checkpoints.SideState:
        """Everything that a checkpoint holds besides the learner's own state, cut at one moment."""
        explorer = self.explorer.state()
        # What arrived after this cut is in flight for the explorer's state: it would be played again.
        self.collator.drain(before=explorer.next_rollout_id)
        return checkpoints.SideState(
            update=self.update,
            policy_version=self.trainer.model_version,
            env_turns=self.env_turns,
            wall_s=self.writer.metrics.wall_s,
            explorer=explorer.to_dict(),
            composer=self.collator.composer.state_dict(),
            counters={
                "collator": self.collator.state_dict(),
                "skipped_updates": self.trainer.skipped_updates,
                "lost_evaluations": self.lost_evaluations,
                "open_evaluations": sorted(item["update"] for item in self._evaluations.values()),
            },
        )

    def write_line(self, kind: str, values: dict[str, Any]) -> None:
        """Add a line about the newest weights to metrics.jsonl."""
        self._write(kind, self.update, self.update, values)

    def _write(self, kind: str, update: int, version: int, values: dict[str, Any]) -> dict[str, Any]:
        stamps = {"kind": kind, "update": update, "policy_version": version, "env_turns": self.env_turns}
        return self.writer.write_metrics({**values, **stamps})

    def _open(self) -> None:
        c = self.args
        path, state = self._resumed or (None, None)
        names = (
            "batch_rows",
            "pool_multiplier",
            "cap",
            "max_staleness",
            "max_pending_age",
            "seed",
            "token_budget",
        )
        settings = {"preset": c.composer, **{name: getattr(c, name) for name in names}}
        start_time = time.time() - (state.wall_s if state else 0.0)
        self.writer = RunWriter(self.trainer.run_dir.path, start_time, None if state else settings)
        save_config(c, self.trainer.run_dir.config)
        if state is not None:
            self.trainer.skipped_updates = state.counters["skipped_updates"]
            self.lost_evaluations = state.counters["lost_evaluations"]
            evaluations = read_metrics(self.trainer.run_dir.path, ["eval"])
            self._done_evaluations = {e["update"] for e in evaluations if e["update"] <= state.update}
            # That of the update itself is asked for again; the weights of earlier ones are gone.
            left = {*state.counters.get("open_evaluations", ())} - self._done_evaluations - {state.update}
            self.lost_evaluations += len(left)
            for update in sorted(left):
                self.progress.note(f"The evaluation of update {update} is lost: the run ended before it did.")
            self.writer.resume(
                update=state.update,
                policy_version=state.policy_version,
                env_turns=state.env_turns,
                next_rollout_id=state.explorer["next_rollout_id"],
            )
            self.progress.note(f"Going on from {path} (update {state.update}).")

    def _close(self) -> None:
        self._playing = False
        if self.writer is not None:
            with contextlib.suppress(Exception):
                self.handle_messages()
            self.writer.close()
        self.progress.close()

    # Signals.

    def request_stop(self, reason: str) -> None:
        """End after the update in progress, with a checkpoint."""
        self.stop_reason = self.stop_reason or reason

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        asked_at = 0.0

        def handler(number: int, frame: Any) -> None:
            nonlocal asked_at
            # A terminal sends Ctrl-C to every process, and a launcher of ranks passes its own on.
            again = time.monotonic() - asked_at > _SAME_SIGNAL_S
            if self.stopping and not again:
                return
            asked_at = time.monotonic()
            if self.stopping:
                for end in (lambda: self.explorer.stop(0.0), self.trainer.policy_files.destroy):
                    with contextlib.suppress(Exception):
                        end()
                os._exit(128 + number)
            if not self._playing:
                raise KeyboardInterrupt(signal.Signals(number).name)
            self.request_stop(signal.Signals(number).name)
            self.progress.note(
                f"{self.stop_reason}: the update in progress is finished and a checkpoint is written; once more to "
                "leave at once."
            )

        old = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, previous in old.items():
                signal.signal(number, previous)


@contextlib.contextmanager
def deaf_to_signals() -> Iterator[None]:
    """On ranks beside the main one: that one decides when the run ends, and tells the others through the batches."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    old = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, previous in old.items():
            signal.signal(number, previous)
