"""Evaluations inside the explorer: a second student, pinned to one policy version, while training episodes go on.

They never touch the training student, so its weights may change meanwhile; and they leave half of a shared pool's
workers to training.
"""

from __future__ import annotations

import asyncio
from typing import Any

from .config import ExplorerConfig
from .deadline import within
from .engines import Engines
from .environments import ask_env, make_pool
from .messages import EvalDone, Evaluate, ExplorerError

__all__ = ["Evaluations"]


class Evaluations:
    """Plays one evaluation after another.

    Args:
        config: ``eval_env_kwargs`` decides whether the training pool is shared.
        engines: Builds the second student.
        pool: The training pool.
        prompt: The prompt style.

    Attributes:
        own_pool: The pool of the evaluation environment, once there is one.
        student: The second student, once there is one.
    """

    def __init__(self, config: ExplorerConfig, engines: Engines, pool: Any, prompt: Any) -> None:
        self.config, self.engines, self.prompt = config, engines, prompt
        self.own_pool: Any = None
        self.student: Any = None
        self._training_pool = pool
        self._asked: set[int] = set()
        self._lock = asyncio.Lock()

    def is_new(self, request_id: int) -> bool:
        """Whether this was not asked before; a restart may make the trainer ask twice."""
        new = request_id not in self._asked
        self._asked.add(request_id)
        return new

    async def play(self, asked: Evaluate) -> EvalDone:
        """The answer, an error included."""
        try:
            async with self._lock:
                result = await within(self.config.eval_timeout_s, self._play(asked))
        except asyncio.TimeoutError:
            why = f"it took longer than {self.config.eval_timeout_s:.0f} s; raise eval_timeout_s, or play fewer episodes"
            return EvalDone(asked.request_id, None, why, asked.version)
        except Exception as error:
            return EvalDone(asked.request_id, None, f"{type(error).__name__}: {error}", asked.version)
        return EvalDone(asked.request_id, result, None, asked.version)

    async def _play(self, asked: Evaluate) -> dict[str, Any]:
        from ..evaluate import evaluate

        config = self.config
        if self.student is None:
            if self.engines.make_eval_student is None:
                raise ExplorerError("This engine cannot evaluate: its factory gives no make_eval_student.")
            self.student = await asyncio.to_thread(self.engines.make_eval_student)
        await within(config.load_timeout_s, self.student.load_weights(asked.path, asked.version))
        pool, concurrency = await self._environments()
        tasks = asked.tasks if asked.tasks is not None else await ask_env(config, pool, "tasks")
        result = await evaluate(
            self.student,
            pool,
            self.engines.codec,
            self.prompt,
            list(tasks)[: asked.episodes],
            temperature=asked.temperature,
            max_turns=asked.max_turns,
            seed=asked.seed,
            greedy=asked.greedy,
            concurrency=concurrency,
            history=config.history,
            max_tokens=config.max_tokens,
            max_model_len=config.max_model_len,
            episode_timeout_s=config.episode_timeout_s,
        )
        return result.to_dict()

    async def _environments(self) -> tuple[Any, int]:
        """A pool, and how many episodes may be played in it at once."""
        config = self.config
        if config.eval_env_kwargs is None or config.eval_env_kwargs == config.env_kwargs:
            return self._training_pool, max(1, config.workers // 2)
        workers = config.eval_workers or config.workers
        if self.own_pool is None:
            pool = make_pool(config, config.eval_env_kwargs, workers)
            await within(config.start_timeout_s, pool.start())
            self.own_pool = pool
        return self.own_pool, workers
