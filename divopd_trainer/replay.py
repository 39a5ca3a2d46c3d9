"""Any composer preset over the rollouts that a run recorded: who gets trained, and what it costs.

Every preset is handed the same turns with the same policy versions at the same updates, so differences are the
composer's alone. With the run's own settings the replay makes the very batches that the run trained on.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from divopd_gym.errors import ConfigError

from .composer import PRESETS, Batch, BatchComposer
from .framelog import RecordError
from .metrics import effective_rollouts, gini, top1_share
from .records import Run
from .turns import Rollout

__all__ = [
    "ReplayResult",
    "ReplayTurn",
    "Stream",
    "Variant",
    "compare",
    "composition",
    "light_turns",
    "load_stream",
    "replay",
    "results_table",
]

DEFAULT_SETTINGS: dict[str, Any] = {
    "preset": "divopd",
    "batch_rows": 64,
    "pool_multiplier": 4,
    "cap": 4,
    "max_staleness": 2,
    "max_pending_age": 8,
    "seed": 0,
    "token_budget": None,
}
"""The paper's; used where neither the records nor the run's config say otherwise."""


@dataclass(frozen=True)
class Variant:
    """A composer preset with what it changes of the run's settings.

    Attributes:
        label: How tables call it.
        settings: Arguments of `BatchComposer`; ``preset`` is always there.
    """

    label: str
    settings: dict[str, Any]

    @classmethod
    def parse(cls, text: str) -> Variant:
        """Read ``PRESET``, ``PRESET:CAP`` or ``auto``.

        CAP is a number, ``none`` or ``auto``; after ``divopd-cost`` a number is its budget of tokens. ``auto`` alone is
        ``divopd:auto``.

        Raises:
            ConfigError: It is none of these.
        """
        preset, _, value = ("divopd:auto" if text == "auto" else text).partition(":")
        if preset not in PRESETS or (
            value and not (value.isdecimal() and int(value) or value in ("none", "auto"))
        ):
            raise ConfigError(
                f"Unknown preset {text!r}; choose from auto, {', '.join(PRESETS)}, each with ':N', ':none' or ':auto' "
                "behind it for another cap (after divopd-cost: another budget of tokens)."
            )
        settings: dict[str, Any] = {"preset": preset}
        if value.isdecimal():
            settings["token_budget" if preset == "divopd-cost" else "cap"] = int(value)
        elif value:
            settings["cap"] = None if value == "none" else value
        return cls(text, settings)


@dataclass(frozen=True)
class ReplayTurn:
    """What composing and counting need of a recorded turn; a few numbers instead of its tokens.

    Attributes:
        rollout_id: See `divopd_trainer.turns.Turn`.
        index: See `Turn`.
        policy_version: See `Turn`.
        score: See `Turn`.
        valid: See `Turn`.
        segment: The segment's place in its rollout; rows of one segment share a prefix.
        seq_len: Prompt and response tokens.
        n_valid: Response tokens that carry loss.
        n_scored: Response tokens that the teacher scored.
    """

    rollout_id: int
    index: int
    policy_version: int
    score: float
    valid: bool
    segment: int
    seq_len: int
    n_valid: int
    n_scored: int


@dataclass
class Stream:
    """The turns of a run as they reached the learner.

    Attributes:
        arrivals: (update, turns that arrived before it was composed), in order.
        settings: The composer's settings of the run.
        recorded: The selection of the run itself by update, as (rollout id, turn index); empty if unknown.
        notices: What is not as recorded, one sentence each.
    """

    arrivals: list[tuple[int, list[ReplayTurn]]]
    settings: dict[str, Any] = field(default_factory=lambda: dict(DEFAULT_SETTINGS))
    recorded: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)

    def paced(self, load: float) -> Stream:
        """The same turns in the same order, ``load`` batches of valid turns an update.

        Whole rollouts arrive until that many valid turns have come in all; each turn keeps the lag between its
        version and the update at which it arrived. A what-if: no learner produced these versions.
        """
        rollouts: dict[int, list[tuple[int, ReplayTurn]]] = defaultdict(list)
        for update, turns in self.arrivals:
            for turn in turns:
                rollouts[turn.rollout_id].append((update - turn.policy_version, turn))
        granted = load * self.settings["batch_rows"]
        arrivals: list[tuple[int, list[ReplayTurn]]] = [(1, [])]
        total = 0
        for lagged in rollouts.values():
            while total >= granted * len(arrivals):
                arrivals.append((len(arrivals) + 1, []))
            update, turns = arrivals[-1]
            turns += [replace(turn, policy_version=max(update - lag, 0)) for lag, turn in lagged]
            total += sum(turn.valid for _, turn in lagged)
        note = f"Arrivals were spread anew at load {load:g}; policy versions keep the lag that was recorded."
        return Stream(arrivals, self.settings, {}, [*self.notices, note])


def load_stream(run: Run) -> Stream:
    """Read what reached the learner, update by update.

    Runs without batch records are read by policy version: a rollout counts as arrived before the update that
    follows its last version.

    Raises:
        RecordError: Nothing was recorded that could be replayed.
    """
    settings = dict(DEFAULT_SETTINGS)
    config = dict(run.config)
    named = config.get("composer") or config.get("method")
    if named:
        config["preset"] = named
    for source in (config, run.settings):
        settings |= {name: source[name] for name in DEFAULT_SETTINGS if name in source}
    turns: dict[tuple[int, int], ReplayTurn] = {}
    by_version: dict[int, list[ReplayTurn]] = defaultdict(list)
    for rollout in run.rollouts():
        light = list(light_turns(rollout))
        turns |= {(turn.rollout_id, turn.index): turn for turn in light}
        if light:
            by_version[light[-1].policy_version + 1].extend(light)
    if not turns:
        raise RecordError(
            f"{run.path} holds no student turn to replay; expected at least one finished rollout in rollouts/; let "
            "the run go on, or pass another run."
        )
    recorded = {batch.update: batch.selected for batch in run.batches}
    stream = Stream([], settings, recorded, list(run.notices))
    if not any(batch.arrivals for batch in run.batches):
        stream.notices.append(
            "No arrivals were recorded; each rollout counts as arrived before the update after its last version."
        )
        last = max(by_version)
        stream.arrivals = [(update, by_version.get(update, [])) for update in range(1, last + 1)]
        return stream
    lost = 0
    for batch in run.batches:
        found = [turns[key] for key in batch.arrivals if key in turns]
        lost += len(batch.arrivals) - len(found)
        stream.arrivals.append((batch.update, found))
    if lost:
        stream.notices.append(f"{lost} turns reached the learner but are missing in rollouts/; left out.")
    return stream


def light_turns(rollout: Rollout) -> Iterable[ReplayTurn]:
    """What replaying needs of a rollout's student turns, in order."""
    places = {id(segment): place for place, segment in enumerate(rollout.segments)}
    for turn in rollout.turns:
        if not turn.trainable:
            continue
        yield ReplayTurn(
            rollout_id=turn.rollout_id,
            index=turn.index,
            policy_version=turn.policy_version,
            score=turn.score,
            valid=turn.valid,
            segment=places[id(turn.segment)],
            seq_len=turn.seq_len,
            n_valid=int(turn.valid_mask().sum()) if turn.valid else 0,
            n_scored=turn.n_tokens if turn.teacher_logprobs is not None else 0,
        )


