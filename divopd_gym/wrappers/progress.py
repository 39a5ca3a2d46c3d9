"""When a turn made no progress, as a pure rule and a counter.

No progress is an invalid action, or an action equal to the immediately previous executed one (case and spaces aside)
that leaves the set of admissible actions as it was (DivOPD, arXiv 2609.34838, section 3.4). An environment that lists
no actions is judged by its observation instead; with neither, the repetition alone counts.
"""

from __future__ import annotations

from collections.abc import Iterable

from divopd_gym.errors import ConfigError
from divopd_gym.prompts.parsing import squeeze

__all__ = ["ProgressCounter", "made_progress"]


def made_progress(
    action: str,
    previous: str | None,
    valid: bool,
    admissible_before: Iterable[str] | None,
    admissible_after: Iterable[str] | None,
    observation_before: str | None = None,
    observation_after: str | None = None,
) -> bool:
    """Whether a turn made progress.

    Args:
        action: What was executed.
        previous: What was executed before it in this episode, by whomever; None at the first turn.
        valid: Whether the action could be parsed and the environment took it.
        admissible_before: Admissible actions before it; None where the environment lists none.
        admissible_after: The same after it.
        observation_before: The observation it answered; used only where actions are not listed.
        observation_after: The observation it led to.
    """
    if not valid:
        return False
    if previous is None or squeeze(action).lower() != squeeze(previous).lower():
        return True
    if admissible_before is not None and admissible_after is not None:
        return set(admissible_before) != set(admissible_after)
    if observation_before is not None and observation_after is not None:
        return squeeze(observation_before) != squeeze(observation_after)
    return False


class ProgressCounter:
    """Counts consecutive turns without progress.

    Attributes:
        count: Turns without progress since the last one with it.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin an episode."""
        self.count = 0
        self._previous: str | None = None

    def observe(
        self,
        action: str,
        valid: bool,
        admissible_before: Iterable[str] | None,
        admissible_after: Iterable[str] | None,
        observation_before: str | None = None,
        observation_after: str | None = None,
    ) -> bool:
        """Take in one executed turn; see `made_progress`. Returns whether it made progress."""
        moved = made_progress(
            action,
            self._previous,
            valid,
            admissible_before,
            admissible_after,
            observation_before,
            observation_after,
        )
        self._previous = action
        self.count = 0 if moved else self.count + 1
        return moved


def check_count(name: str, value: int, least: int) -> int:
    """Refuse a number of turns that is none.

    Raises:
        ConfigError: `value` is no integer, or less than `least`.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name} is {value!r}; expected a number of turns, {least} or more.")
    return value
