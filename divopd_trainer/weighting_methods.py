"""The weightings of Guided-OPD, ATOD, SAGE-OPD and RetireOPD.

Each starts from the shares of `weighting.uniform_weights` and multiplies them by what its paper says about a row, its
turn or its tokens. Rewards (imitation, group advantages) are constants that do not depend on the learner, so they are
given beside the weights; see `weighting.TokenWeights`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from divopd_gym.errors import ConfigError

from .turns import Rollout, Turn
from .weighting import TokenWeights, uniform_weights

__all__ = ["ATODWeighting", "GuidedWeighting", "RetireWeighting", "SAGEWeighting"]


class GuidedWeighting:
    """Guided-OPD (arXiv 2606.15912): distillation weighs 1 - b, imitation of the teacher's own turns b.

    b is the probability with which the teacher acted when the row was played, not the one of now: rows are trained
    some updates after they were played.

    Args:
        reduction: One of `weighting.REDUCTIONS`.
    """

    needs_controller = "guided"
    weighs_imitation = True
    gives_rewards = True

    def __init__(self, reduction: str = "seq-mean-token-mean") -> None:
        uniform_weights([], reduction)
        self.reduction = reduction

    def annotate(self, rollout: Rollout) -> None:
        """Note the rollout's b with its turns; an episode that the controller left to the student has 0."""
        b = float(rollout.meta.get("controller", {}).get("teacher_probability", 0.0))
        for turn in rollout.turns:
            turn.info["teacher_probability"] = b

    def weights(self, rows: Sequence[Turn], update: int) -> TokenWeights:
        """See `weighting.RowWeighting`; a reward of 1 times its share is the gradient of cross-entropy."""
        weights, rewards = [], []
        for turn, share in zip(rows, uniform_weights(rows, self.reduction)):
            b = turn.info.get("teacher_probability", 0.0)
            weights.append(share * (0.0 if turn.imitated else 1 - b))
            rewards.append(share * (b if turn.imitated else 0.0))
        return TokenWeights(weights, rewards)


class ATODWeighting:
    """ATOD (arXiv 2606.27814): ``A = kappa * A_OPD * w_turn + rho * A_GRPO``.

    With ``p = min(update / ramp_updates, 1)``: ``kappa = max(least_kappa, 1 - (1 - least_kappa) * p)`` (the paper's
    max(0.1, 1 - 0.9 p)) and ``rho = 1 + p``. A_GRPO is the group-normalised reward of the episode, and w_turn is T-DUR,
    `turn_weights`.

    Args:
        ramp_updates: Updates after which kappa and rho stay where they are.
        least_kappa: Where kappa ends, 0 to 1.
        reduction: One of `weighting.REDUCTIONS`.

    Raises:
        ConfigError: A value out of range.
    """

    needs_groups = True
    needs_whole_rollouts = True
    gives_rewards = True

    def __init__(
        self, ramp_updates: int = 80, least_kappa: float = 0.1, reduction: str = "seq-mean-token-mean"
    ) -> None:
        if ramp_updates < 1 or not 0 <= least_kappa <= 1:
            raise ConfigError(
                f"ATOD has ramp_updates {ramp_updates} (1 or more expected) and least_kappa {least_kappa} (0 to 1 "
                "expected). The paper has 80 and 0.1."
            )
        uniform_weights([], reduction)
        self.ramp_updates, self.least_kappa, self.reduction = ramp_updates, least_kappa, reduction

    def scales(self, update: int) -> tuple[float, float]:
        """Kappa and rho at an update."""
        p = min(update / self.ramp_updates, 1.0)
        return max(self.least_kappa, 1 - (1 - self.least_kappa) * p), 1 + p

    @staticmethod
    def turn_weights(turns: Sequence[Turn]) -> list[float]:
        """T-DUR: ``w = 1 - (1 - d) * (1 - h)`` of each turn of one rollout.

        d is the mean of ``|student - teacher|`` and h that of ``-student`` over the turn's valid log-probs, in nats, both
        min-max normalised over the turns; 0.5 each where the turns differ by less than 1e-8.

        Args:
            turns: Of one rollout, each with a valid token and the student's log-probs.
        """
        gaps, surprises = [], []
        for turn in turns:
            mask = turn.valid_mask()
            student = turn.student_logprobs[mask].astype(np.float64)
            gaps.append(float(np.abs(student - turn.teacher_logprobs[mask]).mean()))
            surprises.append(float(-student.mean()))
        pairs = zip(_min_max(gaps), _min_max(surprises))
        return [1 - (1 - d) * (1 - h) for d, h in pairs]

    def annotate(self, rollout: Rollout) -> None:
        """Note w_turn with the turns that can be trained, compared over all of them whoever gets into a batch."""
        turns = [turn for turn in rollout.turns if turn.valid and not turn.imitated]
        for turn, weight in zip(turns, self.turn_weights(turns)):
            turn.info["turn_weight"] = weight

    def weights(self, rows: Sequence[Turn], update: int) -> TokenWeights:
        """See `weighting.RowWeighting`.

        Raises:
            ConfigError: A row has no group advantage.
        """
        kappa, rho = self.scales(update)
        shares = uniform_weights(rows, self.reduction)
        weights = [share * (kappa * turn.info.get("turn_weight", 1.0)) for turn, share in zip(rows, shares)]
        rewards = [share * (rho * _group_advantage(turn)) for turn, share in zip(rows, shares)]
        return TokenWeights(weights, rewards)


