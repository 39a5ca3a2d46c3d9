"""Segments, turns and rollouts: what an episode leaves behind, and whether a turn can be trained.

A `Segment` is one append-only token sequence; a `Turn` points at one response inside it, so a prompt that many
turns share is stored once. Every per-token array of a turn has one entry a response token: entry ``i`` scores
token ``start + i`` of the segment given all tokens before it. No torch here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np

from divopd_gym.errors import DivOPDError

__all__ = [
    "Actor",
    "Rollout",
    "Segment",
    "StopReason",
    "Turn",
    "TurnError",
    "WhyNot",
    "make_turn",
    "score_turn",
]


class TurnError(DivOPDError, ValueError):
    """A turn was built from arrays that do not fit together."""


class StopReason(str, Enum):
    """Why a response ended."""

    END_OF_TURN = "end_of_turn"
    LENGTH = "length"
    CONTEXT_OVERFLOW = "context_overflow"
    ERROR = "error"


class Actor(str, Enum):
    """Who wrote a response."""

    STUDENT = "student"
    TEACHER = "teacher"
    REPLAY = "replay"


class WhyNot(str, Enum):
    """Why a turn carries no loss; the first rule that applies, in this order."""

    NOT_STUDENT = "not_student"
    PROMPT_TRUNCATED = "prompt_truncated"
    GENERATION_FAILED = "generation_failed"
    NO_TOKENS = "no_tokens"
    NO_TEACHER_SCORES = "no_teacher_scores"
    TEACHER_SCORES_MISALIGNED = "teacher_scores_misaligned"
    TEACHER_MASK_MISALIGNED = "teacher_mask_misaligned"
    NO_VALID_TOKEN = "no_valid_token"


@dataclass(eq=False)
class Segment:
    """One token sequence that only ever grows.

    In *accumulate* history a rollout is one segment; in *window(n)* history each turn is a segment of its own.

    Attributes:
        rollout_id: The rollout it belongs to.
        index: Its place among the rollout's segments, from 0.
        token_ids: int32 [T].
    """

    rollout_id: int
    index: int = 0
    token_ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))

    def __post_init__(self) -> None:
        self.token_ids = np.asarray(self.token_ids, np.int32)

    def __len__(self) -> int:
        return len(self.token_ids)

    def append(self, token_ids: Iterable[int]) -> tuple[int, int]:
        """Add ids at the end; returns the span ``(start, end)`` they now occupy.

        Arrays taken from the segment earlier stay as they were.
        """
        if not isinstance(token_ids, np.ndarray):
            token_ids = np.fromiter(token_ids, np.int32)
        start = len(self.token_ids)
        self.token_ids = np.concatenate([self.token_ids, token_ids.astype(np.int32, copy=False)])
        return start, len(self.token_ids)


@dataclass(frozen=True, eq=False)
class Turn:
    """One response, with all that is needed to choose it and to train on it.

    Build it with `make_turn`, which fills ``valid``, ``why_not`` and ``score``.

    Attributes:
        rollout_id: Rises with arrival.
        index: Zero-based number of the turn in its episode.
        segment: Holds the tokens; the prompt is ``segment.token_ids[:start]``.
        start: First response token.
        end: One past the last response token.
        student_logprobs: float32 [n], nats, of the distribution that was sampled, at generation.
        teacher_logprobs: float32 [n] under the same index convention, or None when not scored.
        teacher_mask: bool [n]; None means that every teacher score counts.
        policy_version: Completed updates whose weights wrote this response.
        stop_reason: A `StopReason` value.
        actor: An `Actor` value.
        valid: Whether it may enter a batch (the validity gate's verdict).
        why_not: A `WhyNot` value when not valid.
        score: Sum over valid tokens of student minus teacher log-prob at generation: signed, in nats; 0 for a reply
            of the teacher that is imitated.
        prompt_truncated: Whether the prompt lost tokens to a limit.
        teacher_topk_ids: int32 [n, K] or None.
        teacher_topk_logprobs: float32 [n, K] or None.
        extra_ids: int32 [n, M] or None: tokens that the student drew beside each realised one (AsyncOPD's
            multi-sample estimate); -1 where there is none.
        extra_teacher_logprobs: float32 [n, M], the teacher's log-probs of `extra_ids`, NaN where it has none; or None.
        action: What was sent to the environment.
        action_valid: Whether the reply parsed and the environment took it.
        observation: What the environment had said before this turn.
        info: Anything else for records and reports; JSON values only. ``imitate``: a teacher's reply that trains.
    """

    rollout_id: int
    index: int
    segment: Segment
    start: int
    end: int
    student_logprobs: np.ndarray
    teacher_logprobs: np.ndarray | None
    teacher_mask: np.ndarray | None
    policy_version: int
    stop_reason: str = StopReason.END_OF_TURN.value
    actor: str = Actor.STUDENT.value
    valid: bool = False
    why_not: str | None = None
    score: float = 0.0
    prompt_truncated: bool = False
    teacher_topk_ids: np.ndarray | None = None
    teacher_topk_logprobs: np.ndarray | None = None
    extra_ids: np.ndarray | None = None
    extra_teacher_logprobs: np.ndarray | None = None
    action: str = ""
    action_valid: bool = True
    observation: str = ""
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def n_tokens(self) -> int:
        """Response tokens."""
        return self.end - self.start

    @property
    def seq_len(self) -> int:
        """Tokens that a forward pass of this turn alone must read: prompt and response."""
        return self.end

    @property
    def prompt_ids(self) -> np.ndarray:
        """int32 [start]."""
        return self.segment.token_ids[: self.start]

    @property
    def response_ids(self) -> np.ndarray:
        """int32 [n]."""
        return self.segment.token_ids[self.start : self.end]

    @property
    def imitated(self) -> bool:
        """Whether this is a reply of the teacher that the student is trained to give (cross-entropy)."""
        return self.actor == Actor.TEACHER.value and bool(self.info.get("imitate"))

    @property
    def trainable(self) -> bool:
        """Whether it is a candidate for a batch at all; `valid` says whether it can be trained."""
        return self.actor == Actor.STUDENT.value or self.imitated

    def valid_mask(self) -> np.ndarray:
        """Bool [n]: tokens that carry loss; all False when the turn as a whole may not be trained.

        A token without a finite teacher score is masked by itself; it does not spoil its row.
        """
        n = self.n_tokens
        if _why_not_as_a_whole(self) is not None:
            return np.zeros(n, np.bool_)
        if self.imitated:
            return np.ones(n, np.bool_) if self.teacher_mask is None else self.teacher_mask
        mask = np.isfinite(self.teacher_logprobs) & np.isfinite(self.student_logprobs)
        return mask if self.teacher_mask is None else mask & self.teacher_mask


@dataclass(eq=False)
class Rollout:
    """One episode of one task.

    Attributes:
        rollout_id: Rises with arrival.
        task: Task id.
        attempt: Which try at this task it is, from 0.
        turns: In order; teacher and replayed turns included.
        success: Strict success.
        done: Whether the environment ended the episode.
        score: Final score, 0 to 1.
        reward: Sum of rewards.
        turns_played: Actions sent to the environment.
        done_reason: Why the episode ended.
        seed: Seed of the episode.
        policy_versions: (first, last) version that wrote one of its student turns.
        timings: Seconds by name.
        meta: Anything else; JSON values only.
    """

    rollout_id: int
    task: str = ""
    attempt: int = 0
    turns: list[Turn] = field(default_factory=list)
    success: bool = False
    done: bool = False
    score: float = 0.0
    reward: float = 0.0
    turns_played: int = 0
    done_reason: str | None = None
    seed: int = 0
    policy_versions: tuple[int, int] | None = None
    timings: dict[str, float] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)

    @property
    def segments(self) -> list[Segment]:
        """The distinct segments that its turns point into, in order of first use."""
        return list({id(turn.segment): turn.segment for turn in self.turns}.values())

    @property
    def valid_turns(self) -> list[Turn]:
        """Turns that may be trained."""
        return [turn for turn in self.turns if turn.valid]


def make_turn(
    *,
    rollout_id: int,
    index: int,
    segment: Segment,
    start: int,
    end: int,
    student_logprobs: Any,
    teacher_logprobs: Any = None,
    teacher_mask: Any = None,
    policy_version: int = 0,
    stop_reason: str = StopReason.END_OF_TURN,
    actor: str = Actor.STUDENT,
    prompt_truncated: bool = False,
    teacher_topk_ids: Any = None,
    teacher_topk_logprobs: Any = None,
    extra_ids: Any = None,
    extra_teacher_logprobs: Any = None,
    action: str = "",
    action_valid: bool = True,
    observation: str = "",
    info: dict[str, Any] | None = None,
) -> Turn:
    """Build a turn and judge it.

    A turn is valid (DivOPD, algorithm 1, the gate) when the student wrote it, its prompt was not cut, generation
    did not fail, it has tokens and teacher scores, a mask if given is as long as the response, and at least
    one token is left. Missing or misaligned teacher data make a turn invalid; they are no error.

    Args:
        rollout_id: See `Turn`.
        index: See `Turn`.
        segment: Must already hold the response.
        start: First response token in the segment.
        end: One past the last.
        student_logprobs: [n] numbers.
        teacher_logprobs: [n] numbers or None.
        teacher_mask: [n] truth values or None.
        policy_version: See `Turn`.
        stop_reason: A `StopReason` or its value.
        actor: An `Actor` or its value.
        prompt_truncated: See `Turn`.
        teacher_topk_ids: [n, K] or None.
        teacher_topk_logprobs: [n, K] or None.
        extra_ids: [n, M] or None.
        extra_teacher_logprobs: [n, M] or None.
        action: See `Turn`.
        action_valid: See `Turn`.
        observation: See `Turn`.
        info: See `Turn`.

    Raises:
        TurnError: The span lies outside the segment, the student's log-probs or extra draws are not one entry a
            token, or the stop reason or the actor is unknown.
    """
    if not 0 <= start <= end <= len(segment):
        raise TurnError(
            f"Turn {rollout_id}/{index} spans tokens {start}:{end} of a segment with {len(segment)} tokens; "
            "append the response to the segment before making the turn."
        )
    student = np.asarray(student_logprobs, np.float32)
    if student.shape != (end - start,):
        raise TurnError(
            f"Turn {rollout_id}/{index} has {end - start} response tokens but student log-probs of shape "
            f"{student.shape}; pass exactly one log-prob a response token."
        )
    extra = None if extra_ids is None else np.asarray(extra_ids, np.int32)
    if extra is not None and (extra.ndim != 2 or len(extra) != len(student)):
        raise TurnError(
            f"Turn {rollout_id}/{index} has {end - start} response tokens but extra draws of shape {extra.shape}; "
            "pass an array [n, M], the same number of draws at every response token."
        )
    try:
        stop_reason, actor = StopReason(stop_reason).value, Actor(actor).value
    except ValueError as error:
        raise TurnError(
            f"Turn {rollout_id}/{index}: {error}; expected one of {[m.value for m in StopReason]} as stop "
            f"reason and one of {[m.value for m in Actor]} as actor."
        ) from None
    turn = Turn(
        rollout_id=int(rollout_id),
        index=int(index),
        segment=segment,
        start=int(start),
        end=int(end),
        student_logprobs=student,
        teacher_logprobs=None,
        teacher_mask=None,
        policy_version=int(policy_version),
        stop_reason=stop_reason,
        actor=actor,
        prompt_truncated=bool(prompt_truncated),
        extra_ids=extra,
        action=action,
        action_valid=bool(action_valid),
        observation=observation,
        info=dict(info or {}),
    )
    return score_turn(
        turn, teacher_logprobs, teacher_mask, teacher_topk_ids, teacher_topk_logprobs, extra_teacher_logprobs
    )


def score_turn(
    turn: Turn,
    teacher_logprobs: Any,
    teacher_mask: Any = None,
    teacher_topk_ids: Any = None,
    teacher_topk_logprobs: Any = None,
    extra_teacher_logprobs: Any = None,
) -> Turn:
    """A copy of the turn with these teacher scores, judged again (the segment is shared, not copied).

    `extra_teacher_logprobs` are of the turn's own `extra_ids`.
    """

    def array(values: Any, dtype: Any) -> np.ndarray | None:
        return None if values is None else np.asarray(values, dtype)

    turn = dataclasses.replace(
        turn,
        teacher_logprobs=array(teacher_logprobs, np.float32),
        teacher_mask=array(teacher_mask, np.bool_),
        teacher_topk_ids=array(teacher_topk_ids, np.int32),
        teacher_topk_logprobs=array(teacher_topk_logprobs, np.float32),
        extra_teacher_logprobs=array(extra_teacher_logprobs, np.float32),
    )
    why_not = _why_not_as_a_whole(turn)
    score = 0.0
    if why_not is None:
        mask = turn.valid_mask()
        if mask.any() and turn.imitated:
            pass  # nobody knows what the student would have said it with: it ranks as no disagreement
        elif mask.any():
            gaps = turn.student_logprobs[mask].astype(np.float64) - turn.teacher_logprobs[mask]
            score = float(gaps.sum())
        else:
            why_not = WhyNot.NO_VALID_TOKEN
    reason = None if why_not is None else why_not.value
    return dataclasses.replace(turn, valid=why_not is None, why_not=reason, score=score)


def _why_not_as_a_whole(turn: Turn) -> WhyNot | None:
    """The first reason, short of its single tokens, that keeps a turn out of training."""
    n = turn.n_tokens
    if not turn.trainable:
        return WhyNot.NOT_STUDENT
    if turn.prompt_truncated:
        return WhyNot.PROMPT_TRUNCATED
    if turn.stop_reason == StopReason.ERROR.value:
        return WhyNot.GENERATION_FAILED
    if n == 0 or turn.start == 0:
        return WhyNot.NO_TOKENS
    if turn.teacher_logprobs is None:
        return WhyNot.NO_TEACHER_SCORES
    if turn.teacher_logprobs.shape != (n,):
        return WhyNot.TEACHER_SCORES_MISALIGNED
    if (
        turn.extra_teacher_logprobs is not None
        and np.shape(turn.extra_ids) != turn.extra_teacher_logprobs.shape
    ):
        return WhyNot.TEACHER_SCORES_MISALIGNED
    if turn.teacher_mask is not None and turn.teacher_mask.shape != (n,):
        return WhyNot.TEACHER_MASK_MISALIGNED
    return None
