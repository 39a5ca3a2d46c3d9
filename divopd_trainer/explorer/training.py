"""Training episodes: begun when the pacer says so, played, scored if the composer can still use them, and sent.

Every episode is a coroutine of its own. Whatever fails in it costs this one episode, until too many in a row do.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

from divopd_gym.errors import DivOPDError

from ..turns import Rollout
from .deadline import within
from .depth import DepthControl
from .episode import renumber, run_episode, score_rollout
from .groups import Finished, Groups
from .messages import EpisodeFailed, ExplorerError, ExplorerState, GroupDone, RolloutDone
from .review import ReviewContext
from .scoring import ScoringGate
from .tasks import Ticket

__all__ = ["TrainingEpisodes"]

_BARREN_PER_FAILURE = 5


class _Handle:
    """An environment handle that reports each turn played."""

    def __init__(self, handle: Any, played: Any) -> None:
        self._handle, self._played = handle, played

    async def reset(self, task: str | None = None, seed: int | None = None) -> tuple[str, dict]:
        return await self._handle.reset(task=task, seed=seed)

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        outcome = await self._handle.step(action)
        self._played()
        return outcome

    async def call(self, name: str) -> Any:
        return await self._handle.call(name)


class _Student:
    """A `StudentEngine` that writes no turn which can never train, if it only has to wait for newer weights."""

    def __init__(self, student: Any, explorer: Any) -> None:
        self._student, self._explorer = student, explorer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._student, name)

    async def generate(self, request: Any) -> Any:
        explorer = self._explorer
        if explorer.pacer.too_late:
            await within(explorer.config.load_timeout_s, explorer.loaded.wait())
        return await self._student.generate(request)


class TrainingEpisodes:
    """Plays the schedule's tickets for an explorer.

    Args:
        explorer: The `Explorer`; its config, engines, environments, pacer, schedule, counters and channel are used.
        state: Where to begin.
    """

    def __init__(self, explorer: Any, state: ExplorerState) -> None:
        config = explorer.config
        self.explorer, self.config = explorer, config
        self.next_rollout_id = state.next_rollout_id
        self.controller = config.make_controller()
        self.review = config.make_review()
        self.depth = DepthControl(config.make_horizon(), config.max_turns, config.probe_rollouts)
        if state.depth is not None:
            self.depth.load_state_dict(state.depth)
        self.groups = Groups(config.group, lambda *place: explorer.schedule.frontier.is_finished(*place))
        pool_turns = (config.pool_turns or 4 * config.batch_rows) if config.lazy_scoring else None
        pacer = explorer.pacer
        self.gate = ScoringGate(
            pool_turns, lambda: pacer.delivered, self._all_stale, lambda: pacer.learner_wants
        )
        self._serial = 0
        self._last: Ticket | None = None
        self._failed_in_row = 0
        self._first_cause = ""
        self._barren_in_row = 0

    async def dispatch(self) -> None:
        """Begin episodes for ever."""
        explorer = self.explorer
        while True:
            explorer.wake.clear()
            while self._wants_more():
                ticket = explorer.schedule.take()
                if ticket is None:
                    break
                self._serial, self._last = self._serial + 1, ticket
                explorer.pacer.begin(self._serial)
                explorer.job(self._episode(self._serial, ticket))
            with contextlib.suppress(asyncio.TimeoutError):
                await within(1.0, explorer.wake.wait())

    def _wants_more(self) -> bool:
        pacer, last, size = self.explorer.pacer, self._last, self.groups.size
        if last is not None and (last.place + 1) % size:
            # A group is sent whole, so what is begun of it is of no use before the rest is.
            return pacer.in_flight < pacer.max_concurrent
        return pacer.wants_more()

    async def _episode(self, key: int, ticket: Ticket) -> None:
        """Play one ticket to its end, whatever that is."""
        explorer, pacer = self.explorer, self.explorer.pacer
        max_turns, probe = self.depth.begin(explorer.update)
        rollout, held, finished = None, 0, None
        try:
            rollout, began = await self._play(key, ticket, max_turns)
            deadline = began + self.config.episode_timeout_s
            if probe:
                rollout.meta["probe"] = True
            # Until it is sent, its turns are outstanding but take no place from the next episode.
            held = sum(turn.trainable for turn in rollout.turns)
            pacer.end(key, held, 0)
            pacer.hold(held)
            explorer.wake.set()
            scored = await self._score(rollout, probe, deadline)
        except asyncio.CancelledError:
            rollout = None
            pacer.end(key, None)
            explorer.schedule.give_back(ticket)
            raise
        except Exception as error:
            pacer.end(key, None)
            pacer.deliver(held, 0)
            rollout = None
            self._count_failure(ticket, error)
            finished = Finished(ticket)
        else:
            self._failed_in_row = 0
            if scored:
                self._check_barren(rollout)
            finished = Finished(ticket, rollout, scored, held)
        finally:
            # Before it is sent, for what is sent says how the depth stands after it.
            self.depth.end(rollout, probe)
            if finished is not None:
                self._finish(finished)
            # What it gave back, or never delivered, may be room for those that wait.
            self.gate.pump()
            explorer.wake.set()

    async def _play(self, key: int, ticket: Ticket, max_turns: int) -> tuple[Rollout, float]:
        """The episode, and when it had an environment to begin in."""
        config, engines, pool = self.config, self.explorer.engines, self.explorer.pool
        teacher, vocabulary = engines.teacher_for(ticket.task)
        handle = await within(config.episode_timeout_s, pool.acquire(), pool.release)
        began = time.monotonic()
        try:
            rollout = await run_episode(
                rollout_id=key,
                task=ticket.task,
                attempt=ticket.attempt,
                env=_Handle(handle, lambda: self.explorer.pacer.played(key)),
                student=_Student(engines.student, self.explorer),
                teacher=teacher,
                codec=engines.codec,
                prompt=self.explorer.prompt,
                history=config.history,
                limits=config.limits(),
                controller=self.controller,
                temperature=config.temperature,
                run_seed=config.seed,
                score=False,
                update=self.explorer.update,
                max_turns=max_turns,
                extra_samples=config.extra_samples,
                teacher_vocabulary=vocabulary,
            )
            return rollout, began
        finally:
            # Scoring needs no environment; the next episode can have it.
            pool.release(handle)

    async def _score(self, rollout: Rollout, probe: bool, deadline: float) -> bool:
        """Have the teacher read it and the review change it; False when it went stale before."""
        config, explorer = self.config, self.explorer
        teacher, vocabulary = explorer.engines.teacher_for(rollout.task)
        begun = time.monotonic()
        # A probe is scored whatever happens: the horizon waits for it.
        if teacher is None or not (probe or await self.gate.enter(rollout)):
            return False
        # A slow learner's full pool is no fault of the episode.
        deadline += time.monotonic() - begun
        lazy = config.lazy_scoring and not probe and self.review is None
        try:
            await score_rollout(
                rollout,
                teacher,
                teacher_vocabulary=vocabulary,
                topk=config.teacher_topk,
                timeout_s=max(1.0, deadline - time.monotonic()),
                oldest_version=explorer.pacer.oldest_usable if lazy else None,
            )
            if self.review is not None:
                await self.review.review(
                    rollout,
                    ReviewContext(
                        config,
                        explorer.engines,
                        teacher,
                        vocabulary,
                        explorer.prompt,
                        explorer.pool,
                        deadline,
                    ),
                )
        finally:
            if not probe:
                self.gate.leave(rollout)
        return True

    def _finish(self, finished: Finished) -> None:
        """Send an episode, or the whole group that it completes."""
        explorer = self.explorer
        # No await lies between finishing a ticket and sending its rollout, so a state taken in between is clean.
        done = []
        for member in self.groups.add(finished):
            rollout, ticket = member.rollout, member.ticket
            if rollout is None:
                explorer.schedule.finish(ticket, dropped=True)
                continue
            oldest = explorer.pacer.oldest_usable
            valid = [turn for turn in rollout.turns if turn.trainable and turn.valid]
            usable = sum(turn.policy_version >= oldest for turn in valid)
            renumber(rollout, self.next_rollout_id)
            rollout.meta.update(epoch=ticket.epoch, place=ticket.place)
            self.next_rollout_id += 1
            explorer.counters.episode(rollout, stale=len(valid) - usable, scored=member.scored)
            explorer.pacer.deliver(member.held, usable)
            explorer.schedule.finish(ticket)
            done.append(RolloutDone(rollout, ticket, usable, self.depth.state_dict()))
        if done:
            explorer.channel.send(done[0] if len(done) == 1 else GroupDone(tuple(done)))

    def _all_stale(self, rollout: Rollout) -> bool:
        oldest = self.explorer.pacer.oldest_usable
        versions = [turn.policy_version for turn in rollout.turns if turn.trainable]
        return bool(versions) and max(versions) < oldest

    def _count_failure(self, ticket: Ticket, error: Exception) -> None:
        why = str(error) if isinstance(error, DivOPDError) else f"{type(error).__name__}: {error}"
        self.explorer.counters.add("episodes_failed")
        self.explorer.channel.send(EpisodeFailed(ticket.task, ticket.attempt, why, ticket))
        self._failed_in_row += 1
        if self._failed_in_row == 1:
            self._first_cause = why
        if self._failed_in_row >= self.config.max_failures:
            self.explorer.give_up(
                ExplorerError(
                    f"{self._failed_in_row} episodes in a row failed (max_failures); the first: {self._first_cause}"
                )
            )

    def _check_barren(self, rollout: Rollout) -> None:
        """Stop a run in which every episode is scored and nothing can ever train: the learner would wait for ever."""
        barren = not any(turn.valid or "unscored" in turn.info for turn in rollout.turns)
        self._barren_in_row = self._barren_in_row + 1 if barren else 0
        limit = _BARREN_PER_FAILURE * self.config.max_failures
        if self._barren_in_row >= limit:
            why = sorted({turn.why_not for turn in rollout.turns if turn.why_not}) or ["no turn at all"]
            self.explorer.give_up(
                ExplorerError(
                    f"{limit} scored episodes in a row held no turn that can train (reasons in the last one: {why}); "
                    "see that the teacher's context and vocabulary fit the student's, and that max_turns leaves the "
                    "student a turn."
                )
            )
