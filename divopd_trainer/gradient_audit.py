"""How well a batch's gradient stands for that of all turns it was chosen from (DivOPD, appendix D).

G is the mean gradient over the valid turns of the pool at an update, Ghat that of the rows a preset selects from the
same pool (dead rows count as 0, as in training). Every turn's gradient is computed exactly, one by one, no sketch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from divopd_gym.errors import ConfigError

from .composer import PRESETS, BatchComposer
from .diagnostics import disagreement_std
from .losses import forward_logprobs, sampled_reverse_kl
from .packing import pack
from .records import Run
from .replay import Stream, Variant
from .turns import Turn

__all__ = ["Agreement", "Choice", "agreement", "audit_choice", "choices", "load_turns", "turn_gradients"]

Key = tuple[int, int]


@dataclass(frozen=True)
class Agreement:
    """Of a batch's gradient Ghat with its pool's gradient G.

    Attributes:
        projection: ``<G, Ghat> / |G|^2``: the part of G that one update makes; 1 is all. None if G is 0.
        cosine: ``cos(G, Ghat)``. None if either is 0.
        norm_pool: ``|G|``.
        norm_batch: ``|Ghat|``.
        rows: Rows of the batch, dead ones included.
        dead_rows: Rows that carry no loss.
        disagreement_std: See `diagnostics.disagreement_std`, of the live rows.
    """

    projection: float | None
    cosine: float | None
    norm_pool: float
    norm_batch: float
    rows: int = 0
    dead_rows: int = 0
    disagreement_std: float = 0.0


@dataclass(frozen=True)
class Choice:
    """What several presets select from one pool.

    Attributes:
        update: The update that the batches are for.
        pool: Valid turns, as (rollout id, turn index).
        selected: Rows by the name of the variant.
    """

    update: int
    pool: list[Key]
    selected: dict[str, list[Key]]


def agreement(pool_gradient: torch.Tensor, batch_gradient: torch.Tensor) -> Agreement:
    """Compare two gradients.

    Args:
        pool_gradient: G, [P].
        batch_gradient: Ghat, [P].
    """
    g, ghat = pool_gradient.double(), batch_gradient.double()
    inner, square = float(g @ ghat), float(g @ g)
    norm, norm_hat = math.sqrt(square), float(ghat.norm())
    both = norm * norm_hat
    return Agreement(inner / square if square else None, inner / both if both else None, norm, norm_hat)


def choices(stream: Stream, variants: Sequence[Variant], updates: Sequence[int]) -> list[Choice]:
    """What each variant would select at some updates, all from the same state of the queue.

    The queue's history is the run's own: the recorded preset is replayed up to each update, and there every variant
    gets the same pending and unread turns.

    Args:
        stream: From `divopd_trainer.replay.load_stream`.
        variants: Presets, with other settings if wanted.
        updates: Recorded updates.

    Raises:
        ConfigError: An update was not recorded.
    """
    recorded = [update for update, _ in stream.arrivals]
    missing = sorted(set(updates) - set(recorded))
    if missing:
        raise ConfigError(
            f"Updates {missing} were not recorded; expected numbers from {recorded[0]} to {recorded[-1]}. Choose others "
            "with --updates."
        )
    settings = stream.settings
    if settings["preset"] not in PRESETS:
        settings = settings | {"preset": "divopd"}

    def composer(changes: Mapping[str, Any]) -> BatchComposer:
        made = BatchComposer(**{**settings, **changes})
        made.fill = True  # as the learner's collator has it
        return made

    run = composer({})
    found = []
    for update, arrivals in stream.arrivals:
        run.feed(arrivals)
        if update in updates:
            state = run.state_dict()
            pool = _pool(composer({"preset": "gate-only"}), state, update)
            selected = {}
            for variant in variants:
                chooser = composer(variant.settings)
                chooser.load_state_dict(state)
                selected[variant.label] = [_key(turn) for turn in chooser.compose(update).selected]
            found.append(Choice(update, pool, selected))
        run.compose(update)
    return found


def _pool(composer: BatchComposer, state: Mapping[str, Any], update: int) -> list[Key]:
    """The valid turns that a pooled composer would choose from: chosen, kept and given up."""
    given_up: list[Any] = []
    composer.on_drop = lambda turn, why: given_up.append(turn) if why == "expired" else None
    composer.load_state_dict(dict(state))
    batch = composer.compose(update)
    return [_key(turn) for turn in (*batch.selected, *batch.pending, *given_up)]


def _key(turn: Any) -> Key:
    return turn.rollout_id, turn.index


def load_turns(run: Run, wanted: set[Key]) -> dict[Key, Turn]:
    """The recorded turns of these keys, tokens and all; those that are missing are left out."""
    return {_key(turn): turn for rollout in run.rollouts() for turn in rollout.turns if _key(turn) in wanted}


def turn_gradients(
    model: Any, turns: Sequence[Turn], temperature: float = 1.0
) -> Iterator[tuple[int, torch.Tensor]]:
    """The exact gradient of every turn's own loss: the mean over its valid tokens of DivOPD's surrogate (section 2.1).

    Turns of one segment share a forward pass; each has a backward pass of its own.

    Args:
        model: A `transformers` causal language model whose parameters require gradients.
        turns: Those without a valid token give nothing.
        temperature: Of the sampling.

    Yields:
        Place in `turns`, and the gradient as one vector over all parameters.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    device = parameters[0].device
    groups: dict[int, list[int]] = {}
    for place, turn in enumerate(turns):
        groups.setdefault(id(turn.segment), []).append(place)
    for places in groups.values():
        for micro in pack([turns[place] for place in places]):
            micro = micro.to(device)
            logp = forward_logprobs(model, micro, temperature)
            rows = sorted(set(micro.row.tolist()))
            for row in rows:
                mine = micro.row == row
                weights = mine / mine.sum()
                loss = sampled_reverse_kl(logp, micro.teacher_logprobs, weights.to(logp.dtype))
                gradients = torch.autograd.grad(
                    loss, parameters, retain_graph=row != rows[-1], allow_unused=True
                )
                yield (
                    places[row],
                    torch.cat(
                        [
                            (torch.zeros_like(p) if g is None else g).flatten()
                            for p, g in zip(parameters, gradients)
                        ]
                    ),
                )


