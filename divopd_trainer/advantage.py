"""How a trained token is scored: constants that multiply the gradient of its log-prob.

An advantage never carries a gradient. It sees the learner's own log-probs right before the update, so nothing here
can be computed earlier; what is known earlier belongs into a weighting.
"""

from __future__ import annotations

from typing import Protocol

import torch

from divopd_gym.errors import ConfigError

from .packing import MicroBatch

__all__ = ["FOPD", "Advantage", "ReverseKL"]


class Advantage(Protocol):
    """The seam."""

    def __call__(self, logp_now: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
        """Score the tokens of one micro-batch.

        Args:
            logp_now: float32 [N], the learner's log-probs, without gradient.
            micro: Teacher and generation log-probs, row numbers and ages of the same tokens.

        Returns:
            float32 [N]; values at tokens of weight 0 do not matter.
        """
        ...


class ReverseKL:
    """DivOPD's advantage (arXiv 2609.34838, section 2.1): ``beta * (teacher - student now)``.

    Args:
        beta: Scale.
    """

    def __init__(self, beta: float = 1.0) -> None:
        self.beta = beta

    def __call__(self, logp_now: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
        """See `Advantage`."""
        return self.beta * (micro.teacher_logprobs - logp_now)


class FOPD(ReverseKL):
    """f-OPD (arXiv 2605.17862): `ReverseKL` times the freshness of the row.

    ``f = exp(-(a * sqrt(D_roll) + b * sqrt(D_sup))) / (age + 1)`` and the row weighs ``max(f - threshold, 0)``. D_roll
    is KL(student now || student that wrote the row), estimated as the mean over the row's valid tokens of
    ``r * log(r) - r + 1`` with r the ratio of the two probabilities: the tokens are drawn from the student that wrote
    them, so the mean of log(r) alone would estimate minus the other KL. D_sup is the drift of the supervision: 0 for
    a frozen teacher. Age counts updates since the row's weights.

    Args:
        rollout_coefficient: a. Not published; 1 by default.
        supervision_coefficient: b. Not published; without effect while the teacher is frozen.
        threshold: Freshness at which a row stops counting (xi), 0 to 1.
        beta: Scale.

    Raises:
        ConfigError: A value out of range.
    """

    def __init__(
        self,
        rollout_coefficient: float = 1.0,
        supervision_coefficient: float = 1.0,
        threshold: float = 0.0,
        beta: float = 1.0,
    ) -> None:
        super().__init__(beta)
        if rollout_coefficient < 0 or supervision_coefficient < 0 or not 0 <= threshold < 1:
            raise ConfigError(
                f"f-OPD has coefficients {rollout_coefficient} and {supervision_coefficient} (0 or more expected) and "
                f"threshold {threshold} (0 to below 1 expected)."
            )
        self.rollout_coefficient, self.supervision_coefficient = rollout_coefficient, supervision_coefficient
        self.threshold = threshold

    def freshness(
        self, logp_now: torch.Tensor, micro: MicroBatch, supervision_drift: float = 0.0
    ) -> torch.Tensor:
        """F of each token's row, float32 [N]."""
        if len(micro.row) == 0:
            return torch.zeros_like(logp_now)
        # Replies that are imitated have no log-prob at generation: no drift. exp of more than 30 says nothing new.
        change = torch.nan_to_num(logp_now - micro.student_logprobs).clamp(-30.0, 30.0)
        divergence = torch.exp(change) * change - torch.expm1(change)
        row = micro.row.clamp_min(0)
        total = torch.zeros(int(row.max()) + 1, dtype=change.dtype, device=change.device).index_add_(
            0, row, divergence
        )
        count = torch.zeros_like(total).index_add_(0, row, torch.ones_like(change))
        drift = (total / count.clamp_min(1)).clamp_min(0)[row]
        exponent = (
            self.rollout_coefficient * drift.sqrt() + self.supervision_coefficient * supervision_drift**0.5
        )
        return torch.exp(-exponent) / (micro.age + 1)

    def __call__(self, logp_now: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
        """See `Advantage`."""
        fresh = (self.freshness(logp_now, micro) - self.threshold).clamp_min(0)
        return super().__call__(logp_now, micro) * fresh
