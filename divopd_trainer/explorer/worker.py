"""The explorer's process: environments, engines, and the loop that plays episodes as coroutines.

Nothing blocks its event loop: environments are processes, forward passes and the pipe have threads. Everything
awaited has a deadline. It ends when told to, when its parent ends, and it takes its environment workers with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

from divopd_gym.errors import ConfigError, DivOPDError
from divopd_gym.prompts import get_prompt

from ..costs import engine_costs, engine_troubles
from ..registry import import_plugins
from .channel import Channel, end_with_parent
from .config import ExplorerConfig
from .counters import Counters
from .deadline import within
from .engines import Engines, build_engines
from .environments import ask_env, make_pool
from .evaluations import Evaluations
from .messages import (
    Evaluate,
    ExplorerError,
    ExplorerState,
    Fatal,
    GetState,
    Heartbeat,
    PolicyLoaded,
    PoolStatus,
    Ready,
    SetPolicy,
    StateReply,
    Stop,
)
from .pacing import Pacer
from .tasks import TaskSchedule
from .training import TrainingEpisodes

__all__ = ["Explorer", "explorer_main"]

_ORPHAN_GRACE_S = 3.0


def explorer_main(
    config: ExplorerConfig, state: dict[str, Any], policy: SetPolicy | None, pipe: Connection, parent: int
) -> None:
    """Entry point of the process.

    Args:
        config: What to do.
        state: `ExplorerState.to_dict` to go on from.
        policy: Weights to begin with instead of those of ``config.student``.
        pipe: To the trainer.
        parent: The trainer's process id.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent(parent)
    channel = Channel(pipe)
    try:
        explorer = Explorer(config, ExplorerState.from_dict(state), channel, policy)
    except Exception as error:
        channel.send(Fatal(_cause(error)))
        channel.flush(3.0)
        os._exit(1)
    threading.Thread(target=_watch_parent, args=(parent, explorer), name="parent-watch", daemon=True).start()
    asyncio.run(_live(explorer, channel))


def _cause(error: BaseException) -> str:
    """What to tell the trainer; a surprise also shows where it happened."""
    if isinstance(error, DivOPDError):
        return str(error)
    traceback.print_exception(error)
    return f"{type(error).__name__}: {error}"


async def _live(explorer: Explorer, channel: Channel) -> None:
    """Run to the end, say why if that is an error, and leave at once.

    An orderly exit would wait for threads that may be inside native code, and nothing is left for it to do.
    """
    code = 0
    try:
        await explorer.run()
    except BaseException as error:
        code = 1
        channel.send(Fatal(_cause(error)))
    channel.flush(3.0)
    sys.stdout.flush()
    sys.stderr.flush()
    explorer.kill_workers()
    os._exit(code)


