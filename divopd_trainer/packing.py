"""Rows to micro-batches: turns that share a prefix become one sequence, sequences fill a token budget.

Packing decides what a forward pass costs and nothing else: every trained token keeps the tokens before it and its
weight, so the gradient of a batch is the same however it is packed, split into micro-batches or spread over ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from divopd_gym.errors import ConfigError

from .turns import Turn
from .weighting import TokenWeights, imitation_apart, uniform_weights

__all__ = ["MicroBatch", "dummy_micro_batch", "pack", "split_ranks"]

Layout = Literal["padded", "packed"]
# Tokens at which a causal transformer's attention costs about what its matrix products do (12 x hidden size 1365).
_ATTENTION_SCALE = 16384


@dataclass(eq=False)
class MicroBatch:
    """What one forward and backward pass reads. N is the number of its trained tokens.

    Attributes:
        input_ids: int64 [R, L]; "packed" layout has R = 1.
        position_ids: int64 [R, L]; restarts at 0 with every sequence of a packed row.
        attention_mask: int64 [R, L], 1 at tokens; None in the packed layout, where the restarting positions
            keep the sequences apart.
        target_index: int64 [N], into the R*L positions: the position whose logits score the token, which is the
            one before the token's own.
        target_ids: int64 [N], the trained tokens.
        teacher_logprobs: float32 [N].
        student_logprobs: float32 [N], at generation.
        weights: float32 [N]; over all micro-batches of a batch they add up to 1 less the share of dead rows.
        row: int64 [N], number of the batch's row that the token belongs to.
        rewards: float32 [N], constant advantages times their weight; see `weighting.TokenWeights`.
        age: int64 [N], updates since the weights that wrote the token's row; 0 when they are the learner's own.
        forwarded_tokens: Tokens in the sequences, padding left out.
        teacher_topk_ids: int64 [N, K] or None.
        teacher_topk_logprobs: float32 [N, K] or None.
        extra_ids: int64 [N, M] or None; tokens drawn beside the realised one, -1 where there is none.
        extra_teacher_logprobs: float32 [N, M] or None; NaN where the teacher has no score.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    attention_mask: torch.Tensor | None
    target_index: torch.Tensor
    target_ids: torch.Tensor
    teacher_logprobs: torch.Tensor
    student_logprobs: torch.Tensor
    weights: torch.Tensor
    row: torch.Tensor
    rewards: torch.Tensor
    age: torch.Tensor
    forwarded_tokens: int
    teacher_topk_ids: torch.Tensor | None = None
    teacher_topk_logprobs: torch.Tensor | None = None
    extra_ids: torch.Tensor | None = None
    extra_teacher_logprobs: torch.Tensor | None = None

    @property
    def padded_tokens(self) -> int:
        """Positions computed, padding included."""
        return self.input_ids.numel()

    @property
    def n_targets(self) -> int:
        """Trained tokens (N)."""
        return len(self.target_ids)

    def model_inputs(self) -> dict[str, Any]:
        """Arguments of a `transformers` causal model's forward."""
        inputs = {"input_ids": self.input_ids, "position_ids": self.position_ids, "use_cache": False}
        if self.attention_mask is not None:
            inputs["attention_mask"] = self.attention_mask
        return inputs

    def to(self, device: torch.device | str) -> MicroBatch:
        """A copy with every tensor on the device."""
        moved = {
            name: value.to(device)
            for name, value in ((f.name, getattr(self, f.name)) for f in dataclasses.fields(self))
            if isinstance(value, torch.Tensor)
        }
        return dataclasses.replace(self, **moved)


@dataclass(eq=False)
class _Sequence:
    """One forward sequence and the batch rows whose responses lie in it."""

    token_ids: np.ndarray
    rows: list[int]

    @property
    def length(self) -> int:
        return len(self.token_ids)

    @property
    def cost(self) -> float:
        return _cost(self.length)


@dataclass(frozen=True)
class _RowValues:
    """What the rows of a batch bring, each list in their order."""

    rows: Sequence[Turn]
    masks: Sequence[np.ndarray]
    weights: Sequence[np.ndarray]
    rewards: Sequence[np.ndarray]
    ages: Sequence[int]


def _cost(length: int) -> float:
    return length * (1 + length / _ATTENTION_SCALE)


