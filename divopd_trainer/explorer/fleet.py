"""Several explorers that feed one learner: seen from the learner they are one.

Each is a process with engines and environments of its own and a share of the tasks that no other plays. Rollouts are
numbered in the order in which they arrive from anybody. Load, episodes in flight and what the learner waits for are
split, so that together they keep the pace of one. An explorer that dies costs what it had in flight; the others go on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import queue
import threading
from collections import deque
from typing import Any

from divopd_gym.errors import ConfigError

from ..costs import COSTS, TROUBLES
from ..turns import Rollout
from .buffer import RolloutBuffer
from .config import ExplorerConfig
from .episode import renumber
from .messages import (
    EpisodeFailed,
    Evaluate,
    ExplorerError,
    ExplorerState,
    GetState,
    Heartbeat,
    PoolStatus,
    Ready,
    SetPolicy,
    StateReply,
    Stop,
)
from .process import ExplorerProcess

__all__ = ["ExplorerFleet", "make_explorer", "split_config"]

# Gauges that say the same of every explorer or are shares of one; all others add up.
_MEANS = ("expected_turns", "success_rate")
_LEAST = ("policy_version", "epoch")
_RESTARTED = {*COSTS, *TROUBLES}


def make_explorer(
    config: ExplorerConfig, count: int = 1, *, state: dict[str, Any] | None = None, max_restarts: int = 2
) -> Any:
    """One explorer, or several behind one front.

    Args:
        config: What they do together.
        count: How many.
        state: As JSON values, from where they go on; None = from the beginning.
        max_restarts: Deaths that are mended, of each.

    Raises:
        ConfigError: The state is of another number of explorers, or there is not enough to share.
    """
    schedule = (state or {}).get("schedule") or {}
    saved = len(schedule["explorers"]) if "explorers" in schedule else 1
    if schedule and saved != count:
        raise ConfigError(
            f"The checkpoint is of a run with explorers: {saved}, this one has explorers: {count}; expected the same, "
            f"because each has played its own share of the tasks. Resume with explorers: {saved}; env_workers and "
            "max_concurrent may differ."
        )
    if count == 1:
        return ExplorerProcess(config, state=state, max_restarts=max_restarts)
    return ExplorerFleet(config, count, state=state, max_restarts=max_restarts)


def split_config(config: ExplorerConfig, count: int) -> list[ExplorerConfig]:
    """What each of several explorers does; workers and episodes in flight add up to those of the whole.

    Args:
        config: What they do together.
        count: How many.

    Raises:
        ConfigError: There are fewer workers, episodes in flight or student servers than explorers.
    """
    for name in ("workers", "max_concurrent"):
        if getattr(config, name) < count:
            raise ConfigError(
                f"explorers is {count}, but there is {name} {getattr(config, name)} to share; expected at least one "
                f"each. Raise env_workers and max_concurrent to {count} or more, or lower explorers."
            )
    urls = list(config.student_urls)
    if config.engine == "vllm" and count > 1 and len(urls) < count:
        raise ConfigError(
            f"explorers is {count}, but student_urls names {len(urls)} server(s); expected at least one each, because "
            "an explorer hands its servers the weights. Add servers, or lower explorers."
        )
    return [
        dataclasses.replace(
            config,
            share=(number, count),
            workers=_part(config.workers, number, count),
            max_concurrent=_part(config.max_concurrent, number, count),
            load=None if config.load is None else config.load / count,
            pool_turns=math.ceil((config.pool_turns or 4 * config.batch_rows) / count),
            # Each horizon learns from its own explorer alone, so each needs whole rounds of probes.
            student_urls=tuple(urls[number::count]),
            # Only the first evaluates, with as many environments as one explorer alone would have.
            eval_urls=config.eval_urls if number == 0 else (),
            eval_workers=config.eval_workers or config.workers,
        )
        for number in range(count)
    ]


def _part(total: int, number: int, count: int) -> int:
    return total // count + (number < total % count)


class _Inlet:
    """The buffer that one explorer puts its rollouts into; what it counts is this explorer's share."""

    def __init__(self, fleet: ExplorerFleet) -> None:
        self._fleet = fleet

    @property
    def valid_turns(self) -> int:
        return self._fleet.rollout_buffer.valid_turns // len(self._fleet.sharing)

    def put(self, rollout: Rollout) -> None:
        self._fleet.arrived(rollout)

    def wake(self) -> None:
        self._fleet.rollout_buffer.wake()


