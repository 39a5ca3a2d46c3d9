"""Chat as token ids that only grow: the first prompt, then what is appended after each reply.

The pieces are read off the tokenizer's own chat template once. The past is never rendered again, so turn n+1's
prompt starts with turn n's prompt and reply id for id, whatever the template does to earlier turns
(https://github.com/volcengine/verl/issues/6854).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from divopd_gym.errors import ConfigError

__all__ = ["ChatCodec"]

# Unlikely in a template, and no digit or letter of a word that a template could look for.
_A, _B, _C = "qzAq", "qzBq", "qzCq"


class ChatCodec:
    """Encodes an episode's messages for one tokenizer.

    Thinking is off (``enable_thinking=False`` is passed to the template), and whatever the template writes
    to open an assistant message, an empty thinking block included, belongs to the prompt.

    Args:
        tokenizer: A `transformers` tokenizer with a chat template.

    Attributes:
        end_of_turn_id: The id that the template closes an assistant message with, or None if it has none.
        end_of_turn_ids: Every id at which generation should stop (the one above first, then EOS).

    Raises:
        ConfigError: The tokenizer has no chat template, or its template cannot be taken apart.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigError(
                f"The tokenizer {getattr(tokenizer, 'name_or_path', '') or tokenizer!r} has no chat template; "
                "agents need one. Use an instruction-tuned checkpoint, or set tokenizer.chat_template to the "
                "template that the model was trained with and save it beside the model."
            )
        try:
            text = self._render([("user", _A), ("assistant", _B), ("user", _C)], open_reply=True)
        except Exception as error:
            raise ConfigError(
                f"The chat template failed on a user, an assistant and a user message of plain text: {error}. "
                "Expected a template for text chat; set tokenizer.chat_template to one."
            ) from error
        _, found_b, after_reply = text.partition(_B)
        between, found_c, rest = after_reply.partition(_C)
        if not (found_b and found_c):
            raise ConfigError(
                "The chat template does not write an assistant message followed by a user message verbatim "
                f"(rendering: {text!r}); expected both contents in it, in this order. Use a template that does."
            )
        padded = f"\t{_C}\t"
        self._strips = padded not in self._render([("user", padded)], open_reply=True)
        close = self._leading_special_token(between.lstrip(" "))
        # A template may write a blank before the closing token; a model that was sampled need not.
        self._between = between.lstrip(" ")[len(close) :] if close else between
        self._after_user = rest
        self.end_of_turn_id: int | None = tokenizer.convert_tokens_to_ids(close) if close else None
        eos = getattr(tokenizer, "eos_token_id", None)
        ids = dict.fromkeys(i for i in (self.end_of_turn_id, eos) if i is not None)
        if not ids:
            raise ConfigError(
                "Neither the chat template nor the tokenizer names a token that ends a turn; set "
                "tokenizer.eos_token, or use a template that closes messages with a special token."
            )
        self.end_of_turn_ids: tuple[int, ...] = tuple(ids)

    def start(self, system: str | None, user: str) -> np.ndarray:
        """Ids of the first prompt, the opening of the assistant message included; int32 [T]."""
        messages = ([] if system is None else [("system", system)]) + [("user", user)]
        try:
            text = self._render(messages, open_reply=True)
        except Exception:
            if system is None:
                raise
            # Some templates refuse a system message; its text then opens the user's.
            text = self._render([("user", f"{system}\n\n{user}")], open_reply=True)
        return self.encode(text)

    def extend(self, user: str, *, closed: bool = True) -> np.ndarray:
        """Ids to append after a reply: the user's next message and the opening of the next reply.

        Args:
            user: The message.
            closed: Whether the reply's own last id ended the turn (see `closes`); if not, the end-of-turn id
                is added first.

        Returns:
            int32 [T].
        """
        ids = self.encode(self._between + (user.strip() if self._strips else user) + self._after_user)
        if closed or self.end_of_turn_id is None:
            return ids
        return np.concatenate([np.array([self.end_of_turn_id], np.int32), ids])

    def closes(self, response_ids: Sequence[int] | np.ndarray) -> bool:
        """Whether a reply ends with the id that the template closes an assistant message with."""
        if len(response_ids) == 0:
            return False
        end = self.end_of_turn_ids[0] if self.end_of_turn_id is None else self.end_of_turn_id
        return int(response_ids[-1]) == end

    def reply(self, text: str) -> np.ndarray:
        """Ids of a written (not sampled) reply, its end-of-turn id included; int32 [T]."""
        return np.concatenate([self.encode(text), np.array(self.end_of_turn_ids[:1], np.int32)])

    def encode(self, text: str) -> np.ndarray:
        """Ids of a text as it stands, special tokens in it recognised, none added; int32 [T]."""
        return np.asarray(self.tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)

    def decode(self, response_ids: Sequence[int] | np.ndarray) -> str:
        """Text of a reply without special tokens; for reading only, never to be encoded again."""
        return self.tokenizer.decode([int(i) for i in response_ids], skip_special_tokens=True)

    def _render(self, messages: Sequence[tuple[str, str]], *, open_reply: bool) -> str:
        return self.tokenizer.apply_chat_template(
            [{"role": role, "content": content} for role, content in messages],
            tokenize=False,
            add_generation_prompt=open_reply,
            enable_thinking=False,
        )

    def _leading_special_token(self, text: str) -> str:
        tokens = set(self.tokenizer.get_added_vocab()) | set(self.tokenizer.all_special_tokens)
        return max((t for t in tokens if t and text.startswith(t)), key=len, default="")
