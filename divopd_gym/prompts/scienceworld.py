"""ScienceWorld's texts: the laboratory role, the task without its opening, and action forms and objects apart.

Listing every possible action would take thousands of lines and most of them would be nonsense, so a message gives the
forms of the actions and the names of the visible things, as agents of the TCOD family are trained on. No example names
a thing to focus on: agents that saw one did nothing else (https://github.com/Tencent/digitalhuman/issues/13).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from divopd_gym.prompts.text import ActionPrompt, ThinkPrompt, TinyPrompt

__all__ = ["ScienceWorldAction", "ScienceWorldThink", "ScienceWorldTiny"]

_OPENING = re.compile(r"^\s*(?:task description:\s*)?your task is to:?\s+", re.IGNORECASE)
# The simulator's example of this one is cut short; what it takes is the longer form.
_GO = "go OBJ"


@dataclass(frozen=True)
class _Laboratory:
    """What ScienceWorld adds to each style.

    Attributes:
        lower: Whether actions are made lower-case (the simulator does not care).
        objects: Whether the names of the visible things are listed.
    """

    role: ClassVar[str] = (
        "You carry out a science task in a simulated building with several rooms by writing one action at a time. "
        "The action 'focus on' tells the examiner which thing the task is about: use it only on that thing, and before "
        "you change it, since focusing on a wrong thing fails the task at once."
    )

    lower: bool = False
    objects: bool = True

    def goal(self, observation: str, info: Mapping[str, Any]) -> str:
        """The task without its opening words."""
        return _OPENING.sub("", str(info.get("goal") or "")).strip()

    def _grammar(self, info: Mapping[str, Any]) -> str | None:
        templates = info.get("action_templates")
        if not templates:
            return None
        forms = ["go to OBJ" if t == _GO else str(t) for t in templates]
        text = "\n".join(forms) + "\nOBJ stands for the name of a thing or a room."
        names = info.get("objects")
        if self.objects and names:
            text += "\nNames that mean something here: " + ", ".join(map(str, names))
        return text


@dataclass(frozen=True)
class ScienceWorldThink(_Laboratory, ThinkPrompt):
    """`ThinkPrompt` in ScienceWorld's words."""

    pairs: int = 2
    lower: bool = False


@dataclass(frozen=True)
class ScienceWorldAction(_Laboratory, ActionPrompt):
    """`ActionPrompt` in ScienceWorld's words."""

    lower: bool = False


@dataclass(frozen=True)
class ScienceWorldTiny(_Laboratory, TinyPrompt):
    """`TinyPrompt` for ScienceWorld, with the whole task: its later sentences say where a thing belongs."""

    lower: bool = True