class ExplorerFleet:
    """Explorers that look like one `ExplorerProcess`; see the module.

    Args:
        config: What they do together.
        count: How many.
        state: From where they go on; None = from the beginning.
        max_restarts: Deaths that are mended, of each.
        make: Makes one, as `ExplorerProcess` is made; for tests.

    Attributes:
        members: The explorers; the first plays the evaluations.
        rollout_buffer: Received rollouts of all, in order of arrival, numbered so.
        failures: The latest `EpisodeFailed` of any.
    """

    def __init__(
        self,
        config: ExplorerConfig,
        count: int,
        *,
        state: ExplorerState | dict | None = None,
        max_restarts: int = 2,
        make: Any = ExplorerProcess,
    ) -> None:
        self.config = config
        state = ExplorerState.from_dict(state) if isinstance(state, dict) else state or ExplorerState()
        states = (state.schedule or {}).get("explorers") or [None] * count
        self.rollout_buffer = RolloutBuffer()
        self.failures: deque[EpisodeFailed] = deque(maxlen=100)
        self.model_version = config.policy_version
        self._next_id = state.next_rollout_id
        self._lock = threading.Lock()
        self._readies: list[Ready | None] = [None] * count
        self._ready: Ready | None = None
        self._beats: tuple[Heartbeat | None, ...] = ()
        self._beat: Heartbeat | None = None
        self._totals = [_RisingTotals() for _ in range(count)]
        self.members = [
            make(part, state=saved, max_restarts=max_restarts, buffer=_Inlet(self))
            for part, saved in zip(split_config(config, count), states, strict=True)
        ]
        for member in self.members:
            member.failures = self.failures

    # --- rollouts ----------------------------------------------------------------------------------------------

    def arrived(self, rollout: Rollout) -> None:
        """Take in a rollout of any explorer; called by their threads."""
        with self._lock:
            self.rollout_buffer.put(renumber(rollout, self._next_id))
            self._next_id += 1

    def state(self) -> ExplorerState:
        """Where the received rollouts of all end, as one consistent cut; see `ExplorerProcess.state`."""
        with contextlib.ExitStack() as held:
            # An explorer hands a rollout over while it holds its own lock, so now none is half-way.
            for member in self.members:
                held.enter_context(member.lock)
            states = [member.state() for member in self.members]
            with self._lock:
                counters = _summed([state.counters for state in states])
                schedule = {"explorers": [state.to_dict() for state in states]}
                return ExplorerState(schedule, self._next_id, counters, None)

    # --- life --------------------------------------------------------------------------------------------------

    def start(self, wait: bool = True) -> None:
        """Start all; with `wait`, return when every one is ready. Raises as `ExplorerProcess.start` does."""
        for member in self.members:
            member.start(wait=False)
        if wait:
            try:
                for number, member in enumerate(self.members):
                    with self._named(number):
                        member.start()
            except BaseException:
                self.stop(2.0)
                raise

    def stop(self, grace_s: float = 10.0) -> None:
        """End all, at the same time; see `ExplorerProcess.stop`."""
        if grace_s <= 0:
            # A signal handler must not wait for threads.
            for member in self.members:
                member.stop(0.0)
            return
        stops = [threading.Thread(target=member.stop, args=(grace_s,)) for member in self.members]
        for stop in stops:
            stop.start()
        for stop in stops:
            stop.join(grace_s + 15.0)

    def kill(self) -> None:
        """End the running processes at once; unless stopping, that counts as deaths and they are restarted."""
        for member in self.members:
            member.kill()

    def check_health(self, stale_after_s: float = 60.0) -> None:
        """Raise if nothing more is to be expected of one of them; see `ExplorerProcess.check_health`."""
        for number, member in enumerate(self.members):
            with self._named(number):
                member.check_health(stale_after_s)

    @contextlib.contextmanager
    def _named(self, number: int) -> Any:
        try:
            yield
        except ExplorerError as error:
            raise type(error)(f"Explorer {number + 1} of {len(self.members)}: {error}") from error

    @property
    def pid(self) -> int | None:
        """Of the first one's process."""
        return self.members[0].pid

    @property
    def env_pids(self) -> tuple[int, ...]:
        """Of the environment workers of all, as last reported."""
        return tuple(pid for member in self.members for pid in member.env_pids)

    @property
    def exhausted(self) -> bool:
        """Whether every task of every epoch is finished and received."""
        return all(member.exhausted for member in self.members)

    @property
    def idle(self) -> bool:
        """Whether nothing comes any more of any."""
        return all(member.idle for member in self.members)

    @property
    def restarts(self) -> int:
        """Times any was started again."""
        return sum(member.restarts for member in self.members)

    # --- what they say -----------------------------------------------------------------------------------------

    @property
    def ready(self) -> Ready | None:
        """The latest `Ready` of any, None before every one was ready."""
        with self._lock:
            now = [member.ready for member in self.members]
            for number, ready in enumerate(now):
                if ready is not self._readies[number]:
                    self._readies[number] = self._ready = ready
            return self._ready if all(now) else None

    @property
    def heartbeat(self) -> Heartbeat | None:
        """The latest heartbeats as one: counters add up, and so do gauges that are amounts."""
        with self._lock:
            beats = tuple(member.heartbeat for member in self.members)
            if any(new is not old for new, old in zip(beats, self._beats)) or not self._beats:
                risen = [total.of(beat) for total, beat in zip(self._totals, beats) if beat is not None]
                self._beats, self._beat = beats, _merged(risen)
            return self._beat

    @property
    def loaded_version(self) -> int:
        """The policy version that every one has loaded, or a later one."""
        return min(member.loaded_version for member in self.members)

    @property
    def eval_results(self) -> queue.Queue:
        """Answers to evaluations."""
        return self.members[0].eval_results

    @property
    def metrics_queue(self) -> queue.Queue:
        """Gauges of the first one; `heartbeat` has those of all."""
        return self.members[0].metrics_queue

    # --- what they are told ------------------------------------------------------------------------------------

    @property
    def sharing(self) -> list[Any]:
        """Those that what is wanted is shared among: all that are ready and not done with their tasks, if any is."""
        able = [member for member in self.members if member.able]
        return able or self.members

    def update_model_version(self, model_version: int) -> None:
        """See `ExplorerProcess.update_model_version`."""
        self.model_version = model_version
        for member in self.members:
            member.update_model_version(model_version)

    def send(self, message: SetPolicy | PoolStatus | Evaluate | GetState | Stop) -> None:
        """Send without waiting: evaluations to the first, everything else to all, the learner's needs in shares."""
        if isinstance(message, Evaluate):
            self.members[0].send(message)
            return
        if isinstance(message, PoolStatus):
            count = len(self.sharing)
            message = dataclasses.replace(
                message,
                available=message.available // count,
                # Rounded up: none may think that nobody waits.
                wanted=math.ceil(message.wanted / count),
                unread=message.unread // count,
            )
        for member in self.members:
            member.send(message)

    def new_request_id(self) -> int:
        """A number for `Evaluate` or `GetState`."""
        return self.members[0].new_request_id()

    def request(self, message: Evaluate | GetState, timeout: float) -> Any:
        """Send and wait for the answer; see `ExplorerProcess.request`."""
        if isinstance(message, GetState):
            return StateReply(message.request_id, self.state().to_dict())
        return self.members[0].request(message, timeout)


