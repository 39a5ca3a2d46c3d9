"""A limit on the turns of an episode."""

from __future__ import annotations

import gymnasium

from divopd_gym.core import DoneReason
from divopd_gym.wrappers.progress import check_count

__all__ = ["StepLimit"]


class StepLimit(gymnasium.Wrapper, gymnasium.utils.RecordConstructorArgs):
    """Truncate an episode (``done_reason`` "turn_limit") after so many calls of `step`.

    Success, failure or another limit at that very turn goes first.

    Args:
        env: A text environment.
        max_turns: Turns of an episode, 1 or more.

    Raises:
        ConfigError: `max_turns` is no such number.
    """

    def __init__(self, env: gymnasium.Env, max_turns: int) -> None:
        gymnasium.utils.RecordConstructorArgs.__init__(self, max_turns=max_turns)
        gymnasium.Wrapper.__init__(self, env)
        self.max_turns = check_count("max_turns", max_turns, 1)
        self._turns = 0
        own = getattr(env.unwrapped, "max_turns", None)
        if own is not None and own < max_turns:
            gymnasium.logger.warn(
                f"StepLimit(env, {max_turns}) has no effect: the environment's own max_turns={own} ends episodes "
                f"before. Make it with max_turns={max_turns} or None."
            )

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[str, dict]:
        """Begin an episode."""
        self._turns = 0
        return self.env.reset(seed=seed, options=options)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        """Play one turn."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._turns += 1
        if self._turns >= self.max_turns and not (terminated or truncated):
            truncated, info = True, {**info, "done_reason": DoneReason.TURN_LIMIT.value}
        return observation, float(reward), terminated, truncated, info