def pack(
    rows: Sequence[Turn],
    token_weights: Sequence[np.ndarray] | TokenWeights | None = None,
    *,
    update: int | None = None,
    merge: bool = True,
    max_tokens: int = 16384,
    pad_id: int = 0,
    layout: Layout = "padded",
    world: int = 1,
) -> list[MicroBatch]:
    """Lay out one batch for the learner.

    Args:
        rows: The batch; rows without a valid token take part in nothing but the row count.
        token_weights: For each row, one weight a response token ([n]); those at tokens that are not valid are ignored.
            None: `weighting.uniform_weights`, the mean over a row's valid tokens, then over all rows. Plain weights of a
            reply that is imitated weigh its cross-entropy.
        update: The update that the batch is for, from which rows get their age; None: age 0.
        merge: Rows of one segment become one sequence, up to the last of their responses. False: one sequence a row.
        max_tokens: Budget of a micro-batch, in positions (padding counts). A longer sequence gets one of its own.
        pad_id: Fills padded positions; they carry no loss and nothing attends to them, so it may be a real token.
        layout: "padded": a sequence a row of the tensor. "packed": all in one row, positions restarting (kernels for
            variable lengths, or `transformers`' own masks).
        world: Ranks the result will be spread over; the number of micro-batches is made a multiple of it where there
            are sequences enough.

    Returns:
        Micro-batches, costliest first; none if no row has a valid token.

    Raises:
        ConfigError: A weight array does not fit its row, or the layout is unknown.
    """
    if layout not in ("padded", "packed"):
        raise ConfigError(f"Unknown packing layout {layout!r}; choose 'padded' or 'packed'.")
    if max_tokens < 1 or world < 1:
        raise ConfigError(f"max_tokens is {max_tokens} and world is {world}; both must be 1 or more.")
    if not isinstance(token_weights, TokenWeights):
        token_weights = imitation_apart(
            rows, uniform_weights(rows) if token_weights is None else token_weights
        )
    weights = list(token_weights.weights)
    rewards = token_weights.rewards
    rewards = [np.zeros(np.shape(w)) for w in weights] if rewards is None else list(rewards)
    if len(weights) != len(rows) or len(rewards) != len(rows):
        raise ConfigError(f"{len(weights)} weight arrays for {len(rows)} rows; pass one array a row.")
    for number, turn, w in [
        (i, t, w) for values in (weights, rewards) for i, (t, w) in enumerate(zip(rows, values))
    ]:
        if np.shape(w) != (turn.n_tokens,):
            raise ConfigError(
                f"Row {number} has {turn.n_tokens} response tokens but weights of shape {np.shape(w)}; pass one "
                "weight a response token, 0 where it is not valid."
            )
    masks = [turn.valid_mask() for turn in rows]
    sequences = _sequences(rows, masks, merge)
    bins = _bins(sequences, max_tokens, layout, world)
    with_topk = bool(rows) and all(t.teacher_topk_ids is not None for t, m in zip(rows, masks) if m.any())
    n_extra = max((_extra_width(turn) for turn in rows), default=0)
    ages = [0 if update is None else update - 1 - turn.policy_version for turn in rows]
    values = _RowValues(rows, masks, weights, rewards, ages)
    return [_micro_batch(members, values, pad_id, layout, with_topk, n_extra) for members in bins]


