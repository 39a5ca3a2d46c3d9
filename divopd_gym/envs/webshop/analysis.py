"""`analyse`: text to index terms exactly as Lucene's English analysis does it.

Unicode word boundaries (UAX #29, with East Asian characters one by one and pictographs as words), English possessive
removed, lower case, 33 stop words dropped, Porter stems.
"""

from __future__ import annotations

import re
from functools import lru_cache

from divopd_gym.envs.webshop import wordbreak as wb
from divopd_gym.envs.webshop.porter import porter_stem

__all__ = ["MAX_TOKEN_CHARS", "STOP_WORDS", "analyse", "term_of", "words"]

MAX_TOKEN_CHARS = 255
"""Longer words are cut into pieces of this length."""

STOP_WORDS = frozenset(
    re.findall(
        r"\w+",
        "a an and are as at be but by for if in into is it no not of on or such that the their then there these "
        "they this to was will with",
    )
)


def _class(*ranges: str) -> str:
    parts = []
    for item in " ".join(ranges).split():
        first, _, last = item.partition("-")
        parts.append(rf"\U{int(first, 16):08x}-\U{int(last or first, 16):08x}")
    return "[" + "".join(parts) + "]"


def _word_pattern() -> re.Pattern[str]:
    """The grammar of words; the names are those of the Unicode classes, ``x`` marks trailing extenders."""
    extend = _class(wb.EXTEND) + "*"
    letter = _class(wb.ALETTER, wb.HEBREW) + extend
    hebrew = _class(wb.HEBREW) + extend
    numeric = _class(wb.NUMERIC) + extend
    katakana = _class(wb.KATAKANA) + extend
    joiner = _class(wb.EXTENDNUMLET) + extend
    in_word = _class(wb.MIDLETTER, wb.MIDNUMLET, "27") + extend
    in_number = _class(wb.MIDNUM, wb.MIDNUMLET, "27") + extend
    letters = rf"{letter}(?:(?:(?:{joiner})*|{in_word}){letter})*"
    numbers = rf"{numeric}(?:(?:(?:{joiner})*|{in_number}){numeric})*"
    # A quote may end a Hebrew word (gershayim inside, geresh at the end).
    quoted = rf"{hebrew}(?:\"{extend}{hebrew}|'{extend}(?!{letter}))"
    kana = rf"{katakana}(?:(?:{joiner})*{katakana})*"
    chunk = rf"(?:{kana}|(?:{quoted}|{numbers}|{letters})+)"
    word = rf"(?:{joiner})*{chunk}(?:(?:{joiner})+{chunk})*(?:{joiner})*"
    picture = _class(wb.PICTOGRAPH)
    modifier = "[\U0001f3fb-\U0001f3ff]?"
    emoji = (
        rf"[\U0001f1e6-\U0001f1ff]{extend}[\U0001f1e6-\U0001f1ff]{extend}"
        rf"|[#*]\ufe0f?\u20e3{extend}"
        rf"|{picture}{modifier}{extend}(?:(?<=\u200d){picture}{modifier}{extend})*"
    )
    single = rf"{_class(wb.HAN)}{extend}|{_class(wb.HIRAGANA)}{extend}|(?:{_class(wb.SA)}{extend})+"
    return re.compile(rf"{word}|{emoji}|{single}")


# Most listings are plain ASCII, where the grammar is short; the result is the same.
_LETTERS = "[a-z](?:(?:_*|[:.'])[a-z])*"
_NUMBERS = "[0-9](?:(?:_*|[,;.'])[0-9])*"
_CHUNK = rf"(?:{_NUMBERS}|{_LETTERS})+"
_ASCII = re.compile(rf"_*{_CHUNK}(?:_+{_CHUNK})*_*", re.IGNORECASE | re.ASCII)
_FULL = _word_pattern()


def words(text: str) -> list[str]:
    """The words of a text, in order, as they stand in it."""
    found = (_ASCII if text.isascii() else _FULL).findall(text)
    if any(len(word) > MAX_TOKEN_CHARS for word in found):
        found = [
            word[i : i + MAX_TOKEN_CHARS] for word in found for i in range(0, len(word), MAX_TOKEN_CHARS)
        ]
    return found


def _lower(word: str) -> str:
    if word.isascii():
        return word.lower()
    # One code point each, as Java does it: no final sigma, no combining dot.
    return "".join(c.lower()[0] if len(c.lower()) > 1 else c.lower() for c in word)


@lru_cache(maxsize=1 << 18)
def term_of(word: str) -> str | None:
    """The index term of a word, None for a stop word."""
    if len(word) >= 2 and word[-1] in "sS" and word[-2] in "'\u2019\uff07":
        word = word[:-2]
    word = _lower(word)
    if word in STOP_WORDS:
        return None
    return porter_stem(word)


def analyse(text: str) -> list[str]:
    """Index terms of a text in order, repeats included."""
    return [term for word in words(text) if (term := term_of(word)) is not None]
