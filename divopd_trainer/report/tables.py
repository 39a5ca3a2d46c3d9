"""The report's headline and tables, as HTML. Every text of a run passes through `html.escape`."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence

from ..diagnostics import DEPTH_BANDS
from .charts import COSTS
from .collect import EvalPoint, RunFigures, share
from .compare import Comparison, Estimate, ratio_text
from .episodes import RolloutScan
from .groups import Group
from .svg import colour_class, format_number

__all__ = [
    "cost_table", "depth_table", "duration", "figures_table", "headline", "methods_table", "runs_table",
    "types_table",
]  # fmt: skip

Scans = Sequence[Sequence[RolloutScan]]


def duration(seconds: float) -> str:
    """12 s, 3.4 min, 2.1 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h"


def _percent(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{100 * value:.{digits}f} %"


def _with_interval(point: EvalPoint | None) -> str:
    if point is None:
        return "-"
    ends = f"{100 * point.low:.0f}-{100 * point.high:.0f}"
    return f'{_percent(point.rate)} <span class="note">[{ends}]</span>'


def _estimate(estimate: Estimate | None) -> str:
    """Mean and interval; the seeds' own values on hover."""
    if estimate is None:
        return "-"
    text = _percent(estimate.mean)
    if estimate.interval is not None:
        low, high = (100 * min(1.0, max(0.0, end)) for end in estimate.interval)
        text += f' <span class="note">[{low:.0f}-{high:.0f}]</span>'
    values = ", ".join(f"{100 * value:.1f}" for value in estimate.values)
    return f'<span title="seeds: {values}">{text}</span>' if len(estimate.values) > 1 else text


def _key(group: Group) -> str:
    return f'<i class="key {colour_class(group.number)}"></i>{html.escape(group.label)}'


def _card(label: str, value: str, note: str = "", kind: str = "") -> str:
    return (
        f'<div class="card {kind}"><span class="label">{html.escape(label)}</span>'
        f'<span class="value">{value}</span><span class="note">{note}</span></div>'
    )


def _rate_card(label: str, point: EvalPoint | None, kind: str = "") -> str:
    if point is None:
        return _card(label, "-", "not evaluated", kind)
    note = f"{100 * point.low:.0f}-{100 * point.high:.0f} %, {point.episodes} episodes"
    return _card(label, f"{100 * point.rate:.0f}<small> %</small>", note, kind)


def headline(figures: RunFigures, scan: RolloutScan) -> str:
    """The cards of one run."""
    totals = figures.totals
    cards = [_rate_card("Teacher", figures.teacher)] if figures.teacher is not None else []
    cards.append(_rate_card("Student before", figures.initial))
    cards.append(_rate_card("Student after", figures.final, "main"))
    if figures.initial is not None and figures.final is not None:
        gain = 100 * (figures.final.rate - figures.initial.rate)
        cards.append(
            _card("Gain", f"{gain:+.0f}<small> points</small>", "strict success, after minus before")
        )
    tokens, rows = totals["trained_tokens"], totals["forwarded_tokens_rows"]
    forwarded = totals["forwarded_tokens"]
    note = f"{format_number(forwarded)} forwarded" if forwarded else ""
    if forwarded and rows > forwarded:
        note += f", {rows / forwarded:.1f}x fewer than one row per turn"
    cards.append(_card("Updates", f"{totals['updates']:,.0f}", f"{scan.rollouts:,} episodes recorded"))
    cards.append(_card("Tokens trained", format_number(tokens), note))
    cards.append(_card("Time", duration(totals["wall_s"]), f"{totals['env_turns']:,.0f} environment turns"))
    return f'<section class="cards">{"".join(cards)}</section>'


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{text}</th>" for text in head)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>" for cells in lines)
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def methods_table(comparison: Comparison) -> str:
    """One line a method: what it reached."""
    columns = {
        "Before": "before",
        "After": "after",
        "Peak": "peak",
        "Final five": "final",
        f"nAUC to {comparison.budget}": "auc",
    }
    columns = {
        name: field
        for name, field in columns.items()
        if any(getattr(result, field) for result in comparison.results)
    }
    lines = []
    for result in comparison.results:
        seeds = html.escape(", ".join(result.group.seeds))
        cells = [_estimate(getattr(result, field)) for field in columns.values()]
        lines.append([_key(result.group), f"{len(result.group.runs)} ({seeds})", *cells])
    teachers = [run.teacher for r in comparison.results for run in r.group.runs if run.teacher is not None]
    note = "Strict success, mean over seeds [95 % interval of the mean, from three seeds]."
    if teachers:
        rates = sorted({point.rate for point in teachers})
        shown = (
            _with_interval(teachers[0])
            if len(rates) == 1
            else " to ".join(map(_percent, rates[:: len(rates) - 1]))
        )
        note += f" Teacher: {shown}."
    return _table(["Method", "Seeds", *columns], lines) + f'<p class="note">{note}</p>'


