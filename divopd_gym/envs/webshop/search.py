"""`SearchEngine`: BM25 top-k equal to Lucene's, order and ties included, over memory-mapped postings.

Scores follow Lucene's BM25Similarity in 32-bit arithmetic, summed in 64 bits; equal scores rank by ASIN. Terms are read
from the rarest on, and lists that can no longer bring a new document into the top k are only looked up, not read
(H. Turtle and J. Flood, "Query evaluation: strategies and optimizations", 1995).
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable

import numpy as np

from divopd_gym.envs.webshop.analysis import analyse
from divopd_gym.envs.webshop.postings import Postings

__all__ = ["SearchEngine"]

_SLACK = 1e-3
# Below this many postings reading everything is cheaper than deciding what to read.
_SMALL = 20_000
# Up to this many documents a whole row of scores is cheaper than keeping track of which were touched.
_FEW = 20_000
# Up to this many postings their saturations are computed once and kept.
_KEPT = 4_000_000


class SearchEngine:
    """Searches an index. Any number of engines may share one mapped index; one engine serves one thread at a time.

    Args:
        postings: the index.
        term_id: gives the number of a term, None if no document has it.
    """

    def __init__(self, postings: Postings, term_id: Callable[[str], int | None]):
        self._postings = postings
        self._term_id = term_id
        self._inverse = postings.inverse_norms()
        self._scores = np.zeros(len(postings.norms), dtype=np.float64)
        self._saturations = (
            1 + postings.tfs.astype(np.float32) * self._inverse[postings.docs]
            if len(postings.docs) <= _KEPT
            else None
        )
        self._lock = threading.Lock()

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
        with self._lock:
            docs, scores = (self._dense if len(self._scores) <= _FEW else self._top)(terms, k)
        return [(int(self._postings.rows[d]), float(s)) for d, s in zip(docs, scores, strict=True)]

    def _weighted(self, terms: list[tuple[int, int]]) -> list[tuple[int, int, np.float32, float]]:
        """Start and end of each list, weight, and most it can give; dearest to cheapest contribution."""
        offsets, documents = self._postings.offsets, int(self._postings.totals[0])
        found = []
        for number, count in terms:
            start, end = int(offsets[number]), int(offsets[number + 1])
            if start == end:
                continue
            df = end - start
            idf = np.float32(math.log(1 + (documents - df + 0.5) / (df + 0.5)))
            weight = np.float32(count) * idf
            found.append((start, end, weight, float(weight) * float(self._postings.bounds[number]) + 1e-6))
        return sorted(found, key=lambda one: (-one[3], one[1] - one[0]))

    def _gains(self, docs: np.ndarray, tfs: np.ndarray, weight: np.float32) -> np.ndarray:
        one = np.float32(1)
        return weight - weight / (one + tfs.astype(np.float32) * self._inverse[docs])

    def _list_gains(self, start: int, end: int, docs: np.ndarray, weight: np.float32) -> np.ndarray:
        if self._saturations is not None:
            return weight - weight / self._saturations[start:end]
        return self._gains(docs, self._postings.tfs[start:end], weight)

    def _dense(self, terms: list[tuple[int, int]], k: int) -> tuple[np.ndarray, np.ndarray]:
        scores = np.zeros(len(self._scores), dtype=np.float64)
        for start, end, weight, _ in self._weighted(terms):
            docs = self._postings.docs[start:end]
            scores[docs] += self._list_gains(start, end, docs, weight)
        candidates = np.flatnonzero(scores)
        return _ranked(candidates, scores[candidates], k)

    def _top(self, terms: list[tuple[int, int]], k: int) -> tuple[np.ndarray, np.ndarray]:
        lists = self._weighted(terms)
        cost = sum(end - start for start, end, _, _ in lists)
        bound = sum(one[3] for one in lists)
        scores, touched = self._scores, []
        seen = 0
        index = 0
        threshold = -math.inf
        try:
            while index < len(lists):
                start, end, weight, most = lists[index]
                # Only when the rest of the lists is long is it worth to know how good the k-th document is already.
                if cost > _SMALL and seen >= k:
                    threshold = _kth(scores[np.concatenate(touched)], k)
                    if threshold > bound + _SLACK:
                        break
                docs = np.asarray(self._postings.docs[start:end])
                gains = self._list_gains(start, end, docs, weight)
                new = docs[scores[docs] == 0]
                scores[docs] += gains
                touched.append(new)
                seen += len(new)
                cost -= end - start
                bound -= most
                index += 1
            candidates = np.concatenate(touched) if touched else np.empty(0, dtype=np.int32)
            sums = scores[candidates]
        finally:
            for docs in touched:
                scores[docs] = 0
        return self._finish(candidates, sums, lists[index:], bound, threshold, k)

    def _finish(self, candidates, sums, lists, bound, threshold, k) -> tuple[np.ndarray, np.ndarray]:
        """Complete the sums of the documents that can still get into the top k, and rank them."""
        if lists:
            keep = sums + bound >= threshold - _SLACK
            candidates, sums = candidates[keep], sums[keep]
            order = np.argsort(candidates)
            candidates, sums = candidates[order], sums[order]
        for start, end, weight, most in lists:
            docs = self._postings.docs[start:end]
            place = np.searchsorted(docs, candidates)
            place[place == end - start] = 0
            hit = np.flatnonzero(docs[place] == candidates)
            sums[hit] += self._gains(candidates[hit], self._postings.tfs[start:end][place[hit]], weight)
            bound -= most
            if len(sums) > k:
                keep = sums + bound >= _kth(sums, k) - _SLACK
                candidates, sums = candidates[keep], sums[keep]
        return _ranked(candidates, sums, k)


def _ranked(candidates: np.ndarray, sums: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    final = sums.astype(np.float32)
    if len(final) > k:
        keep = final >= _kth(final, k)
        candidates, final = candidates[keep], final[keep]
    order = np.lexsort((candidates, -final))[:k]
    return candidates[order], final[order]


def _kth(values: np.ndarray, k: int) -> float:
    """The k-th largest value."""
    return float(np.partition(values, len(values) - k)[len(values) - k])
