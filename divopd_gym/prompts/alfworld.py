"""ALFWorld's texts: the household role, the room without its banner, and the 0.3.x / 0.4.x wording of placing.

Data of release 0.4.x says ``move X to Y`` where older data says ``put X in/on Y``; which one holds is read from the
admissible actions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from divopd_gym.prompts.base import ParsedAction
from divopd_gym.prompts.text import ActionPrompt, ThinkPrompt, TinyPrompt

__all__ = ["ALFWorldAction", "ALFWorldThink", "ALFWorldTiny", "alias_placing"]

_BANNER = re.compile(r"^\s*-=.*?=-\s*$", re.MULTILINE)
_TASK = re.compile(r"^\s*Your task is to:[ \t]*(.*?)\s*$", re.MULTILINE | re.IGNORECASE)
_LIST = re.compile(r"\byou see (?=\S)", re.IGNORECASE)
_ROOM = re.compile(r"^you are in the middle of a room\b", re.IGNORECASE)
_PUT = re.compile(r"put (?P<thing>.+?) (?:in/on|in|on|into|onto|to) (?P<place>.+)")
_MOVE = re.compile(r"move (?P<thing>.+?) (?:to|in/on|into|onto) (?P<place>.+)")


def alias_placing(action: str, admissible: list[str] | None) -> str:
    """Translate between ``put X in/on Y`` and ``move X to Y`` where only the other one is known.

    Args:
        action: A lower-case action.
        admissible: What the environment admits now; None if unknown, then ``move`` is taken.

    Returns:
        The wording that is admissible; `action` itself if it is, or if neither is.
    """
    found = _PUT.fullmatch(action) or _MOVE.fullmatch(action)
    if found is None or (admissible is not None and action in admissible):
        return action
    forms = [f"move {found['thing']} to {found['place']}", f"put {found['thing']} in/on {found['place']}"]
    if admissible is None:
        return forms[0]
    return next((form for form in forms if form in admissible), action)


@dataclass(frozen=True)
class _Household:
    """What ALFWorld adds to each style.

    Attributes:
        lower: Whether actions are made lower-case (the game matches exactly, and in lower case).
        alias: Whether placing is translated between the old and the new wording.
    """

    role: ClassVar[str] = (
        "You do a chore in a simulated household by writing one action at a time. You see only what is in front "
        "of you, carry one thing at a time, and must go to a place before you can use what is there."
    )
    unlisted: ClassVar[frozenset[str]] = frozenset({"help"})

    lower: bool = True
    alias: bool = False

    def goal(self, observation: str, info: Mapping[str, Any]) -> str:
        """The task sentence without its opening."""
        if goal := str(info.get("goal") or "").strip():
            return goal
        found = _TASK.search(observation)
        return found[1] if found else ""

    def scene(self, observation: str) -> str:
        """The observation without banner and task sentence."""
        text = _TASK.sub("", _BANNER.sub("", observation))
        return re.sub(r"\n{3,}", "\n\n", text).strip()

    def settle(self, parsed: ParsedAction, info: Mapping[str, Any] | None) -> ParsedAction:
        """Bring the action into the game's spelling, and into its wording of placing if asked to."""
        parsed = super().settle(parsed, info)  # type: ignore[misc]
        return self._aliased(parsed, info)

    def _aliased(self, parsed: ParsedAction, info: Mapping[str, Any] | None) -> ParsedAction:
        if not self.alias:
            return parsed
        return replace(parsed, action=alias_placing(parsed.action, (info or {}).get("admissible_actions")))


@dataclass(frozen=True)
class ALFWorldThink(_Household, ThinkPrompt):
    """`ThinkPrompt` in ALFWorld's words."""

    pairs: int = 2
    lower: bool = True


@dataclass(frozen=True)
class ALFWorldAction(_Household, ActionPrompt):
    """`ActionPrompt` in ALFWorld's words."""

    lower: bool = True


@dataclass(frozen=True)
class ALFWorldTiny(_Household, TinyPrompt):
    """`TinyPrompt` for ALFWorld: the first observation is cut down to the list of places."""

    lower: bool = True

    def scene(self, observation: str) -> str:
        """The observation without banner and task; of the first one only the list of places, as it stands."""
        text = super().scene(observation)
        found = _LIST.search(text) if _ROOM.match(text) else None
        return text[found.end() :] if found else text

    def parse(self, reply: str, info: Mapping[str, Any] | None = None) -> ParsedAction:
        """Read the first line as it stands."""
        return self._aliased(super().parse(reply, info), info)
