"""Which queries of a batch attend to which keys, worked out once for all layers.

Queries come one after another without padding. Those of conversations that add one token attend together, over a
range of slots with a mask; the others attend piece by piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

__all__ = ["Layout", "Piece", "sequence_layout", "slot_layout"]


@dataclass(frozen=True)
class Piece:
    """Consecutive queries of one conversation or sequence.

    Attributes:
        first: First query.
        end: One past the last query.
        slot: Whose keys; -1: of the tokens of this very batch, from `begin` on.
        begin: First key.
        length: How many keys.
        mask: [end - first, length], added to the attention's logits; None: causal, as many queries as keys.
    """

    first: int
    end: int
    slot: int
    begin: int
    length: int
    mask: torch.Tensor | None


@dataclass(frozen=True)
class Layout:
    """All queries of a batch.

    Attributes:
        single: How many queries, the first ones, are the only ones of their slots.
        lanes: The range of slots that holds theirs: first, one past the last.
        place: int64 [single], place of each in that range; None: every slot of the range has one.
        length: Keys they look at.
        mask: [lanes, 1, 1, length], added to the attention's logits; None: all see all.
        pieces: The other queries.
    """

    single: int = 0
    lanes: tuple[int, int] = (0, 0)
    place: torch.Tensor | None = None
    length: int = 0
    mask: torch.Tensor | None = None
    pieces: tuple[Piece, ...] = ()


def slot_layout(
    slots: np.ndarray, starts: np.ndarray, counts: np.ndarray, device: torch.device, dtype: torch.dtype
) -> Layout:
    """Queries that look at slots.

    Args:
        slots: int [F]; those with one query come first, in rising order.
        starts: int [F], position of each one's first query.
        counts: int [F], number of queries.
        device: Of the tensors.
        dtype: Of the masks.
    """
    single = int((counts == 1).sum())
    lanes, place, length, mask = (0, 0), None, 0, None
    if single:
        low, high = int(slots[0]), int(slots[single - 1]) + 1
        at = slots[:single] - low
        lanes, length = (low, high), int(starts[:single].max()) + 1
        if high - low != single:
            place = torch.from_numpy(at).to(device)
        # A slot of the range that has no query sees its first key: a row without any would be NaN.
        last = np.zeros(high - low, np.int64)
        last[at] = starts[:single]
        if (last != length - 1).any():
            unseen = np.where(np.arange(length) > last[:, None], np.float32(-np.inf), np.float32(0))
            mask = torch.from_numpy(unseen[:, None, None]).to(device, dtype)
    pieces = []
    first = single
    for slot, past, count in zip(slots[single:].tolist(), starts[single:].tolist(), counts[single:].tolist()):
        hidden = None
        if past:
            hidden = torch.zeros(count, past + count, dtype=dtype, device=device)
            hidden[:, past:].fill_(-torch.inf).triu_(1)
        pieces.append(Piece(first, first + count, slot, 0, past + count, hidden))
        first += count
    return Layout(single, lanes, place, length, mask, tuple(pieces))


def sequence_layout(
    lengths: Sequence[int], positions: Sequence[np.ndarray] | None, device: torch.device, dtype: torch.dtype
) -> Layout:
    """Queries that look at the tokens of their own sequence in this batch.

    Args:
        lengths: Of the sequences, which lie one after another.
        positions: Of each one's queries; None: every token is one.
        device: Of the tensors.
        dtype: Of the masks.
    """
    pieces = []
    first = begin = 0
    for number, length in enumerate(lengths):
        count, mask = length, None
        if positions is not None:
            at = np.asarray(positions[number])
            count = len(at)
            unseen = np.where(np.arange(length) > at[:, None], np.float32(-np.inf), np.float32(0))
            mask = torch.from_numpy(unseen).to(device, dtype)
        if count:
            pieces.append(Piece(first, first + count, -1, begin, length, mask))
        first, begin = first + count, begin + length
    return Layout(pieces=tuple(pieces))
