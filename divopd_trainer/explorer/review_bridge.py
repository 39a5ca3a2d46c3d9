"""FutureBridge's review (arXiv 2608.01953): one reply of the teacher, kept if the student goes on better from there."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import numpy as np

from divopd_gym.errors import ConfigError, DivOPDError
from divopd_gym.prompts import history_pairs

from ..turns import Actor, Rollout, Segment, Turn
from .deadline import within
from .episode import EpisodeLimits, EpisodePlayer
from .review import ReviewContext
from .teacher_scores import cause_of, score_rollout

__all__ = ["FutureBridge", "favoured_share", "widest_gap"]


class _GivenUp(DivOPDError):
    """The bridge leads nowhere; the message is the outcome."""


def widest_gap(turns: list[Turn]) -> int | None:
    """Place of the student turn with the largest mean of student minus teacher log-prob over its valid tokens.

    Only turns that another student turn follows count: without it there is no future to compare with.
    """
    scored = [place for place, turn in enumerate(turns) if turn.actor == Actor.STUDENT.value and turn.valid]
    gaps = {place: turns[place].score / int(turns[place].valid_mask().sum()) for place in scored[:-1]}
    return max(gaps, key=lambda place: gaps[place], default=None)


def favoured_share(turns: list[Turn]) -> float | None:
    """Share of the valid tokens of these turns' student replies that the teacher finds likelier; None without one."""
    better = total = 0
    for turn in turns:
        if turn.actor == Actor.STUDENT.value and turn.valid:
            mask = turn.valid_mask()
            better += int((turn.teacher_logprobs[mask] > turn.student_logprobs[mask]).sum())
            total += int(mask.sum())
    return better / total if total else None


