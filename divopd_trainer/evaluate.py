"""Evaluation: every task once, the student alone, one policy version, with an interval and per task type.

An episode whose environment or engine failed is played once more; if that fails too it counts as not solved and is
listed under `errors`, never left out.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from divopd_gym.errors import ConfigError, DivOPDError, PoolError
from divopd_trainer.explorer.deadline import within
from divopd_trainer.explorer.episode import EpisodeFailure, EpisodeLimits, run_episode
from divopd_trainer.metrics import wilson_interval
from divopd_trainer.turns import Rollout

__all__ = ["EpisodeResult", "EvalResult", "EvaluationError", "evaluate", "task_type"]

_TRIES = 2


class EvaluationError(DivOPDError, RuntimeError):
    """An evaluation whose numbers would mean nothing: mixed policy versions, or no episode that could be played."""


@dataclass(frozen=True)
class EpisodeResult:
    """What became of one task.

    Attributes:
        task: Its id.
        task_type: The environment's name for the kind of task, else what the id says.
        success: Strict success.
        done: Whether the environment ended the episode itself.
        score: Final score, 0 to 1.
        turns: Actions played.
        invalid_actions: How many of them did not parse or were refused.
        tokens: Tokens that the student wrote.
        done_reason: Why it ended; "error" if it could not be played.
        error: First cause if it could not be played.
    """

    task: str
    task_type: str
    success: bool = False
    done: bool = False
    score: float = 0.0
    turns: int = 0
    invalid_actions: int = 0
    tokens: int = 0
    done_reason: str | None = None
    error: str | None = None


@dataclass(frozen=True)
class EvalResult:
    """One evaluation; all rates are over all tasks, those that could not be played included as not solved.

    Attributes:
        policy_version: The one version that played every episode.
        results: One a task, in the order of the tasks given.
        wall_s: Seconds it took.
        temperature: Of sampling.
        greedy: Whether the most likely token was taken instead.
    """

    policy_version: int
    results: list[EpisodeResult]
    wall_s: float = 0.0
    temperature: float = 1.0
    greedy: bool = False
    retried: int = 0

    @property
    def episodes(self) -> int:
        """Number of tasks."""
        return len(self.results)

    @property
    def success_rate(self) -> float:
        """Share of tasks solved, 0 to 1."""
        return fmean(r.success for r in self.results)

    @property
    def interval(self) -> tuple[float, float]:
        """95 % Wilson interval of the success rate."""
        return wilson_interval(sum(r.success for r in self.results), self.episodes)

    @property
    def errors(self) -> list[EpisodeResult]:
        """The tasks that could not be played."""
        return [r for r in self.results if r.error is not None]

    def to_dict(self) -> dict[str, Any]:
        """The values of an "eval" line of metrics.jsonl; JSON types only."""
        by_type: dict[str, list[EpisodeResult]] = {}
        for result in self.results:
            by_type.setdefault(result.task_type, []).append(result)
        return {
            "policy_version": self.policy_version,
            **_summary(self.results),
            "per_type": {name: _summary(by_type[name]) for name in sorted(by_type)},
            "errors": len(self.errors),
            "error_tasks": [{"task": r.task, "why": r.error} for r in self.errors],
            "retried": self.retried,
            "temperature": self.temperature,
            "greedy": self.greedy,
            "eval_s": self.wall_s,
        }


@dataclass
class _Work:
    """What the coroutines of one evaluation share."""

    queue: deque[tuple[int, str]]
    results: dict[int, EpisodeResult] = field(default_factory=dict)
    versions: set[int] = field(default_factory=set)
    retried: int = 0


async def evaluate(
    engine: Any,
    pool: Any,
    codec: Any,
    prompt: Any,
    tasks: Sequence[str],
    *,
    temperature: float = 0.4,
    max_turns: int = 30,
    seed: int = 0,
    greedy: bool = False,
    concurrency: int = 8,
    history: str = "accumulate",
    max_tokens: int = 512,
    max_model_len: int | None = None,
    episode_timeout_s: float = 900.0,
    on_rollout: Callable[[Rollout], None] | None = None,
) -> EvalResult:
    """Play every task once with an engine whose weights nobody replaces meanwhile.

    The seeds follow from `seed` and the task alone, so neither concurrency nor a second try changes a result.

    Args:
        engine: A `StudentEngine`.
        pool: A started `EnvPool`.
        codec: A `ChatCodec`.
        prompt: A `PromptStyle`.
        tasks: Task ids, each once.
        temperature: Of sampling; 0 means greedy.
        max_turns: Actions an episode.
        seed: Of the evaluation.
        greedy: Take the most likely token.
        concurrency: Episodes at once; no more than the pool has workers is of use.
        history: "accumulate" or "window:n".
        max_tokens: Tokens a response.
        max_model_len: Tokens of prompt and response; None = what the engine can.
        episode_timeout_s: Seconds for one episode, and for the wait for an environment.
        on_rollout: Called with every finished rollout, in the order in which they end.

    Raises:
        ConfigError: No tasks, or a task twice.
        EvaluationError: More than one policy version took part, or not one task could be played.
    """
    tasks = [str(task) for task in tasks]
    if not tasks:
        raise ConfigError(
            "There is no task to evaluate; expected at least one. Choose a split that has tasks."
        )
    twice = sorted({task for task in tasks if tasks.count(task) > 1}) if len(set(tasks)) < len(tasks) else []
    if twice:
        raise ConfigError(f"Tasks are given more than once ({', '.join(twice[:5])}); expected each once.")
    greedy = greedy or temperature == 0
    began = time.monotonic()
    work = _Work(deque(enumerate(tasks)))
    work.versions.add(engine.policy_version)

    async def play(number: int, task: str) -> Rollout:
        env = await within(episode_timeout_s, pool.acquire(), pool.release)
        try:
            return await run_episode(
                rollout_id=number,
                task=task,
                env=env,
                student=engine,
                codec=codec,
                prompt=prompt,
                history=history,
                limits=EpisodeLimits(max_turns, max_tokens, max_model_len, episode_timeout_s),
                temperature=temperature or 1.0,
                run_seed=seed,
                greedy=greedy,
                score=False,
                evaluating=True,
            )
        finally:
            pool.release(env)

    async def player() -> None:
        while work.queue:
            number, task = work.queue.popleft()
            for left in reversed(range(_TRIES)):
                try:
                    rollout = await play(number, task)
                except (EpisodeFailure, PoolError, asyncio.TimeoutError) as error:
                    if left:
                        work.retried += 1
                        continue
                    why = f"{type(error).__name__}: {error}"
                    work.results[number] = EpisodeResult(
                        task, task_type(task), done_reason="error", error=why
                    )
                    break
                work.versions.update(rollout.policy_versions or ())
                work.results[number] = _result(rollout)
                if on_rollout is not None:
                    on_rollout(rollout)
                break

    players = [asyncio.ensure_future(player()) for _ in range(max(1, min(concurrency, len(tasks))))]
    try:
        await asyncio.gather(*players)
    finally:
        for one in players:
            one.cancel()
        await asyncio.gather(*players, return_exceptions=True)
    work.versions.add(engine.policy_version)
    if len(work.versions) > 1:
        raise EvaluationError(
            f"Policy versions {sorted(work.versions)} took part in one evaluation; expected exactly one. Evaluate "
            "with an engine of its own, whose weights are not replaced until the evaluation ends."
        )
    result = EvalResult(
        work.versions.pop(),
        [work.results[number] for number in range(len(tasks))],
        time.monotonic() - began,
        temperature,
        greedy,
        work.retried,
    )
    if len(result.errors) == result.episodes:
        raise EvaluationError(
            f"None of {result.episodes} tasks could be played; the first failed with {result.errors[0].error}"
        )
    return result


def task_type(task: str) -> str:
    """The kind of task that an id names, where the environment does not say.

    ALFWorld's ``pick_and_place_simple-Mug-None-Desk-308/trial_T2019...`` is ``pick_and_place_simple``,
    ScienceWorld's ``find-plant/12`` is ``find-plant``; a bare number says nothing and is ``all``.
    """
    head, slash, _ = task.partition("/")
    if not slash and re.fullmatch(r"\d*", head):
        return "all"
    alfworld = re.fullmatch(r"([a-z_]+)-[^-]*-[^-]*-[^-]*-\d+", head)
    return alfworld.group(1) if alfworld else head


def _result(rollout: Rollout) -> EpisodeResult:
    return EpisodeResult(
        task=rollout.task,
        task_type=str(rollout.meta.get("task_type") or task_type(rollout.task)),
        success=rollout.success,
        done=rollout.done,
        score=rollout.score,
        turns=rollout.turns_played,
        invalid_actions=sum(not turn.action_valid for turn in rollout.turns),
        tokens=sum(turn.n_tokens for turn in rollout.turns),
        done_reason=rollout.done_reason,
    )


def _summary(results: Sequence[EpisodeResult]) -> dict[str, Any]:
    played = [r for r in results if r.error is None]
    turns = sum(r.turns for r in played)
    successes = sum(r.success for r in results)
    low, high = wilson_interval(successes, len(results))
    return {
        "success_rate": successes / len(results),
        "success_low": low,
        "success_high": high,
        "done_rate": fmean(r.done for r in results),
        "score": fmean(r.score for r in results),
        "episodes": len(results),
        "turns": turns / len(played) if played else 0.0,
        "invalid_action_rate": sum(r.invalid_actions for r in played) / turns if turns else 0.0,
        "tokens": sum(r.tokens for r in played),
    }