def cost_table(comparison: Comparison) -> str:
    """Cost to the target against the baseline; empty when it cannot be told or there is one method."""
    if len(comparison.results) < 2:
        return ""
    if comparison.target is None:
        return (
            '<p class="note">No cost to a target: the baseline reaches no multiple of 5 % at which no run began. '
            "Name one with --target, or train for longer.</p>"
        )
    keys = [key for key in COSTS if any(key in result.ratios for result in comparison.results)]
    if not keys:
        return ""
    lines = []
    for result in comparison.results:
        base = result.group is comparison.baseline
        cells = ["1" if base and key in result.ratios else _ratio(result.ratios.get(key)) for key in keys]
        lines.append([_key(result.group), *cells])
    name = html.escape(comparison.baseline.label)
    note = (
        f"How many times less than {name} a method spent up to its first evaluation at {_percent(comparison.target, 0)} "
        f"or more: cost({name}) / cost(method) [95 % bootstrap over seeds]; above 1 is cheaper."
    )
    head = [COSTS[key][0].capitalize() for key in keys]
    return f'<p class="note">{note}</p>' + _table(["Method", *head], lines)


def _ratio(ratio) -> str:
    text, mark, rest = ratio_text(ratio).partition(" [")
    return html.escape(text) + (f' <span class="note">[{html.escape(rest)}</span>' if mark else "")


def runs_table(groups: Sequence[Group]) -> str:
    """One line a run."""
    lines = []
    for group in groups:
        for run, seed in zip(group.runs, group.seeds):
            lines.append(
                [
                    _key(group),
                    html.escape(seed),
                    html.escape(run.run.name),
                    _with_interval(run.initial),
                    _with_interval(run.final),
                    _with_interval(run.best),
                    f"{run.totals['updates']:,.0f}",
                    format_number(run.totals["trained_tokens"]),
                    duration(run.totals["wall_s"]),
                ]
            )
    head = ["Method", "Seed", "Directory", "Before", "After", "Best", "Updates", "Tokens trained", "Time"]
    return f"<details><summary>All {len(lines)} runs</summary>{_table(head, lines)}</details>"


def _figures() -> list[tuple[str, Callable[[RunFigures, RolloutScan], float | None], Callable]]:
    """(label, of a run and its scan, how it is written)."""

    def total(name: str) -> Callable:
        return lambda run, scan: run.totals.get(name) or None

    def mean(name: str) -> Callable:
        return lambda run, scan: run.mean(name)

    def with_batches(of: Callable[[RolloutScan], float | None]) -> Callable:
        return lambda run, scan: of(scan) if run.run.batches else None

    def waiting(run: RunFigures, scan: RolloutScan) -> float | None:
        wait, work = run.sum("wait_s"), run.sum("learner_s")
        return None if wait is None else share(wait, wait + (work or 0))

    return [
        ("Done rate after", lambda run, scan: run.final and run.final.done_rate, _percent),
        ("Mean score after", lambda run, scan: run.final and run.final.score, format_number),
        ("Updates", total("updates"), format_number),
        ("Episodes recorded", lambda run, scan: scan.rollouts or None, format_number),
        ("Environment turns", total("env_turns"), format_number),
        ("Wall time", total("wall_s"), duration),
        ("End-to-end time (generator + teacher + learner)", lambda run, scan: _end_to_end(run), duration),
        ("Generator time", total("generator_s"), duration),
        ("Teacher time", total("teacher_s"), duration),
        ("Learner time", total("learner_s"), duration),
        ("Generator tokens", total("generator_tokens"), format_number),
        ("Teacher tokens", total("teacher_tokens"), format_number),
        ("Tokens trained", total("trained_tokens"), format_number),
        ("Tokens forwarded, prefixes merged", total("forwarded_tokens"), format_number),
        ("Tokens forwarded, one row per turn", total("forwarded_tokens_rows"), format_number),
        ("Effective rollouts a batch", mean("effective_rollouts"), format_number),
        ("Largest rollout's token share", mean("top1_share"), _percent),
        ("Turns per rollout in a batch", mean("turns_per_rollout"), format_number),
        ("KL per token", mean("kl_per_token"), format_number),
        ("Dead rows", lambda run, scan: share(run.sum("dead_rows"), run.sum("rows")), _percent),
        ("Valid rollouts never used", with_batches(lambda s: share(s.never_used, s.valid_rollouts)), _percent),
        ("Valid turns trained", with_batches(lambda s: share(s.trained_turns, s.valid_turns)), _percent),
        ("Gini of trained turns over rollouts", with_batches(lambda s: s.gini), format_number),
        ("Turns dropped as stale", lambda run, scan: run.sum("dropped_stale"), format_number),
        (
            "Teacher tokens scored per token trained",
            lambda run, scan: share(scan.scored_tokens or None, run.totals["trained_tokens"]),
            format_number,
        ),
        ("Learner waiting", waiting, _percent),
    ]  # fmt: skip


