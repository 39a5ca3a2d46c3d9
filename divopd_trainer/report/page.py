"""The report's page: headline, curves, tables and the episode view, in one HTML file without outside requests.

A run may come from anybody: recorded texts are escaped, and the page's own policy allows no script but the page's.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from ..records import read_run
from .charts import GROUPS, Chart, charts_of
from .collect import collect
from .compare import Comparison, compare
from .curve_files import write_curves, write_summary
from .episode_data import GAP_UNIT, EpisodeStore
from .episodes import RolloutScan, scan_rollouts
from .groups import Group, group_runs
from .svg import colour_class, figure
from .tables import cost_table, depth_table, figures_table, headline, methods_table, runs_table, types_table
from .vocabulary import find_vocabulary

__all__ = ["ReportFiles", "render", "write_report"]

EPISODE_BYTES = 12 << 20
"""Packed episode texts of a page, all runs together."""
EPISODES_LISTED = 24_000


@dataclass
class ReportFiles:
    """What `write_report` wrote; stands for the path of the page where a path is wanted.

    Attributes:
        html: The page.
        pngs: Curves; empty without matplotlib.
        curves: SVG and CSV of every curve, and summary.csv.
        notices: What could not be read or drawn, one sentence each.
    """

    html: Path
    pngs: list[Path] = field(default_factory=list)
    curves: list[Path] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)

    def __fspath__(self) -> str:
        return os.fspath(self.html)


def write_report(
    run_dirs: Sequence[str | Path],
    out: str | Path | None = None,
    *,
    title: str | None = None,
    png: bool = True,
    curves: bool = True,
    episodes: int | None = None,
    labels: Sequence[str] | None = None,
    teacher: dict[str, Any] | None = None,
    baseline: str | None = None,
    target: float | None = None,
) -> ReportFiles:
    """Write the report of one or several runs.

    Args:
        run_dirs: Run directories; runs that differ only in their seed are one method, and methods are compared.
        out: The HTML file, or a directory for report.html; defaults to report.html in the first run. Curves go to
            a folder beside the page.
        title: Heading of the page; defaults to the names of the methods, or of the one run.
        png: Whether to draw PNG curves (needs matplotlib).
        curves: Whether to write SVG and CSV of every curve.
        episodes: Episodes whose text the page carries at most, all runs together, evenly spread over each run;
            None: as many as keep the page small.
        labels: A name a run; runs of one name are one method. Defaults to the runs' configuration.
        teacher: An evaluation of the teacher made elsewhere (the JSON of ``divopd eval``).
        baseline: Method that costs are compared with; defaults to ``vanilla``, else the first.
        target: Success rate that costs are compared at; see `compare.compare`.

    Raises:
        RecordError: A directory is no run.
    """
    paths, places = [], set()
    notices = []
    for path in map(Path, run_dirs):
        if path.resolve() in places:
            notices.append(f"{path} was given twice; it counts once.")
            labels = labels and [*labels[: len(paths)], *labels[len(paths) + 1 :]]
            continue
        places.add(path.resolve())
        paths.append(path)
    runs = [collect(read_run(path), name, teacher) for path, name in zip(paths, _names(paths))]
    groups = group_runs(runs, labels)
    most = None if episodes is None else max(1, episodes // len(runs))
    limits = (EPISODE_BYTES // len(runs), most, max(100, EPISODES_LISTED // len(runs)))
    scans = [
        [scan_rollouts(run.run, EpisodeStore(*limits, find_vocabulary(run.run))) for run in group.runs]
        for group in groups
    ]
    charts = charts_of(groups, scans)
    comparison = compare(groups, baseline=baseline, target=target)
    page = _target(out, paths[0])
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(render(groups, scans, charts, comparison, title), encoding="utf-8", errors="replace")
    files = ReportFiles(page, notices=notices + [notice for run in runs for notice in run.run.notices])
    folder = page.with_name(f"{page.stem}_curves")
    if curves:
        files.curves = write_curves(charts, folder)
        if charts:
            files.curves.append(write_summary(comparison, folder / "summary.csv"))
    if png:
        try:
            from .figures import write_pngs
        except ImportError:
            files.notices.append(
                "No PNG curves: matplotlib is not installed; `pip install 'divopd[report]'`."
            )
        else:
            files.pngs = write_pngs(charts, folder)
    return files


def _target(out: str | Path | None, first: Path) -> Path:
    if out is None:
        return first / "report.html"
    out = Path(out)
    return out if out.suffix.lower() in (".html", ".htm") else out / "report.html"


def _names(paths: Sequence[Path]) -> list[str]:
    """Directory names; with the parent's name before them where two are the same."""
    names = [path.resolve().name for path in paths]
    if len(set(names)) < len(names):
        names = [f"{path.resolve().parent.name}/{path.resolve().name}" for path in paths]
    return names


