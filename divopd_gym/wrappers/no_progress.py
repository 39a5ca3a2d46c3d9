"""Counting, and on request ending, episodes that go nowhere."""

from __future__ import annotations

import gymnasium

from divopd_gym.core import DoneReason
from divopd_gym.wrappers.progress import ProgressCounter, check_count

__all__ = ["NoProgress"]


class NoProgress(gymnasium.Wrapper, gymnasium.utils.RecordConstructorArgs):
    """Put the number of consecutive turns without progress into ``info["no_progress"]``.

    What counts as progress is `made_progress`'s rule. Environments whose ``admissible_actions`` are None are judged
    by the text of their observations.

    Args:
        env: A text environment.
        patience: Truncate the episode (``done_reason`` "no_progress") at that many turns; None only counts.

    Raises:
        ConfigError: `patience` is not None and not a number of turns, 1 or more.
    """

    def __init__(self, env: gymnasium.Env, patience: int | None = None) -> None:
        gymnasium.utils.RecordConstructorArgs.__init__(self, patience=patience)
        gymnasium.Wrapper.__init__(self, env)
        self.patience = None if patience is None else check_count("patience", patience, 1)
        self._counter = ProgressCounter()

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[str, dict]:
        """Begin an episode."""
        observation, info = self.env.reset(seed=seed, options=options)
        self._counter.reset()
        self._now = (observation, info.get("admissible_actions"))
        return observation, {**info, "no_progress": 0}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        """Play one turn."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        before, listed = self._now
        self._now = (observation, info.get("admissible_actions"))
        self._counter.observe(
            action, bool(info.get("valid_action", True)), listed, self._now[1], before, observation
        )
        info = {**info, "no_progress": self._counter.count}
        over = terminated or truncated
        if not over and self.patience is not None and self._counter.count >= self.patience:
            truncated, info["done_reason"] = True, DoneReason.NO_PROGRESS.value
        return observation, float(reward), terminated, truncated, info
