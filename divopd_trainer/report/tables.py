"""The report's headline and tables, as HTML."""

from __future__ import annotations

import html
from collections.abc import Sequence

from .collect import EvalPoint, RunFigures
from .episodes import RolloutScan
from .svg import format_number

__all__ = ["depth_table", "duration", "final_table", "headline", "types_table"]


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


def headline(runs: Sequence[RunFigures], scans: Sequence[RolloutScan]) -> str:
    """One run: cards. Several: a line a run."""
    if len(runs) > 1:
        return f'<section class="compared">{_compared(runs)}</section>'
    (figures,), totals = runs, runs[0].totals
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
    cards.append(_card("Updates", f"{totals['updates']:,.0f}", f"{scans[0].rollouts:,} episodes recorded"))
    cards.append(_card("Tokens trained", format_number(tokens), note))
    cards.append(_card("Time", duration(totals["wall_s"]), f"{totals['env_turns']:,.0f} environment turns"))
    return f'<section class="cards">{"".join(cards)}</section>'


def _compared(runs: Sequence[RunFigures]) -> str:
    lines = []
    for number, figures in enumerate(runs):
        key = f'<i class="key c{number % 6}"></i>'
        cells = [
            f"{key}{html.escape(figures.label)}",
            _with_interval(figures.initial),
            f"<b>{_with_interval(figures.final)}</b>",
            _with_interval(figures.best),
            f"{figures.totals['updates']:,.0f}",
            format_number(figures.totals["trained_tokens"]),
            duration(figures.totals["wall_s"]),
        ]
        lines.append(cells)
    head = ["Run", "Before", "After", "Best", "Updates", "Tokens trained", "Time"]
    teacher = next((figures.teacher for figures in runs if figures.teacher is not None), None)
    note = "" if teacher is None else f'<p class="note">Teacher: {_with_interval(teacher)}</p>'
    return _table(head, lines) + note


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{html.escape(text)}</th>" for text in head)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>" for cells in lines)
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _mean(figures: RunFigures, name: str) -> float | None:
    values = [line[name] for line in figures.train if line.get(name) is not None]
    return sum(values) / len(values) if values else None


def _sum(figures: RunFigures, name: str) -> float | None:
    values = [line[name] for line in figures.train if line.get(name) is not None]
    return sum(values) if values else None


def final_table(runs: Sequence[RunFigures], scans: Sequence[RolloutScan]) -> str:
    """One line a figure, one column a run."""

    def number(value: float | None) -> str:
        return "-" if value is None else format_number(value)

    lines: list[list[str]] = []
    pairs = list(zip(runs, scans))

    def add(label: str, cells: Sequence[str]) -> None:
        if any(cell != "-" for cell in cells):
            lines.append([label, *cells])

    add("Teacher, success", [_with_interval(f.teacher) for f in runs])
    add("Student before, success", [_with_interval(f.initial) for f in runs])
    add("Student after, success", [_with_interval(f.final) for f in runs])
    add("Best evaluation", [_with_interval(f.best) for f in runs])
    last = [[point.rate for point in f.evals[-5:]] for f in runs]
    add("Mean of the last five", [_percent(sum(r) / len(r)) if len(r) == 5 else "-" for r in last])
    add("Done rate after", [_percent(f.final.done_rate) if f.final else "-" for f in runs])
    finals = [f.final for f in runs]
    add("Mean score after", [number(p.score) if p else "-" for p in finals])
    add("Updates", [f"{f.totals['updates']:,.0f}" for f in runs])
    add("Episodes recorded", [f"{s.rollouts:,}" if s.rollouts else "-" for s in scans])
    add("Environment turns", [f"{f.totals['env_turns']:,.0f}" for f in runs])
    add("Tokens trained", [number(f.totals["trained_tokens"] or None) for f in runs])
    add("Tokens forwarded, prefixes merged", [number(f.totals["forwarded_tokens"] or None) for f in runs])
    add(
        "Tokens forwarded, one row per turn",
        [number(f.totals["forwarded_tokens_rows"] or None) for f in runs],
    )
    add("Wall time", [duration(f.totals["wall_s"]) for f in runs])
    add("Effective rollouts a batch", [number(_mean(f, "effective_rollouts")) for f in runs])
    add("Largest rollout's token share", [_percent(_mean(f, "top1_share")) for f in runs])
    used = [
        _percent(s.never_used / s.valid_rollouts) if s.valid_rollouts and f.run.batches else "-"
        for f, s in pairs
    ]
    add("Valid rollouts never used", used)
    used = [
        _percent(s.trained_turns / s.valid_turns) if s.valid_turns and f.run.batches else "-"
        for f, s in pairs
    ]
    add("Valid turns trained", used)
    dead = [(_sum(f, "dead_rows"), _sum(f, "rows")) for f in runs]
    add("Dead rows", [_percent(d / n) if d is not None and n else "-" for d, n in dead])
    add("Turns dropped as stale", [number(_sum(f, "dropped_stale")) for f in runs])
    waits = [(_sum(f, "wait_s"), _sum(f, "learner_s")) for f in runs]
    add("Learner waiting", [_percent(w / (w + u)) if w is not None and u else "-" for w, u in waits])
    head = ["", *(f.label for f in runs)] if len(runs) > 1 else ["", "Value"]
    return _table(head, lines)


def types_table(runs: Sequence[RunFigures]) -> str:
    """Success by task type, before and after; empty when the evaluations do not tell types apart."""
    names = dict.fromkeys(
        name for f in runs for point in (f.initial, f.final) if point is not None for name in point.per_type
    )
    lines = []
    for name in names:
        cells, count = [html.escape(name)], None
        for figures in runs:
            before, after = (
                point.per_type.get(name) if point is not None else None
                for point in (figures.initial, figures.final)
            )
            count = next((pair[1] for pair in (after, before) if pair and pair[1]), count)
            cells += [_percent(before[0], 0) if before else "-", _percent(after[0], 0) if after else "-"]
        lines.append([*cells, str(count) if count else "-"])
    if not lines:
        return ""
    head = ["Task type"]
    for figures in runs:
        prefix = f"{figures.label}, " if len(runs) > 1 else ""
        head += [f"{prefix}before", "after"]
    return _table([*head, "Episodes"], lines)


def depth_table(runs: Sequence[RunFigures], scans: Sequence[RolloutScan]) -> str:
    """Share of valid turns that trained, by depth in the episode and its outcome."""
    lines = []
    for number, (figures, scan) in enumerate(zip(runs, scans)):
        if not figures.run.batches:
            continue
        bands = sorted({band for band, _ in scan.depth}, key=lambda band: int(band.split("-")[0].rstrip("+")))
        for band in bands:
            cells = [band]
            for outcome in (True, False):
                valid, trained = scan.depth.get((band, outcome), (0, 0))
                share = _percent(trained / valid, 0) if valid else "-"
                cells.append(f'{share} <span class="note">of {valid:,}</span>' if valid else "-")
            if len(runs) > 1:
                cells.insert(0, f'<i class="key c{number % 6}"></i>{html.escape(figures.label)}')
            lines.append(cells)
    if not lines:
        return ""
    head = ["Turn", "In successful episodes", "In failed episodes"]
    return _table(["Run", *head] if len(runs) > 1 else head, lines)