def render(
    groups: Sequence[Group],
    scans: Sequence[Sequence[RolloutScan]],
    charts: Sequence[Chart],
    comparison: Comparison,
    title: str | None = None,
) -> str:
    """The page as text.

    Args:
        groups: Methods.
        scans: For each group one scan a run.
        charts: From `charts.charts_of`.
        comparison: From `compare.compare`.
        title: Heading.
    """
    many, single = len(groups) > 1, len(groups) == 1 and len(groups[0].runs) == 1
    if title is None:
        title = groups[0].runs[0].label if single else _title(groups)
    sections = []
    if single:
        sections.append(headline(groups[0].runs[0], scans[0][0]))
    else:
        cost = cost_table(comparison)
        body = f"<div>{methods_table(comparison)}</div>" + (
            f"<h2>Cost to the target</h2>{cost}" if cost else ""
        )
        sections.append(f'<section id="methods" class="compared">{body}{runs_table(groups)}</section>')
    for heading in GROUPS:
        drawn = "".join(
            figure(chart, legend=not many or chart.kind == "stack")
            for chart in charts
            if chart.group == heading
        )
        if drawn:
            sections.append(_section(heading, f'<div class="charts">{drawn}</div>'))
    tables = figures_table(groups, scans, comparison) + types_table(groups)
    sections.append(_section("Results" if single else "Figures", f'<div class="tables">{tables}</div>'))
    depth = depth_table(groups, scans)
    if depth:
        note = (
            '<p class="note">Share of valid turns that were trained, by number of the turn and outcome.</p>'
        )
        sections.append(_section("Which turns trained", note + depth))
    episodes = _episode_section(groups, scans)
    sections.append(episodes)
    script = _asset("charts.js") + _asset("episodes.js")
    digest = base64.b64encode(hashlib.sha256(f"\n{script}\n".encode()).digest()).decode()
    values = {
        "hash": digest,
        "kind": "many crowded" if len(groups) > 3 else "many" if many else "one",
        "style": _asset("report.css"),
        "script": script,
        "title": html.escape(title),
        "facts": _facts(groups),
        "nav": _nav(groups, charts, bool(depth), bool(episodes), single),
        "body": "\n".join(sections),
    }
    # One pass: a mark inside a recorded text stays what it is.
    return re.sub(r"\{\{(\w+)\}\}", lambda mark: values[mark[1]], _asset("report.html"))


def _title(groups: Sequence[Group]) -> str:
    count = sum(len(group.runs) for group in groups)
    names = " · ".join(group.label for group in groups) if len(groups) <= 3 else f"{len(groups)} methods"
    return f"{names}, {count} runs" if count > len(groups) else names


def _anchor(heading: str) -> str:
    return heading.lower().replace(" ", "-")


def _section(heading: str, body: str) -> str:
    return f'<section id="{_anchor(heading)}"><h2>{html.escape(heading)}</h2>{body}</section>'


def _nav(groups: Sequence[Group], charts: Sequence[Chart], depth: bool, episodes: bool, single: bool) -> str:
    """Links to the sections, and for several methods the legend that switches them on and off."""
    names = [] if single else ["Methods"]
    names += [name for name in GROUPS if any(chart.group == name for chart in charts)]
    names.append("Results" if single else "Figures")
    names += ["Which turns trained"] if depth else []
    names += ["Episodes"] if episodes else []
    links = "".join(f'<a href="#{_anchor(name)}">{name}</a>' for name in names)
    chips = "".join(
        f'<button type="button" class="chip" aria-pressed="true" data-group="{group.number}">'
        f'<i class="key {colour_class(group.number)}"></i>{html.escape(group.label)}</button>'
        for group in groups
    )
    return f"<nav>{links}</nav>" + (f'<div class="chips">{chips}</div>' if len(groups) > 1 else "")


def _facts(groups: Sequence[Group]) -> str:
    """What all groups have in common, on one line."""
    configs = [group.runs[0].config for group in groups]
    shown = []
    fields = (
        ("method", ""),
        ("env_id", ""),
        ("model", "student "),
        ("teacher", "teacher "),
        ("seed", "seed "),
    )
    for name, label in fields:
        values = {str(config.get(name)) for config in configs if config.get(name) is not None}
        if len(values) != 1 or (name == "seed" and len(groups[0].runs) > 1):
            continue
        text = html.escape(f"{label}{values.pop()}")
        shown.append(f"<b>{text}</b>" if name == "method" else text)
    return " · ".join(shown)


def _episode_section(groups: Sequence[Group], scans: Sequence[Sequence[RolloutScan]]) -> str:
    runs, blocks, listed, full, total = [], [], 0, 0, 0
    many = sum(len(group.runs) for group in groups) > 1
    for group, own in zip(groups, scans):
        for run, seed, scan in zip(group.runs, group.seeds, own):
            episodes = scan.store.episodes
            if not episodes:
                continue
            number = len(runs)
            name = f"{group.label}, seed {seed}" if many and seed != "?" else run.label
            runs.append({"run": name, "rollouts": scan.rollouts})
            # Base64 holds no "<", so these need no escaping.
            blocks.append(
                f'<script type="text/plain" id="index-{number}">{scan.store.packed_index()}</script>'
            )
            texts = "\n".join(scan.store.texts)
            blocks.append(f'<script type="text/plain" id="texts-{number}">{texts}</script>')
            listed, full, total = listed + len(episodes), full + len(scan.store.texts), total + scan.rollouts
    if not runs:
        return ""
    # "<" is escaped so that no recorded text can end the script element.
    data = json.dumps({"runs": runs, "unit": GAP_UNIT}, separators=(",", ":")).replace("<", "\\u003c")
    shown = f"All {listed:,}" if listed == total else f"{listed:,} of {total:,}"
    texts = "" if full == listed else f", {full:,} of them with their texts, evenly spread over the run"
    note = (
        f"{shown} recorded episodes{texts}. Colour: how far student and teacher disagree, in nats per token "
        "(orange: the student is surer than the teacher; blue: less sure). A mark under a cell: the turn was trained; "
        "hatched: somebody else than the student acted. Click a turn for its tokens."
    )
    return _section(
        "Episodes",
        f'<p class="note">{note}</p><div class="browser"><div class="list"></div><div class="detail"></div></div>'
        f'<script type="application/json" id="episode-data">{data}</script>{"".join(blocks)}',
    )


def _asset(name: str) -> str:
    return (resources.files(__package__) / "assets" / name).read_text("utf-8")
