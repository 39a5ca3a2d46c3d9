"""The thread that does a local engine's forward passes: batches whatever waits, token by token.

New responses join at the next token and finished ones leave. New weights wait until the running responses (they
are short) have ended, and hold back those not begun, so that a response is of exactly one policy version.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, deque
from typing import Any

import numpy as np
import torch

from divopd_trainer.costs import work_clock
from divopd_trainer.engines.backends import Backend, Feed
from divopd_trainer.engines.base import EngineClosed, EngineError, Generation, TokenScores
from divopd_trainer.engines.jobs import GenerateJob, Job, LoadJob, ScoreJob, deliver
from divopd_trainer.engines.sampling import sample
from divopd_trainer.engines.slot_cache import SlotTable
from divopd_trainer.engines.weights import load_policy

__all__ = ["ForwardThread"]

# Logits of this many entries at a time when scoring: 64 MB in float32.
_SCORE_CHUNK = 1 << 24


class ForwardThread:
    """Owns the model; everything else only puts jobs in.

    Args:
        backend: The model's forward passes.
        slots: How many responses run at once; equals the backend's.
        max_batch_tokens: Most new tokens in one forward pass; longer prompts go in pieces.
        policy_version: Version of the weights that the model has now.
        num_threads: torch threads of the forward passes.
        name: For the thread and messages.

    Attributes:
        policy_version: Version of the weights in place.
        counters: Tokens generated, prefilled, reused, scored; forward passes; seconds in them, see `work_clock`.
    """

    def __init__(
        self,
        backend: Backend,
        slots: int,
        *,
        max_batch_tokens: int,
        policy_version: int = 0,
        num_threads: int = 1,
        name: str = "engine",
    ) -> None:
        self.backend = backend
        self.policy_version = policy_version
        self.counters: Counter[str] = Counter()
        self._table = SlotTable(slots)
        self._budget = max_batch_tokens
        self._num_threads = num_threads
        self._clock = work_clock(next(backend.model.parameters()).device.type, num_threads)
        self._condition = threading.Condition()
        self._inbox: deque[Job] = deque()
        self._forget: deque[Any] = deque()
        self._closed = False
        self._waiting: deque[GenerateJob] = deque()
        self._scoring: deque[ScoreJob] = deque()
        self._loading: deque[LoadJob] = deque()
        self._running: list[GenerateJob] = []
        self._finished: list[tuple[Job, Any]] = []
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, job: Job) -> None:
        """Queue a job; its future gets the result or an exception."""
        with self._condition:
            if self._closed:
                raise EngineClosed(f"The engine {self._thread.name!r} is closed; it takes no more requests.")
            self._inbox.append(job)
            self._condition.notify()

    def forget(self, key: Any) -> None:
        """Give a conversation's slot away at the next chance."""
        self._forget.append(key)

    def load_figures(self) -> dict[str, int]:
        """How many responses run, and how many requests of each kind wait."""
        return {
            "running": len(self._running),
            "waiting": len(self._waiting) + len(self._inbox),
            "scoring": len(self._scoring),
        }

    def close(self, timeout_s: float = 30.0) -> bool:
        """Stop; whoever still waits gets `EngineClosed`. Returns whether the thread ended in time."""
        with self._condition:
            self._closed = True
            self._condition.notify()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        torch.set_num_threads(self._num_threads)
        with torch.inference_mode():
            while self._take_inbox():
                try:
                    self._iterate()
                except Exception as error:
                    self._fail_all(error)
                self._flush()
        self._fail_all(EngineClosed(f"The engine {self._thread.name!r} was closed."), everything=True)
        self._flush()

    def _take_inbox(self) -> bool:
        with self._condition:
            busy = self._running or self._waiting or self._scoring or self._loading
            while not busy and not self._inbox and not self._closed:
                self._condition.wait(timeout=1.0)
            if self._closed:
                return False
            jobs, self._inbox = self._inbox, deque()
        queues = {GenerateJob: self._waiting, ScoreJob: self._scoring, LoadJob: self._loading}
        for job in jobs:
            queues[type(job)].append(job)
        return True

    def _iterate(self) -> None:
        while self._forget:
            self._table.forget(self._forget.popleft())
        for job in [j for j in self._running if j.cancelled]:
            self._leave(job)
        if self._loading and not self._running:
            self._load(self._loading.popleft())
        if not self._loading:
            self._admit()
        if self._running:
            self._advance()
        if self._scoring:
            self._score()

    def _load(self, job: LoadJob) -> None:
        if job.cancelled:
            return
        try:
            # Kept weights of the old version would give log-probs of neither.
            with torch.inference_mode(False):
                load_policy(self.backend.model, job.tensors)
        except Exception as error:
            self._finished.append((job, error))
            return
        self._table.invalidate()
        self.policy_version = job.version
        self.counters["weight_loads"] += 1
        self._finished.append((job, job.version))

    def _admit(self) -> None:
        while self._waiting:
            job = self._waiting[0]
            if job.cancelled:
                self._waiting.popleft()
                continue
            lease = self._table.acquire(job.request.cache_key, job.request.prompt_ids)
            if lease is None:
                return
            self._waiting.popleft()
            job.slot, job.fed, job.cached = lease.slot, lease.reused, lease.reused
            job.version = self.policy_version
            # Running before the copy, so that a failed copy gives the slot back.
            self._running.append(job)
            try:
                if lease.copy_from is not None:
                    self.backend.buffers.copy_prefix(lease.copy_from, lease.slot, lease.reused)
            except Exception as error:
                self._fail(job, error)
                continue
            self.counters["cached_tokens"] += lease.reused

    def _advance(self) -> None:
        """One forward pass: a token for every running response, and as much of new prompts as fits."""
        began = self._clock()
        left = self._budget - sum(j.unfed == 1 for j in self._running)
        jobs, feeds = [], []
        for job in self._running:
            count = job.unfed
            if count > 1:
                count = min(count, left)
                if count <= 0:
                    continue
                left -= count
            jobs.append(job)
            feeds.append(Feed(job.slot, job.fed, job.next_ids(count), wanted=count == job.unfed))
        if not feeds:
            raise EngineError(
                f"max_batch_tokens is {self._budget}, not above the number of running responses "
                f"({len(self._running)}); raise it."
            )
        self._extend(jobs, feeds)
        self.counters["generate_s"] += self._clock() - began

    def _extend(self, jobs: list[GenerateJob], feeds: list[Feed]) -> None:
        """Forward and draw; of a pass that fails, each response is tried alone, so that only the culprit fails."""
        try:
            logits = self.backend.extend(feeds)
        except Exception as error:
            if len(jobs) == 1:
                self._fail(jobs[0], error)
                return
            for job, feed in zip(jobs, feeds):
                self._extend([job], [feed])
            return
        for job, feed in zip(jobs, feeds):
            job.fed += len(feed.ids)
            self.counters["prefill_tokens"] += len(feed.ids) if len(feed.ids) > 1 else 0
        drawing = [job for job, feed in zip(jobs, feeds) if feed.wanted]
        if drawing:
            self._draw(drawing, logits)
        self.counters["forwards"] += 1

    def _draw(self, jobs: list[GenerateJob], logits: torch.Tensor) -> None:
        device = logits.device
        greedy = None
        if any(job.request.greedy for job in jobs):
            greedy = torch.tensor([job.request.greedy for job in jobs], device=device)
        # Column 0 is the response's own draw; the rest, if any, are drawn beside it and go nowhere else.
        uniforms = np.zeros((len(jobs), 1 + max(job.request.extra_samples for job in jobs)))
        for row, job in zip(uniforms, jobs):
            at = len(job.out)
            row[0] = job.uniforms[at]
            if job.extra_uniforms is not None:
                row[1 : 1 + job.request.extra_samples] = job.extra_uniforms[at]
        ids, logprobs = sample(
            logits,
            torch.tensor([job.request.temperature for job in jobs], dtype=torch.float32, device=device),
            torch.from_numpy(uniforms).to(device),
            greedy,
        )
        self.counters["generated_tokens"] += len(jobs)
        for job, (token, *extra), logprob in zip(jobs, ids.tolist(), logprobs[:, 0].tolist()):
            if not math.isfinite(logprob):
                error = EngineError(
                    f"The model gave a log-prob of {logprob} for a sampled token at policy version {job.version}: "
                    "its weights or logits are not finite. Look at the learner's loss and gradient norm, and "
                    "lower the learning rate."
                )
                self._leave(job, error)
                continue
            job.out.append(token)
            job.logprobs.append(logprob)
            if job.extra_uniforms is not None:
                job.extra.append(extra[: job.request.extra_samples])
            if token in job.stops or len(job.out) == job.room:
                reason = "end_of_turn" if token in job.stops else "length"
                self._leave(job, self._generation(job, reason))

    def _generation(self, job: GenerateJob, reason: str) -> Generation:
        return Generation(
            np.array(job.out, np.int32),
            np.array(job.logprobs, np.float32),
            reason,
            job.version,
            job.cached,
            time.monotonic() - job.arrived,
            None if job.extra_uniforms is None else np.array(job.extra, np.int32),
        )

    def _leave(self, job: GenerateJob, result: Any = None) -> None:
        self._running.remove(job)
        self._table.release(job.slot, job.held_tokens())
        if not job.cancelled:
            self._finished.append((job, result))

    def _score(self) -> None:
        """Score the waiting sequences of about the first one's length that fit one forward pass."""
        began = self._clock()
        queue = [job for job in self._scoring if not job.cancelled]
        self._scoring = deque()
        if not queue:
            return
        first = queue[0]
        # Padding to the longest is what a batch costs a padded backend: neighbours in length go together.
        others = sorted(queue[1:], key=lambda j: abs(len(j.ids) - len(first.ids)))
        batch, longest = [first], len(first.ids)
        for job in others:
            width = max(longest, len(job.ids))
            if width * (len(batch) + 1) <= self._budget:
                batch.append(job)
                longest = width
        chosen = set(map(id, batch))
        self._scoring.extend(job for job in queue if id(job) not in chosen)
        self._score_or_split(batch)
        self.counters["scored_tokens"] += sum(len(job.ids) for job in batch)
        self.counters["score_s"] += self._clock() - began

    def _score_or_split(self, batch: list[ScoreJob]) -> None:
        try:
            self._score_batch(batch)
        except Exception as error:
            if len(batch) == 1:
                self._finished.append((batch[0], _forward_failed(error)))
                return
            for job in batch:
                self._score_or_split([job])

    def _score_batch(self, batch: list[ScoreJob]) -> None:
        hidden = self.backend.hidden([job.ids for job in batch], [job.positions for job in batch])
        device = hidden.device
        targets = torch.from_numpy(np.concatenate([job.targets for job in batch])).to(device)
        temperatures = torch.tensor([job.temperature for job in batch for _ in job.targets], device=device)
        topk = min(max(job.topk for job in batch), self.backend.vocab_size)
        candidates = _side_by_side(batch, device)
        chunk = max(1, _SCORE_CHUNK // self.backend.vocab_size)
        scores, ids, values, given = [], [], [], []
        for start in range(0, len(targets), chunk):
            part = slice(start, start + chunk)
            logits = self.backend.head(hidden[part]).float() / temperatures[part, None]
            total = torch.logsumexp(logits, -1, keepdim=True)
            chosen = logits.gather(1, targets[part, None].clamp(min=0)) - total
            scores.append(chosen[:, 0].masked_fill(targets[part] < 0, torch.nan))
            if candidates is not None:
                wanted = candidates[part]
                found = logits.gather(1, wanted.clamp(min=0)) - total
                given.append(found.masked_fill(wanted < 0, torch.nan))
            if topk:
                best = logits.topk(topk, dim=-1)
                ids.append(best.indices.int())
                values.append(best.values - total)
        flat = torch.cat(scores).cpu().numpy()
        flat_ids = torch.cat(ids).cpu().numpy() if topk else None
        flat_values = torch.cat(values).cpu().numpy() if topk else None
        flat_given = torch.cat(given).cpu().numpy() if given else None
        at = 0
        for job in batch:
            end, k = at + len(job.targets), min(job.topk, topk)
            result = TokenScores(flat[at:end].copy())
            if k:
                result.topk_ids = flat_ids[at:end, :k].copy()
                result.topk_logprobs = flat_values[at:end, :k].copy()
            if job.candidates is not None:
                result.candidate_logprobs = flat_given[at:end, : job.candidates.shape[1]].copy()
            self._finished.append((job, result))
            at = end

    def _fail(self, job: GenerateJob, error: Exception) -> None:
        # What the slot holds is unknown after a failed pass.
        job.fed = 0
        self._leave(job, error if isinstance(error, EngineError) else _forward_failed(error))

    def _fail_all(self, error: Exception, *, everything: bool = False) -> None:
        failure = error if isinstance(error, EngineError) else _forward_failed(error)
        for job in list(self._running):
            self._fail(job, failure)
        if everything:
            rest = [*self._waiting, *self._scoring, *self._loading, *self._inbox]
            self._finished.extend((job, failure) for job in rest)

    def _flush(self) -> None:
        if self._finished:
            finished, self._finished = self._finished, []
            deliver(finished)


def _side_by_side(batch: list[ScoreJob], device: torch.device) -> torch.Tensor | None:
    """The jobs' candidates as one int64 [P, C], -1 where a job has fewer or none; None if no job has any."""
    width = max((job.candidates.shape[1] for job in batch if job.candidates is not None), default=0)
    if not width:
        return None
    wide = np.full((sum(len(job.targets) for job in batch), width), -1, np.int64)
    at = 0
    for job in batch:
        if job.candidates is not None:
            wide[at : at + len(job.targets), : job.candidates.shape[1]] = job.candidates
        at += len(job.targets)
    return torch.from_numpy(wide).to(device)


def _forward_failed(error: Exception) -> EngineError:
    failure = EngineError(
        f"A forward pass failed: {type(error).__name__}: {error}. If memory ran out, lower max_slots, "
        "max_batch_tokens or max_model_len."
    )
    failure.__cause__ = error
    return failure