class SAGEWeighting:
    """SAGE-OPD (arXiv 2606.19659): the teacher's verdict on a turn times its confidence in each token.

    A token weighs its turn's verdict (0 for "skip") times the teacher's top-1 probability there; these weights are
    divided by their mean over all valid tokens of the batch, skipped ones included. A batch in which every turn is
    skipped weighs nothing.

    Args:
        weak: Weight of a turn that trains weakly. Not published; ours.
        strong: Of one that trains strongly. Not published; ours.
        reduction: One of `weighting.REDUCTIONS`.

    Raises:
        ConfigError: The weights are not ``0 < weak <= strong``.
    """

    needs_topk = True
    needs_review = "sage"

    def __init__(
        self, weak: float = 0.5, strong: float = 1.5, reduction: str = "seq-mean-token-mean"
    ) -> None:
        if not 0 < weak <= strong < math.inf:
            raise ConfigError(
                f"SAGE has weak {weak} and strong {strong}; expected 0 < weak <= strong. Turns that should not train "
                "are skipped by the teacher's verdict."
            )
        uniform_weights([], reduction)
        self.verdicts = {"skip": 0.0, "weak": weak, "strong": strong}
        self.reduction = reduction

    def weights(self, rows: Sequence[Turn], update: int) -> list[np.ndarray]:
        """See `weighting.RowWeighting`.

        Raises:
            ConfigError: A row that can be trained has no verdict, or no top-1 probability of the teacher.
        """
        masks = [turn.valid_mask() for turn in rows]
        factors = [self._factors(turn) if mask.any() else mask * 0.0 for turn, mask in zip(rows, masks)]
        n_valid = sum(int(mask.sum()) for mask in masks)
        total = sum(float(factor[mask].sum()) for factor, mask in zip(factors, masks))
        scale = n_valid / total if total > 0 else 0.0
        shares = uniform_weights(rows, self.reduction)
        return [share * factor * scale for share, factor in zip(shares, factors)]

    def _factors(self, turn: Turn) -> np.ndarray:
        verdict = turn.info.get("sage")
        if verdict not in self.verdicts:
            raise ConfigError(
                f"Turn {turn.rollout_id}/{turn.index} has the verdict {verdict!r}; SAGE's weighting expects one of "
                f"{', '.join(self.verdicts)} in info['sage']. Set review to sage, or weighting to uniform."
            )
        if turn.teacher_topk_logprobs is None or not np.size(turn.teacher_topk_logprobs):
            raise ConfigError(
                f"Turn {turn.rollout_id}/{turn.index} came without the teacher's candidates; SAGE's weighting expects "
                "its top-1 log-prob at every token. Set teacher_top_k to 1 or more, and use an engine that reports it."
            )
        top1 = np.exp(turn.teacher_topk_logprobs[:, 0].astype(np.float64))
        return self.verdicts[verdict] * np.nan_to_num(top1)


