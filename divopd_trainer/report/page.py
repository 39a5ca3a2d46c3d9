"""The report's page: headline, curves, tables and the episode view, in one HTML file without outside requests."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from ..records import read_run
from .collect import Chart, RunFigures, Series, charts_of, collect
from .episodes import RolloutScan, scan_rollouts
from .svg import format_number, line_chart
from .tables import depth_table, final_table, headline, types_table

__all__ = ["ReportFiles", "render", "write_report"]


@dataclass
class ReportFiles:
    """What `write_report` wrote.

    Attributes:
        html: The page.
        pngs: Curves; empty without matplotlib.
        notices: What could not be read or drawn, one sentence each.
    """

    html: Path
    pngs: list[Path] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)


def write_report(
    run_dirs: Sequence[str | Path],
    out: str | Path | None = None,
    *,
    png: bool = True,
    episodes: int = 60,
    labels: Sequence[str] | None = None,
    teacher: dict[str, Any] | None = None,
) -> ReportFiles:
    """Write the report of one or several runs.

    Args:
        run_dirs: Run directories; several are compared in the same charts.
        out: The HTML file; defaults to report.html in the first run. PNG curves go to a folder beside it.
        png: Whether to draw PNG curves (needs matplotlib).
        episodes: Episodes of each run that the page carries, evenly spread over the run.
        labels: Names of the runs; defaults to their directories' names.
        teacher: An evaluation of the teacher made elsewhere (the JSON of ``divopd eval``).

    Raises:
        RecordError: A directory is no run.
    """
    paths = [Path(path) for path in run_dirs]
    names = list(labels or _names(paths))
    runs = [collect(read_run(path), name, teacher) for path, name in zip(paths, names)]
    scans = [scan_rollouts(figures.run, max(2, episodes // len(runs))) for figures in runs]
    charts = charts_of(runs)
    _add_exploring(charts, runs, scans)
    target = Path(out) if out is not None else paths[0] / "report.html"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(render(runs, scans, charts), encoding="utf-8")
    files = ReportFiles(target, notices=[notice for figures in runs for notice in figures.run.notices])
    if png:
        try:
            from .figures import write_pngs
        except ImportError:
            files.notices.append(
                "No PNG curves: matplotlib is not installed; `pip install 'divopd[report]'`."
            )
        else:
            files.pngs = write_pngs(charts, target.with_name(f"{target.stem}_curves"))
    return files


def _names(paths: Sequence[Path]) -> list[str]:
    """Directory names; with the parent's name before them where two are the same."""
    names = [path.resolve().name for path in paths]
    if len(set(names)) < len(names):
        names = [f"{path.resolve().parent.name}/{path.resolve().name}" for path in paths]
    return names


def _add_exploring(charts: list[Chart], runs: Sequence[RunFigures], scans: Sequence[RolloutScan]) -> None:
    """Success of training episodes, from the rollouts, where the metrics did not carry it."""
    if any(chart.key == "explore" for chart in charts):
        return
    series = []
    for number, (figures, scan) in enumerate(zip(runs, scans)):
        points = scan.success_curve()
        if len(points) > 1:
            label = figures.label if len(runs) > 1 else "exploring"
            series.append(Series(label, [x for x, _ in points], [y for _, y in points], run=number))
    if series:
        place = next((i for i, chart in enumerate(charts) if chart.group != "Success"), len(charts))
        note = "training episodes, at the sampling temperature"
        charts.insert(
            place,
            Chart("explore", "Success while exploring", "policy version", "share", series, note, "Learning"),
        )


def render(runs: Sequence[RunFigures], scans: Sequence[RolloutScan], charts: Sequence[Chart]) -> str:
    """The page as text."""
    sections = [headline(runs, scans)]
    for group in dict.fromkeys(chart.group for chart in charts):
        figures = "".join(line_chart(chart) for chart in charts if chart.group == group)
        sections.append(
            f'<section><h2>{html.escape(group)}</h2><div class="charts">{figures}</div></section>'
        )
    sections.append(
        f'<section><h2>Results</h2><div class="tables">{final_table(runs, scans)}{types_table(runs)}</div></section>'
    )
    depth = depth_table(runs, scans)
    if depth:
        sections.append(f"<section><h2>Which turns trained</h2>{depth}</section>")
    sections.append(_episode_section(runs, scans))
    title = " · ".join(figures.label for figures in runs)
    page = _asset("report.html")
    for mark, text in (
        ("{{title}}", html.escape(title)),
        ("{{facts}}", _facts(runs)),
        ("{{style}}", _asset("report.css")),
        ("{{script}}", _asset("report.js")),
        ("{{body}}", "\n".join(sections)),
    ):
        page = page.replace(mark, text)
    return page


def _facts(runs: Sequence[RunFigures]) -> str:
    items = []
    for number, figures in enumerate(runs):
        config = figures.run.config
        shown = [
            f"<b>{html.escape(str(config[name]))}</b>"
            if name == "method"
            else html.escape(f"{label}{config[name]}")
            for name, label in (
                ("method", ""),
                ("env_id", ""),
                ("model", "student "),
                ("teacher", "teacher "),
            )
            if config.get(name)
        ]
        key = f'<i class="key c{number % 6}"></i>{html.escape(figures.label)}: ' if len(runs) > 1 else ""
        if shown:
            items.append(f"<div>{key}{' · '.join(shown)}</div>")
    return "".join(items)


def _episode_section(runs: Sequence[RunFigures], scans: Sequence[RolloutScan]) -> str:
    data = [
        {"run": figures.label, "rollouts": scan.rollouts, "episodes": scan.episodes}
        for figures, scan in zip(runs, scans)
        if scan.episodes
    ]
    if not data:
        return ""
    # "<" is escaped so that no recorded text can end the script element.
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    shown = sum(len(scan.episodes) for scan in scans)
    total = sum(scan.rollouts for scan in scans)
    return (
        f'<section id="episodes"><h2>Episodes</h2><p class="note">{shown} of {format_number(total)} recorded '
        "episodes, evenly spread over the run. Colour: how far student and teacher disagree on a turn, in nats per "
        "token (orange: the student is surer than the teacher; blue: less sure). A mark under a cell: the turn was "
        'trained.</p><div class="browser"><div class="list"></div><div class="detail"></div></div>'
        f'<script type="application/json" id="episode-data">{text}</script></section>'
    )


def _asset(name: str) -> str:
    return (resources.files(__package__) / "assets" / name).read_text("utf-8")
