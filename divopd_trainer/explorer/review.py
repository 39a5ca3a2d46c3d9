"""What may happen to a finished, scored rollout before the learner gets it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ..turns import Rollout
from .config import ExplorerConfig

__all__ = ["Review", "ReviewContext"]


@dataclass
class ReviewContext:
    """What a review may use.

    Attributes:
        config: The explorer's.
        engines: Student, codec and the rest.
        teacher: The `TeacherEngine` of this rollout's task.
        teacher_vocabulary: bool [V], ids that mean the same to it; None = all.
        prompt: The `PromptStyle`.
        pool: Of environments: ``acquire()`` and ``release(handle)``.
        deadline: On `time.monotonic`'s clock.
    """

    config: ExplorerConfig
    engines: Any
    teacher: Any
    teacher_vocabulary: np.ndarray | None
    prompt: Any
    pool: Any
    deadline: float

    @property
    def time_left(self) -> float:
        """Seconds, 1 at least: what is left is given up rather than failed."""
        return max(1.0, self.deadline - time.monotonic())


class Review(Protocol):
    """The seam: changes a rollout in place (the info of its turns, or more turns)."""

    async def review(self, rollout: Rollout, context: ReviewContext) -> None:
        """Called once a rollout, after its scoring. An error fails the episode."""
        ...
