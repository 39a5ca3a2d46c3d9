"""`SearchEngine`: BM25 top-k equal to Lucene's, order and ties included, over memory-mapped postings.

Scores follow Lucene's BM25Similarity in 32-bit arithmetic, summed in 64 bits; equal scores rank by ASIN. Large
catalogues are read by a compiled loop if Numba is installed; without it the results are the same and take longer.
"""

from __future__ import annotations

import functools
import math
import threading
from collections import Counter
from collections.abc import Callable

import numpy as np

from divopd_gym.envs.webshop.analysis import analyse
from divopd_gym.envs.webshop.postings import Postings

__all__ = ["SearchEngine"]

# Up to this many documents NumPy is as quick as a compiled loop, which takes seconds to load.
_FEW = 50_000
# Up to this many postings their saturations are computed once and kept.
_KEPT = 4_000_000
# Documents whose scores the compiled loop holds at a time: 512 kB.
_STRETCH = 1 << 16


_List = tuple[int, int, np.float32, float]


@functools.cache
def _compiled() -> Callable | None:
    try:
        from divopd_gym.envs.webshop.scan import scan
    except (ImportError, RuntimeError):
        # Not installed, or nowhere to keep what it compiles.
        return None
    return scan


class SearchEngine:
    """Searches an index. Any number of engines may share one mapped index.

    Args:
        postings: the index.
        term_id: gives the number of a term, None if no document has it.
    """

    def __init__(self, postings: Postings, term_id: Callable[[str], int | None]):
        self._postings = postings
        self._term_id = term_id
        self._inverse = postings.inverse_norms()
        self._large = len(self._inverse) > _FEW
        self._saturations: np.ndarray | None = None
        if not self._large and len(postings.docs) <= _KEPT:
            self._saturations = self._saturation(slice(None), postings.docs)
        self._sums = np.zeros(_STRETCH, dtype=np.float64)
        self._lock = threading.Lock()
        if self._large and _compiled() is not None:
            # Compiling takes seconds, which no turn should have to wait for.
            self._scan([], 1)

    def search(self, query: str, k: int = 50) -> list[tuple[int, float]]:
        """The best documents for a query.

        Args:
            query: any text.
            k: most results to give.

        Returns:
            Catalogue row and score of each, best first.
        """
        terms = []
        for term, count in Counter(analyse(query)).items():
            number = self._term_id(term)
            if number is not None:
                terms.append((number, count))
        lists = self._weighted(terms)
        if self._large and _compiled() is not None:
            with self._lock:
                docs, scores = self._scan(lists, k)
        else:
            docs, scores = self._add_up(lists)
        docs, scores = _ranked(docs, scores, k)
        return [(int(self._postings.rows[d]), float(s)) for d, s in zip(docs, scores, strict=True)]

    def _weighted(self, terms: list[tuple[int, int]]) -> list[_List]:
        """Start and end of each term's postings, its weight, and the most that one of them can give."""
        offsets, documents = self._postings.offsets, int(self._postings.totals[0])
        found = []
        for number, count in terms:
            start, end = int(offsets[number]), int(offsets[number + 1])
            df = end - start
            if df:
                idf = np.float32(math.log(1 + (documents - df + 0.5) / (df + 0.5)))
                weight = np.float32(count) * idf
                found.append((start, end, weight, float(weight) * float(self._postings.bounds[number])))
        return found

    def _saturation(self, place: slice, docs: np.ndarray) -> np.ndarray:
        return np.float32(1) + self._postings.tfs[place].astype(np.float32) * self._inverse[docs]

    def _add_up(self, lists: list[_List]) -> tuple[np.ndarray, np.ndarray]:
        sums = np.zeros(len(self._inverse), dtype=np.float64)
        for start, end, weight, _ in lists:
            place = slice(start, end)
            docs = self._postings.docs[place]
            kept = self._saturations
            saturation = self._saturation(place, docs) if kept is None else kept[place]
            sums[docs] += weight - weight / saturation
        docs = np.flatnonzero(sums)
        return docs, sums[docs].astype(np.float32)

    def _scan(self, lists: list[_List], k: int) -> tuple[np.ndarray, np.ndarray]:
        postings = self._postings
        lists = sorted(lists, key=lambda one: one[3])
        tops, scores = np.empty(k, dtype=np.int32), np.empty(k, dtype=np.float32)
        found = _compiled()(
            postings.docs,
            postings.tfs,
            self._inverse,
            np.array([one[0] for one in lists], dtype=np.int64),
            np.array([one[1] for one in lists], dtype=np.int64),
            np.array([one[2] for one in lists], dtype=np.float32),
            np.array([one[3] for one in lists], dtype=np.float64),
            k,
            self._sums,
            tops,
            scores,
        )
        return tops[:found], scores[:found]


def _ranked(docs: np.ndarray, scores: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The k best: by score, equal ones by number, which is the order of their asins."""
    if len(scores) > k:
        keep = scores >= np.partition(scores, len(scores) - k)[len(scores) - k]
        docs, scores = docs[keep], scores[keep]
    order = np.lexsort((docs, -scores))[:k]
    return docs[order], scores[order]
