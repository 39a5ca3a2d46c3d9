"""The benchmark's files as users bring them: where they are, and reading them piece by piece.

The full item file has 5 GB; it is read one listing at a time, never as a whole.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from divopd_gym.data import candidate_roots
from divopd_gym.errors import ConfigError, DataNotFoundError

__all__ = ["Sources", "digest", "find_sources", "read_array", "read_object"]

_ITEMS = {"full": "items_shuffle.json", "small": "items_shuffle_1000.json"}
_FACTS = {"full": "items_ins_v2.json", "small": "items_ins_v2_1000.json"}
_HUMAN = ("items_human_ins.json", "items_human_ins_1000.json")
_CHUNK = 1 << 22


@dataclass(frozen=True)
class Sources:
    """The files of one catalogue.

    Attributes:
        folder: where they lie.
        items: listings.
        facts: attributes and generated instructions.
        human: instructions written by people, or None.
    """

    folder: Path
    items: Path
    facts: Path
    human: Path | None

    @property
    def files(self) -> list[Path]:
        """Those that there are."""
        return [path for path in (self.items, self.facts, self.human) if path is not None]

    @property
    def size(self) -> int:
        """Bytes of the listings."""
        return self.items.stat().st_size


def find_sources(data_dir: str | os.PathLike[str], size: str | None = None) -> Sources:
    """Find the files of a catalogue.

    Args:
        data_dir: their folder, or one with a folder ``webshop`` in it.
        size: ``small`` (the 1,000 products) or ``full``; None takes the full one if it is there.

    Raises:
        ConfigError: an unknown size.
        DataNotFoundError: a file is missing; the message says which and where it was looked for.
    """
    if size not in (None, *_ITEMS):
        raise ConfigError(f"size={size!r}; choose 'small', 'full' or None for what is there")
    kinds = [size] if size else list(_ITEMS)
    looked = []
    for _, root in candidate_roots("webshop", data_dir):
        for kind in kinds:
            items = root / _ITEMS[kind]
            looked.append(str(items))
            if not items.is_file():
                continue
            facts = root / _FACTS[kind]
            if not facts.is_file():
                raise DataNotFoundError(
                    f"{items} is there but {facts.name} beside it is not; the two belong together, fetch both"
                )
            names = _HUMAN if kind == "full" else tuple(reversed(_HUMAN))
            human = next((root / name for name in names if (root / name).is_file()), None)
            return Sources(root, items, facts, human)
    raise DataNotFoundError(
        f"no WebShop catalogue was found; looked for {', '.join(looked)}. Put the benchmark's items_shuffle*.json, "
        "items_ins_v2*.json and items_human_ins.json there, name their folder by data_dir=, or leave data_dir "
        "out to shop in the generated catalogue"
    )


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() if _FILE_DIGEST else _digest(file)


_FILE_DIGEST = hasattr(hashlib, "file_digest")


def _digest(file: Any) -> str:
    found = hashlib.sha256()
    while chunk := file.read(1 << 20):
        found.update(chunk)
    return found.hexdigest()


class _Reader:
    """A window on a JSON text that grows when more is needed."""

    def __init__(self, path: Path, report: Callable[[int], None] | None):
        self.path = path
        self._file = path.open(encoding="utf-8")
        self._report = report
        self._decoder = json.JSONDecoder()
        self.text, self.at = "", 0

    def close(self) -> None:
        self._file.close()

    def more(self) -> bool:
        chunk = self._file.read(_CHUNK)
        self.text, self.at = self.text[self.at :] + chunk, 0
        if self._report is not None and chunk:
            self._report(len(chunk))
        return bool(chunk)

    def skip(self, expected: str) -> str:
        """The next character that is not white space, which must be one of `expected`; it is consumed."""
        while True:
            while self.at < len(self.text) and self.text[self.at].isspace():
                self.at += 1
            if self.at < len(self.text):
                break
            if not self.more():
                raise self.broken(f"the file ends where one of {expected!r} was expected")
        found = self.text[self.at]
        if found not in expected:
            raise self.broken(f"{found!r} where one of {expected!r} was expected")
        self.at += 1
        return found

    def value(self) -> Any:
        while self.at < len(self.text) and self.text[self.at].isspace():
            self.at += 1
        while True:
            try:
                found, end = self._decoder.raw_decode(self.text, self.at)
            except json.JSONDecodeError as error:
                if not self.more():
                    raise self.broken(str(error)) from error
                while self.at < len(self.text) and self.text[self.at].isspace():
                    self.at += 1
                continue
            # A number at the window's edge may go on beyond it; objects, lists and texts may not.
            if end == len(self.text) and isinstance(found, (int, float)) and self.more():
                continue
            self.at = end
            return found

    def broken(self, what: str) -> ConfigError:
        return ConfigError(f"{self.path} is no complete JSON file of the benchmark ({what}); fetch it again")


def read_array(path: Path, report: Callable[[int], None] | None = None) -> Iterator[Any]:
    """The elements of a JSON array, one by one.

    Args:
        path: the file.
        report: told how many characters were read, chunk by chunk.

    Raises:
        ConfigError: the file is not one complete JSON array.
    """
    reader = _Reader(path, report)
    try:
        reader.skip("[")
        if reader.skip('{["]') == "]":
            return
        reader.at -= 1
        while True:
            yield reader.value()
            if reader.skip(",]") == "]":
                return
    finally:
        reader.close()


def read_object(path: Path, report: Callable[[int], None] | None = None) -> Iterator[tuple[str, Any]]:
    """The entries of a JSON object, one by one; see `read_array`."""
    reader = _Reader(path, report)
    try:
        reader.skip("{")
        if reader.skip('"}') == "}":
            return
        reader.at -= 1
        while True:
            key = reader.value()
            reader.skip(":")
            yield key, reader.value()
            if reader.skip(",}") == "}":
                return
            if reader.skip('"') == '"':
                reader.at -= 1
    finally:
        reader.close()
