"""How much each trained token of a batch weighs in the loss.

A loss is a sum over tokens of weight times value. Weights are computed once, over the whole batch, so nothing that
happens later (packing, micro-batches, ranks) can change the gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from divopd_gym.errors import ConfigError

from .turns import Turn

__all__ = [
    "REDUCTIONS", "Reduction", "RowWeighting", "TokenWeights", "TurnOPDWeighting", "UniformWeighting", "imitation_apart",
    "turnopd_shares", "uniform_weights",
]  # fmt: skip

Reduction = Literal["seq-mean-token-mean", "token-mean", "seq-mean-token-sum"]
REDUCTIONS: tuple[str, ...] = ("seq-mean-token-mean", "token-mean", "seq-mean-token-sum")


@dataclass
class TokenWeights:
    """Weights of a batch's tokens. The loss is the sum over tokens of ``-(weight * advantage + reward) * ratio``.

    Attributes:
        weights: For each row float64 [n], 0 at tokens that are not valid.
        rewards: For each row float64 [n]: advantages that do not depend on the learner, times the token's share
            (a group-normalised reward; 1 where a reply is imitated, which is its cross-entropy). None: 0.
    """

    weights: list[np.ndarray]
    rewards: list[np.ndarray] | None = None


def imitation_apart(rows: Sequence[Turn], weights: Sequence[np.ndarray]) -> TokenWeights:
    """Plain weights, with those of imitated replies as rewards: a constant advantage of 1 is cross-entropy.

    Args:
        rows: The whole batch.
        weights: For each row float64 [n].
    """
    imitated = [turn.imitated for turn in rows]
    if not any(imitated):
        return TokenWeights(list(weights))
    return TokenWeights(
        [np.zeros(np.shape(w)) if teachers else w for w, teachers in zip(weights, imitated)],
        [w if teachers else np.zeros(np.shape(w)) for w, teachers in zip(weights, imitated)],
    )


class RowWeighting(Protocol):
    """The seam: rows of a whole batch in, one weight a response token out.

    Optional: ``annotate(rollout)`` is called once when a rollout arrives and may write JSON values into the ``info``
    of its turns; ``observe(line)`` and ``observe_eval(line)`` get the train and evaluation lines; ``state_dict()`` and
    ``load_state_dict(state)`` with JSON values.
    """

    def weights(self, rows: Sequence[Turn], update: int) -> list[np.ndarray] | TokenWeights:
        """For each row float64 [n], 0 at tokens that are not valid."""
        ...


def uniform_weights(rows: Sequence[Turn], reduction: str = "seq-mean-token-mean") -> list[np.ndarray]:
    """Weights that know nothing but the masks.

    - "seq-mean-token-mean" (DivOPD, section 2.1): mean over a row's valid tokens, then over all rows. Dead rows
      stay in the row count, so the weights add up to 1 less their share.
    - "token-mean": mean over all valid tokens of the batch.
    - "seq-mean-token-sum": sum over a row's valid tokens, then mean over all rows.

    Args:
        rows: The whole batch.
        reduction: One of `REDUCTIONS`.

    Returns:
        For each row float64 [n], 0 at tokens that are not valid.

    Raises:
        ConfigError: An unknown reduction.
    """
    if reduction not in REDUCTIONS:
        raise ConfigError(f"Unknown reduction {reduction!r}; choose one of {', '.join(REDUCTIONS)}.")
    masks = [turn.valid_mask() for turn in rows]
    total = sum(int(mask.sum()) for mask in masks)
    weights = []
    for mask in masks:
        n_valid = int(mask.sum())
        if reduction == "seq-mean-token-mean":
            weight = 1 / (len(rows) * max(1, n_valid))
        elif reduction == "token-mean":
            weight = 1 / max(1, total)
        else:
            weight = 1 / len(rows)
        weights.append(mask * weight)
    return weights


class UniformWeighting:
    """`uniform_weights` as a `RowWeighting`.

    Args:
        reduction: One of `REDUCTIONS`.
    """

    def __init__(self, reduction: str = "seq-mean-token-mean") -> None:
        uniform_weights([], reduction)
        self.reduction = reduction

    def weights(self, rows: Sequence[Turn], update: int) -> list[np.ndarray]:
        """See `uniform_weights`; the update makes no difference."""
        return uniform_weights(rows, self.reduction)


def turnopd_shares(tokens_per_turn: Sequence[int], alpha: float) -> list[float]:
    """Share of each turn of a rollout in its loss (TurnOPD, arXiv 2607.05804, loss controller).

    ``(1 - alpha) * n_t / sum(n) + alpha / T``: from a mean over tokens (alpha 0) to a mean over turns (alpha 1).

    Args:
        tokens_per_turn: Supervised tokens of each observed turn.
        alpha: 0 to 1.

    Returns:
        Shares that add up to 1; equal ones if no turn has a token.

    Raises:
        ConfigError: alpha out of range or a negative count.
    """
    if not 0 <= alpha <= 1 or any(n < 0 for n in tokens_per_turn):
        raise ConfigError(
            f"alpha is {alpha} (0 to 1 expected) or a token count is negative: {list(tokens_per_turn)}."
        )
    turns, total = len(tokens_per_turn), sum(tokens_per_turn)
    if total == 0:
        return [1 / turns] * turns
    return [(1 - alpha) * n / total + alpha / turns for n in tokens_per_turn]


class TurnOPDWeighting:
    """TurnOPD's loss controller over the rows of a batch.

    A rollout keeps its share of the batch's valid tokens; inside it the rows that are in the batch get
    `turnopd_shares`, spread evenly over their valid tokens. Alpha rises with the update.

    Args:
        total_updates: Updates of the whole run (K).
        start: Fraction of the run at which alpha leaves 0 (s).
        end: Fraction at which it reaches 1 (e).
        cap: No turn's share may exceed this many times its token share (the survivor floor); what is cut off goes to
            the rollout's other turns. None for no cap.

    Raises:
        ConfigError: A range that is empty or a cap below 1.
    """

    def __init__(
        self, total_updates: int, start: float = 0.0, end: float = 1.0, cap: float | None = 4.0
    ) -> None:
        if total_updates < 1 or not start < end or (cap is not None and cap < 1):
            raise ConfigError(
                f"total_updates is {total_updates} (1 or more expected), start {start} and end {end} (start < end "
                f"expected), cap {cap} (1 or more, or none, expected)."
            )
        self.total_updates, self.start, self.end, self.cap = total_updates, start, end, cap

    def alpha(self, update: int) -> float:
        """``clip((update / total_updates - start) / (end - start), 0, 1)``."""
        return min(1.0, max(0.0, (update / self.total_updates - self.start) / (self.end - self.start)))

    def weights(self, rows: Sequence[Turn], update: int) -> list[np.ndarray]:
        """Weights that add up to 1 less the share of dead rows."""
        masks = [turn.valid_mask() for turn in rows]
        counts = [int(mask.sum()) for mask in masks]
        live = [number for number, n in enumerate(counts) if n]
        groups: dict[int, list[int]] = {}
        for number in live:
            groups.setdefault(rows[number].rollout_id, []).append(number)
        row_weight = np.zeros(len(rows))
        for members in groups.values():
            n = np.array([counts[m] for m in members], np.float64)
            shares = np.array(turnopd_shares([counts[m] for m in members], self.alpha(update)))
            if self.cap is not None:
                shares = _capped(shares, self.cap * n / n.sum())
            row_weight[members] = n.sum() * shares
        if live:
            row_weight *= len(live) / len(rows) / row_weight.sum()
        return [mask * (row_weight[i] / max(1, counts[i])) for i, mask in enumerate(masks)]


def _capped(shares: np.ndarray, limits: np.ndarray) -> np.ndarray:
    """Shares that add up to 1, none above its limit; those below theirs keep their proportions. Limits add up to 1 or more."""
    shares, full = shares.copy(), np.zeros(len(shares), np.bool_)
    while (over := ~full & (shares > limits * (1 + 1e-12))).any():
        full |= over
        shares[full] = limits[full]
        if full.all():
            break
        shares[~full] *= (1 - shares[full].sum()) / shares[~full].sum()
    return shares