@dataclass
class ReplayResult:
    """What one preset made of a stream.

    Attributes:
        preset: Its name.
        summary: The figures of the table; see `SUMMARY`.
        updates: The same figures update by update, and rows, rollouts, pending, unread.
        same_as_recorded: Updates whose batch equals the recorded one, of how many; None when not comparable.
    """

    preset: str
    summary: dict[str, float | int | None]
    updates: list[dict[str, float | int]]
    same_as_recorded: tuple[int, int] | None = None


SUMMARY: dict[str, tuple[str, str]] = {
    "updates": ("updates", "{:,.0f}"),
    "never_used_share": ("valid rollouts never used", "{:.1%}"),
    "gini": ("Gini of selected turns a rollout", "{:.3f}"),
    "stale_share": ("turns dropped as stale", "{:.1%}"),
    "dropped_stale": ("  rows", "{:,.0f}"),
    "effective_rollouts": ("effective rollouts a batch", "{:.2f}"),
    "top1_share": ("token share of the largest rollout", "{:.1%}"),
    "effective_rollouts_forwarded": ("effective rollouts, by tokens forwarded", "{:.2f}"),
    "top1_share_forwarded": ("largest rollout, by tokens forwarded", "{:.1%}"),
    "turns_per_rollout": ("turns per rollout in a batch", "{:.2f}"),
    "dead_row_share": ("dead rows", "{:.1%}"),
    "forwarded_tokens_rows": ("tokens forwarded, one row per turn", "{:,.0f}"),
    "forwarded_tokens_merged": ("tokens forwarded, prefixes merged", "{:,.0f}"),
    "trained_tokens": ("tokens trained", "{:,.0f}"),
    "scored_per_trained": ("teacher tokens scored per token trained", "{:.2f}"),
}
"""Figure -> (label, format). Composition figures are means over updates: by trained response tokens, as in the train
lines of metrics.jsonl, and by the tokens of one row per turn, prompts included."""