def audit_choice(
    model: Any,
    choice: Choice,
    turns: Mapping[Key, Turn],
    temperature: float = 1.0,
    on_turn: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Agreement]:
    """Compare the gradient of every variant's batch with that of the pool.

    Replies of the teacher that are imitated have another loss and are left out on both sides. Memory: one vector of
    the model's size for the pool and one a variant.

    Args:
        model: The student as it was before the update; see `turn_gradients`.
        choice: From `choices`.
        turns: Holds every turn of the choice; see `load_turns`.
        temperature: Of the sampling.
        on_turn: Called with turns done and turns in all.

    Returns:
        By the name of the variant.

    Raises:
        ConfigError: The pool holds no turn that can be trained.
    """

    def kept(keys: Sequence[Key]) -> list[Turn]:
        return [turns[key] for key in keys if key in turns and not turns[key].imitated]

    pool = [turn for turn in kept(choice.pool) if turn.valid]
    batches = {label: kept(keys) for label, keys in choice.selected.items()}
    if not pool:
        raise ConfigError(
            f"At update {choice.update} there was no valid turn to choose from; choose another with --updates."
        )
    live = {_key(turn): turn for rows in (pool, *batches.values()) for turn in rows if turn.valid}
    every = list(live.values())
    members = {_key(turn) for turn in pool}
    chosen = {label: {_key(turn) for turn in rows} for label, rows in batches.items()}
    size = sum(p.numel() for p in model.parameters() if p.requires_grad)
    device = next(model.parameters()).device
    total = torch.zeros(size, device=device)
    sums = {label: torch.zeros(size, device=device) for label in batches}
    for done, (place, gradient) in enumerate(turn_gradients(model, every, temperature), 1):
        key = _key(every[place])
        if key in members:
            total.add_(gradient, alpha=1 / len(pool))
        for label, keys in chosen.items():
            if key in keys:
                sums[label].add_(gradient, alpha=1 / len(batches[label]))
        on_turn(done, len(every))
    answer = {}
    for label, rows in batches.items():
        trained = [turn for turn in rows if turn.valid]
        answer[label] = replace(
            agreement(total, sums[label]),
            rows=len(rows),
            dead_rows=len(rows) - len(trained),
            disagreement_std=disagreement_std((turn.rollout_id, turn.score) for turn in trained),
        )
    return answer