class FutureBridge:
    """Tries one bridge a rollout.

    At the turn of the `widest_gap` the teacher writes one reply in place of the student's. The environment is begun
    anew with the rollout's seed and the same actions up to there, the student goes on for `turns` turns, and the
    teacher scores them. If their `favoured_share` is higher than that of the original's next turns, the teacher's
    reply becomes an extra turn: actor teacher, ``info["imitate"]``, ``info["bridge"]`` the place it stands in for,
    index the next free one (so it lies beyond ``rollout.turns_played``), a segment of its own.

    It never fails an episode: ``rollout.meta["bridge"]`` says how it ended. Outcomes: "kept", "not_better",
    "no_turn" (no gap with a future), "no_environment" (none free in time), "diverged" (the replay did not show what
    it had shown), "same" (the teacher wrote the very same), "ended" (no turn of the student followed), "failed"
    (with ``why``).

    Args:
        turns: Turns that the student goes on for.
        wait_s: Seconds to wait for a free environment.

    Raises:
        ConfigError: A value out of range.
    """

    name = "future-bridge"
    needs_teacher = True
    imitates = True

    def __init__(self, turns: int = 3, wait_s: float = 60.0) -> None:
        if isinstance(turns, bool) or not isinstance(turns, int) or turns < 1 or not wait_s > 0:
            raise ConfigError(
                f"The review 'future-bridge' has turns={turns!r} (a whole number of at least 1 expected) and "
                f"wait_s={wait_s!r} (above 0 expected)."
            )
        self.turns, self.wait_s = turns, wait_s

    async def review(self, rollout: Rollout, context: ReviewContext) -> None:
        """See `Review.review`; never fails an episode."""
        rollout.meta["bridge"] = note = {}
        try:
            await self._try(rollout, context, note)
        except _GivenUp as reason:
            note["outcome"] = str(reason)
        except Exception as error:
            note.update(outcome="failed", why=cause_of(error))

    async def _try(self, rollout: Rollout, context: ReviewContext, note: dict[str, Any]) -> None:
        played = rollout.turns[: rollout.turns_played]
        place = widest_gap(played)
        if place is None:
            raise _GivenUp("no_turn")
        note["turn"] = place
        note["original_share"] = favoured_share(played[place + 1 : place + 1 + self.turns])
        try:
            handle = await within(
                min(self.wait_s, context.time_left), context.pool.acquire(), context.pool.release
            )
        except asyncio.TimeoutError:
            raise _GivenUp("no_environment") from None
        player = self._player(rollout, context, handle)
        try:
            bridge = await self._play(player, rollout.seed, played, place)
        finally:
            context.pool.release(handle)
            for engine in (player.student, player.teacher):
                if forget := getattr(engine, "forget", None):
                    forget(player.cache_key)
        future = Rollout(rollout.rollout_id, rollout.task, rollout.attempt, player.turns[place + 1 :])
        await score_rollout(
            future,
            context.teacher,
            teacher_vocabulary=context.teacher_vocabulary,
            timeout_s=context.time_left,
        )
        note["share"] = favoured_share(future.turns)
        if note["share"] is None or note["original_share"] is None:
            raise _GivenUp("ended")
        if note["share"] <= note["original_share"]:
            raise _GivenUp("not_better")
        rollout.turns.append(_as_extra(bridge, rollout, place))
        note["outcome"] = "kept"

    def _player(self, rollout: Rollout, context: ReviewContext, handle: Any) -> EpisodePlayer:
        config = context.config
        player = EpisodePlayer(
            rollout_id=rollout.rollout_id,
            task=rollout.task,
            attempt=rollout.attempt,
            env=handle,
            student=context.engines.student,
            teacher=context.teacher,
            codec=context.engines.codec,
            prompt=context.prompt,
            window=history_pairs(config.history),
            limits=EpisodeLimits(
                config.max_turns, config.max_tokens, config.max_model_len, context.time_left
            ),
            temperature=config.temperature,
            run_seed=config.seed,
            greedy=False,
            extra_samples=0,
            teacher_vocabulary=context.teacher_vocabulary,
        )
        player.imitate = True
        player.cache_key = ("bridge", rollout.rollout_id)
        return player

    async def _play(self, player: EpisodePlayer, seed: int, played: list[Turn], place: int) -> Turn:
        """Replay, let the teacher write, and let the student go on; the teacher's turn."""
        observation, info = await self._rebuild(player, seed, played, place)
        player.go_on_after(played[:place])
        task = player.task
        for turn in range(place, min(place + 1 + self.turns, player.limits.max_turns)):
            actor = (Actor.TEACHER if turn == place else Actor.STUDENT).value
            parsed = await player.respond(turn, actor, observation, info, task)
            if parsed is None:
                break
            if turn == place:
                self._check(player.turns[place], played[place])
            before = observation
            observation, _, terminated, truncated, info = await player.timed(
                "the environment", "env_s", player.env.step(parsed.action)
            )
            player.past.append((before, parsed.action))
            if terminated or truncated:
                break
        if len(player.turns) <= place + 1:
            raise _GivenUp("ended")
        return player.turns[place]

    async def _rebuild(
        self, player: EpisodePlayer, seed: int, played: list[Turn], place: int
    ) -> tuple[str, dict]:
        observation, info = await player.timed(
            "the reset", "reset_s", player.env.reset(task=player.task, seed=seed)
        )
        if observation != played[0].observation:
            raise _GivenUp("diverged")
        for before, after in zip(played[:place], played[1 : place + 1]):
            observation, _, terminated, truncated, info = await player.timed(
                "the environment", "env_s", player.env.step(before.action)
            )
            if terminated or truncated or observation != after.observation:
                raise _GivenUp("diverged")
        return observation, info

    def _check(self, bridge: Turn, original: Turn) -> None:
        if not np.array_equal(bridge.prompt_ids, original.prompt_ids):
            raise _GivenUp("diverged")
        if np.array_equal(bridge.response_ids, original.response_ids):
            raise _GivenUp("same")


def _as_extra(bridge: Turn, rollout: Rollout, place: int) -> Turn:
    """The turn under the next free index, in a segment that ends with it."""
    segment = Segment(rollout.rollout_id, len(rollout.segments), bridge.segment.token_ids[: bridge.end])
    index = max(turn.index for turn in rollout.turns) + 1
    return dataclasses.replace(bridge, index=index, segment=segment, info={**bridge.info, "bridge": place})
