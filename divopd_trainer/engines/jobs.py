"""Requests on their way through a local engine's forward thread, and how their results get back to asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from divopd_trainer.engines.base import GenerateRequest, TokenScores

__all__ = ["GenerateJob", "Job", "LoadJob", "ScoreJob", "deliver"]


@dataclass(eq=False)
class Job:
    """One request; `future` belongs to the loop that made it and is only touched there."""

    loop: asyncio.AbstractEventLoop
    future: asyncio.Future
    arrived: float = field(default_factory=time.monotonic, kw_only=True)
    cancelled: bool = field(default=False, kw_only=True)


@dataclass(eq=False)
class GenerateJob(Job):
    """A response being sampled.

    Attributes:
        request: What was asked.
        room: Token limit after the context limit was applied.
        stops: Ids that end the response.
        uniforms: The request's stream, one number a token.
        extra_uniforms: float64 [room, extra_samples], for the draws beside each token; None: there are none.
        slot: Where its keys and values are; -1 before admission.
        fed: How many of prompt + response are in the slot.
    """

    request: GenerateRequest
    room: int
    stops: frozenset[int]
    uniforms: np.ndarray
    slot: int = -1
    fed: int = 0
    cached: int = 0
    version: int = -1
    out: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    extra_uniforms: np.ndarray | None = None
    extra: list[list[int]] = field(default_factory=list)

    @property
    def unfed(self) -> int:
        """Tokens that still have to go through the model before the next one can be drawn."""
        return len(self.request.prompt_ids) + len(self.out) - self.fed

    def next_ids(self, count: int) -> Sequence[int] | np.ndarray:
        """The next `count` unfed tokens."""
        prompt = self.request.prompt_ids
        if self.fed >= len(prompt):
            first = self.fed - len(prompt)
            return self.out[first : first + count]
        return prompt[self.fed : self.fed + count]

    def held_tokens(self) -> np.ndarray:
        """What the slot holds: int32 [fed]."""
        prompt = self.request.prompt_ids
        if self.fed <= len(prompt):
            return prompt[: self.fed].copy()
        return np.concatenate([prompt, np.array(self.out[: self.fed - len(prompt)], np.int32)])


@dataclass(eq=False)
class ScoreJob(Job):
    """A sequence to score.

    Attributes:
        ids: int32, the part that has to go through the model.
        positions: int64 [P], whose logits are wanted.
        targets: int64 [P], the tokens to score; -1 where only the alternatives can be given.
        topk: How many alternatives.
        temperature: Scores are of ``softmax(logits / temperature)``.
        candidates: int64 [P, C], more ids to score at each position; -1 where there is none.
    """

    ids: np.ndarray
    positions: np.ndarray
    targets: np.ndarray
    topk: int
    temperature: float
    candidates: np.ndarray | None = None


@dataclass(eq=False)
class LoadJob(Job):
    """Weights to put in place once no response is running."""

    tensors: Mapping[str, Any]
    version: int


def deliver(finished: list[tuple[Job, Any]]) -> None:
    """Set results or exceptions on their own loops, with one wake-up a loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Job, Any]]] = {}
    for job, result in finished:
        by_loop.setdefault(job.loop, []).append((job, result))
    for loop, items in by_loop.items():
        # The loop may be closed already; then nobody waits.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(_set, items)


def _set(items: list[tuple[Job, GenerateJob | TokenScores | BaseException | None]]) -> None:
    for job, result in items:
        if job.future.done():
            continue
        if isinstance(result, BaseException):
            job.future.set_exception(result)
        else:
            job.future.set_result(result)
