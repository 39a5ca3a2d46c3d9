"""Porter's stemmer as Lucene has it: words of one or two letters stay, and ``bli`` -> ``ble``, ``logi`` -> ``log``.

M. F. Porter, "An algorithm for suffix stripping", Program 14 (1980), with the author's later departures. What is not an
ASCII vowel counts as a consonant, digits and other scripts included.
"""

from __future__ import annotations

__all__ = ["porter_stem"]

_VOWELS = frozenset("aeiou")

# Rules of a stage, by the last letter but one; within a letter the first suffix that fits is the only one tried.
_STAGE_2: dict[str, tuple[tuple[str, str], ...]] = {
    "a": (("ational", "ate"), ("tional", "tion")),
    "c": (("enci", "ence"), ("anci", "ance")),
    "e": (("izer", "ize"),),
    "l": (("bli", "ble"), ("alli", "al"), ("entli", "ent"), ("eli", "e"), ("ousli", "ous")),
    "o": (("ization", "ize"), ("ation", "ate"), ("ator", "ate")),
    "s": (("alism", "al"), ("iveness", "ive"), ("fulness", "ful"), ("ousness", "ous")),
    "t": (("aliti", "al"), ("iviti", "ive"), ("biliti", "ble")),
    "g": (("logi", "log"),),
}
# Stage 3 goes by the last letter.
_STAGE_3: dict[str, tuple[tuple[str, str], ...]] = {
    "e": (("icate", "ic"), ("ative", ""), ("alize", "al")),
    "i": (("iciti", "ic"),),
    "l": (("ical", "ic"), ("ful", "")),
    "s": (("ness", ""),),
}
_STAGE_4: dict[str, tuple[str, ...]] = {
    "a": ("al",),
    "c": ("ance", "ence"),
    "e": ("er",),
    "i": ("ic",),
    "l": ("able", "ible"),
    "n": ("ant", "ement", "ment", "ent"),
    "o": ("ion", "ou"),
    "s": ("ism",),
    "t": ("ate", "iti"),
    "u": ("ous",),
    "v": ("ive",),
    "z": ("ize",),
}


def porter_stem(word: str) -> str:
    """The stem of a lower-case word."""
    if len(word) <= 2:
        return word
    word = _plural(word)
    word = _past(word)
    if word[-1] == "y" and _has_vowel(word[:-1]):
        word = word[:-1] + "i"
    if len(word) > 1:
        word = _replace(word, _STAGE_2.get(word[-2], ()))
    word = _replace(word, _STAGE_3.get(word[-1], ()))
    word = _strip(word)
    return _final_e(word)


def _consonants(word: str) -> list[bool]:
    """For each letter, whether it is a consonant: ``y`` is one at the start and after a vowel."""
    flags: list[bool] = []
    for letter in word:
        if letter in _VOWELS:
            flags.append(False)
        elif letter == "y":
            flags.append(not flags or not flags[-1])
        else:
            flags.append(True)
    return flags


def _measure(stem: str) -> int:
    """How many times a run of vowels is followed by a run of consonants."""
    flags = _consonants(stem)
    return sum(1 for before, now in zip(flags, flags[1:], strict=False) if not before and now)


def _has_vowel(stem: str) -> bool:
    return not all(_consonants(stem))


def _double(word: str) -> bool:
    return len(word) > 1 and word[-1] == word[-2] and _consonants(word)[-1]


def _closed(word: str) -> bool:
    """Whether the word ends consonant, vowel, consonant other than w, x, y."""
    if len(word) < 3 or word[-1] in "wxy":
        return False
    flags = _consonants(word)
    return flags[-1] and not flags[-2] and flags[-3]


def _plural(word: str) -> str:
    if word[-1] != "s":
        return word
    if word.endswith("sses") or word.endswith("ies"):
        return word[:-2]
    return word if word[-2] == "s" else word[:-1]


def _past(word: str) -> str:
    if word.endswith("eed"):
        return word[:-1] if _measure(word[:-3]) > 0 else word
    for suffix in ("ed", "ing"):
        if word.endswith(suffix):
            stem = word[: -len(suffix)]
            if not _has_vowel(stem):
                return word
            break
    else:
        return word
    if stem.endswith(("at", "bl", "iz")):
        return stem + "e"
    if _double(stem):
        return stem if stem[-1] in "lsz" else stem[:-1]
    return stem + "e" if _measure(stem) == 1 and _closed(stem) else stem


def _replace(word: str, rules: tuple[tuple[str, str], ...]) -> str:
    for suffix, new in rules:
        if word.endswith(suffix):
            stem = word[: -len(suffix)]
            return stem + new if _measure(stem) > 0 else word
    return word


def _strip(word: str) -> str:
    if len(word) < 2:
        return word
    for suffix in _STAGE_4.get(word[-2], ()):
        if word.endswith(suffix):
            stem = word[: -len(suffix)]
            if suffix == "ion" and not stem.endswith(("s", "t")):
                continue
            return stem if _measure(stem) > 1 else word
    return word


def _final_e(word: str) -> str:
    if word[-1] == "e":
        stem = word[:-1]
        measure = _measure(stem)
        if measure > 1 or (measure == 1 and not _closed(stem)):
            word = stem
    if word[-1] == "l" and _double(word) and _measure(word) > 1:
        word = word[:-1]
    return word
