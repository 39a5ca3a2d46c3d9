"""WebShop's texts: the shopper's role, pages without the instruction, and a short form for tiny models."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from divopd_gym.prompts.text import ActionPrompt, ThinkPrompt, TinyPrompt

__all__ = ["WebShopAction", "WebShopThink", "WebShopTiny"]

_SEP = " [SEP] "
_HEAD = re.compile(
    r"\A(?:WebShop \[SEP\] )?Instruction: \[SEP\] .*? \[SEP\] (?=Back to Search\b|Search\Z)", re.DOTALL
)
_RICH_HEAD = re.compile(
    r"^(?:WebShop\n)?Instruction: ?\n.*?\n(?=\[button\] (?:Back to Search|Search) )", re.DOTALL | re.M
)
_ASIN = re.compile(r"[A-Z0-9]{10}")
_PAGE = re.compile(r"Page (-?\d+) \(Total results: \d+\)")
_BUTTONS = frozenset(
    (
        "Back to Search",
        "< Prev",
        "Next >",
        "Search",
        "Description",
        "Features",
        "Reviews",
        "Attributes",
        "Buy Now",
    )
)


@dataclass(frozen=True)
class _Shopper:
    """What WebShop adds to each style."""

    role: ClassVar[str] = (
        "You shop for somebody in a web shop by writing one action at a time: search[words] where there is a search "
        "field, click[text] for anything on the page that can be clicked. Find the product that fits the request, "
        "choose the options that it names, then click[buy now]. Buying ends the visit."
    )

    def scene(self, observation: str) -> str:
        """The page without the instruction, which the message gives as the task."""
        text = _HEAD.sub("", observation, count=1)
        return (
            _RICH_HEAD.sub("", text, count=1) if text is observation or text == observation else text
        ).strip()

    def actions(self, info: Mapping[str, Any]) -> list[str] | None:
        """The possible actions; the search as a form to fill in, since what to search for is the shopper's choice."""
        found = super().actions(info)  # type: ignore[misc]
        if found is None:
            return None
        clicks = [action for action in found if not action.startswith("search[")]
        return ["search[<your query>]", *clicks] if len(clicks) < len(found) else clicks


@dataclass(frozen=True)
class WebShopThink(_Shopper, ThinkPrompt):
    """`ThinkPrompt` in WebShop's words."""


@dataclass(frozen=True)
class WebShopAction(_Shopper, ActionPrompt):
    """`ActionPrompt` in WebShop's words."""


@dataclass(frozen=True)
class WebShopTiny(_Shopper, TinyPrompt):
    """`TinyPrompt` for WebShop: a line per product or option group, titles cut short, and what was chosen.

    Attributes:
        title_words: words of a title that are shown.
    """

    title_words: int = 6

    def scene(self, observation: str) -> str:
        """The page in few lines; other forms than ``text`` as they are."""
        text = super().scene(observation)
        if _SEP not in text and text not in _BUTTONS:
            return text
        pieces = [piece.strip() for piece in text.split(_SEP)]
        results = any(_PAGE.fullmatch(piece) for piece in pieces)
        lines: list[str] = []
        for place, piece in enumerate(pieces):
            before = pieces[place - 1] if place else ""
            after = pieces[place + 1] if place + 1 < len(pieces) else ""
            if found := _PAGE.fullmatch(piece):
                lines.append(f"page {found[1]}")
            elif results and lines and piece.startswith("$"):
                lines[-1] += f" {piece}"
            elif results and _ASIN.fullmatch(before):
                lines[-1] += f" {self._cut(piece)}"
            elif piece in _BUTTONS or piece == "Rating: N.A.":
                continue
            else:
                # Options are clicked by their whole text, titles are not.
                lines.append(self._cut(piece) if after.startswith("Price: ") else piece)
        return "\n".join(lines) or "search"

    def _cut(self, text: str) -> str:
        return " ".join(text.split()[: self.title_words])

    def user(
        self, turn: int, observation: str, info: Mapping[str, Any], history: Sequence[tuple[str, str]]
    ) -> str:
        """The user message of a turn; see `PromptStyle.user`."""
        chosen = info.get("options")
        if chosen:
            observation = f"{observation}{_SEP}chosen: {'; '.join(chosen.values())}"
        return super().user(turn, observation, info, history)
