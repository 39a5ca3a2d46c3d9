"""Divergences between student and teacher on a batch's tokens, and the forward pass that feeds them.

Every loss is a weighted sum over tokens; `weighting` makes the weights over the whole batch. All log-probs are in
nats, of the distribution that was sampled (logits divided by the temperature), and entry i scores token i given the
tokens before it.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch.utils.checkpoint import checkpoint

from divopd_gym.errors import ConfigError

from .packing import MicroBatch

__all__ = [
    "advantage_loss", "forward_kl_topk", "forward_logprobs", "jsd", "multi_sample_reverse_kl", "sample_candidates",
    "sampled_reverse_kl", "select_logprobs", "target_hidden", "topk_support",
]  # fmt: skip

Support = Literal["tail", "renormalized"]


def sampled_reverse_kl(
    logp: torch.Tensor, teacher_logp: torch.Tensor, weights: torch.Tensor, beta: float = 1.0
) -> torch.Tensor:
    """Reverse KL estimated on the sampled tokens (DivOPD, section 2.1).

    The advantage ``A = beta * (teacher - stopgrad(student))`` is a constant, and the surrogate
    ``-A * exp(logp - stopgrad(logp))`` has the gradient ``-A * grad logp``.

    Args:
        logp: [N], the learner's log-probs right before this update, with gradient.
        teacher_logp: [N].
        weights: [N]; tokens of weight 0 add nothing, whatever their log-probs.
        beta: Scale.

    Returns:
        Scalar: ``sum(weights * surrogate)``; its value is ``beta * sum(weights * (student - teacher))``.
    """
    logp, teacher_logp, weights = _weighted_tokens(weights, logp, teacher_logp)
    now = logp.detach()
    advantage = beta * (teacher_logp - now)
    return (weights * -advantage * torch.exp(logp - now)).sum()


def advantage_loss(
    logp: torch.Tensor, advantage: torch.Tensor, weights: torch.Tensor, rewards: torch.Tensor | None = None
) -> torch.Tensor:
    """The surrogate of any advantage: ``-(weight * advantage + reward) * exp(logp - stopgrad(logp))``, summed.

    Args:
        logp: [N], the learner's log-probs, with gradient.
        advantage: [N], without gradient; `divopd_trainer.advantage`.
        weights: [N]; where it is 0 the advantage does not matter, be it NaN.
        rewards: [N], constant advantages times their weight; None: 0.

    Returns:
        Scalar, with the gradient ``-sum((weight * advantage + reward) * grad logp)``.
    """
    factor = torch.where(weights != 0, weights * advantage, 0.0)
    if rewards is not None:
        factor = factor + rewards
    logp, factor = _weighted_tokens(factor.detach(), logp)
    return -(factor * torch.exp(logp - logp.detach())).sum()


def multi_sample_reverse_kl(
    logp: torch.Tensor, teacher_logp: torch.Tensor, weights: torch.Tensor, beta: float = 1.0
) -> torch.Tensor:
    """Reverse KL estimated on several draws a position (AsyncOPD, arXiv 2606.24143).

    The mean of `sampled_reverse_kl`'s surrogate over the realised token and the tokens drawn beside it: the same
    expectation, and 1/K of the variance of one draw. There is no importance weight: draws of an older student stand
    for draws of this one, while log-probs and advantages are the learner's own.

    Args:
        logp: [N, K], the learner's log-probs of the draws, with gradient; K = 1 is `sampled_reverse_kl`.
        teacher_logp: [N, K]; a draw without a finite value is left out and the mean is over the others.
        weights: [N]; tokens of weight 0 add nothing.
        beta: Scale.

    Returns:
        Scalar; its value is ``beta * sum(weights * mean(student - teacher))``.
    """
    logp, teacher_logp, weights = _weighted_tokens(weights, logp, teacher_logp)
    present = torch.isfinite(teacher_logp)
    # Before the product: 0 * inf would be NaN, in the value and in the gradient.
    logp, teacher_logp = logp.masked_fill(~present, 0.0), teacher_logp.masked_fill(~present, 0.0)
    now = logp.detach()
    surrogate = -beta * (teacher_logp - now) * torch.exp(logp - now)
    return (weights * surrogate.sum(-1) / present.sum(-1).clamp_min(1)).sum()


def sample_candidates(micro: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """What `multi_sample_reverse_kl` is about: each position's draws, the realised token first.

    Args:
        micro: With ``extra_ids``.

    Returns:
        Ids int64 [N, K] for `forward_logprobs` (0 where a draw is missing), and the teacher's log-probs float32
        [N, K], NaN there.

    Raises:
        ConfigError: The turns came without extra draws.
    """
    if micro.extra_ids is None or micro.extra_teacher_logprobs is None:
        raise ConfigError(
            "A batch came without the extra draws that the multi-sample reverse KL is estimated on; expected extra_ids "
            "and extra_teacher_logprobs in its turns. Ask the engine for extra_samples and have the teacher score "
            "them, or use divergence: sampled_reverse_kl."
        )
    teacher = micro.extra_teacher_logprobs.masked_fill(micro.extra_ids < 0, torch.nan)
    ids = torch.cat([micro.target_ids[:, None], micro.extra_ids.clamp_min(0)], 1)
    return ids, torch.cat([micro.teacher_logprobs[:, None], teacher], 1)


def forward_kl_topk(
    student_topk_logp: torch.Tensor,
    teacher_topk_logp: torch.Tensor,
    weights: torch.Tensor,
    support: Support = "tail",
) -> torch.Tensor:
    """KL(teacher || student) on the teacher's top candidates.

    Args:
        student_topk_logp: [N, K], at the teacher's candidates, with gradient.
        teacher_topk_logp: [N, K]; -inf marks an absent candidate.
        weights: [N].
        support: "tail" adds one bucket for everything else; "renormalized" compares the candidates alone.

    Returns:
        Scalar.

    Raises:
        ConfigError: "renormalized" with one candidate, which is 0 whatever the student does.
    """
    student, teacher, weights = _weighted_tokens(weights, student_topk_logp, teacher_topk_logp)
    student, teacher = topk_support(student, teacher, support)
    return (weights * _kl(teacher, student)).sum()


def jsd(
    student_logp: torch.Tensor,
    teacher_logp: torch.Tensor,
    weights: torch.Tensor,
    beta: float = 0.5,
    support: Support | None = None,
) -> torch.Tensor:
    """Generalised Jensen-Shannon divergence ``beta * KL(teacher || m) + (1 - beta) * KL(student || m)``.

    ``m = beta * teacher + (1 - beta) * student``; beta 0 is defined as KL(teacher || student), beta 1 as
    KL(student || teacher), as in TRL.

    Args:
        student_logp: [N, K], with gradient.
        teacher_logp: [N, K]; -inf marks an absent candidate.
        weights: [N].
        beta: 0 to 1.
        support: None if the K entries are the whole vocabulary; else see `forward_kl_topk`.

    Returns:
        Scalar.

    Raises:
        ConfigError: beta out of range, or a support of one candidate.
    """
    if not 0 <= beta <= 1:
        raise ConfigError(f"beta is {beta}; it must lie between 0 (forward KL) and 1 (reverse KL).")
    student, teacher, weights = _weighted_tokens(weights, student_logp, teacher_logp)
    if support is not None:
        student, teacher = topk_support(student, teacher, support)
    if beta == 0:
        values = _kl(teacher, student)
    elif beta == 1:
        values = _kl(student, teacher)
    else:
        mixture = torch.logaddexp(_finite(teacher) + math.log(beta), _finite(student) + math.log(1 - beta))
        values = beta * _kl(teacher, mixture) + (1 - beta) * _kl(student, mixture)
    return (weights * values).sum()


def topk_support(
    student_logp: torch.Tensor, teacher_logp: torch.Tensor, support: Support
) -> tuple[torch.Tensor, torch.Tensor]:
    """Make both sides distributions over the same candidates.

    Args:
        student_logp: [N, K].
        teacher_logp: [N, K]; -inf marks an absent candidate, which is then absent on both sides.
        support: See `forward_kl_topk`.

    Returns:
        Student and teacher log-probs, [N, K+1] with a tail, else [N, K].

    Raises:
        ConfigError: An unknown support, or "renormalized" with one candidate.
    """
    student_logp = student_logp.masked_fill(teacher_logp == -torch.inf, -torch.inf)
    if support == "tail":
        return tuple(torch.cat([x, _log_rest(x)[:, None]], 1) for x in (student_logp, teacher_logp))
    if support == "renormalized":
        if student_logp.shape[1] < 2:
            raise ConfigError(
                "A renormalized support of one candidate gives a loss that is exactly 0; use support='tail' or "
                "two candidates or more."
            )
        return tuple(x - torch.logsumexp(x, 1, keepdim=True) for x in (student_logp, teacher_logp))
    raise ConfigError(f"Unknown support {support!r}; choose 'tail' or 'renormalized'.")


def select_logprobs(logits: torch.Tensor, ids: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """Log-probs of chosen ids under ``softmax(logits / temperature)``, in float32 at least.

    Args:
        logits: [N, V].
        ids: [N] or [N, K].
        temperature: Above 0.

    Returns:
        Shaped like `ids`.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logp = torch.log_softmax(wide / temperature, -1)
    return logp.gather(-1, ids[:, None])[:, 0] if ids.ndim == 1 else logp.gather(-1, ids)


