"""Engines inside the process: any transformers causal LM, batched, with a prefix cache, on a CPU or a GPU.

`LocalStudent` samples and takes new weights while it runs; `LocalTeacher` is frozen, scores given tokens at its
temperature, and can act too. The front is asyncio; one thread an engine does the forward passes.
"""

from __future__ import annotations

import asyncio
import atexit
import weakref
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from divopd_gym.errors import ConfigError
from divopd_trainer.engines.backends import load_model, make_backend, max_positions
from divopd_trainer.engines.base import EngineError, EngineTimeout, GenerateRequest, Generation, TokenScores
from divopd_trainer.engines.forward import ForwardThread
from divopd_trainer.engines.jobs import GenerateJob, Job, LoadJob, ScoreJob
from divopd_trainer.engines.sampling import extra_uniforms, uniform_stream
from divopd_trainer.engines.weights import read_policy

__all__ = ["LocalEngine", "LocalStudent", "LocalTeacher"]

_open: weakref.WeakSet[LocalEngine] = weakref.WeakSet()


class LocalEngine:
    """What student and teacher share.

    Args:
        model: Directory or hub name of a causal LM, or a model object (which is copied).
        device: "auto" (a GPU if there is one), "cpu", "cuda", ...
        dtype: "auto" (float32 on a CPU, bfloat16 on a GPU) or a torch type's name.
        max_slots: How many conversations are held, and responses run, at once.
        max_batch_tokens: Most new tokens in one forward pass; None: 1,024 on a CPU, where more gains nothing and
            makes responses wait, and 16,384 on a GPU.
        max_model_len: Most tokens of a conversation, prompt and response together; None: what the model allows.
        stop_ids: Ids that end a response where a request names none; None: the model's own EOS ids.
        temperature: At which `score` works.
        backend: "auto", "dense" or "transformers"; see `divopd_trainer.engines.backends`.
        num_threads: torch threads of the forward passes. More than one thread a process collapses on shared cores.
        request_timeout_s: Deadline of every request, in seconds.
        policy_version: Version of the weights in `model`.

    Raises:
        ConfigError: The model cannot be read or has layers that the engine cannot hold.
    """

    name = "engine"

    def __init__(
        self,
        model: str | Path | Any,
        *,
        device: str = "auto",
        dtype: str = "auto",
        max_slots: int = 32,
        max_batch_tokens: int | None = None,
        max_model_len: int | None = None,
        stop_ids: Sequence[int] | None = None,
        temperature: float = 1.0,
        backend: str = "auto",
        num_threads: int = 1,
        request_timeout_s: float = 600.0,
        policy_version: int = 0,
    ) -> None:
        self.model = load_model(model, device=device, dtype=dtype)
        if max_batch_tokens is None:
            on_cpu = next(self.model.parameters()).device.type == "cpu"
            max_batch_tokens = max(1024 if on_cpu else 16_384, 2 * max_slots)
        if max_slots < 1 or max_batch_tokens <= max_slots:
            raise ConfigError(
                f"max_slots is {max_slots} and max_batch_tokens {max_batch_tokens}; expected at least one slot, and "
                "more batch tokens than slots, so that prompts get on while all responses run."
            )
        if not temperature > 0:
            raise ConfigError(f"temperature is {temperature}; expected a number above 0.")
        allowed = max_positions(self.model)
        if max_model_len is not None and not 2 <= max_model_len <= allowed:
            raise ConfigError(
                f"max_model_len is {max_model_len}; expected 2 to {allowed}, the model's own number of positions."
            )
        self.max_model_len = max_model_len or allowed
        self.temperature = temperature
        self.request_timeout_s = request_timeout_s
        self.stop_ids = tuple(_eos_ids(self.model) if stop_ids is None else stop_ids)
        made = make_backend(self.model, max_slots, backend)
        self.backend = type(made).__name__
        self.vocab_size = made.vocab_size
        self._forward = ForwardThread(
            made,
            max_slots,
            max_batch_tokens=max_batch_tokens,
            policy_version=policy_version,
            num_threads=num_threads,
            name=f"local-{self.name}",
        )
        _open.add(self)

    @property
    def policy_version(self) -> int:
        """Version of the weights that the next response will be sampled with."""
        return self._forward.policy_version

    @property
    def counters(self) -> dict[str, float]:
        """Totals since the start: tokens generated, prefilled, reused and scored, forward passes, seconds in them."""
        return dict(self._forward.counters)

    @property
    def gauges(self) -> dict[str, int]:
        """How much runs and waits now."""
        return self._forward.load_figures()

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one response.

        Prompt plus response stay within `max_model_len`: the token limit is cut to what is left, and if not one
        token fits the result has none and the stop reason ``context_overflow``.

        Raises:
            EngineTimeout: No answer within `request_timeout_s`.
            EngineError: The prompt holds ids outside the vocabulary, or the forward pass failed.
        """
        prompt = request.prompt_ids
        if int(prompt.min()) < 0 or int(prompt.max()) >= self.vocab_size:
            raise EngineError(
                f"A prompt holds ids from {prompt.min()} to {prompt.max()}, but the {self.name}'s vocabulary has "
                f"{self.vocab_size} entries. Encode prompts with the tokenizer of this model."
            )
        room = min(request.max_tokens, self.max_model_len - len(prompt))
        if room < 1:
            empty = np.zeros(0, np.int32), np.zeros(0, np.float32)
            extra = np.zeros((0, request.extra_samples), np.int32) if request.extra_samples else None
            return Generation(*empty, "context_overflow", self.policy_version, extra_ids=extra)
        stops = frozenset(map(int, request.stop_ids or self.stop_ids))
        loop = asyncio.get_running_loop()
        job = GenerateJob(
            loop, loop.create_future(), request, room, stops, uniform_stream(request.seed, room)
        )
        if request.extra_samples:
            job.extra_uniforms = extra_uniforms(request.seed, room, request.extra_samples)
        return await self._submit(job)

    async def score(
        self,
        token_ids: np.ndarray,
        spans: Sequence[tuple[int, int]],
        topk: int = 0,
        temperature: float | None = None,
        *,
        candidates: Sequence[np.ndarray] | None = None,
    ) -> list[np.ndarray] | list[TokenScores]:
        """Log-probs of given tokens, in one forward pass over the sequence up to the last span's end.

        Args:
            token_ids: int [T], the whole segment.
            spans: ``(start, end)`` pairs with 0 <= start <= end <= T.
            topk: Also give this many most likely tokens at each position.
            temperature: Instead of the engine's own.
            candidates: For each span int [end - start, C]: also score these ids in the place of the token at each
                position, in the same forward pass; -1 where there is none. One C for all spans of a call.

        Returns:
            One float32 [end - start] array a span (with ``topk`` or candidates: one `TokenScores`): entry i scores
            ``token_ids[start + i]`` given all tokens before it. NaN: the very first token of a sequence, tokens
            beyond `max_model_len`, and ids outside the vocabulary.

        Raises:
            EngineTimeout: No answer within `request_timeout_s`.
            EngineError: A span lies outside the sequence, candidates do not fit the spans, or the forward pass failed.
        """
        ids = np.asarray(token_ids, np.int32)
        spans = [(int(start), int(end)) for start, end in spans]
        for start, end in spans:
            if not 0 <= start <= end <= len(ids):
                raise EngineError(
                    f"A span ({start}, {end}) was given with {len(ids)} tokens; expected 0 <= start <= end <= T."
                )
        places = np.concatenate([np.arange(a, b) for a, b in spans] or [np.zeros(0, np.int64)])
        wanted = None if candidates is None else _fitting(candidates, spans)
        # Token t is read off position t - 1; the token at the limit can still be scored, none behind it.
        scorable = (places > 0) & (places < self.max_model_len + 1)
        scores = TokenScores(
            np.full(len(places), np.nan, np.float32),
            np.full((len(places), topk), -1, np.int32),
            np.full((len(places), topk), np.nan, np.float32),
            np.full((len(places), 0 if wanted is None else wanted.shape[1]), np.nan, np.float32),
        )
        if scorable.any():
            used = places[scorable]
            known = (ids >= 0) & (ids < self.vocab_size)
            targets = np.where(known[used], ids[used], -1).astype(np.int64)
            context = np.where(known, ids, 0)[: int(used.max())]
            loop = asyncio.get_running_loop()
            heat = self.temperature if temperature is None else temperature
            job = ScoreJob(loop, loop.create_future(), context, used - 1, targets, topk, heat)
            if wanted is not None:
                asked = wanted[scorable]
                job.candidates = np.where((asked >= 0) & (asked < self.vocab_size), asked, -1)
            found: TokenScores = await self._submit(job)
            scores.logprobs[scorable] = found.logprobs
            if topk:
                width = found.topk_ids.shape[1]
                scores.topk_ids[scorable, :width] = found.topk_ids
                scores.topk_logprobs[scorable, :width] = found.topk_logprobs
            if wanted is not None and wanted.shape[1]:
                scores.candidate_logprobs[scorable] = found.candidate_logprobs
        cuts = np.cumsum([end - start for start, end in spans])[:-1]
        if not spans:
            return []
        if not topk and wanted is None:
            return np.split(scores.logprobs, cuts)
        return [TokenScores(*p) for p in zip(*(np.split(a, cuts) for a in vars(scores).values()))]

    def forget(self, cache_key: Hashable) -> None:
        """The conversation is over; its keys and values are the first to make room."""
        self._forward.forget(cache_key)

    def close(self, timeout_s: float = 30.0) -> bool:
        """Stop the forward thread; requests still waiting raise `EngineClosed`. Returns whether it ended in time."""
        _open.discard(self)
        return self._forward.close(timeout_s)

    def __enter__(self) -> LocalEngine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    async def _submit(self, job: Job) -> Any:
        self._forward.put(job)
        try:
            return await asyncio.wait_for(job.future, self.request_timeout_s)
        except asyncio.TimeoutError as error:
            raise EngineTimeout(
                f"The local {self.name} did not answer within {self.request_timeout_s:g} s "
                f"({self._forward.load_figures()}). Raise request_timeout_s, or run fewer episodes at once."
            ) from error
        finally:
            job.cancelled = True


class LocalStudent(LocalEngine):
    """The policy: see `LocalEngine`."""

    name = "student"

    async def load_weights(self, source: str | Path | Mapping[str, Any], version: int) -> None:
        """Replace the weights in place.

        Running responses are finished with the old weights first and no new one begins until the new ones are
        there, so every response is of one version. Kept prefixes are computed anew when they are next used.

        Args:
            source: A policy file, a model directory, or the tensors by name.
            version: The version that the weights are.

        Raises:
            WeightsError: Names or shapes differ, or the file cannot be read; the old weights stay.
            EngineTimeout: No answer within `request_timeout_s`.
        """
        if isinstance(source, (str, Path)):
            # Read before the pause, off the event loop.
            source = await asyncio.to_thread(read_policy, source)
        loop = asyncio.get_running_loop()
        await self._submit(LoadJob(loop, loop.create_future(), source, version))


class LocalTeacher(LocalEngine):
    """The frozen teacher: see `LocalEngine`; `score` works at its `temperature`."""

    name = "teacher"


def _fitting(candidates: Sequence[np.ndarray], spans: list[tuple[int, int]]) -> np.ndarray:
    """Candidates of all spans, int64 [P, C]."""
    arrays = [np.asarray(c, np.int64) for c in candidates]
    shapes = [a.shape for a in arrays]
    width = shapes[0][-1] if shapes and shapes[0] else 0
    if shapes != [(end - start, width) for start, end in spans]:
        raise EngineError(
            f"Candidates of shapes {shapes} were given with the spans {spans}; expected one array "
            "[tokens of the span, C] a span, with the same C. Fill up with -1 where there is no candidate."
        )
    return np.concatenate(arrays) if arrays else np.zeros((0, 0), np.int64)


def _eos_ids(model: Any) -> list[int]:
    for config in (getattr(model, "generation_config", None), model.config):
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return [int(i) for i in (ids if isinstance(ids, (list, tuple)) else [ids])]
    return []


@atexit.register
def _close_all() -> None:
    # A thread inside a native call while the interpreter goes down can take the process with it.
    for engine in list(_open):
        engine.close(timeout_s=5.0)
