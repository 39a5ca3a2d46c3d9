"""What a run will take before it starts: tokens an update and a run, and memory of learner and servers.

Orders of magnitude: how long episodes and replies get is not known beforehand, so both are assumed (see `Assumptions`),
and the figures say "about". Upper bounds follow from the settings alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .composer import PRESETS
from .model_shapes import ModelShape
from .registry import build

__all__ = [
    "Assumptions",
    "LearnerMemory",
    "TokenEstimate",
    "estimate_tokens",
    "evaluations",
    "learner_memory",
]

_LOGIT_CHUNK = 2048  # targets whose logits exist at a time; see losses.forward_logprobs
_LOGIT_BYTES = 2 + 3 * 4  # bfloat16 logits, their float32 copy, its log-softmax and its gradient


@dataclass(frozen=True)
class Assumptions:
    """What is not known before a run.

    Attributes:
        depth: Turns of an episode, as a share of `max_turns`.
        reply: Tokens of a reply, as a share of `max_tokens`.
        fill: Share of the context that an accumulated chat holds at `max_turns`.
    """

    depth: float = 0.5
    reply: float = 0.25
    fill: float = 1.0


@dataclass(frozen=True)
class TokenEstimate:
    """Tokens of one update, about, unless it says otherwise.

    Attributes:
        turns: Turns an episode has.
        rollouts: Episodes played an update.
        context: Tokens of the last turn's prompt and reply.
        explored: Tokens that the student writes.
        teacher: Tokens that the teacher reads when each episode is scored once.
        rows: Tokens that the learner forwards with one row a turn.
        learner: Tokens that the learner forwards with the run's packing if every rollout gives k turns.
        least: The same if it is given whole rollouts, as few as fill the batch.
        most: The most that the learner can forward.
    """

    turns: float
    rollouts: float
    context: float
    explored: float
    teacher: float
    rows: float
    learner: float
    least: float
    most: int


def estimate_tokens(config: Any, assume: Assumptions | None = None) -> TokenEstimate:
    """Tokens of a mean update.

    Args:
        config: A `DivOPDConfig`.
        assume: What is not known.
    """
    assume = assume or Assumptions()
    turns = _mean_turns(config, assume.depth * config.max_turns)
    # A load without a limit is bounded by what the composer can look at.
    load = config.load if config.load is not None else max(2, config.pool_multiplier)
    rollouts = load * config.batch_rows / turns
    limit = config.max_model_len * assume.fill
    # An accumulated chat grows by the same amount each turn; a window stays as long as it is.
    grows = config.history == "accumulate"
    context = limit * turns / config.max_turns if grows else limit * (1 + _pairs(config)) / config.max_turns
    context = min(context, float(config.max_model_len))
    mean_row = context / 2 if grows else context
    rows = config.batch_rows * mean_row
    learner = least = rows
    if config.merge_packing and grows:
        least = min(rows, config.batch_rows / turns * context)
        a_rollout = min(_rows_a_rollout(config, turns), turns)
        # The deepest of n turns drawn from an episode lies at n / (n + 1) of it; a whole episode ends at its end.
        reach = 1.0 if a_rollout >= turns else a_rollout / (a_rollout + 1)
        learner = min(rows, max(least, config.batch_rows / a_rollout * context * reach))
    return TokenEstimate(
        turns=turns,
        rollouts=rollouts,
        context=context,
        explored=rollouts * turns * config.max_tokens * assume.reply,
        teacher=rollouts * (context if grows else turns * context),
        rows=rows,
        learner=learner,
        least=least,
        most=config.batch_rows * config.max_model_len,
    )


def evaluations(config: Any) -> int:
    """How often the student is evaluated."""
    every, updates = config.eval_every, config.updates
    versions = set(range(every, updates + 1, every)) if every else set()
    versions |= {0} if config.eval_at_start else set()
    versions |= {updates} if config.eval_at_end else set()
    return len(versions)


def _pairs(config: Any) -> int:
    return int(config.history.partition(":")[2] or 0)


def _mean_turns(config: Any, typical: float) -> float:
    """Turns of a training episode, averaged over the updates that the horizon grows over."""
    horizon = build("horizon", config.horizon, config.horizon_kwargs, config.facts())
    allowed = [horizon.turns(update) for update in range(1, config.updates + 1)]
    return max(1.0, sum(min(typical, turns) for turns in allowed) / len(allowed))


def _rows_a_rollout(config: Any, turns: float) -> float:
    preset = PRESETS.get(config.composer)
    covers = preset is None or (preset.coverage in ("rollout", "cost") and preset.capped)
    return float(config.cap) if covers and isinstance(config.cap, int) else turns


@dataclass(frozen=True)
class LearnerMemory:
    """Bytes on each GPU (or on the CPU) of the learner, by what they hold.

    Attributes:
        parts: (what, bytes), largest effects first.
        trained: Weights that are trained.
    """

    parts: Sequence[tuple[str, float]]
    trained: int

    @property
    def total(self) -> float:
        """Sum of the parts."""
        return sum(size for _, size in self.parts)


def learner_memory(config: Any, shape: ModelShape, gpus: int = 1, on_gpu: bool = True) -> LearnerMemory:
    """Memory of one rank of the learner.

    Args:
        config: A `DivOPDConfig`.
        shape: Of the student.
        gpus: Ranks.
        on_gpu: Whether it computes in bfloat16, as it does on a GPU.
    """
    sharded = gpus if config.fsdp and gpus > 1 else 1
    width = 2 if "16" in str((config.model_init_kwargs or {}).get("dtype", config.dtype)) else 4
    trained, trained_width = shape.parameters, width
    weights = shape.parameters * width
    if config.lora_rank:
        trained, trained_width = shape.adapter_parameters(config.lora_rank), 4
        weights += trained * 4
    gradients = trained * trained_width
    parts = [
        ("weights", weights / sharded),
        ("gradients", gradients / sharded),
        ("AdamW's two moments", 2 * trained * trained_width / sharded),
    ]
    if gpus > 1 and sharded == 1:
        parts.append(("buckets of data parallelism", float(gradients)))
    if on_gpu and width == 4:
        # Sharded: one layer is gathered while the next one is on its way, and the embedding.
        copy = shape.parameters * 2
        if sharded > 1:
            copy = 2 * copy / shape.layers + shape.vocabulary * shape.hidden * 2
        parts.append(("bfloat16 copies of the weights", float(copy)))
    # One sequence of full length fits whatever the limit says.
    tokens = max(config.max_microbatch_tokens, config.max_model_len)
    # A CPU computes in float32.
    scale = 1 if on_gpu else 2
    layer = tokens * shape.layer_activation_bytes() * scale
    if config.gradient_checkpointing:
        boundary = tokens * shape.hidden * 2 * scale * shape.layers
        parts.append(
            (f"activations of {tokens:,} tokens, recomputed layer by layer", float(boundary + layer))
        )
    else:
        parts.append((f"activations of {tokens:,} tokens", float(layer * shape.layers)))
    logits = min(_LOGIT_CHUNK, tokens) * shape.vocabulary * _LOGIT_BYTES
    parts.append((f"logits of {min(_LOGIT_CHUNK, tokens):,} targets", float(logits)))
    return LearnerMemory(parts, trained)