def split_ranks(micro_batches: Sequence[MicroBatch], world: int, pad_id: int = 0) -> list[list[MicroBatch]]:
    """Spread micro-batches over ranks: equal counts, balanced cost, the same answer on every rank.

    Ranks that run short get dummies of weight 0, so that every rank takes part in every collective. Frameworks that
    average gradients over ranks (DDP, FSDP) need the loss multiplied by `world`.

    Returns:
        One list of micro-batches a rank, all of the same length, at least 1.
    """
    per_rank = max(1, -(-len(micro_batches) // world))
    ranks: list[list[MicroBatch]] = [[] for _ in range(world)]
    loads = [0.0] * world
    for micro in sorted(micro_batches, key=lambda m: -_micro_cost(m)):
        open_ranks = [r for r in range(world) if len(ranks[r]) < per_rank]
        rank = min(open_ranks, key=lambda r: (loads[r], r))
        ranks[rank].append(micro)
        loads[rank] += _micro_cost(micro)
    for members in ranks:
        while len(members) < per_rank:
            members.append(dummy_micro_batch(pad_id, packed=_is_packed(micro_batches)))
    return ranks


def dummy_micro_batch(pad_id: int = 0, *, packed: bool = False) -> MicroBatch:
    """Two tokens and one target of weight 0: touches every parameter, changes no gradient.

    It has candidates and draws as well, whatever the divergence of the batch that it completes.
    """
    ids = torch.full((1, 2), pad_id, dtype=torch.int64)
    zero = torch.zeros(1, dtype=torch.float32)
    return MicroBatch(
        input_ids=ids,
        position_ids=torch.arange(2)[None],
        attention_mask=None if packed else torch.ones_like(ids),
        target_index=torch.zeros(1, dtype=torch.int64),
        target_ids=ids[0, 1:].clone(),
        teacher_logprobs=zero,
        student_logprobs=zero.clone(),
        weights=zero.clone(),
        row=torch.full((1,), -1, dtype=torch.int64),
        rewards=zero.clone(),
        age=torch.zeros(1, dtype=torch.int64),
        forwarded_tokens=0,
        teacher_topk_ids=torch.zeros((1, 2), dtype=torch.int64),
        teacher_topk_logprobs=torch.full((1, 2), -1.0),
        extra_ids=torch.full((1, 1), -1),
        extra_teacher_logprobs=torch.full((1, 1), torch.nan),
    )


def _extra_width(turn: Turn) -> int:
    """Tokens drawn beside each realised one; 0 unless the teacher has scored them."""
    if turn.extra_ids is None or turn.extra_teacher_logprobs is None:
        return 0
    return turn.extra_ids.shape[1]


def _widened(turn: Turn, name: str, at: np.ndarray, width: int, fill: float) -> np.ndarray:
    """[len(at), width] of a turn's draws, filled up: turns of one batch may have been drawn with other settings."""
    wide = np.full((len(at), width), fill)
    if own := _extra_width(turn):
        wide[:, :own] = getattr(turn, name)[at]
    return wide


def _is_packed(micro_batches: Sequence[MicroBatch]) -> bool:
    return bool(micro_batches) and micro_batches[0].attention_mask is None


def _micro_cost(micro: MicroBatch) -> float:
    if micro.attention_mask is None:
        starts = np.flatnonzero(micro.position_ids[0].cpu().numpy() == 0)
        return sum(_cost(int(n)) for n in np.diff(starts, append=micro.input_ids.shape[1]))
    return micro.input_ids.shape[0] * _cost(micro.input_ids.shape[1])


def _sequences(rows: Sequence[Turn], masks: Sequence[np.ndarray], merge: bool) -> list[_Sequence]:
    groups: dict[int, list[int]] = {}
    for number, turn in enumerate(rows):
        if masks[number].any():
            groups.setdefault(id(turn.segment) if merge else number, []).append(number)
    return [
        _Sequence(rows[members[0]].segment.token_ids[: max(rows[n].end for n in members)], members)
        for members in groups.values()
    ]


def _bins(sequences: list[_Sequence], max_tokens: int, layout: Layout, world: int) -> list[list[_Sequence]]:
    """Sequences of each micro-batch; depends on nothing but their lengths and order."""
    ordered = sorted(sequences, key=lambda s: -s.length)
    bins = _padded_bins(ordered, max_tokens) if layout == "padded" else _packed_bins(ordered, max_tokens)
    while len(bins) % world:
        # Halving the costliest splittable one serves balance and never breaks the budget.
        splittable = [b for b in bins if len(b) > 1]
        if not splittable:
            break
        costliest = max(splittable, key=lambda b: sum(s.cost for s in b))
        bins.remove(costliest)
        bins += [costliest[: len(costliest) // 2], costliest[len(costliest) // 2 :]]
    return sorted(bins, key=lambda b: -sum(s.cost for s in b))


def _padded_bins(ordered: list[_Sequence], max_tokens: int) -> list[list[_Sequence]]:
    bins: list[list[_Sequence]] = []
    for sequence in ordered:
        # Longest first, so the bin's width is that of its first member.
        if bins and (len(bins[-1]) + 1) * bins[-1][0].length <= max_tokens:
            bins[-1].append(sequence)
        else:
            bins.append([sequence])
    return bins


def _packed_bins(ordered: list[_Sequence], max_tokens: int) -> list[list[_Sequence]]:
    total = sum(s.length for s in ordered)
    for count in range(max(1, -(-total // max_tokens)), len(ordered) + 1):
        bins: list[list[_Sequence]] = [[] for _ in range(count)]
        loads, sizes = [0.0] * count, [0] * count
        for sequence in ordered:
            fits = [i for i in range(count) if not bins[i] or sizes[i] + sequence.length <= max_tokens]
            if not fits:
                break
            best = min(fits, key=lambda i: (loads[i], i))
            bins[best].append(sequence)
            loads[best] += sequence.cost
            sizes[best] += sequence.length
        else:
            return [b for b in bins if b]
    return [[s] for s in ordered]


def _micro_batch(
    members: list[_Sequence],
    values: _RowValues,
    pad_id: int,
    layout: Layout,
    with_topk: bool,
    n_extra: int,
) -> MicroBatch:
    lengths = [s.length for s in members]
    if layout == "packed":
        ids = np.concatenate([s.token_ids for s in members]).astype(np.int64)[None]
        positions = np.concatenate([np.arange(n) for n in lengths])[None]
        mask, starts = None, np.cumsum([0, *lengths[:-1]])
    else:
        width = max(lengths)
        ids = np.full((len(members), width), pad_id, np.int64)
        mask = np.zeros((len(members), width), np.int64)
        positions = np.tile(np.arange(width), (len(members), 1))
        for r, sequence in enumerate(members):
            ids[r, : sequence.length] = sequence.token_ids
            mask[r, : sequence.length] = 1
        starts = np.arange(len(members)) * width
    parts: dict[str, list[np.ndarray]] = {
        name: []
        for name in (
            *("index", "ids", "teacher", "student", "weight", "row", "reward", "age"),
            *("topk_ids", "topk_logprobs", "extra_ids", "extra_logprobs"),
        )
    }
    for begin, sequence in zip(starts, members):
        for number in sequence.rows:
            turn = values.rows[number]
            at = np.flatnonzero(values.masks[number])
            parts["index"].append(begin + turn.start + at - 1)
            parts["ids"].append(turn.response_ids[at])
            parts["teacher"].append(turn.teacher_logprobs[at])
            parts["student"].append(turn.student_logprobs[at])
            parts["weight"].append(np.asarray(values.weights[number])[at])
            parts["reward"].append(np.asarray(values.rewards[number])[at])
            parts["age"].append(np.full(len(at), values.ages[number]))
            parts["row"].append(np.full(len(at), number))
            if with_topk:
                parts["topk_ids"].append(turn.teacher_topk_ids[at])
                parts["topk_logprobs"].append(turn.teacher_topk_logprobs[at])
            if n_extra:
                parts["extra_ids"].append(_widened(turn, "extra_ids", at, n_extra, -1))
                parts["extra_logprobs"].append(_widened(turn, "extra_teacher_logprobs", at, n_extra, np.nan))

    def tensor(name: str, dtype: type) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(parts[name]).astype(dtype))

    return MicroBatch(
        input_ids=torch.from_numpy(ids),
        position_ids=torch.from_numpy(positions.astype(np.int64)),
        attention_mask=None if mask is None else torch.from_numpy(mask),
        target_index=tensor("index", np.int64),
        target_ids=tensor("ids", np.int64),
        teacher_logprobs=tensor("teacher", np.float32),
        student_logprobs=tensor("student", np.float32),
        weights=tensor("weight", np.float32),
        row=tensor("row", np.int64),
        rewards=tensor("reward", np.float32),
        age=tensor("age", np.int64),
        forwarded_tokens=sum(lengths),
        teacher_topk_ids=tensor("topk_ids", np.int64) if with_topk else None,
        teacher_topk_logprobs=tensor("topk_logprobs", np.float32) if with_topk else None,
        extra_ids=tensor("extra_ids", np.int64) if n_extra else None,
        extra_teacher_logprobs=tensor("extra_logprobs", np.float32) if n_extra else None,
    )
