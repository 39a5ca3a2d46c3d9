"""The frozen teacher on vLLM servers: one request scores a whole segment, and it can act too.

It scores at temperature 1, for a server's ``temperature`` does not reach the log-probs of a prompt. Tokens beyond the
server's context stay unscored (NaN), unless overlapping windows are asked for, whose scores are approximate: a token
is then judged from at least `overlap` tokens before it instead of from all.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from divopd_gym.errors import ConfigError
from divopd_trainer.engines.base import EngineError, GenerateRequest, Generation, TokenScores
from divopd_trainer.engines.completions import (
    generate_body,
    no_room,
    prompt_scores,
    read_completion,
    refuse_unfinished,
    room_for,
    score_body,
)
from divopd_trainer.engines.http import Server
from divopd_trainer.engines.replicas import Replicas

__all__ = ["VLLMTeacher", "windows"]

_PATH = "/v1/completions"
_LONG = 2048


def windows(length: int, limit: int, overlap: int) -> list[tuple[int, int, int]]:
    """How a sequence is cut for a server that reads at most `limit` tokens.

    Args:
        length: Tokens of the sequence.
        limit: Tokens of one window.
        overlap: Tokens that each window but the first reads again as context; 0: one window, the rest is left out.

    Returns:
        ``(start, end, first)``: a window reads ``[start, end)`` and scores ``[first, end)``.
    """
    cuts = [(0, min(length, limit), 0)]
    while overlap and cuts[-1][1] < length:
        first = cuts[-1][1]
        start = first - overlap
        cuts.append((start, min(length, start + limit), first))
    return cuts


class VLLMTeacher:
    """A teacher behind one or more servers.

    Args:
        servers: All of the same model.
        max_model_len: What the servers were started with. One token of it is taken by vLLM itself, so
            ``max_model_len - 1`` are read and the last of those is scored.
        stop_ids: Ids that end a response where a request names none.
        overlap: See `windows`.
        vocab_size: Ids that the model knows; a server refuses others, so they are left unscored here, and read as
            id 0 where they stand before scored tokens. None: all are sent.
        per_server: Requests that one server is given at once; each may take memory for the log-probs of a long prompt.
        request_timeout_s: Deadline of a request, all attempts together.
        silent_s: See `Replicas`.

    Raises:
        ConfigError: No server, or an overlap that leaves no room.
    """

    name = "teacher"

    def __init__(
        self,
        servers: Sequence[Server],
        *,
        max_model_len: int,
        stop_ids: Sequence[int] = (),
        overlap: int = 0,
        vocab_size: int | None = None,
        per_server: int = 16,
        request_timeout_s: float = 600.0,
        silent_s: float = 30.0,
    ) -> None:
        if not 0 <= overlap < max_model_len - 1:
            raise ConfigError(
                f"teacher_overlap is {overlap} with a teacher that reads {max_model_len - 1} tokens; expected 0 (leave "
                "tokens beyond unscored) to less than that."
            )
        self.max_model_len, self.overlap, self.vocab_size = max_model_len, overlap, vocab_size
        self.stop_ids = tuple(int(i) for i in stop_ids)
        self.replicas = Replicas(
            servers, "teacher", per_server=per_server, timeout_s=request_timeout_s, silent_s=silent_s
        )
        self._totals: dict[str, float] = dict.fromkeys(
            ("scored_tokens", "unscored_tokens", "generated_tokens", "prefill_tokens"), 0
        )

    @property
    def counters(self) -> dict[str, float]:
        """Totals since the start: tokens read and scored, left unscored, generated; requests, retries, restarts."""
        return {**self._totals, **self.replicas.counters, "score_s": self.replicas.busy_s}

    async def score(
        self,
        token_ids: np.ndarray,
        spans: Sequence[tuple[int, int]],
        topk: int = 0,
        *,
        candidates: Sequence[np.ndarray] | None = None,
    ) -> list[np.ndarray] | list[TokenScores]:
        """Log-probs of given tokens; see `TeacherEngine.score`.

        Args:
            token_ids: int [T], the whole segment; nothing behind the last span is sent.
            spans: ``(start, end)`` pairs.
            topk: Also give this many most likely tokens at each position; the servers' ``--max-logprobs`` bounds it.
            candidates: Not possible; None.

        Raises:
            EngineTimeout: No answer within the deadline.
            EngineError: A span lies outside, candidates were given, or the servers refuse or keep failing.
        """
        if candidates is not None:
            raise EngineError(
                "Candidates were given, but a vLLM server scores the tokens themselves and its own top k only. Use "
                "divergence: sampled_reverse_kl, or engine: local."
            )
        ids = np.asarray(token_ids, np.int32)
        for start, end in spans:
            if not 0 <= start <= end <= len(ids):
                raise EngineError(
                    f"A span ({start}, {end}) was given with {len(ids)} tokens; expected 0 <= start <= end <= T."
                )
        length = max((end for start, end in spans if end > start), default=0)
        known = (ids >= 0) & (ids < (self.vocab_size or np.iinfo(np.int32).max))
        ids = np.where(known, ids, 0)
        logprobs = np.full(length, np.nan, np.float32)
        top_ids = np.full((length, topk), -1, np.int32)
        top_logprobs = np.full((length, topk), np.nan, np.float32)

        async def read(start: int, end: int, first: int) -> None:
            piece = ids[start:end]
            answer, replica = await self.replicas.ask(
                _PATH, lambda _: score_body(piece, topk, model=None), refuse_unfinished
            )
            args = answer, piece, topk, replica.server.url
            # Taking a long answer apart would hold up the event loop.
            long = len(piece) * (1 + topk) > _LONG
            found = await asyncio.to_thread(prompt_scores, *args) if long else prompt_scores(*args)
            for whole, part in zip((logprobs, top_ids, top_logprobs), found):
                whole[first:end] = part[first - start :]
            self._totals["scored_tokens"] += len(piece)

        # A token that nothing stands before has no score, and a span may hold nothing else.
        if length > 1:
            cuts = windows(length, self.max_model_len - 1, self.overlap)
            await asyncio.gather(*(read(*cut) for cut in cuts))
            self._totals["unscored_tokens"] += length - cuts[-1][1]
            for whole, nothing in ((logprobs, np.nan), (top_ids, -1), (top_logprobs, np.nan)):
                whole[~known[:length]] = nothing
        results = []
        for start, end in spans:
            results.append(TokenScores(logprobs[start:end], top_ids[start:end], top_logprobs[start:end]))
        return results if topk else [found.logprobs for found in results]

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one response for a turn that is handed over; see `StudentEngine.generate`.

        Raises:
            EngineTimeout: No answer within the deadline.
            EngineError: The servers refuse it, or keep failing; or more draws a position are asked for.
        """
        begun, prompt = time.monotonic(), request.prompt_ids
        room = room_for(request, self.max_model_len)
        if not room:
            return no_room(0)
        stops = request.stop_ids or self.stop_ids

        def body(_: Any) -> dict[str, Any]:
            return generate_body(request, room, stops, model=None)

        key = request.cache_key
        answer, replica = await self.replicas.ask(_PATH, body, refuse_unfinished, key=key)
        found = read_completion(answer, prompt, room, replica.server.url)
        self._totals["generated_tokens"] += len(found.token_ids)
        self._totals["prefill_tokens"] += found.prompt_tokens - found.cached_tokens
        seconds = time.monotonic() - begun
        return Generation(found.token_ids, found.logprobs, found.stop_reason, 0, found.cached_tokens, seconds)

    def forget(self, cache_key: Hashable) -> None:
        """The conversation is over."""
        self.replicas.forget(cache_key)

    async def aclose(self) -> None:
        """Close every connection."""
        await self.replicas.aclose()
