"""Messages read back from recorded token ids: decoded piece by piece, never encoded, never rendered again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .chat import ChatCodec
from .turns import Segment, Turn

__all__ = ["DialogueReader"]

_A, _B = "qzAq", "qzBq"


class DialogueReader:
    """Splits a segment into the messages that the model saw and wrote.

    The chat template's own text round a message is cut off where it is recognised; where it is not, the whole
    piece is one message of role ``user``, template text included.

    Args:
        tokenizer: That of the model that played.

    Raises:
        ConfigError: It has no chat template that `ChatCodec` can take apart.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.codec = ChatCodec(tokenizer)
        self.tokenizer = tokenizer
        self._openings = [
            form
            for form in (self._opening([("system", _A), ("user", _B)]), self._opening([("user", _B)]))
            if form is not None
        ]

    def messages(self, segment: Segment, turns: Sequence[Turn]) -> list[dict[str, str]]:
        """All messages of a segment up to its last reply.

        Args:
            segment: Holds the ids.
            turns: The turns that point into it, in order.

        Returns:
            ``{"role", "content"}``; replies have the role ``assistant``, whoever wrote them.
        """
        found: list[dict[str, str]] = []
        end = 0
        for turn in turns:
            piece = self._text(segment.token_ids[end : turn.start])
            found += self._first(piece) if end == 0 else [_message("user", self._between(piece))]
            found.append(_message("assistant", self.codec.decode(turn.response_ids)))
            end = turn.end
        return found

    def _text(self, ids: np.ndarray) -> str:
        return self.tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)

    def _opening(self, messages: list[tuple[str, str]]) -> tuple[str, str | None, str] | None:
        """(before the first message, between the two, after the last), or None if the template refuses them."""
        try:
            text = self.codec._render(messages, open_reply=True)
        except Exception:
            return None
        head, found, rest = text.partition(messages[0][1])
        if len(messages) == 1 or not found:
            return (head, None, rest) if found else None
        between, found, tail = rest.partition(messages[1][1])
        return (head, between, tail) if found else None

    def _first(self, text: str) -> list[dict[str, str]]:
        for head, between, tail in self._openings:
            if not text.startswith(head) or not text.endswith(tail):
                continue
            body = text[len(head) : len(text) - len(tail)]
            if between is None:
                return [_message("user", body)]
            system, found, user = body.partition(between)
            if found:
                return [_message("system", system), _message("user", user)]
        return [_message("user", text)]

    def _between(self, text: str) -> str:
        """The user message in what stands between two replies."""
        end = self.codec.end_of_turn_id
        close = "" if end is None else self.tokenizer.decode([end], skip_special_tokens=False)
        for head in (close + self.codec._between, self.codec._between):
            if text.startswith(head) and text.endswith(self.codec._after_user):
                return text[len(head) : len(text) - len(self.codec._after_user)]
        return text


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
