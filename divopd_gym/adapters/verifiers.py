"""Environments for `verifiers`: a ``MultiTurnEnv`` whose user is the environment.

env = load_environment("divopd_gym/ALFWorld-v0", {"split": "generated"}, num_tasks=100)
env.generate_sync(env.get_dataset(), client, model="...")

Environments run in processes of their own (`divopd_gym.pool`), so a game that hangs or dies costs one rollout.
Importing this module needs verifiers 0.3 (later versions have no ``MultiTurnEnv``).
"""

from __future__ import annotations

import asyncio
import functools
import zlib
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

from divopd_gym.adapters.conversation import Conversation
from divopd_gym.errors import ConfigError, PoolError
from divopd_gym.pool_sync import SyncEnvPool

try:
    import verifiers as vf

    _Base = vf.MultiTurnEnv
except (ImportError, AttributeError) as error:
    raise ConfigError(
        f"divopd_gym.adapters.verifiers cannot use the package verifiers ({error}); expected version 0.3, which "
        "has MultiTurnEnv. Run: pip install 'divopd[verifiers]'."
    ) from error

__all__ = ["TextGameEnv", "load_environment"]

T = TypeVar("T")
_STATE = "divopd"


class _Running:
    """What a rollout holds while it runs."""

    def __init__(self, handle: Any, chat: Conversation) -> None:
        self.handle, self.chat = handle, chat


class TextGameEnv(_Base):
    """A `divopd_gym` environment as the user of a chat.

    The reward is the final score, 0 to 1. Metrics of weight 0: ``success`` (strict), ``env_turns``,
    ``invalid_actions``. The end of an episode is ``final_env_response``; the environment's own `max_turns` counts.

    Args:
        env_id: Gymnasium id.
        env_kwargs: Its keyword arguments.
        eval_kwargs: Those of the evaluation tasks' environment, on top of `env_kwargs`; None: the same tasks.
        style: Prompt style.
        num_tasks: Only the first so many tasks; None for all.
        num_eval_tasks: The same of the evaluation tasks.
        workers: Processes that run environments; also the number of rollouts that play at once, others wait.
        step_timeout_s: Seconds that a turn may take.
        **more: As of ``verifiers.MultiTurnEnv``.

    Raises:
        ConfigError: An argument that cannot work.
        PoolError: The environment cannot be built.
    """

    def __init__(
        self,
        env_id: str,
        env_kwargs: Mapping[str, Any] | None = None,
        *,
        eval_kwargs: Mapping[str, Any] | None = None,
        style: str = "action",
        num_tasks: int | None = None,
        num_eval_tasks: int | None = None,
        workers: int = 4,
        step_timeout_s: float = 30.0,
        **more: Any,
    ) -> None:
        Conversation(env_id, style)
        self.gym_id, self.style = env_id, style
        self.workers, self.step_timeout_s = workers, step_timeout_s
        self._kwargs = {"train": dict(env_kwargs or {})}
        if eval_kwargs is not None:
            self._kwargs["eval"] = {**self._kwargs["train"], **eval_kwargs}
        self._pools: dict[str, SyncEnvPool] = {}
        held_out = "eval" if eval_kwargs is not None else "train"
        super().__init__(
            dataset=functools.partial(self._rows, "train", num_tasks),
            eval_dataset=functools.partial(self._rows, held_out, num_eval_tasks),
            rubric=vf.Rubric(
                funcs=[score, success, env_turns, invalid_actions], weights=[1.0, 0.0, 0.0, 0.0]
            ),
            **more,
        )

    def _rows(self, part: str, limit: int | None) -> Any:
        from datasets import Dataset

        pool = self._pool(part)
        with pool.lend(pool.pool.reset_timeout_s) as handle:
            tasks = list(handle.call("tasks"))[:limit]
        # The prompt is written when the rollout starts; its column must be there before.
        return Dataset.from_list(
            [
                {
                    "prompt": [{"role": "user", "content": task}],
                    "answer": "",
                    "info": {"task_id": task, "part": part},
                }
                for task in tasks
            ]
        )

    def _pool(self, part: str) -> SyncEnvPool:
        if part not in self._pools:
            pool = SyncEnvPool(
                self.gym_id, self._kwargs[part], self.workers, step_timeout_s=self.step_timeout_s
            )
            pool.start()
            self._pools[part] = pool
        return self._pools[part]

    async def setup_state(self, state: Any) -> Any:
        """Begin the episode of the row's task; the first messages become the prompt."""
        info = state["info"]
        pool = self._pool(info["part"])
        try:
            handle = await _in(pool, pool.pool.acquire())
            state[_STATE] = _Running(handle, Conversation(self.gym_id, self.style))
            observation, first = await _in(
                pool, handle.reset(info["task_id"], zlib.crc32(info["task_id"].encode()))
            )
        except PoolError as error:
            raise vf.Error(f"The episode of task {info['task_id']!r} could not start: {error}") from error
        state["prompt"] = _messages(state[_STATE].chat.open(observation, first))
        return state

    async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
        """Play the newest reply; the next message, or the end."""
        running = state[_STATE]
        parsed = running.chat.parse(_text(messages[-1]))
        try:
            outcome = await _in(self._pool(state["info"]["part"]), running.handle.step(parsed.action))
        except PoolError as error:
            raise vf.Error(f"The episode of task {state['info']['task_id']!r} broke: {error}") from error
        answer = _messages([{"role": "user", "content": running.chat.played(parsed, outcome)}])
        if running.chat.done:
            state["final_env_response"] = answer
        return answer

    @vf.cleanup
    async def give_back(self, state: Any) -> None:
        """Return the environment to the pool, however the rollout ended."""
        running = state.get(_STATE)
        if running is not None and running.handle is not None:
            handle, running.handle = running.handle, None
            pool = self._pool(state["info"]["part"])
            await _in(pool, _release(pool, handle))

    @vf.teardown
    async def close_pools(self) -> None:
        """End every environment process."""
        # Blocking: verifiers also calls this while the interpreter ends, when no thread can be started any more.
        _close_all(self._pools)


