"""`scan`: a compiled loop over postings, for catalogues of a million documents. Needs Numba; small ones do without.

Documents are scored in stretches whose scores fit a processor's cache. Lists that together cannot lift a document into
the best k are not read but looked up, for the documents that the other lists brought close enough (H. Turtle and
J. Flood, "Query evaluation: strategies and optimizations", 1995).
"""

from __future__ import annotations

import numpy as np
from numba import njit

__all__ = ["scan"]

_SLACK = 1e-3
# Lists are looked up rather than read while together they can give less than this share of the k-th score: at more,
# too many documents would have to be looked up in them.
_SHARE = 0.5


@njit(cache=True, nogil=True)
def _keep(tops, scores, found, k, doc, score):  # pragma: no cover - compiled
    """Put a document on the heap, whose top is the worst: the lowest score, and of equal ones the last document."""
    if found < k:
        child = found
        while child > 0:
            parent = (child - 1) >> 1
            if scores[parent] < score or (scores[parent] == score and tops[parent] > doc):
                break
            scores[child], tops[child] = scores[parent], tops[parent]
            child = parent
        scores[child], tops[child] = score, doc
        return found + 1
    if score > scores[0] or (score == scores[0] and doc < tops[0]):
        parent = 0
        while True:
            child = 2 * parent + 1
            if child >= k:
                break
            other = child + 1
            if other < k and (
                scores[other] < scores[child]
                or (scores[other] == scores[child] and tops[other] > tops[child])
            ):
                child = other
            if score < scores[child] or (score == scores[child] and doc > tops[child]):
                break
            scores[parent], tops[parent] = scores[child], tops[child]
            parent = child
        scores[parent], tops[parent] = score, doc
    return found


@njit(cache=True, nogil=True)
def _seek(docs, at, end, doc):  # pragma: no cover - compiled
    """First place from `at` to `end` whose document is not before `doc`."""
    while at < end:
        middle = (at + end) >> 1
        if docs[middle] < doc:
            at = middle + 1
        else:
            end = middle
    return at


@njit(cache=True, nogil=True)
def scan(
    docs, tfs, inverse, starts, ends, weights, most, k, sums, tops, scores
):  # pragma: no cover - compiled
    """Find the k best documents.

    Args:
        docs: ``int32[P]`` documents of all postings, ascending within a list.
        tfs: ``uint16[P]`` term frequencies.
        inverse: ``float32[N]`` inverse norms of the documents.
        starts: ``int64[T]`` where each list begins.
        ends: ``int64[T]`` where it ends.
        weights: ``float32[T]`` its weight.
        most: ``float64[T]`` the most that a posting of it can give; the lists are in ascending order of it.
        k: how many to find.
        sums: ``float64[n]`` of zeros, n the length of a stretch; zeros again afterwards.
        tops: ``int32[k]``, filled with the documents, in no order.
        scores: ``float32[k]``, filled with their scores.

    Returns:
        How many were found.
    """
    count, lists, stretch = len(inverse), len(starts), len(sums)
    place, limit = starts.copy(), starts.copy()
    one = np.float32(1.0)
    # Entry t: the most that the lists before t can give together.
    below = np.zeros(lists + 1, dtype=np.float64)
    for t in range(lists):
        below[t + 1] = below[t] + most[t]
    touched = np.empty(stretch, dtype=np.int32)
    found = read = 0
    for low in range(0, count, stretch):
        high = min(low + stretch, count)
        threshold = -1.0
        if found == k:
            threshold = np.float64(scores[0]) - _SLACK
            while read < lists and below[read + 1] < _SHARE * threshold:
                read += 1
        seen = 0
        for t in range(read, lists):
            at, end, weight = place[t], ends[t], weights[t]
            while at < end:
                doc = docs[at]
                if doc >= high:
                    break
                gain = weight - weight / (one + np.float32(tfs[at]) * inverse[doc])
                before = sums[doc - low]
                if before == 0.0:
                    touched[seen] = doc
                    seen += 1
                sums[doc - low] = before + gain
                at += 1
            place[t] = at
        if seen == 0:
            continue
        for t in range(read):
            place[t] = _seek(docs, limit[t], ends[t], low)
            limit[t] = _seek(docs, place[t], ends[t], high)
        for number in range(seen):
            doc = touched[number]
            total = sums[doc - low]
            sums[doc - low] = 0.0
            if total + below[read] < threshold:
                continue
            for t in range(read - 1, -1, -1):
                if total + below[t + 1] < threshold:
                    break
                at = _seek(docs, place[t], limit[t], doc)
                if at < limit[t] and docs[at] == doc:
                    weight = weights[t]
                    total += weight - weight / (one + np.float32(tfs[at]) * inverse[doc])
            found = _keep(tops, scores, found, k, doc, np.float32(total))
            if found == k:
                threshold = np.float64(scores[0]) - _SLACK
    return found
