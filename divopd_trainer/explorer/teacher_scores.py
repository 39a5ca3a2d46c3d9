"""The teacher reads what the student wrote: one call a segment, and every turn is judged again."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np

from divopd_gym.errors import DivOPDError

from ..engines.base import TokenScores
from ..turns import Actor, Rollout, Turn, score_turn
from .deadline import within

__all__ = ["EpisodeFailure", "cause_of", "known_ids", "score_rollout"]


class EpisodeFailure(DivOPDError, RuntimeError):
    """An episode ended without a result: its environment or an engine failed, or it took too long."""


async def score_rollout(
    rollout: Rollout,
    teacher: Any,
    *,
    teacher_vocabulary: np.ndarray | None = None,
    topk: int = 0,
    timeout_s: float = 300.0,
    oldest_version: int | None = None,
) -> None:
    """Have the teacher score every student turn, one call a segment, and judge the turns again, in place.

    A token without a finite score, or that means something else to the teacher, is masked.

    Args:
        rollout: Its turns are replaced by scored ones.
        teacher: A `TeacherEngine`.
        teacher_vocabulary: bool [V], see `run_episode`.
        topk: Candidates a token to keep.
        timeout_s: Seconds for all of it.
        oldest_version: Turns of older weights can no longer train: they are left unscored, with ``info["unscored"]``.

    Raises:
        EpisodeFailure: The teacher failed or took too long.
    """
    begun = time.monotonic()
    by_segment: dict[int, list[int]] = {}
    for place, turn in enumerate(rollout.turns):
        if turn.actor != Actor.STUDENT.value or not turn.n_tokens:
            continue
        if oldest_version is not None and turn.policy_version < oldest_version:
            turn.info["unscored"] = "stale"
        else:
            by_segment.setdefault(id(turn.segment), []).append(place)

    async def score_segment(places: list[int]) -> None:
        turns = [rollout.turns[place] for place in places]
        spans = [(turn.start, turn.end) for turn in turns]
        ids = turns[0].segment.token_ids[: spans[-1][1]]
        options: dict[str, Any] = {"topk": topk} if topk else {}
        if any(turn.extra_ids is not None for turn in turns):
            options["candidates"] = [turn.extra_ids for turn in turns]
        scores = await teacher.score(ids, spans, **options)
        for place, turn, found in zip(places, turns, scores):
            rollout.turns[place] = _scored(turn, found, teacher_vocabulary)

    try:
        await within(timeout_s, asyncio.gather(*map(score_segment, by_segment.values())))
    except asyncio.TimeoutError:
        raise EpisodeFailure(
            f"The teacher did not score rollout {rollout.rollout_id} of task {rollout.task!r} within "
            f"{timeout_s:.0f} s; raise episode_timeout_s, or check that the teacher is alive."
        ) from None
    except Exception as error:
        raise EpisodeFailure(
            f"Scoring task {rollout.task!r} (attempt {rollout.attempt}) failed: {cause_of(error)}"
        ) from error
    rollout.timings["score_s"] = rollout.timings.get("score_s", 0.0) + time.monotonic() - begun


def _scored(turn: Turn, found: Any, vocabulary: np.ndarray | None) -> Turn:
    """A turn with what an engine found for its span: an array, or `TokenScores`, or None."""
    logprobs, top_ids, top_logprobs, drawn = found, None, None, None
    if isinstance(found, TokenScores):
        logprobs, drawn = found.logprobs, getattr(found, "candidate_logprobs", None)
        if np.size(found.topk_ids):
            top_ids, top_logprobs = found.topk_ids, found.topk_logprobs
    mask = None
    if vocabulary is not None:
        mask = known_ids(turn.response_ids, vocabulary)
        if top_ids is not None:
            # The learner would look them up in the student's own vocabulary.
            top_ids = np.where(known_ids(top_ids, vocabulary), top_ids, -1)
        if turn.extra_ids is not None and drawn is not None:
            drawn = np.where(known_ids(turn.extra_ids, vocabulary), drawn, np.nan)
    return score_turn(
        turn, logprobs, mask, top_ids, top_logprobs, drawn if turn.extra_ids is not None else None
    )


def known_ids(ids: np.ndarray, vocabulary: np.ndarray) -> np.ndarray:
    """Which ids mean the same to a teacher of this vocabulary, bool [V]."""
    inside = (ids >= 0) & (ids < len(vocabulary))
    return inside & vocabulary[np.where(inside, ids, 0)]


def cause_of(error: BaseException) -> str:
    """What an error says, with its type where that is not ours."""
    return str(error) if isinstance(error, DivOPDError) else f"{type(error).__name__}: {error}"
