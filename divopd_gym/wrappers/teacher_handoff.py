"""Teacher recovery: when the student is stuck, a teacher plays a few turns and hands back (arXiv 2609.34838, 3.4).

`HandoffPolicy` decides who acts and knows nothing of environments; `TeacherHandoff` applies it to any of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import gymnasium

from divopd_gym.wrappers.progress import ProgressCounter, check_count

__all__ = ["STUDENT", "TEACHER", "HandoffPolicy", "TeacherHandoff"]

STUDENT, TEACHER = "student", "teacher"


class HandoffPolicy:
    """Who acts next: the student, or for a while the teacher. Pure.

    The teacher takes over after `patience` consecutive turns without progress and acts for at most `budget` turns
    in the whole rollout. By default it keeps its turns until the budget is spent. The counter starts
    again when it hands back, and it may take over again while budget is left.

    Args:
        patience: Consecutive turns without progress that call the teacher, 1 or more.
        budget: Turns of the teacher in a rollout in all; 0 never calls it.
        return_on_progress: Whether the teacher hands back as soon as one of its turns made progress.

    Attributes:
        acting: Who acts next, "student" or "teacher".
        budget_left: Teacher turns that are left.
        teacher_turns: Teacher turns played.
        handoffs: How often the teacher took over.

    Raises:
        ConfigError: `patience` or `budget` is no such number.
    """

    def __init__(self, patience: int, budget: int, return_on_progress: bool = False) -> None:
        self.patience = check_count("patience", patience, 1)
        self.budget = check_count("budget", budget, 0)
        self.return_on_progress = return_on_progress
        self._counter = ProgressCounter()
        self.reset()

    def reset(self) -> None:
        """Begin a rollout."""
        self.acting = STUDENT
        self.budget_left, self.teacher_turns, self.handoffs = self.budget, 0, 0
        self._counter.reset()

    @property
    def no_progress(self) -> int:
        """Consecutive turns without progress since the rollout or the last hand-back began."""
        return self._counter.count

    def observe(
        self,
        action: str,
        valid: bool,
        admissible_before: Iterable[str] | None,
        admissible_after: Iterable[str] | None,
        observation_before: str | None = None,
        observation_after: str | None = None,
    ) -> str:
        """Take in the turn that was just executed by whoever was `acting`.

        Args:
            action: What was executed.
            valid: Whether it could be parsed and the environment took it.
            admissible_before: Admissible actions before it; None where the environment lists none.
            admissible_after: The same after it.
            observation_before: The observation it answered; used only where actions are not listed.
            observation_after: The observation it led to.

        Returns:
            Who acts next.
        """
        moved = self._counter.observe(
            action, valid, admissible_before, admissible_after, observation_before, observation_after
        )
        if self.acting == TEACHER:
            self.teacher_turns += 1
            self.budget_left -= 1
            if self.budget_left == 0 or (moved and self.return_on_progress):
                self.acting = STUDENT
                self._counter.count = 0
        elif self._counter.count >= self.patience and self.budget_left > 0:
            self.acting = TEACHER
            self.handoffs += 1
        return self.acting


class TeacherHandoff(gymnasium.Wrapper):
    """Let a teacher play whenever the student is stuck; usable with any text environment.

    The teacher's turns are played inside `step`, right after the student's turn that called for them: the student
    gets the observation that the teacher left it, the sum of the rewards, and the teacher's turns in
    ``info["teacher_turns"]`` (a list of dicts with observation, action, reward; observation is the one that was
    answered). Put limits on turns inside this wrapper, so that the teacher's count too.

    Args:
        env: A text environment.
        teacher: A function of (observation, info) that gives the next action, or an object with
            ``reset``, ``observe`` and ``act`` (an `Expert`), which is told of every turn.
        patience: See `HandoffPolicy`.
        budget: See `HandoffPolicy`.
        return_on_progress: See `HandoffPolicy`.
    """

    def __init__(
        self,
        env: gymnasium.Env,
        teacher: Callable[[str, dict[str, Any]], str] | Any,
        patience: int,
        budget: int,
        return_on_progress: bool = False,
    ) -> None:
        super().__init__(env)
        self.policy = HandoffPolicy(patience, budget, return_on_progress)
        self.teacher = teacher
        self._follows = hasattr(teacher, "act") and hasattr(teacher, "observe")

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[str, dict]:
        """Begin an episode with the student acting."""
        observation, info = self.env.reset(seed=seed, options=options)
        self.policy.reset()
        if self._follows:
            self.teacher.reset(observation, info)
        self._now = (observation, info)
        return observation, {**info, "teacher_turns": [], "teacher_budget": self.policy.budget_left}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        """Play the student's turn, and the teacher's turns if it called for them."""
        turns: list[dict[str, Any]] = []
        reward, terminated, truncated = self._play(action)
        while self.policy.acting == TEACHER and not (terminated or truncated):
            observation, info = self._now
            action = self.teacher.act() if self._follows else self.teacher(observation, info)
            gained, terminated, truncated = self._play(action)
            turns.append({"observation": observation, "action": action, "reward": gained})
            reward += gained
        observation, info = self._now
        info = {**info, "teacher_turns": turns, "teacher_budget": self.policy.budget_left}
        return observation, reward, terminated, truncated, info

    def _play(self, action: str) -> tuple[float, bool, bool]:
        before, known = self._now
        after, reward, terminated, truncated, info = self.env.step(action)
        self._now = (after, info)
        self.policy.observe(
            action,
            bool(info.get("valid_action", True)),
            known.get("admissible_actions"),
            info.get("admissible_actions"),
            before,
            after,
        )
        if self._follows:
            self.teacher.observe(action, after, info)
        return float(reward), terminated, truncated
