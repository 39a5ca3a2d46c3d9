"""Environments for TRL's ``environment_factory`` (``GRPOTrainer``, ``AsyncGRPOTrainer``): one tool, `act`, one reward.

trainer = GRPOTrainer(..., environment_factory=environment_factory("divopd_gym/ALFWorld-v0"),
                      train_dataset=task_dataset("divopd_gym/ALFWorld-v0", limit=500))

TRL takes every public method but ``reset`` and ``get_reward`` for a tool, so there are no others.
"""

from __future__ import annotations

import functools
import threading
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium

import divopd_gym  # noqa: F401  (registers the environments)
from divopd_gym.adapters.conversation import Conversation
from divopd_gym.errors import ConfigError, ResetNeeded
from divopd_gym.prompts import ParsedAction

__all__ = ["TextGame", "environment_factory", "task_dataset", "task_rows"]

_OVER = "The episode is over: {reason}. Do not act any more."
# TRL's asynchronous trainer calls tools from several threads; engines of one process share parsers.
_LOCK = threading.RLock()


class TextGame:
    """One environment behind TRL's tool calls; TRL makes an instance a rollout and resets it for the next.

    The reward is the final score, 0 to 1; of an episode that a limit of TRL's cut short, the score so far.

    Args:
        env_id: Gymnasium id.
        env_kwargs: Its keyword arguments; plain values, so that the factory can be sent to another process.
        success_reward: Reward strict success (0 or 1) in place of the score.
    """

    def __init__(
        self, env_id: str, env_kwargs: Mapping[str, Any] | None = None, success_reward: bool = False
    ) -> None:
        # Observation, task and actions, but not "reply with the action alone", which is for replies without tools.
        self._chat = Conversation(env_id, "action")
        self._success_reward = success_reward
        with _LOCK:
            self._env = gymnasium.make(env_id, **dict(env_kwargs or {}))

    def reset(self, task: str | None = None, seed: int | None = None, **row: Any) -> str:
        """Begin an episode.

        Args:
            task: Task id, from the data set's column of that name; None: the environment chooses by the seed.
            seed: Seed; by default one that the task fixes, so that all rollouts of a group start alike.
            **row: The data set's other columns; not used.

        Returns:
            What TRL appends to the user's message.

        Raises:
            ConfigError: There is no such task.
        """
        if seed is None and task is not None:
            seed = zlib.crc32(task.encode())
        options = None if task is None else {"task": task}
        with _LOCK:
            observation, info = self._env.reset(seed=seed, options=options)
        text = self._chat.open(observation, info)[-1]["content"]
        role = getattr(self._chat.prompt, "role", "")
        return (
            f"{role}\nCall the tool act with one action at a time until the task is done.\n\n{text}".lstrip()
        )

    def act(self, action: str) -> str:
        """Carry out one action in the environment and observe what happens.

        Args:
            action: The action, written exactly as the environment expects it.

        Returns:
            What you observe afterwards.
        """
        chat = self._chat
        if not chat.info:
            raise ResetNeeded("act() was called before reset(); call reset() first.")
        if chat.done:
            return _OVER.format(reason=chat.info.get("done_reason"))
        parsed = chat.parse(action) if isinstance(action, str) else ParsedAction(str(action), False)
        with _LOCK:
            outcome = self._env.step(parsed.action)
        text = chat.played(parsed, outcome)
        return f"{text}\n{_OVER.format(reason=chat.info.get('done_reason'))}" if chat.done else text

    def get_reward(self) -> float:
        """The score reached, 0 to 1; with `success_reward` 1.0 for strict success and else 0.0."""
        if self._success_reward:
            return float(self._chat.success)
        return float(self._chat.info.get("score", 0.0))

    def __del__(self) -> None:
        env = self.__dict__.get("_env")
        if env is not None:
            env.close()


def environment_factory(
    env_id: str, env_kwargs: Mapping[str, Any] | None = None, success_reward: bool = False
) -> Callable[[], TextGame]:
    """What TRL's trainers take as ``environment_factory``; picklable. Arguments as of `TextGame`."""
    return functools.partial(TextGame, env_id, dict(env_kwargs or {}), success_reward)


def task_rows(
    env_id: str,
    env_kwargs: Mapping[str, Any] | None = None,
    limit: int | None = None,
    prompt: str = "",
) -> list[dict[str, Any]]:
    """One row a task: ``prompt`` (messages; the environment's first message is appended to it) and ``task``.

    Args:
        env_id: Gymnasium id.
        env_kwargs: Its keyword arguments.
        limit: Only the first so many tasks.
        prompt: Text to put before the environment's.

    Raises:
        ConfigError: `limit` is below 1.
    """
    if limit is not None and limit < 1:
        raise ConfigError(f"limit={limit}; give a number of tasks of at least 1, or None for all")
    env = gymnasium.make(env_id, **dict(env_kwargs or {}))
    try:
        tasks = list(env.unwrapped.tasks[:limit])
    finally:
        env.close()
    return [{"prompt": [{"role": "user", "content": prompt}], "task": task} for task in tasks]


def task_dataset(
    env_id: str,
    env_kwargs: Mapping[str, Any] | None = None,
    limit: int | None = None,
    prompt: str = "",
) -> Any:
    """`task_rows` as a Hugging Face ``datasets.Dataset``.

    Raises:
        ConfigError: As `task_rows`, or the package datasets is missing.
    """
    try:
        from datasets import Dataset
    except ImportError:
        raise ConfigError(
            "task_dataset needs the package datasets, which is not installed; run pip install 'divopd[trainer]', or "
            "use task_rows, which gives plain dicts."
        ) from None
    return Dataset.from_list(task_rows(env_id, env_kwargs, limit, prompt))