def target_hidden(model: Any, micro: MicroBatch) -> torch.Tensor:
    """Last hidden states at the positions that score the micro-batch's targets; [N, H].

    Args:
        model: A `transformers` causal language model.
        micro: On the model's device.
    """
    # An adapter's own base_model runs the head too; the backbone lies below it, adapters in place.
    backbone = (
        model.get_base_model()
        if hasattr(model, "peft_config") and hasattr(model, "get_base_model")
        else model
    ).base_model
    hidden = backbone(**micro.model_inputs()).last_hidden_state
    return hidden.flatten(0, 1)[micro.target_index]


def forward_logprobs(
    model: Any,
    micro: MicroBatch,
    temperature: float = 1.0,
    ids: torch.Tensor | None = None,
    chunk: int = 2048,
) -> torch.Tensor:
    """One forward pass: the model's log-probs of the micro-batch's targets, with gradient.

    Logits exist for the targets only, `chunk` of them at a time, and are computed again in the backward pass.

    Args:
        model: A `transformers` causal language model whose logits are ``lm_head(hidden)``.
        micro: On the model's device.
        temperature: Of the sampling.
        ids: [N] or [N, K] to score instead of the targets.
        chunk: Positions whose logits exist at a time.

    Returns:
        [N] or [N, K].
    """
    ids = micro.target_ids if ids is None else ids
    hidden, head = target_hidden(model, micro), model.get_output_embeddings()

    def scored(states: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return select_logprobs(head(states), wanted, temperature)

    if len(ids) <= chunk or not torch.is_grad_enabled():
        parts = [scored(h, i) for h, i in zip(hidden.split(chunk), ids.split(chunk))]
    else:
        parts = [
            checkpoint(scored, h, i, use_reentrant=False)
            for h, i in zip(hidden.split(chunk), ids.split(chunk))
        ]
    return torch.cat(parts)


def _weighted_tokens(weights: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tokens whose weight is not 0, weights last: the others may hold inf or NaN, and 0 * inf is NaN."""
    keep = weights != 0
    return (*(x[keep] for x in tensors), weights[keep])


def _finite(logp: torch.Tensor) -> torch.Tensor:
    # log-probs of -inf have no usable gradient; this floor is 0 in every float type once exponentiated.
    return logp.clamp_min(-1e4)


def _kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """KL(p || q) a token; entries where p is 0 add nothing."""
    p, q = _finite(p), _finite(q)
    return (p.exp() * (p - q)).sum(-1)


def _log_rest(logp: torch.Tensor) -> torch.Tensor:
    """log(1 - sum(exp(logp))), [N, K] -> [N], kept away from log(0) by one part in 10 million."""
    taken = torch.logsumexp(_finite(logp), -1).clamp_max(-1e-7)
    return torch.log(-torch.expm1(taken))