def load_environment(env_id: str = "divopd_gym/ALFWorld-v0", *args: Any, **kwargs: Any) -> TextGameEnv:
    """What `verifiers` calls; arguments as of `TextGameEnv`."""
    return TextGameEnv(env_id, *args, **kwargs)


def score(state: Any, **_: Any) -> float:
    """Final score, 0 to 1; the score so far of a rollout that was cut short."""
    return float(_chat(state).info.get("score", 0.0)) if _STATE in state else 0.0


def success(state: Any, **_: Any) -> float:
    """1.0 when the task was solved, strictly."""
    return float(_chat(state).success) if _STATE in state else 0.0


def env_turns(state: Any, **_: Any) -> float:
    """Turns that the environment played."""
    return float(_chat(state).turns) if _STATE in state else 0.0


def invalid_actions(state: Any, **_: Any) -> float:
    """Turns whose reply did not parse or whose action was not understood."""
    return float(_chat(state).invalid) if _STATE in state else 0.0


def _chat(state: Any) -> Conversation:
    return state[_STATE].chat


async def _in(pool: SyncEnvPool, work: Coroutine[Any, Any, T]) -> T:
    """Await something in the pool's own loop, from whichever loop verifiers runs in now."""
    if pool._loop is None:
        work.close()
        raise PoolError("The environments were closed; make the environment again.")
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, pool._loop))


async def _release(pool: SyncEnvPool, handle: Any) -> None:
    pool.pool.release(handle)


def _close_all(pools: dict[str, SyncEnvPool]) -> None:
    while pools:
        pools.popitem()[1].close()


def _messages(messages: list[dict[str, str]]) -> Any:
    from verifiers.utils.message_utils import normalize_messages

    return normalize_messages(messages, field_name="divopd")


def _text(message: Any) -> str:
    content = message["content"] if isinstance(message, Mapping) else getattr(message, "content", "")
    if isinstance(content, str):
        return content
    parts = content or []
    return "".join(p.get("text", "") if isinstance(p, Mapping) else getattr(p, "text", "") for p in parts)
