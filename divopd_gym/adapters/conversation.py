"""One episode as a chat: observations become user messages, replies become actions. No environment, no model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from divopd_gym.prompts import ParsedAction, get_prompt

__all__ = ["Conversation"]


class Conversation:
    """What both adapters know of an episode; the environment is the caller's.

    Args:
        env_id: Gymnasium id; decides the texts.
        style: Prompt style (`divopd_gym.prompts.prompt_styles`).
        options: Fields of the style.

    Attributes:
        prompt: The `PromptStyle`.
        info: The newest info of the environment; empty before `open`.
        turns: Turns played.
        invalid: Turns whose reply had no action in the form asked for, or whose action was not understood.
        reward: Sum of the rewards, which is the final score.
        done: Whether the episode is over.
    """

    def __init__(self, env_id: str, style: str = "action", options: Mapping[str, Any] | None = None) -> None:
        self.prompt = get_prompt(env_id, style, "accumulate", **dict(options or {}))
        self._observation = ""
        self._past: list[tuple[str, str]] = []
        self.info: dict[str, Any] = {}
        self.turns = self.invalid = 0
        self.reward, self.done = 0.0, False

    def open(self, observation: str, info: Mapping[str, Any]) -> list[dict[str, str]]:
        """Begin an episode with what the environment's reset returned; the first messages."""
        self._past, self.turns, self.invalid, self.reward, self.done = [], 0, 0, 0.0, False
        self._observation, self.info = observation, dict(info)
        system = self.prompt.system(info)
        first = [] if system is None else [{"role": "system", "content": system}]
        return [*first, {"role": "user", "content": self._message()}]

    def parse(self, reply: str) -> ParsedAction:
        """The action in a reply; never raises."""
        return self.prompt.parse(reply, self.info)

    def played(self, parsed: ParsedAction, outcome: tuple[str, float, bool, bool, Mapping[str, Any]]) -> str:
        """Take note of an executed action.

        Args:
            parsed: What `parse` gave.
            outcome: The five values of the environment's ``step``.

        Returns:
            The next user message; after the end the bare last observation.
        """
        observation, reward, terminated, truncated, info = outcome
        self._past.append((self._observation, parsed.action))
        self._observation, self.info = observation, dict(info)
        self.turns += 1
        self.invalid += not (parsed.valid and bool(info.get("valid_action", True)))
        self.reward += float(reward)
        self.done = bool(terminated or truncated)
        return observation if self.done else self._message()

    @property
    def success(self) -> bool:
        """Whether the task is solved, strictly."""
        return bool(self.info.get("success", False))

    def _message(self) -> str:
        return self.prompt.user(self.turns, self._observation, self.info, self._past)
