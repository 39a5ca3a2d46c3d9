"""Reading one action out of a reply. Nothing here raises, whatever the text."""

from __future__ import annotations

import re
from collections.abc import Iterable

from divopd_gym.prompts.base import ParsedAction

__all__ = ["MAX_ACTION_CHARS", "match_admissible", "parse_bare", "parse_tagged", "squeeze"]

# Longer than any command of any environment; what is longer is prose.
MAX_ACTION_CHARS = 300
_GUESS_CHARS = 30
_BLOCK = re.compile(r"<action>(.*?)</action>", re.IGNORECASE | re.DOTALL)
_OPEN = re.compile(r"<action>", re.IGNORECASE)
_THOUGHT_END = re.compile(r"</think>", re.IGNORECASE)
_LABEL = re.compile(r"^(?:>+|action\s*:|command\s*:)\s*", re.IGNORECASE)
_QUOTES = ("'", '"', "`")


def squeeze(text: str) -> str:
    """The text with every run of white space made one blank, and none at the ends."""
    return " ".join(text.split())


def parse_tagged(reply: str, *, lower: bool) -> ParsedAction:
    """Read ``<think>..</think><action>..</action>``.

    The first action block after the last ``</think>`` counts; without one there, the last block anywhere. A
    reply without a block sends its last 30 characters and is flagged (the convention of agents trained with
    this form).

    Args:
        reply: Text of the reply, without special tokens.
        lower: Whether the environment's commands are all lower-case.
    """
    thoughts = list(_THOUGHT_END.finditer(reply))
    spoken = reply[thoughts[-1].end() :] if thoughts else reply
    block = _BLOCK.search(spoken)
    if block is None and thoughts:
        block = next(iter(list(_BLOCK.finditer(reply))[-1:]), None)
    if block is not None:
        action = _clean(block[1], lower)
        if not action:
            return ParsedAction(_guess(reply, lower), False, "empty_action")
        return _bounded(action)
    opened = _OPEN.search(spoken)
    if opened is not None:
        action = _clean(spoken[opened.end() :].strip().partition("\n")[0], lower)
        if action:
            return ParsedAction(action[:MAX_ACTION_CHARS], False, "unclosed_action_tag")
    return ParsedAction(_guess(reply, lower), False, "no_action_tag")


def parse_bare(reply: str, *, lower: bool) -> ParsedAction:
    """Read a reply that is the action alone: its first line that is not empty, after any thinking.

    An action block, a leading prompt sign (``>``) or label (``action:``) and quotes round the action are
    tolerated.

    Args:
        reply: Text of the reply, without special tokens.
        lower: Whether the environment's commands are all lower-case.
    """
    thoughts = list(_THOUGHT_END.finditer(reply))
    spoken = reply[thoughts[-1].end() :] if thoughts else reply
    block = _BLOCK.search(spoken)
    if block is not None:
        spoken = block[1]
    for line in spoken.splitlines():
        action = _clean(_LABEL.sub("", line.strip()), lower)
        if action:
            return _bounded(action)
    return ParsedAction(_guess(reply, lower), False, "empty_action")


def match_admissible(action: str, admissible: Iterable[str] | None) -> str:
    """The admissible action that differs from `action` only in case, spaces or a final stop; else `action`."""
    if admissible is None:
        return action
    by_form = {squeeze(a).lower(): a for a in admissible}
    form = squeeze(action).lower()
    return by_form.get(form) or by_form.get(form.rstrip(" .!")) or action


def _clean(text: str, lower: bool) -> str:
    text = squeeze(text)
    while len(text) >= 2 and text[0] == text[-1] and text[0] in _QUOTES:
        text = text[1:-1].strip()
    return squeeze(text.lower() if lower else text)


def _bounded(action: str) -> ParsedAction:
    if len(action) > MAX_ACTION_CHARS:
        return ParsedAction(action[:MAX_ACTION_CHARS], False, "too_long")
    return ParsedAction(action, True)


def _guess(reply: str, lower: bool) -> str:
    tail = reply.strip()[-_GUESS_CHARS:]
    return squeeze(tail.lower() if lower else tail)
