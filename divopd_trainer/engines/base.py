"""What every engine promises: ids in, ids out, log-probs of the distribution that was sampled, one policy version.

An engine never renders or re-encodes text. A prompt that does not fit is a normal outcome (stop reason
``context_overflow``), not an exception. No torch here.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from divopd_gym.errors import DivOPDError

__all__ = [
    "EngineClosed",
    "EngineError",
    "EngineTimeout",
    "GenerateRequest",
    "Generation",
    "StudentEngine",
    "TeacherEngine",
    "TokenScores",
]


class EngineError(DivOPDError, RuntimeError):
    """A request that an engine cannot serve, or a forward pass that failed."""


class EngineTimeout(EngineError):
    """A request that was not answered before its deadline."""


class EngineClosed(EngineError):
    """A request to an engine that is closed."""


@dataclass
class GenerateRequest:
    """One response to sample.

    Attributes:
        prompt_ids: int32 [T], T >= 1.
        max_tokens: At most this many tokens; fewer where the context limit leaves less room.
        temperature: Tokens are drawn from ``softmax(logits / temperature)``; above 0.
        seed: Fixes the response together with the weights; see `divopd_trainer.engines.sampling`.
        cache_key: Names the conversation (usually the rollout id), so that its keys and values can be kept
            until its next turn. None: nothing is kept for it.
        greedy: Take the most likely token; its log-prob is still reported at `temperature`.
        stop_ids: Ids that end a response, kept as its last token. Empty: the engine's own.
        extra_samples: Tokens to draw at every position beside the realised one, from the same distribution; they
            are no part of the response and do not change it.
    """

    prompt_ids: np.ndarray
    max_tokens: int
    temperature: float = 1.0
    seed: int = 0
    cache_key: Hashable | None = None
    greedy: bool = False
    stop_ids: Sequence[int] = ()
    extra_samples: int = 0

    def __post_init__(self) -> None:
        self.prompt_ids = np.asarray(self.prompt_ids, np.int32)
        if self.prompt_ids.ndim != 1 or len(self.prompt_ids) == 0:
            raise EngineError(
                f"GenerateRequest.prompt_ids has shape {self.prompt_ids.shape}; expected a flat array of at least "
                "one id. Start the prompt with the tokenizer's own header."
            )
        if not self.temperature > 0:
            raise EngineError(
                f"GenerateRequest.temperature is {self.temperature}; expected a number above 0. "
                "Use greedy=True for the most likely token."
            )
        if self.max_tokens < 1:
            raise EngineError(f"GenerateRequest.max_tokens is {self.max_tokens}; expected at least 1.")
        if self.extra_samples < 0:
            raise EngineError(
                f"GenerateRequest.extra_samples is {self.extra_samples}; expected 0 or more. 0 draws the response alone."
            )


@dataclass
class Generation:
    """One sampled response.

    Attributes:
        token_ids: int32 [n]; the stop id, if one was met, is the last.
        logprobs: float32 [n], nats; entry i is the log-prob of token i under the distribution it was drawn from
            (``softmax(logits / temperature)``), given the prompt and the tokens before it.
        stop_reason: ``end_of_turn``, ``length`` or ``context_overflow`` (then n is 0).
        policy_version: The one version of the weights that wrote the whole response.
        cached_tokens: Prompt tokens whose keys and values were reused.
        seconds: From the request's arrival to its last token.
        extra_ids: int32 [n, extra_samples], drawn independently of the response and of each other; None when the
            request asked for none.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    stop_reason: str
    policy_version: int
    cached_tokens: int = 0
    seconds: float = 0.0
    extra_ids: np.ndarray | None = None


@dataclass
class TokenScores:
    """Log-probs of one span, with the most likely alternatives and those of given ones.

    Attributes:
        logprobs: float32 [n], nats; NaN where the token could not be scored.
        topk_ids: int32 [n, K], most likely first; -1 where the position could not be scored.
        topk_logprobs: float32 [n, K]; NaN where the position could not be scored.
        candidate_logprobs: float32 [n, C], of the ids that were asked about; NaN where the position or the id could
            not be scored.
    """

    logprobs: np.ndarray
    topk_ids: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), np.int32))
    topk_logprobs: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), np.float32))
    candidate_logprobs: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), np.float32))


class StudentEngine(Protocol):
    """Samples with weights that are replaced while the run goes on."""

    policy_version: int

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one response."""

    async def load_weights(self, source: str | Path | Mapping[str, Any], version: int) -> None:
        """Replace the weights; a response in flight is finished with the old ones."""

    def forget(self, cache_key: Hashable) -> None:
        """Drop what is kept for a conversation that is over."""


class TeacherEngine(Protocol):
    """Scores given tokens, and acts when a rollout is stuck."""

    async def score(
        self,
        token_ids: np.ndarray,
        spans: Sequence[tuple[int, int]],
        topk: int = 0,
        *,
        candidates: Sequence[np.ndarray] | None = None,
    ) -> list[np.ndarray] | list[TokenScores]:
        """Log-probs of the tokens in each span ``(start, end)``.

        Args:
            token_ids: int [T], the whole segment.
            spans: ``(start, end)`` pairs.
            topk: Also give this many most likely tokens at each position.
            candidates: For each span int32 [end - start, C]: also score these ids in the place of the token at each
                position; -1 where there is none. None: no more than the tokens themselves. Only given by callers
                that want them, so an engine without them needs no such argument.

        Returns:
            One float32 [end - start] array a span: entry i scores ``token_ids[start + i]`` given all tokens
            before it; NaN where it cannot be scored. With ``topk`` above 0 or candidates, one `TokenScores` a span
            instead.
        """

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one response."""