class Explorer:
    """Plays episodes until told to stop; see the module.

    Args:
        config: What to do.
        state: Where to begin.
        channel: Takes messages by ``send`` and gives them by ``listen``.
        policy: Weights to begin with.
    """

    def __init__(
        self, config: ExplorerConfig, state: ExplorerState, channel: Any, policy: SetPolicy | None = None
    ) -> None:
        self.config, self.channel = config, channel
        self.counters = Counters(state.counters)
        self._saved_schedule = state.schedule
        self.update = config.policy_version
        self.pacer = Pacer(
            batch_rows=config.batch_rows,
            max_staleness=config.max_staleness,
            load=config.load,
            max_concurrent=min(config.max_concurrent, config.workers),
            expected_turns=min(15, config.max_turns),
            # What is composed of is about as new as the weights that a restarted explorer begins with.
            version=config.policy_version if policy is None else policy.version,
        )
        self.pool: Any = None
        self.engines: Engines
        self.schedule: TaskSchedule
        self.evaluations: Evaluations | None = None
        self._policy = policy
        self._policy_event = asyncio.Event()
        self.loaded = asyncio.Event()
        self.wake = asyncio.Event()
        self._stop = asyncio.Event()
        self._broken: asyncio.Future[None] | None = None
        self._jobs: set[asyncio.Task] = set()
        import_plugins(config.plugins)
        self.training = TrainingEpisodes(self, state)

    # --- life --------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """From start to stop.

        Raises:
            DivOPDError: It cannot start, or cannot go on.
        """
        loop = asyncio.get_running_loop()
        self._broken = loop.create_future()
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
            loop.add_signal_handler(signal.SIGTERM, self._on_message, Stop(5.0))
        self.channel.listen(loop, self._on_message)
        stopped = asyncio.ensure_future(self._stop.wait())
        try:
            work = asyncio.ensure_future(self._start_and_play())
            await asyncio.wait({work, stopped, self._broken}, return_when=asyncio.FIRST_COMPLETED)
            for finished in (self._broken, work):
                if finished.done():
                    finished.result()
        finally:
            stopped.cancel()
            await self._close(work)

    async def _start_and_play(self) -> None:
        config = self.config
        try:
            await within(config.start_timeout_s, self._start())
        except asyncio.TimeoutError:
            raise ExplorerError(
                f"Models and environments were not ready within {config.start_timeout_s:.0f} s; raise start_timeout_s, "
                "or see what loads so slowly."
            ) from None
        info = {
            "tasks": len(self.schedule.tasks),
            "workers": config.workers,
            "env_id": config.env_id,
            **self.engines.info,
            **self._env_info,
        }
        self.channel.send(Ready(info, self._state()))
        loops = [self.training.dispatch(), self._load_policies(), self._beat()]
        done, _ = await asyncio.wait([self.job(part) for part in loops], return_when=asyncio.FIRST_COMPLETED)
        for part in done:
            part.result()

    async def _start(self) -> None:
        config = self.config
        self.prompt = get_prompt(config.env_id, config.prompt_style, history=config.history)
        self.pool = make_pool(config, config.env_kwargs, config.workers)
        pool = asyncio.ensure_future(self.pool.start())
        self.engines = await asyncio.to_thread(build_engines, config)
        await pool
        if self._policy is not None:
            await self._load(self._policy)
        tasks = config.tasks
        if tasks is None:
            tasks = await ask_env(config, self.pool, "tasks")
        number, of = config.share
        if len(tasks) < of:
            raise ConfigError(
                f"There are {len(tasks)} tasks for {of} explorers; expected at least one each. Lower explorers."
            )
        tasks = list(tasks)[number::of]
        self._env_info = {}
        with contextlib.suppress(DivOPDError):
            self._env_info = {"env_versions": await ask_env(config, self.pool, "versions")}
        self.evaluations = Evaluations(config, self.engines, self.pool, self.prompt)
        self.schedule = TaskSchedule(tasks, seed=config.seed, group=config.group, epochs=config.epochs)
        if self._saved_schedule is not None:
            self.schedule.load_state_dict(self._saved_schedule)

    async def _close(self, work: asyncio.Task) -> None:
        """Drop everything in flight and close what was opened, each within a deadline."""
        jobs = [work, *self._jobs]
        for job in jobs:
            job.cancel()
        if jobs:
            await asyncio.wait(jobs, timeout=2.0)
        for pool in self._pools:
            with contextlib.suppress(Exception):
                await within(5.0, pool.close())

    @property
    def _pools(self) -> list[Any]:
        pools = (self.pool, self.evaluations.own_pool if self.evaluations is not None else None)
        return [pool for pool in pools if pool is not None]

    def kill_workers(self) -> None:
        """End every environment worker at once; for when nothing else works."""
        for pool in self._pools:
            for pid in pool.pids():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)

    def job(self, work: Any) -> asyncio.Task:
        """Run a coroutine beside the others; an error of it ends the explorer."""
        job = asyncio.ensure_future(work)
        self._jobs.add(job)
        job.add_done_callback(self._ended)
        return job

    def _ended(self, job: asyncio.Task) -> None:
        self._jobs.discard(job)
        if not job.cancelled() and job.exception() is not None:
            self.give_up(job.exception())

    def give_up(self, error: BaseException) -> None:
        """End the explorer with this error."""
        if self._broken is not None and not self._broken.done():
            self._broken.set_exception(error)

    # --- what the trainer says ---------------------------------------------------------------------------------

    def _on_message(self, message: Any) -> None:
        if message is None:
            self._stop.set()
        elif isinstance(message, Stop):
            threading.Thread(target=_force, args=(message.grace_s, self), daemon=True).start()
            self._stop.set()
        elif isinstance(message, SetPolicy):
            self.update = message.update
            self._policy = message
            self.pacer.announce(message.version)
            self.loaded.clear()
            self._policy_event.set()
        elif isinstance(message, PoolStatus):
            self.pacer.pool(
                composed=message.update,
                available=message.available + message.buffered,
                wanted=message.wanted,
                received=message.received,
            )
            self.training.gate.pump()
            self.wake.set()
        elif isinstance(message, GetState):
            # No await lies between finishing a ticket and sending its rollout, so this cut is clean.
            self.channel.send(StateReply(message.request_id, self._state()))
        elif isinstance(message, Evaluate) and self.evaluations.is_new(message.request_id):
            self.job(self._evaluate(message))

    def _state(self) -> dict[str, Any]:
        totals = dict(self.counters.totals)
        return ExplorerState(
            self.schedule.state_dict(),
            self.training.next_rollout_id,
            totals,
            self.training.depth.state_dict(),
        ).to_dict()

    async def _load_policies(self) -> None:
        """Load the newest weights asked for; older ones that were overtaken meanwhile are skipped."""
        while True:
            await self._policy_event.wait()
            self._policy_event.clear()
            if self._policy is not None:
                await self._load(self._policy)

    async def _load(self, asked: SetPolicy) -> None:
        self.update = asked.update
        try:
            await within(
                self.config.load_timeout_s, self.engines.student.load_weights(asked.path, asked.version)
            )
        except Exception as error:
            if self._policy is not asked:
                return  # its file may be gone, now that a newer one is there
            raise ExplorerError(
                f"Policy version {asked.version} could not be loaded from {asked.path} (limit "
                f"{self.config.load_timeout_s:.0f} s): {type(error).__name__}: {error}"
            ) from error
        self.pacer.policy(asked.version)
        if not self.pacer.loading:
            self.loaded.set()
        self.training.gate.pump()
        self.counters.add("policy_loads")
        self.channel.send(PolicyLoaded(asked.version))
        self.wake.set()

    # --- evaluations and signs of life ---------------------------------------------------------------------------

    async def _evaluate(self, asked: Evaluate) -> None:
        done = await self.evaluations.play(asked)
        self.counters.add("evaluations" if done.error is None else "evaluations_failed")
        self.channel.send(done)

    async def _beat(self) -> None:
        while True:
            pools = self._pools
            teachers = [self.engines.teacher, *(teacher for teacher, _ in self.engines.others.values())]
            counters = dict(self.counters.totals) | engine_costs(self.engines.student, teachers)
            counters |= engine_troubles(self.engines.student, teachers)
            for pool in pools:
                for name, value in pool.counters.items():
                    counters[f"env_{name}"] = counters.get(f"env_{name}", 0) + value
            pacer = self.pacer
            gauges = {
                "in_flight": pacer.in_flight,
                "outstanding_turns": pacer.outstanding,
                "allowed_turns": min(pacer.allowed, 1e9),
                "unscored_waiting": self.training.gate.waiting,
                "expected_turns": pacer.expected_turns,
                "policy_version": pacer.version,
                "success_rate": self.counters.success_rate,
                "epoch": self.schedule.frontier.epoch,
                **self.counters.rates(),
                **getattr(self.engines.student, "gauges", {}),
            }
            pids = tuple(pid for pool in pools for pid in pool.pids())
            self.channel.send(Heartbeat(counters, gauges, pids))
            await asyncio.sleep(self.config.heartbeat_s)


def _watch_parent(parent: int, explorer: Explorer) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    _force(_ORPHAN_GRACE_S, explorer)


def _force(grace_s: float, explorer: Explorer) -> None:
    """End the process and its workers after a grace, whatever the event loop is doing."""
    time.sleep(grace_s)
    explorer.kill_workers()
    os._exit(1)
