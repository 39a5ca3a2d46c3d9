"""`similarity`: how alike two short phrases are as sets of words, 0 to 100.

The token set ratio of the fuzzywuzzy family: words in common count fully, the rest by the insertions and deletions that
turn one into the other.
"""

from __future__ import annotations

import re
from functools import lru_cache

__all__ = ["alike", "similarity"]

_LATIN = {code: None for code in range(128, 256)}
_OTHER = re.compile(r"[\W_]")


@lru_cache(maxsize=65536)
def _tokens(phrase: str) -> frozenset[str]:
    # Code points 128 to 255 vanish, they do not part words.
    plain = _OTHER.sub(" ", phrase.translate(_LATIN)).lower()
    return frozenset(plain.split())


def _distance(one: str, two: str) -> int:
    """Insertions and deletions that turn one text into another (bit-parallel longest common subsequence)."""
    where: dict[str, int] = {}
    for place, letter in enumerate(one):
        where[letter] = where.get(letter, 0) | 1 << place
    full = (1 << len(one)) - 1
    state = full
    for letter in two:
        matches = state & where.get(letter, 0)
        state = ((state + matches) | (state - matches)) & full
    common = len(one) - bin(state).count("1")
    return len(one) + len(two) - 2 * common


def _share(distance: int, length: int) -> float:
    return 100.0 - 100.0 * distance / length if length else 100.0


@lru_cache(maxsize=65536)
def similarity(one: str, two: str) -> int:
    """Token set ratio of two phrases, rounded; 0 if either has no word."""
    first, second = _tokens(one), _tokens(two)
    if not first or not second:
        return 0
    common, only_first, only_second = first & second, sorted(first - second), sorted(second - first)
    if common and (not only_first or not only_second):
        return 100
    rest_first, rest_second = " ".join(only_first), " ".join(only_second)
    shared = len(" ".join(sorted(common)))
    gap = 1 if shared else 0
    lengths = shared + gap + len(rest_first), shared + gap + len(rest_second)
    best = _share(_distance(rest_first, rest_second), sum(lengths))
    if shared:
        for rest, length in zip((rest_first, rest_second), lengths, strict=True):
            best = max(best, _share(gap + len(rest), shared + length))
    return round(best)


def alike(one: object, two: object) -> bool:
    """Whether the benchmark takes two phrases for the same: a similarity above 85."""
    return similarity(str(one), str(two)) > 85
