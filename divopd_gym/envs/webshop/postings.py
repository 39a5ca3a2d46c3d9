"""Building the inverted index: terms to postings, small enough to map into memory and share between processes.

Documents are numbered in ASIN order, so that the search engine's tie-break is the document number.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from divopd_gym.envs.webshop.analysis import analyse
from divopd_gym.errors import ConfigError

__all__ = ["B", "K1", "LENGTHS", "Postings", "PostingsBuilder"]

K1, B = 0.9, 0.4
"""BM25's parameters, those of the benchmark's search engine."""

_TF_BITS = 16
_FREE = 24
_BLOCK = 1 << 22


def _lengths() -> np.ndarray:
    """The document lengths that one byte can hold: exact up to 40, then 8 per octave (Lucene's SmallFloat)."""

    def decode(code: int) -> int:
        bits, shift = code & 7, (code >> 3) - 1
        return bits if shift < 0 else (bits | 8) << shift

    return np.array([c if c < _FREE else _FREE + decode(c - _FREE) for c in range(256)], dtype=np.int64)


LENGTHS = _lengths()
"""``int64[256]``: length that a norm byte stands for."""


@dataclass
class Postings:
    """An inverted index; the arrays may be memory-mapped.

    Attributes:
        offsets: ``int64[T+1]``, postings of term t are those from offsets[t] to offsets[t+1].
        docs: ``int32[P]``, document numbers, ascending within a term.
        tfs: ``uint16[P]``, how often the term occurs in the document.
        norms: ``uint8[N]``, the document's length as a byte, see `LENGTHS`.
        rows: ``int32[N]``, catalogue row of each document.
        bounds: ``float32[T]``, most that a posting of the term can give, as a share of the term's weight.
        totals: ``int64[2]``, documents with at least one term, and tokens in all.
    """

    offsets: np.ndarray
    docs: np.ndarray
    tfs: np.ndarray
    norms: np.ndarray
    rows: np.ndarray
    bounds: np.ndarray
    totals: np.ndarray

    @classmethod
    def names(cls) -> list[str]:
        """Names of the arrays."""
        return [f.name for f in fields(cls)]

    def save(self, folder: Path) -> None:
        """Write each array as a ``.npy`` file."""
        for name in self.names():
            np.save(folder / f"{name}.npy", getattr(self, name))

    @classmethod
    def load(cls, folder: Path) -> Postings:
        """Map the arrays of a folder, read-only."""
        return cls(**{name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in cls.names()})

    def inverse_norms(self) -> np.ndarray:
        """``float32[N]``: 1 / (k1 * (1 - b + b * length / mean length)) of each document, in Lucene's arithmetic."""
        documents, tokens = (int(x) for x in self.totals)
        f = np.float32
        average = f(tokens / documents) if documents else f(1)
        table = f(1) / (f(K1) * ((f(1) - f(B)) + f(B) * LENGTHS.astype(f) / average))
        return table.astype(f)[self.norms]


class PostingsBuilder:
    """Collects documents in catalogue order, then inverts.

    About 8 bytes per posting are held while sorting; before that, postings wait in a temporary file.

    Args:
        folder: where the temporary file may lie; None for the system's place.
    """

    def __init__(self, folder: Path | None = None):
        self.terms: dict[str, int] = {}
        self._lengths: list[int] = []
        self._pending: list[np.ndarray] = []
        self._waiting = 0
        self._count = 0
        # Closed by `finish`; it has no name, so nothing is left behind if that is never reached.
        self._spill = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115

    def add(self, text: str) -> None:
        """Add the next document."""
        terms = self.terms
        self.add_ids([terms.setdefault(term, len(terms)) for term in analyse(text)])

    def add_ids(self, ids: Sequence[int]) -> None:
        """Add the next document by its term numbers, repeats included."""
        counts = Counter(ids)
        block = np.empty((3, len(counts)), dtype=np.int32)
        block[0] = list(counts.keys())
        block[1] = len(self._lengths)
        block[2] = np.minimum(list(counts.values()), (1 << _TF_BITS) - 1)
        self._append(block, [len(ids)])

    def add_block(self, term: np.ndarray, row: np.ndarray, tf: np.ndarray, lengths: Sequence[int]) -> None:
        """Add many documents at once.

        Args:
            term: ``int32[n]`` term numbers.
            row: ``int32[n]`` document of each, counted from the first document ever added.
            tf: ``int32[n]`` occurrences.
            lengths: tokens of each of the new documents.
        """
        self._append(np.stack([term, row, tf]).astype(np.int32, copy=False), lengths)

    def _append(self, block: np.ndarray, lengths: Sequence[int]) -> None:
        self._lengths.extend(lengths)
        self._pending.append(block)
        self._waiting += block.shape[1]
        self._count += block.shape[1]
        if self._waiting >= _BLOCK:
            self._flush()

    def _flush(self) -> None:
        if self._pending:
            # Column by column, so that one posting's three numbers lie together.
            np.concatenate(self._pending, axis=1).T.astype(np.int32).tofile(self._spill)
        self._pending, self._waiting = [], 0

    def finish(self, asins: Sequence[str]) -> Postings:
        """Invert everything added.

        Args:
            asins: of the documents, in the order they were added.

        Raises:
            ConfigError: the numbers of texts and asins differ, or there are too many postings to number.
        """
        documents = len(self._lengths)
        if len(asins) != documents:
            raise ConfigError(f"{documents} documents were added but {len(asins)} asins given; give one each")
        rows = np.array(sorted(range(documents), key=asins.__getitem__), dtype=np.int32)
        rank = np.empty(documents, dtype=np.int32)
        rank[rows] = np.arange(documents, dtype=np.int32)
        keys, doc_bits, terms = self._sorted_keys(rank)
        shift = doc_bits + _TF_BITS
        offsets = np.searchsorted(keys, np.arange(terms + 1, dtype=np.int64) << shift)
        docs = np.empty(len(keys), dtype=np.int32)
        tfs = np.empty(len(keys), dtype=np.uint16)
        for start in range(0, len(keys), _BLOCK):
            part = keys[start : start + _BLOCK]
            docs[start : start + _BLOCK] = (part >> _TF_BITS) & ((1 << doc_bits) - 1)
            tfs[start : start + _BLOCK] = part & ((1 << _TF_BITS) - 1)
        del keys
        lengths = np.array(self._lengths, dtype=np.int64)
        codes = np.searchsorted(LENGTHS, lengths, side="right") - 1
        found = Postings(
            offsets=offsets.astype(np.int64),
            docs=docs,
            tfs=tfs,
            norms=codes.astype(np.uint8)[rows],
            rows=rows,
            bounds=np.zeros(terms, dtype=np.float32),
            totals=np.array([int((lengths > 0).sum()), int(lengths.sum())], dtype=np.int64),
        )
        found.bounds = _bounds(found)
        return found

    def _sorted_keys(self, rank: np.ndarray) -> tuple[np.ndarray, int, int]:
        self._flush()
        doc_bits = max(1, int(len(rank)).bit_length())
        keys = np.empty(self._count, dtype=np.int64)
        self._spill.seek(0)
        done = terms = 0
        for block in _blocks(self._spill, self._count):
            part = keys[done : done + len(block)]
            part[:] = block[:, 0]
            terms = max(terms, int(part.max()) + 1)
            part <<= doc_bits
            part |= rank[block[:, 1]]
            part <<= _TF_BITS
            part |= block[:, 2]
            done += len(block)
        self._spill.close()
        terms = max(terms, len(self.terms))
        if terms.bit_length() + doc_bits + _TF_BITS > 63:
            raise ConfigError(
                f"{terms} terms in {len(rank)} documents do not fit a 63-bit key; split the catalogue"
            )
        keys.sort()
        return keys, doc_bits, terms


def _blocks(spill, count: int) -> Iterable[np.ndarray]:
    while count > 0:
        block = np.fromfile(spill, dtype=np.int32, count=3 * min(count, _BLOCK)).reshape(-1, 3)
        count -= len(block)
        yield block


def _bounds(postings: Postings) -> np.ndarray:
    """See `Postings.bounds`; rounded up, so that it stays a bound in any arithmetic."""
    inverse = postings.inverse_norms()
    bounds = np.zeros(len(postings.offsets) - 1, dtype=np.float32)
    for start in range(0, len(postings.docs), _BLOCK):
        end = min(start + _BLOCK, len(postings.docs))
        reach = postings.tfs[start:end].astype(np.float32) * inverse[postings.docs[start:end]]
        share = 1 - 1 / (1 + reach)
        first = int(np.searchsorted(postings.offsets, start, side="right")) - 1
        last = int(np.searchsorted(postings.offsets, end, side="left"))
        starts = np.maximum(postings.offsets[first:last], start) - start
        filled = np.diff(np.append(starts, end - start)) > 0
        most = np.maximum.reduceat(share, starts[filled])
        chosen = np.arange(first, last)[filled]
        bounds[chosen] = np.maximum(bounds[chosen], most)
    return np.minimum(bounds * np.float32(1 + 1e-5), np.float32(1))
