"""SAGE-OPD's review (arXiv 2606.19659): the teacher, shown what a turn led to, says how much it should train."""

from __future__ import annotations

import asyncio
import re
from collections import Counter

import numpy as np

from divopd_gym.errors import ConfigError

from ..engines.base import GenerateRequest
from ..turns import Actor, Rollout, Turn
from .deadline import within
from .review import ReviewContext

__all__ = ["VERDICTS", "SAGEReview", "read_verdict"]

VERDICTS = ("skip", "weak", "strong")
"""What the teacher may say of a turn."""

_WORD = re.compile(rf"\b({'|'.join(VERDICTS)})\b")


def read_verdict(reply: str) -> str | None:
    """The first of `VERDICTS` in a reply; None if there is none."""
    found = _WORD.search(reply.lower())
    return None if found is None else found[1]


class SAGEReview:
    """Asks the teacher about every student turn that can train, one short greedy reply a turn.

    Writes ``turn.info["sage"]``, one of `VERDICTS`, and counts into ``rollout.meta["sage"]``: the verdicts, and
    "unparsed", "failed" and "late" for replies that held none, requests that failed and those that time cut off.
    These turns count as weak. The question's words are ours; the paper's are not published.

    Args:
        max_tokens: Tokens of a reply.
        concurrency: Requests of a rollout at once.
        timeout_s: Seconds for a rollout's turns; what is left of the episode's own time bounds it.
        text_chars: Characters shown of each observation and reply, from the end.

    Raises:
        ConfigError: A value below 1.
    """

    name = "sage"
    needs_teacher = True

    def __init__(
        self, max_tokens: int = 8, concurrency: int = 4, timeout_s: float = 120.0, text_chars: int = 2000
    ) -> None:
        for field, value in (
            ("max_tokens", max_tokens),
            ("concurrency", concurrency),
            ("timeout_s", timeout_s),
            ("text_chars", text_chars),
        ):
            if not value >= 1:
                raise ConfigError(f"The review 'sage' has {field}={value!r}; expected 1 or more.")
        self.max_tokens, self.concurrency = max_tokens, concurrency
        self.timeout_s, self.text_chars = timeout_s, text_chars

    async def review(self, rollout: Rollout, context: ReviewContext) -> None:
        """See `Review.review`; never fails an episode."""
        asked = [t for t in rollout.turns if t.actor == Actor.STUDENT.value and t.valid]
        counts: Counter[str] = Counter()
        slots = asyncio.Semaphore(self.concurrency)

        async def ask(turn: Turn) -> None:
            async with slots:
                verdict, what = await self._ask(rollout, turn, context)
            turn.info["sage"] = verdict
            counts.update([what] if what else [])

        try:
            await within(min(self.timeout_s, context.time_left), asyncio.gather(*map(ask, asked)))
        except asyncio.TimeoutError:
            late = [turn for turn in asked if "sage" not in turn.info]
            counts["late"] = len(late)
            for turn in late:
                turn.info["sage"] = "weak"
        counts.update(turn.info["sage"] for turn in asked)
        names = (*VERDICTS, "unparsed", "failed", "late")
        rollout.meta["sage"] = {name: counts[name] for name in names}

    async def _ask(self, rollout: Rollout, turn: Turn, context: ReviewContext) -> tuple[str, str | None]:
        """The verdict, and what went wrong."""
        codec = context.engines.codec
        try:
            generation = await context.teacher.generate(
                GenerateRequest(
                    prompt_ids=codec.start(
                        None, self.question(rollout, turn, codec.decode(turn.response_ids))
                    ),
                    max_tokens=self.max_tokens,
                    temperature=context.config.temperature,
                    greedy=True,
                    stop_ids=tuple(codec.end_of_turn_ids),
                )
            )
            verdict = read_verdict(codec.decode(np.asarray(generation.token_ids)))
        except Exception:
            return "weak", "failed"
        return (verdict, None) if verdict else ("weak", "unparsed")

    def question(self, rollout: Rollout, turn: Turn, reply: str) -> str:
        """What the teacher reads: the task, the turn, and what the environment answered.

        Args:
            rollout: The whole episode.
            turn: One of its turns.
            reply: The text of the turn's response.
        """
        after = rollout.turns[turn.index + 1 : turn.index + 2]
        then = after[0].observation if after else str(rollout.meta.get("final_observation", ""))
        parts = [
            "An agent learns from you how to act in a text environment. Judge one of its turns by what it led to.",
            f"Task: {rollout.meta.get('goal') or rollout.task}",
            f"Before the turn it saw:\n{self._cut(turn.observation)}",
            f"It wrote:\n{self._cut(reply)}",
            f"The environment answered:\n{self._cut(then)}",
            "How much should your own next words correct the agent here? Answer with one word: skip (they would not "
            "help), weak (a little) or strong (the turn went wrong, or was decisive).",
        ]
        return "\n\n".join(parts)

    def _cut(self, text: str) -> str:
        return text.strip()[-self.text_chars :]
