"""Plain texts in the three styles, right for any text environment; environments subclass them to say more.

Commands are taken from the environment (``info["admissible_actions"]``, ``info["action_templates"]``), never
written down here: their grammar changes with the data (https://github.com/alfworld/alfworld/issues/96).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from divopd_gym.errors import ConfigError
from divopd_gym.prompts.base import ParsedAction
from divopd_gym.prompts.parsing import match_admissible, parse_bare, parse_tagged

__all__ = ["ActionPrompt", "ThinkPrompt", "TinyPrompt"]

Pairs = Sequence[tuple[str, str]]


@dataclass(frozen=True)
class _TextPrompt:
    """What the three styles share.

    Attributes:
        pairs: How many past (observation, action) pairs a user message repeats at most.
        lower: Whether actions are made lower-case.
    """

    name: ClassVar[str]
    role: ClassVar[str] = "You solve a task in a text environment by writing one action at a time."
    # Admissible but useless to an agent, so not listed.
    unlisted: ClassVar[frozenset[str]] = frozenset()

    pairs: int = 0
    lower: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.pairs, int) or self.pairs < 0:
            raise ConfigError(f"pairs is {self.pairs!r}; expected a number of past turns, 0 or more.")

    def system(self, info: Mapping[str, Any]) -> str | None:
        """No system message."""
        return None

    def goal(self, observation: str, info: Mapping[str, Any]) -> str:
        """The task in words."""
        return str(info.get("goal") or "").strip()

    def scene(self, observation: str) -> str:
        """An observation without what the message says elsewhere."""
        return observation.strip()

    def actions(self, info: Mapping[str, Any]) -> list[str] | None:
        """Admissible actions to list, or None if the environment does not list any."""
        admissible = info.get("admissible_actions")
        return None if admissible is None else [a for a in admissible if a not in self.unlisted]

    def shown(self, turn: int, history: Pairs) -> list[tuple[int, str, str]]:
        """The pairs that the message repeats, each with its one-based turn number."""
        pairs = list(history)[-self.pairs :] if self.pairs else []
        return [(turn - len(pairs) + i + 1, self.scene(o), a) for i, (o, a) in enumerate(pairs)]

    def settle(self, parsed: ParsedAction, info: Mapping[str, Any] | None) -> ParsedAction:
        """Bring the parsed action into the environment's own spelling."""
        admissible = (info or {}).get("admissible_actions")
        return ParsedAction(match_admissible(parsed.action, admissible), parsed.valid, parsed.why)

    def _grammar(self, info: Mapping[str, Any]) -> str | None:
        templates = info.get("action_templates")
        return "\n".join(map(str, templates)) if templates else None


@dataclass(frozen=True)
class ThinkPrompt(_TextPrompt):
    """Everything in one user message; the reply thinks in tags, then acts in tags.

    The form that agents of the verl-agent and TCOD families are trained on: role, task, number of turns taken,
    the last two observation/action pairs, the observation, the admissible actions as a quoted list.
    """

    name: ClassVar[str] = "think"
    pairs: int = 2

    def user(self, turn: int, observation: str, info: Mapping[str, Any], history: Pairs) -> str:
        """The user message of a turn; see `PromptStyle.user`."""
        parts = [self.role]
        if goal := self.goal(observation, info):
            parts.append(f"Your task is to: {goal}")
        if past := self.shown(turn, history):
            known = "\n".join(f"[turn {n}] observation: {o!r} action: {a!r}" for n, o, a in past)
            parts.append(f"Turns taken so far: {turn}. The last {len(past)}, oldest first:\n{known}")
        else:
            parts.append(f"Turns taken so far: {turn}.")
        parts.append(f"What you observe now:\n{self.scene(observation)}")
        if (actions := self.actions(info)) is not None:
            listed = ",\n".join(f"'{a}'" for a in actions)
            parts.append(f"Actions that are possible now:\n[{listed}]")
        elif grammar := self._grammar(info):
            parts.append(f"Forms of the actions:\n{grammar}")
        parts.append(
            "First reason about where things stand and what to do next, between <think> and </think>. "
            "Then write one action, exactly as it is to be executed, between <action> and </action>."
        )
        return "\n\n".join(parts)

    def parse(self, reply: str, info: Mapping[str, Any] | None = None) -> ParsedAction:
        """Read the action block; see `parse_tagged`."""
        return self.settle(parse_tagged(reply, lower=self.lower), info)

    def reply(self, action: str, thought: str = "") -> str:
        """A reply that does `action`, with an optional thought."""
        return f"<think>{thought}</think><action>{action}</action>"


@dataclass(frozen=True)
class ActionPrompt(_TextPrompt):
    """A short form for any instruction-tuned model: a system message, then observation, task and actions.

    Attributes:
        list_actions: Whether the admissible actions are listed in every message.
    """

    name: ClassVar[str] = "action"
    list_actions: bool = True

    def system(self, info: Mapping[str, Any]) -> str | None:
        """Role and form of the reply."""
        return f"{self.role} Reply with the next action alone, on one line, and with nothing else."

    def user(self, turn: int, observation: str, info: Mapping[str, Any], history: Pairs) -> str:
        """The user message of a turn; see `PromptStyle.user`."""
        lines = [f"{o}\n> {a}" for _, o, a in self.shown(turn, history)]
        lines.append(self.scene(observation))
        if goal := self.goal(observation, info):
            lines.append(f"Task: {goal}")
        if self.list_actions and (actions := self.actions(info)) is not None:
            lines.append("Possible actions: " + "; ".join(actions))
        elif grammar := self._grammar(info):
            lines.append(f"Forms of the actions:\n{grammar}")
        return "\n".join(lines)

    def parse(self, reply: str, info: Mapping[str, Any] | None = None) -> ParsedAction:
        """Read the first line; see `parse_bare`."""
        return self.settle(parse_bare(reply, lower=self.lower), info)

    def reply(self, action: str) -> str:
        """The action itself."""
        return action


@dataclass(frozen=True)
class TinyPrompt(_TextPrompt):
    """Short lower-case transcripts for models of a few million parameters: no system message, no action list.

    Every message is the observation, then the goal on a line of its own: a tiny model finds the goal again only
    if it stands right before its reply.
    """

    name: ClassVar[str] = "tiny"
    lower: bool = True

    def user(self, turn: int, observation: str, info: Mapping[str, Any], history: Pairs) -> str:
        """The user message of a turn; see `PromptStyle.user`."""
        lines = [f"{_compact(o)}\n> {a}" for _, o, a in self.shown(turn, history)]
        lines.append(_compact(self.scene(observation)))
        if goal := self.goal(observation, info):
            lines.append(_compact(goal))
        text = "\n".join(lines)
        return text.lower() if self.lower else text

    def parse(self, reply: str, info: Mapping[str, Any] | None = None) -> ParsedAction:
        """Read the first line as it stands: a tiny model's words are not corrected."""
        return parse_bare(reply, lower=self.lower)

    def reply(self, action: str) -> str:
        """The action itself, in the letters that the messages are in, so that words can be copied from them."""
        return action.lower() if self.lower else action


def _compact(text: str) -> str:
    return "\n".join(line.strip() for line in text.splitlines() if line.strip())