def _end_to_end(run: RunFigures) -> float | None:
    parts = [run.totals.get(name) for name in ("generator_s", "teacher_s", "learner_s")]
    return None if None in parts else sum(parts)


def figures_table(groups: Sequence[Group], scans: Scans, comparison: Comparison) -> str:
    """One line a figure, one column a method (mean over its seeds)."""
    lines: list[list[str]] = []

    def add(label: str, cells: Sequence[str]) -> None:
        if any(cell != "-" for cell in cells):
            lines.append([label, *cells])

    if len(groups) == 1 and len(groups[0].runs) == 1:
        run, result = groups[0].runs[0], comparison.results[0]
        add("Teacher, success", [_with_interval(run.teacher)])
        add("Student before, success", [_with_interval(run.initial)])
        add("Student after, success", [_with_interval(run.final)])
        add("Best evaluation", [_with_interval(run.best)])
        add("Mean of the last five", [_estimate(result.final)])
        add(f"Area under the curve to update {comparison.budget}", [_estimate(result.auc)])
    for label, of, text in _figures():
        cells = []
        for group, own in zip(groups, scans):
            values = [value for value in map(of, group.runs, own) if value is not None]
            cells.append(text(sum(values) / len(values)) if values else "-")
        add(label, cells)
    if len(groups) > 1:
        return _table(["", *map(_key, groups)], lines)
    head = ["", "Mean of the seeds" if len(groups[0].runs) > 1 else "Value"]
    # Two halves side by side: one column of values alone would be a long strip.
    half = -(-len(lines) // 2)
    return _table(head, lines[:half]) + _table(head, lines[half:])


def types_table(groups: Sequence[Group]) -> str:
    """Success by task type, before and after; empty when the evaluations do not tell types apart."""
    points = [
        point for g in groups for run in g.runs for point in (run.initial, run.final) if point is not None
    ]
    names = dict.fromkeys(name for point in points for name in point.per_type)
    lines = []
    for name in names:
        cells = [html.escape(name)]
        for group in groups:
            pair = []
            for which in ("initial", "final"):
                found = [getattr(run, which).per_type.get(name) for run in group.runs if getattr(run, which)]
                rates = [entry[0] for entry in found if entry]
                pair.append(_percent(sum(rates) / len(rates), 0) if rates else "-")
            cells += [f"{pair[0].removesuffix(' %')} \u2192 {pair[1]}"] if len(groups) > 1 else pair
        counts = [point.per_type[name][1] for point in points if name in point.per_type]
        lines.append([*cells, format_number(counts[-1]) if counts and counts[-1] else "-"])
    if not lines:
        return ""
    columns = list(map(_key, groups)) if len(groups) > 1 else ["Before", "After"]
    head = ["Task type, success before \u2192 after" if len(groups) > 1 else "Task type", *columns]
    return _table([*head, "Episodes"], lines)


def depth_table(groups: Sequence[Group], scans: Scans) -> str:
    """Share of valid turns that trained, by depth in the episode and its outcome."""
    lines = []
    for band in DEPTH_BANDS:
        cells, seen = [band], 0
        for own in scans:
            for outcome in (True, False):
                pairs = [scan.depth.get((band, outcome), (0, 0)) for scan in own]
                valid, trained = (sum(column) for column in zip(*pairs)) if pairs else (0, 0)
                seen += valid
                cells.append(_heat(trained, valid))
        if seen:
            lines.append(cells)
    if not lines or not any(run.run.batches for group in groups for run in group.runs):
        return ""
    head = ["Turn"]
    for group in groups:
        head += (
            [f"{_key(group)}, solved", "failed"]
            if len(groups) > 1
            else ["In solved episodes", "In failed episodes"]
        )
    return _table(head, lines).replace("<table>", '<table class="heat">')


def _heat(trained: int, valid: int) -> str:
    if not valid:
        return "-"
    share = trained / valid
    return (
        f'<span class="heat" style="--s:{100 * share:.0f}%"><b>{_percent(share, 0)}</b> '
        f'<span class="note">of {valid:,}</span></span>'
    )