class RetireWeighting:
    """RetireOPD (arXiv 2609.20784): distillation and rewards together, until the teacher has no more to give.

    ``A = A_OPD + A_GRPO`` first. Distillation ends for good, and A_GRPO is left alone, once both hold: the mean gap
    per token of the last `window` updates is no smaller than that of the `window` updates before, and the newest
    evaluation's success rate is at least ``success_ratio * teacher_success``.

    Args:
        window: Updates over which the gap must have stopped shrinking. Not published; ours.
        success_ratio: Part of the teacher's success that the student must reach, above 0 to 1. Not published; ours.
        teacher_success: Success rate of the teacher on the evaluation tasks, above 0 to 1 (``divopd eval`` gives
            it; the run must evaluate too). None: the gap alone decides.
        reduction: One of `weighting.REDUCTIONS`.

    Attributes:
        retired_at: The update after which distillation ended, or None.

    Raises:
        ConfigError: A value out of range.
    """

    needs_groups = True
    gives_rewards = True

    def __init__(
        self,
        window: int = 10,
        success_ratio: float = 0.8,
        teacher_success: float | None = None,
        reduction: str = "seq-mean-token-mean",
    ) -> None:
        known = teacher_success is None or 0 < teacher_success <= 1
        if window < 1 or not 0 < success_ratio <= 1 or not known:
            raise ConfigError(
                f"RetireOPD has window {window} (1 or more expected), success_ratio {success_ratio} and teacher_success "
                f"{teacher_success} (above 0 to 1 expected, or no teacher_success at all)."
            )
        uniform_weights([], reduction)
        self.window, self.success_ratio, self.teacher_success = window, success_ratio, teacher_success
        self.reduction = reduction
        self.retired_at: int | None = None
        self._gaps: list[float] = []
        self._success: float | None = None

    def observe(self, line: Mapping[str, Any]) -> None:
        """Take the gap of the update that ended; updates that changed nothing are left out."""
        gap = line.get("kl_per_token")
        if self.retired_at is not None or line.get("skipped") or gap is None or not math.isfinite(gap):
            return
        self._gaps = [*self._gaps, float(gap)][-2 * self.window :]
        if self._gap_stopped() and self._student_is_good():
            self.retired_at = int(line["update"])

    def observe_eval(self, line: Mapping[str, Any]) -> None:
        """Take the student's success rate."""
        self._success = float(line["success_rate"])

    def _gap_stopped(self) -> bool:
        if len(self._gaps) < 2 * self.window:
            return False
        return sum(self._gaps[self.window :]) >= sum(self._gaps[: self.window])

    def _student_is_good(self) -> bool:
        if self.teacher_success is None:
            return True
        return self._success is not None and self._success >= self.success_ratio * self.teacher_success

    def weights(self, rows: Sequence[Turn], update: int) -> TokenWeights:
        """See `weighting.RowWeighting`.

        Raises:
            ConfigError: A row has no group advantage.
        """
        shares = uniform_weights(rows, self.reduction)
        rewards = [share * _group_advantage(turn) for turn, share in zip(rows, shares)]
        if self.retired_at is not None:
            shares = [share * 0.0 for share in shares]
        return TokenWeights(shares, rewards)

    def state_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {"gaps": list(self._gaps), "success": self._success, "retired_at": self.retired_at}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`."""
        self._gaps, self._success = [float(gap) for gap in state["gaps"]], state["success"]
        self.retired_at = state["retired_at"]


def _min_max(values: Sequence[float]) -> list[float]:
    low, high = min(values, default=0.0), max(values, default=0.0)
    if high - low < 1e-8:
        return [0.5] * len(values)
    return [(value - low) / (high - low) for value in values]


def _group_advantage(turn: Turn) -> float:
    """A_GRPO of a row; rows that cannot be trained need none."""
    advantage = turn.info.get("group_advantage")
    if advantage is None and turn.valid:
        raise ConfigError(
            f"Turn {turn.rollout_id}/{turn.index} has no group advantage; expected info['group_advantage'], which "
            "episodes of one task get when they are compared. Set attempts_per_task to 2 or more (8 in the paper)."
        )
    return float(advantage or 0.0)