def _summed(counters: list[dict[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for some in counters for name in some)
    return {name: sum(some.get(name, 0) for some in counters) for name in names}


class _RisingTotals:
    """One explorer's heartbeats with engine totals that go on rising when it is started again, which begins at 0."""

    def __init__(self) -> None:
        self._before: dict[str, float] = {}
        self._last: dict[str, float] = {}

    def of(self, beat: Heartbeat) -> Heartbeat:
        totals = {name: value for name, value in beat.counters.items() if name in _RESTARTED}
        for name, value in totals.items():
            last = self._last.get(name, 0)
            if value < last:
                self._before[name] = self._before.get(name, 0) + last
        self._last = totals
        risen = {name: value + self._before.get(name, 0) for name, value in totals.items()}
        return dataclasses.replace(beat, counters={**beat.counters, **risen})


def _merged(beats: list[Heartbeat]) -> Heartbeat | None:
    if not beats:
        return None
    gauges = _summed([beat.gauges for beat in beats])
    for name in gauges:
        values = [beat.gauges[name] for beat in beats if name in beat.gauges]
        if name in _MEANS:
            gauges[name] /= len(values)
        elif name in _LEAST:
            gauges[name] = min(values)
    pids = tuple(pid for beat in beats for pid in beat.pids)
    return Heartbeat(_summed([beat.counters for beat in beats]), gauges, pids)