def replay(stream: Stream, preset: str, *, tail: float = 1.0, **overrides: Any) -> ReplayResult:
    """Run one preset over a stream.

    Args:
        stream: From `load_stream`.
        preset: As `Variant.parse` reads it.
        tail: Composition figures are means over this last part of the updates (the paper: 0.4).
        **overrides: Composer settings instead of the recorded ones.
    """
    variant = Variant.parse(preset)
    settings = stream.settings | overrides | variant.settings
    composer = BatchComposer(**settings)
    composer.fill = True  # as the learner's collator has it
    selected_turns: Counter[int] = Counter()
    valid_rollouts: set[int] = set()
    updates: list[dict[str, float | int]] = []
    arrived = scored = same = 0
    for update, arrivals in stream.arrivals:
        arrived += len(arrivals)
        scored += sum(turn.n_scored for turn in arrivals)
        valid_rollouts |= {turn.rollout_id for turn in arrivals if turn.valid}
        batch = composer.compose(update, arrivals)
        selected_turns.update(turn.rollout_id for turn in batch.selected if turn.valid)
        updates.append(composition(update, batch, composer.unread))
        keys = [(turn.rollout_id, turn.index) for turn in batch.selected]
        same += update in stream.recorded and stream.recorded[update] == keys
    rows = sum(line["rows"] for line in updates)
    stale = sum(line["dropped_stale"] for line in updates)
    trained = sum(line["trained_tokens"] for line in updates)
    # An update without a row has no composition.
    first = len(updates) - max(1, round(tail * len(updates))) if updates else 0
    composed = [line for line in updates[first:] if line["rows"]]
    counts = [selected_turns[rollout_id] for rollout_id in sorted(valid_rollouts)]

    def mean(name: str) -> float | None:
        return sum(line[name] for line in composed) / len(composed) if composed else None

    summary: dict[str, float | int | None] = {
        "updates": len(updates),
        "never_used_share": counts.count(0) / len(counts) if counts else None,
        "gini": gini(counts) if counts else None,
        "stale_share": stale / arrived if arrived else None,
        "dropped_stale": stale,
        "effective_rollouts": mean("effective_rollouts"),
        "top1_share": mean("top1_share"),
        "effective_rollouts_forwarded": mean("effective_rollouts_forwarded"),
        "top1_share_forwarded": mean("top1_share_forwarded"),
        "turns_per_rollout": mean("turns_per_rollout"),
        "dead_row_share": sum(line["dead_rows"] for line in updates) / rows if rows else None,
        "forwarded_tokens_rows": sum(line["forwarded_tokens_rows"] for line in updates),
        "forwarded_tokens_merged": sum(line["forwarded_tokens_merged"] for line in updates),
        "trained_tokens": trained,
        "scored_per_trained": scored / trained if trained else None,
    }
    comparable = bool(stream.recorded) and not overrides and settings == stream.settings
    return ReplayResult(preset, summary, updates, (same, len(updates)) if comparable else None)


def composition(update: int, batch: Batch, unread: int) -> dict[str, float | int]:
    """Who is in a batch and what it costs: one line of `ReplayResult.updates`."""
    trained: Counter[int] = Counter()
    forwarded: Counter[int] = Counter()
    longest: dict[tuple[int, int], int] = {}
    for turn in batch.selected:
        trained[turn.rollout_id] += turn.n_valid
        if turn.n_valid:  # dead rows are not forwarded
            forwarded[turn.rollout_id] += turn.seq_len
            key = (turn.rollout_id, turn.segment)
            longest[key] = max(longest.get(key, 0), turn.seq_len)
    return {
        "update": update,
        "rows": len(batch.selected),
        "rollouts": len(trained),
        "turns_per_rollout": len(batch.selected) / max(len(trained), 1),
        "effective_rollouts": effective_rollouts(trained),
        "top1_share": top1_share(trained),
        "effective_rollouts_forwarded": effective_rollouts(forwarded),
        "top1_share_forwarded": top1_share(forwarded),
        "dead_rows": sum(not turn.valid for turn in batch.selected),
        "dropped_stale": batch.dropped_stale,
        "pending": len(batch.pending),
        "unread": unread,
        "forwarded_tokens_rows": sum(forwarded.values()),
        "forwarded_tokens_merged": sum(longest.values()),
        "trained_tokens": sum(trained.values()),
    }


def compare(
    stream: Stream, presets: Sequence[str], *, tail: float = 1.0, **overrides: Any
) -> list[ReplayResult]:
    """`replay` for several presets over one stream."""
    return [replay(stream, preset, tail=tail, **overrides) for preset in presets]


def results_table(results: Sequence[ReplayResult], title: str | None = None) -> Any:
    """A `rich.table.Table`: one line a figure, one column a preset."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    table.add_column("")
    for result in results:
        table.add_column(result.preset, justify="right")
    for name, (label, form) in SUMMARY.items():
        values = [result.summary[name] for result in results]
        table.add_row(label, *("-" if value is None else form.format(value) for value in values))
    return table
