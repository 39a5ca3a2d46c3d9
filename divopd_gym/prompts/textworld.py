"""TextWorld's texts: the adventurer's role; the rest is said by the games themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from divopd_gym.prompts.text import ActionPrompt, ThinkPrompt, TinyPrompt

__all__ = ["TextWorldAction", "TextWorldThink", "TextWorldTiny"]


@dataclass(frozen=True)
class _Adventure:
    """What TextWorld adds to each style."""

    role: ClassVar[str] = (
        "You play a text adventure by writing one command at a time. You see only the room that you are in and what "
        "you carry."
    )


@dataclass(frozen=True)
class TextWorldThink(_Adventure, ThinkPrompt):
    """`ThinkPrompt` in TextWorld's words."""

    pairs: int = 2
    lower: bool = True


@dataclass(frozen=True)
class TextWorldAction(_Adventure, ActionPrompt):
    """`ActionPrompt` in TextWorld's words."""

    lower: bool = True


@dataclass(frozen=True)
class TextWorldTiny(_Adventure, TinyPrompt):
    """`TinyPrompt` for TextWorld."""

    lower: bool = True
