"""What a prompt style is, and the registry that finds one by environment id.

A style turns observations into messages and replies into actions; it holds no state, so one object serves every
episode. How much of the past is in the chat is the caller's affair (*accumulate* or *window(n)*); a style only
repeats the last `pairs` of the pairs it is handed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from divopd_gym.errors import ConfigError

__all__ = [
    "ParsedAction",
    "PromptStyle",
    "get_prompt",
    "history_pairs",
    "prompt_styles",
    "register_prompt",
]


@dataclass(frozen=True)
class ParsedAction:
    """The action read out of a reply.

    Attributes:
        action: What is sent to the environment; when `valid` is False a best guess, sent all the same.
        valid: Whether the reply had an action in the form that was asked for.
        why: If not, why not: "no_action_tag", "unclosed_action_tag", "empty_action", "too_long"; else None.
    """

    action: str
    valid: bool
    why: str | None = None


@runtime_checkable
class PromptStyle(Protocol):
    """Texts of one environment in one style.

    Attributes:
        name: The name of the style.
        pairs: How many past (observation, action) pairs a user message repeats at most.
    """

    name: str
    pairs: int

    def system(self, info: Mapping[str, Any]) -> str | None:
        """The system message of an episode, or None for none."""
        ...

    def user(
        self, turn: int, observation: str, info: Mapping[str, Any], history: Sequence[tuple[str, str]]
    ) -> str:
        """The user message of a turn.

        Args:
            turn: Zero-based index of the turn, which is also the number of turns taken so far.
            observation: The newest observation.
            info: The newest info of the environment.
            history: Earlier (observation, action) pairs, oldest first; all of them may be handed over.
        """
        ...

    def parse(self, reply: str, info: Mapping[str, Any] | None = None) -> ParsedAction:
        """The action in a reply; never raises, whatever the reply is."""
        ...

    def reply(self, action: str) -> str:
        """What an assistant writes to do `action`; `parse` gives the action back."""
        ...


_REGISTRY: dict[str, dict[str, Callable[..., PromptStyle]]] = {}
_ANY = "*"


def register_prompt(env_id: str, style: str, factory: Callable[..., PromptStyle]) -> None:
    """Make a style known for an environment.

    Args:
        env_id: Gymnasium id, or "*" for environments that have no entry of their own.
        style: Name of the style.
        factory: Called with the options of `get_prompt`, `pairs` among them if a history form is given.
    """
    _REGISTRY.setdefault(env_id, {})[style] = factory


def prompt_styles(env_id: str) -> tuple[str, ...]:
    """Names of the styles that an environment has."""
    return tuple(sorted({**_REGISTRY.get(_ANY, {}), **_REGISTRY.get(_bare(env_id), {})}))


def get_prompt(env_id: str, style: str = "think", history: str | None = None, **options: Any) -> PromptStyle:
    """Find the texts for an environment.

    Args:
        env_id: Gymnasium id ("divopd_gym/ALFWorld-v0"); an id without texts of its own gets plain ones.
        style: "think" (``<think>..</think><action>..</action>``), "action" (the bare action, for any model) or
            "tiny" (short transcripts for tiny models).
        history: "accumulate" or "window:n"; decides how many pairs a user message repeats. With a window it is
            n; else the style's own number, since the chat holds the rest.
        **options: Fields of the style.

    Raises:
        ConfigError: There is no such style, option or history form.
    """
    styles = {**_REGISTRY.get(_ANY, {}), **_REGISTRY.get(_bare(env_id), {})}
    if style not in styles:
        raise ConfigError(
            f"There is no prompt style {style!r} for {env_id}; expected one of {', '.join(sorted(styles))}. "
            "Choose one of these, or add yours with divopd_gym.prompts.register_prompt."
        )
    window = history_pairs(history) if history is not None else None
    if window is not None:
        options.setdefault("pairs", window)
    try:
        return styles[style](**options)
    except TypeError as error:
        raise ConfigError(
            f"Prompt style {style!r} of {env_id} was given options {sorted(options)}: {error}. "
            "Remove the option that the style does not have."
        ) from error


def history_pairs(history: str) -> int | None:
    """Number of past pairs that a window shows; None for *accumulate*.

    Raises:
        ConfigError: `history` is neither "accumulate" nor "window:n" with n >= 0.
    """
    if history == "accumulate":
        return None
    found = re.fullmatch(r"window:(\d+)", history)
    if not found:
        raise ConfigError(
            f"Unknown history form {history!r}; expected 'accumulate' or 'window:n' with n past turns, "
            "for example 'window:2'."
        )
    return int(found[1])


def _bare(env_id: str) -> str:
    # Gymnasium ids may begin with a module to import: "package.module:namespace/Name-v0".
    return env_id.rpartition(":")[2]
