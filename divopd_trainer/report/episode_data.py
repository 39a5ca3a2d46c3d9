"""Episodes for the page's browser, small: an index of all of them, and each one's text packed by itself.

The index (one compressed JSON a run) holds what the list and its colours need; texts and tokens are one compressed
JSON an episode, unpacked in the browser when it is opened. When they would grow beyond a budget an even
sample of the run keeps its text.
"""

from __future__ import annotations

import base64
import json
import zlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..turns import Rollout, Turn

__all__ = ["GAP_UNIT", "TEXT_LIMIT", "EpisodeStore", "Thinning", "episode_index", "episode_text", "pack"]

TEXT_LIMIT = 4000
"""Characters of one observation that the page carries."""
TOKEN_LIMIT = 2000
"""Tokens of one response that the page carries."""
GAP_UNIT = 0.05
"""Nats; gaps of single tokens are rounded to it."""


def pack(value: Any) -> str:
    """JSON, compressed, as base64."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    # Lone surrogates, which environments may print, are no UTF-8.
    data = zlib.compress(text.encode("utf-8", errors="replace"), 6)
    return base64.b64encode(data).decode("ascii")


class Thinning:
    """Keeps an even sample of a stream whose length is not known, within a number and a size.

    Every item is kept until a limit is passed; then every other one is let go, and so on.

    Args:
        limit: Items at most; None: any number.
        budget: Sum of sizes at most; None: any.
    """

    def __init__(self, limit: int | None = None, budget: int | None = None):
        self.limit, self.budget = limit, budget
        self.kept: dict[int, tuple[Any, int]] = {}
        self.seen = self._size = 0
        self._every = 1

    def wants_next(self) -> bool:
        """Whether the next item of the stream will be kept."""
        return self.seen % self._every == 0

    def skip(self) -> None:
        """The next item, not wanted."""
        self.seen += 1

    def add(self, item: Any, size: int = 0) -> None:
        """The next item of the stream."""
        if self.wants_next():
            self.kept[self.seen] = (item, size)
            self._size += size
        self.seen += 1
        while len(self.kept) > 1 and self._over():
            self._every *= 2
            self.kept = {place: kept for place, kept in self.kept.items() if place % self._every == 0}
            self._size = sum(size for _, size in self.kept.values())

    def _over(self) -> bool:
        too_many = self.limit is not None and len(self.kept) > self.limit
        return too_many or (self.budget is not None and self._size > self.budget)

    def items(self) -> dict[int, Any]:
        """Place in the stream -> item, in order."""
        return {place: item for place, (item, _) in self.kept.items()}


@dataclass
class EpisodeStore:
    """The episodes of one run that the page carries.

    Attributes:
        budget: Bytes of packed texts at most.
        limit: Episodes with text at most; None: as the budget allows.
        index_limit: Episodes in the list at most.
        vocabulary: Token id -> text, of the run's tokenizer; may be empty.
    """

    budget: int = 12 << 20
    limit: int | None = None
    index_limit: int = 20_000
    vocabulary: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._index = Thinning(self.index_limit)
        self._texts = Thinning(self.limit, self.budget)

    def add(self, rollout: Rollout, trained_at: dict[tuple[int, int], int]) -> None:
        """The next episode.

        Args:
            rollout: The episode.
            trained_at: (rollout id, turn index) -> update of its training.
        """
        self._index.add(episode_index(rollout, trained_at))
        if not self._texts.wants_next():
            self._texts.skip()
            return
        detail = episode_text(rollout)
        text = pack(detail)
        self._texts.add((text, {token for turn in detail["t"] for token in turn}), len(text))

    @property
    def episodes(self) -> list[dict[str, Any]]:
        """The index, oldest first; ``x`` is an episode's place among `texts`, absent without a text."""
        texts = {place: number for number, place in enumerate(self._texts.items())}
        return [
            entry | ({"x": texts[place]} if place in texts else {})
            for place, entry in self._index.items().items()
        ]

    @property
    def texts(self) -> list[str]:
        """Packed texts of episodes, oldest first."""
        return [text for text, _ in self._texts.items().values()]

    def packed_index(self) -> str:
        """Episodes, and the texts of the tokens that occur in them."""
        used = set().union(*(tokens for _, tokens in self._texts.items().values()))
        words = {token: self.vocabulary[token] for token in sorted(used) if token in self.vocabulary}
        return pack({"episodes": self.episodes, "words": words})


def episode_index(rollout: Rollout, trained_at: dict[tuple[int, int], int]) -> dict[str, Any]:
    """What the list needs of a rollout, under short names.

    Lists have one entry a turn: ``d`` mean over valid tokens of student minus teacher log-prob in thousandths
    of a nat (None without a score), ``n`` tokens, ``u`` update at which it trained (0: it did not), ``v``
    policy version; ``who`` one letter a turn (s student, t teacher, r replay), ``ok`` 1 where the action was
    valid, ``why`` the reason a student's turn could not be trained, by turn.
    """
    return {
        "id": rollout.rollout_id,
        "task": rollout.task,
        "type": str(rollout.meta.get("task_type") or ""),
        "goal": str(rollout.meta.get("goal") or ""),
        "attempt": rollout.attempt,
        "success": bool(rollout.success),
        "score": round(float(rollout.score), 4),
        "reason": rollout.done_reason or "",
        "d": [_disagreement(turn) for turn in rollout.turns],
        "n": [turn.n_tokens for turn in rollout.turns],
        "u": [
            trained_at.get((turn.rollout_id, turn.index), 0) if turn.valid else 0 for turn in rollout.turns
        ],
        "v": [turn.policy_version for turn in rollout.turns],
        "who": "".join(turn.actor[:1] for turn in rollout.turns),
        "ok": "".join("1" if turn.action_valid else "0" for turn in rollout.turns),
        "why": {
            str(place): turn.why_not
            for place, turn in enumerate(rollout.turns)
            if turn.why_not and turn.actor == "student"
        },
    }


def _disagreement(turn: Turn) -> int | None:
    count = int(turn.valid_mask().sum())
    return round(1000 * turn.score / count) if count and not turn.imitated else None


def episode_text(rollout: Rollout) -> dict[str, Any]:
    """What an opened episode needs: ``o`` observations, ``a`` actions, ``t`` token ids of the responses, ``g`` gaps.

    A gap is student minus teacher log-prob in `GAP_UNIT`, None where the token carries no loss. ``end`` is what
    the environment said last.
    """
    return {
        "o": [_cut(turn.observation) for turn in rollout.turns],
        "a": [_cut(turn.action) for turn in rollout.turns],
        "t": [turn.response_ids[:TOKEN_LIMIT].tolist() for turn in rollout.turns],
        "g": [_gaps(turn) for turn in rollout.turns],
        "end": _cut(str(rollout.meta.get("final_observation") or "")),
    }


def _cut(text: str) -> str:
    if len(text) <= TEXT_LIMIT:
        return text
    return f"{text[:TEXT_LIMIT]} ... ({len(text) - TEXT_LIMIT} more characters)"


def _gaps(turn: Turn) -> list[int | None]:
    # A reply of the teacher that is imitated trains without a log-prob of the student, so it has no gap.
    mask = turn.valid_mask() & np.isfinite(turn.student_logprobs)
    if not mask.any():
        return []
    with np.errstate(invalid="ignore", over="ignore"):
        gaps = np.rint(
            (turn.student_logprobs.astype(np.float64) - turn.teacher_logprobs)[:TOKEN_LIMIT] / GAP_UNIT
        )
    return [int(gap) if valid else None for gap, valid in zip(gaps, mask)]
