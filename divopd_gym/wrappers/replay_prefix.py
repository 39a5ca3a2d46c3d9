"""Episodes that begin after a given list of actions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium

from divopd_gym.errors import ConfigError

__all__ = ["ReplayPrefix"]

Prefix = Sequence[str] | Callable[[str, dict[str, Any]], Sequence[str]]


class ReplayPrefix(gymnasium.Wrapper):
    """Play a list of actions inside `reset`, so that the episode goes on from where they lead.

    The info of `reset` tells what was played: ``info["prefix"]`` (a list of (observation, action) pairs, the
    observation being the one that the action answered) and ``info["prefix_reward"]`` (the rewards of the prefix, which
    no `step` returns again).

    Args:
        env: A text environment.
        actions: The actions, or a function of the first (observation, info) that gives them, for example
            ``lambda obs, info: env.unwrapped.gold_path()[:-3]``. ``options={"prefix": [...]}`` of `reset` goes before.
    """

    def __init__(self, env: gymnasium.Env, actions: Prefix = ()) -> None:
        super().__init__(env)
        self.actions = actions

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[str, dict]:
        """Begin an episode and play the prefix.

        Raises:
            ConfigError: The episode ends within the prefix.
        """
        options = dict(options or {})
        actions: Any = options.pop("prefix", self.actions)
        observation, info = self.env.reset(seed=seed, options=options or None)
        if callable(actions):
            actions = actions(observation, info)
        actions = list(actions or ())
        played, total = [], 0.0
        for number, action in enumerate(actions, start=1):
            after, reward, terminated, truncated, info = self.env.step(action)
            played.append((observation, action))
            observation, total = after, total + float(reward)
            if terminated or truncated:
                raise ConfigError(
                    f"The episode of task {info.get('task')!r} ended at action {number} of a prefix of {len(actions)} "
                    f"({action!r}, {info.get('done_reason')}); expected at least one turn after it. "
                    f"Replay at most {number - 1} actions."
                )
        return observation, {**info, "prefix": played, "prefix_reward": total}
