"""A batch bought with forwarded tokens instead of rows (preset ``divopd-cost``). Pure.

With merged packing, turns of one segment share a forward pass that reads the segment up to the deepest of them. A
turn therefore costs only the tokens that it adds to the depth already reached, and every turn above that depth is
free. What is bought is a *piece*: one segment, forwarded on to some depth, with all turns on the way. They all become
rows, whatever their score: their forward is paid for, leaving some out would bias the gradient towards what the
student got wrong by chance, and they could later be had only for the whole prefix.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from divopd_gym.errors import ConfigError

__all__ = ["CostReference", "CostedTurn", "buy", "check_costed", "merged_tokens"]

_HUGE = 1e30
_DECAY = 0.9


class CostedTurn(Protocol):
    """What a budget of tokens needs of a turn beyond `composer.ComposableTurn`.

    ``segment`` says whose prefix it shares: an object (its identity counts, as in packing) or a number within the
    rollout. ``seq_len`` is the tokens of prompt and response, which is also how deep in the segment the turn ends.
    """

    segment: Any
    seq_len: int


def check_costed(turns: Iterable[Any]) -> None:
    """Refuse turns whose cost cannot be told.

    Raises:
        ConfigError: A turn has no ``segment`` or no ``seq_len``.
    """
    for turn in turns:
        missing = [name for name in ("segment", "seq_len") if getattr(turn, name, None) is None]
        if missing:
            raise ConfigError(
                f"A turn of type {type(turn).__name__} has no {' and no '.join(missing)}; a composer with a budget of "
                "tokens needs both. Give turns these attributes, or choose another preset, such as divopd."
            )


def _segment_key(turn: Any) -> tuple[int, Any]:
    segment = turn.segment
    return turn.rollout_id, segment if isinstance(segment, (int, str)) else id(segment)


def merged_tokens(turns: Iterable[CostedTurn]) -> int:
    """Tokens that merged packing forwards for these turns: of every segment, up to the deepest of them."""
    deepest: dict[tuple[int, Any], int] = {}
    for turn in turns:
        key = _segment_key(turn)
        deepest[key] = max(deepest.get(key, 0), turn.seq_len)
    return sum(deepest.values())


class CostReference:
    """What preset divopd would forward, as a running mean of merged tokens a row; the default budget.

    Tokens and rows are summed with a decay of 0.9 an update, so that the mean follows episodes as they get shorter
    or longer over some ten updates and one odd pool moves it little.
    """

    def __init__(self) -> None:
        self.tokens = self.rows = 0.0

    def add(self, tokens: int, rows: int) -> None:
        """One more update of divopd: tokens forwarded, rows trained."""
        if rows:
            self.tokens = _DECAY * self.tokens + tokens
            self.rows = _DECAY * self.rows + rows

    def budget(self, batch_rows: int) -> int:
        """Forwarded tokens of a batch of this many rows at the running mean; at least 1."""
        return max(1, round(batch_rows * self.tokens / self.rows)) if self.rows else 1


class _Group:
    """What one rollout still offers: of every segment, the unbought turns by depth, and the depth reached."""

    def __init__(self, members: Sequence[tuple[int, Any]]) -> None:
        segments: dict[tuple[int, Any], list[tuple[int, int, int, float]]] = {}
        for position, turn in sorted(members, key=lambda m: (m[1].seq_len, m[1].index)):
            offer = (turn.seq_len, turn.index, position, _finite(turn.score))
            segments.setdefault(_segment_key(turn), []).append(offer)
        self._left = list(segments.values())
        self._depth = [0] * len(self._left)

    def best(self, room: float) -> tuple[int, int, int] | None:
        """The piece with the most disagreement per added token that fits; of equals the cheapest.

        Returns:
            (segment's place, turns in the piece, tokens added), or None when no piece fits.
        """
        found, rank = None, (-math.inf, 0.0)
        for place, offers in enumerate(self._left):
            gain = 0.0
            for count, (depth, _, _, score) in enumerate(offers, 1):
                gain += score
                added = depth - self._depth[place]
                if added > room:
                    break
                # Turns that end together are bought together.
                if count < len(offers) and offers[count][0] == depth:
                    continue
                worth = (gain / max(added, 1), -added)
                if worth > rank:
                    found, rank = (place, count, added), worth
        return found

    def take(self, place: int, count: int) -> list[int]:
        """Buy a piece; the pool positions of its turns, by depth."""
        bought, self._left[place] = self._left[place][:count], self._left[place][count:]
        self._depth[place] = bought[-1][0]
        return [position for _, _, position, _ in bought]

    def cheapest(self) -> tuple[int, int, int]:
        """The single turn that costs least."""
        depth, place = min((offers[0][0], place) for place, offers in enumerate(self._left))
        return place, 1, depth


def _finite(score: float) -> float:
    return -_HUGE if math.isnan(score) else min(max(float(score), -_HUGE), _HUGE)


def buy(groups: Sequence[Sequence[tuple[int, CostedTurn]]], budget: int) -> tuple[list[int], int]:
    """Fill a budget of forwarded tokens.

    In the first sweep every rollout, in the order given, buys its best piece that still fits: coverage comes first.
    Further sweeps go on in the same way, each rollout extending what it has, until nothing fits any more. Disagreement
    is the signed sum of the scores of a piece's turns; it ranks pieces of one rollout only, never one rollout against
    another.

    Args:
        groups: The rollouts, in order of service; of each, (position, turn).
        budget: Tokens. Only the very first turn may exceed it, if no piece of the first rollout fits.

    Returns:
        The chosen positions in order of choice, and the tokens forwarded for them.
    """
    chosen: list[int] = []
    spent = 0
    open_groups = [_Group(group) for group in groups if group]
    while open_groups:
        still_open = []
        for group in open_groups:
            piece = group.best(budget - spent)
            if piece is None and not chosen:
                piece = group.cheapest()
            if piece is None:
                continue  # room only shrinks: what does not fit now never will
            place, count, added = piece
            chosen += group.take(place, count)
            spent += added
            still_open.append(group)
        open_groups = still_open
    return chosen, spent
