"""Write the figures of the study into docs/results.md, between the marks there, and its curves into docs/img.

    python examples/study/results.py runs/study --docs docs

Every number on the page comes from here; the words around them are written by hand. The raw metrics, settings and
batches of all runs go into docs/study/NAME.tar.xz, from which `divopd report` makes the report again.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from divopd_trainer.records import read_run
from divopd_trainer.replay import Variant, load_stream
from divopd_trainer.report import charts
from divopd_trainer.report.collect import RunFigures, collect, share
from divopd_trainer.report.compare import Comparison, Estimate, compare, cost_ratio, ratio_text
from divopd_trainer.report.groups import Group, group_runs
from divopd_trainer.stress import load_workload, simulate

sys.path.insert(0, str(Path(__file__).parent))
from pictures import draw  # noqa: E402

KEPT = ("metrics.jsonl", "config.yaml", "batches.jsonl.zst")
"""Files of a run that are kept with the page."""

COSTS = {
    "Tokens trained": charts.COSTS["tokens"][1],
    "Learner seconds": charts.COSTS["learner"][1],
    "Generator, teacher and learner seconds": charts.COSTS["end_to_end"][1],
}
TITLES = {
    "alfworld": "ALFWorld, generated houses",
    "scienceworld": "ScienceWorld, two lifespan tasks",
}


def runs_below(folder: Path) -> list[Path]:
    """Directories of finished runs, METHOD/seed-N, by method and seed."""
    return sorted(path.parent for path in folder.glob("*/seed-*/finished.json"))


def load(folder: Path, first: Sequence[str]) -> list[Group]:
    """The runs of one comparison by method, in the order of `first`, others behind."""
    paths = runs_below(folder)
    if not paths:
        raise SystemExit(
            f"{folder} holds no finished run (METHOD/seed-N/finished.json). Run the study first."
        )
    groups = group_runs([collect(read_run(path)) for path in paths], [path.parent.name for path in paths])
    order = {name: place for place, name in enumerate(first)}
    return sorted(groups, key=lambda group: (order.get(group.label, len(order)), group.label))


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A Markdown table; figures to the right."""
    rule = ["---", *["--:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, rule, *lines])


def rate(estimate: Estimate | None) -> str:
    """``64.2 [58-70]``, in percent."""
    if estimate is None:
        return "-"
    text = f"{100 * estimate.mean:.1f}"
    if estimate.interval is None:
        return text
    low, high = (100 * min(1.0, max(0.0, end)) for end in estimate.interval)
    return f"{text} [{low:.0f}-{high:.0f}]"


def success_table(comparison: Comparison) -> str:
    """Before, after, peak, final five, area under the curve."""
    lines = [
        [
            f"`{result.group.label}`",
            str(len(result.group.runs)),
            *map(rate, (result.before, result.after, result.peak, result.final, result.auc)),
        ]
        for result in comparison.results
    ]
    return table(
        ["method", "seeds", "before", "after", "peak", "final five", f"nAUC to {comparison.budget}"], lines
    )


def ratio_table(groups: Sequence[Group], baseline: str, targets: Sequence[float]) -> str:
    """cost(baseline) / cost(method) at every target."""
    base = next(group for group in groups if group.label == baseline)
    lines = []
    for group in groups:
        for target in targets:
            cells = []
            for of in COSTS.values():
                ratio = cost_ratio(_curves(base, of), _curves(group, of), target)
                cells.append("1" if group is base and ratio is not None else ratio_text(ratio))
            lines.append([f"`{group.label}`", f"{100 * target:.0f} %", *cells])
    return table(["method", "target", *COSTS], lines)


def _curves(group: Group, of: Callable) -> list[list[tuple[float, float]]]:
    return [[(of(point), point.rate) for point in run.evals] for run in group.runs]


def _last(run: RunFigures, name: str) -> float | None:
    values = run.points(name)
    return values[-1][1] if values else None


COMPOSITION: dict[str, tuple[Callable[[RunFigures], float | None], str]] = {
    "effective rollouts": (lambda run: run.mean("effective_rollouts"), "{:.1f}"),
    "largest rollout's token share": (lambda run: run.mean("top1_share"), "{:.2f}"),
    "turns a rollout": (lambda run: run.mean("turns_per_rollout"), "{:.1f}"),
    "mean depth": (lambda run: run.mean("depth_mean"), "{:.1f}"),
    "KL a token": (lambda run: run.mean("kl_per_token"), "{:.2f}"),
    "dead rows": (lambda run: share(run.sum("dead_rows"), run.sum("rows")), "{:.1%}"),
}
USE: dict[str, tuple[Callable[[RunFigures], float | None], str]] = {
    "rollouts never used": (
        lambda run: share(_last(run, "never_used"), _last(run, "valid_rollouts")),
        "{:.1%}",
    ),
    "environment turns a row": (lambda run: share(run.totals["env_turns"], run.sum("rows")), "{:.2f}"),
    "tokens forwarded an update": (lambda run: run.mean("forwarded_tokens"), "{:,.0f}"),
    "one row per turn": (lambda run: run.mean("forwarded_tokens_rows"), "{:,.0f}"),
    "teacher tokens read a token trained": (
        lambda run: share(run.sum("teacher_tokens"), run.sum("trained_tokens")),
        "{:.1f}",
    ),
    "generator s": (lambda run: run.sum("generator_s"), "{:.0f}"),
    "teacher s": (lambda run: run.sum("teacher_s"), "{:.0f}"),
    "learner s": (lambda run: run.sum("learner_work_s"), "{:.0f}"),
    "learner waiting": (
        lambda run: share(run.sum("wait_s"), (run.sum("wait_s") or 0) + (run.sum("learner_s") or 0)),
        "{:.0%}",
    ),
}


def figures_table(groups: Sequence[Group], figures: dict) -> str:
    """One line a method, means over its runs."""
    lines = []
    for group in groups:
        cells = []
        for of, text in figures.values():
            values = group.values(of)
            cells.append(text.format(statistics.fmean(values)) if values else "-")
        lines.append([f"`{group.label}`", *cells])
    return table(["method", *figures], lines)


STRESS = {
    "never used": ("never_used_share", "{:.1%}"),
    "Gini": ("gini", "{:.2f}"),
    "effective rollouts": ("effective_rollouts", "{:.1f}"),
    "stale turns": ("dropped_stale", "{:,.0f}"),
    "read a token trained": ("read_per_trained", "{:.1f}"),
    "the same, lazy": ("read_per_trained_lazy", "{:.1f}"),
    "forwarded an update": ("forwarded_per_update", "{:,.0f}"),
    "disagreement per 1,000": ("score_per_1000", "{:.1f}"),
}


def stress_table(run: Path, presets: Sequence[str], loads: Sequence[int]) -> str:
    """One recorded run at other producer loads, prefixes merged."""
    recorded = read_run(run)
    workload = load_workload(recorded, load_stream(recorded).settings)
    lines = []
    for load_ in loads:
        for preset in presets:
            found = simulate(workload, Variant.parse(preset), load_, cost_model="merged").figures
            cells = [text.format(found[key]) for key, text in STRESS.values()]
            lines.append([f"{load_}, `{preset}`", *cells])
    return table(["episodes in flight", *STRESS], lines)


def pack(folder: Path, out: Path) -> None:
    """The raw metrics of all runs, compressed; the same runs give the same names, without owners and times."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(out, "w:xz", preset=9) as archive:
        for path in runs_below(folder):
            for name in KEPT:
                if (path / name).exists():
                    entry = archive.gettarinfo(path / name, str((path / name).relative_to(folder.parent)))
                    entry.uid = entry.gid = entry.mtime = 0
                    entry.uname = entry.gname = ""
                    with (path / name).open("rb") as file:
                        archive.addfile(entry, file)


def reached(groups: Sequence[Group], baseline: str) -> list[float]:
    """The largest multiple of 5 % that every run of the baseline reaches, and the one below it."""
    target = compare(groups, baseline=baseline).target
    return [] if target is None else [round(target - 0.05, 2), target]


def fill(page: Path, parts: dict[str, str]) -> None:
    """Put every part between its marks ``<!-- NAME -->`` and ``<!-- end -->``."""
    text = page.read_text("utf-8")
    for name, content in parts.items():
        mark = re.compile(rf"(<!-- {re.escape(name)} -->\n).*?(<!-- end -->)", re.DOTALL)
        text, found = mark.subn(lambda match, c=content: f"{match[1]}\n{c}\n\n{match[2]}", text)
        if found != 1:
            raise SystemExit(f"{page} has {found} places for {name!r}; expected one, <!-- {name} -->.")
    page.write_text(text, "utf-8")


def check_archive(archive: Path) -> None:
    """The report can be made from what is kept."""
    with tempfile.TemporaryDirectory() as scratch:
        with tarfile.open(archive) as packed:
            packed.extractall(scratch, filter="data")
        runs = sorted(str(p.parent) for p in Path(scratch).rglob("metrics.jsonl"))
        command = [
            sys.executable,
            "-m",
            "divopd_trainer.cli",
            "report",
            *runs,
            "--out",
            f"{scratch}/page.html",
        ]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def main() -> None:
    """Parse the options and write everything."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, help="folder of the study's comparisons, such as runs/study")
    parser.add_argument("--docs", type=Path, default=Path("docs"), help="folder with results.md (docs)")
    args = parser.parse_args()
    order = ["vanilla-rows", "vanilla", "tcod-f2b", "turnopd", "divopd-base", "divopd", "divopd-cost"]
    parts = {}
    for folder in sorted(path for path in args.runs.iterdir() if runs_below(path)):
        name, groups = folder.name, load(folder, order)
        parts[f"{name} success"] = success_table(compare(groups, baseline="vanilla"))
        parts[f"{name} cost"] = ratio_table(groups, "vanilla", reached(groups, "vanilla"))
        if any(group.label == "vanilla-rows" for group in groups):
            parts[f"{name} rows"] = ratio_table(groups, "vanilla-rows", reached(groups, "vanilla-rows"))
        parts[f"{name} composition"] = figures_table(groups, COMPOSITION)
        parts[f"{name} use"] = figures_table(groups, USE)
        parts[f"{name} stress"] = stress_table(
            folder / "vanilla" / "seed-0", ["vanilla", "divopd-base", "divopd", "divopd-cost"], [2, 6, 16]
        )
        (args.docs / "img").mkdir(exist_ok=True)
        draw(groups, args.docs / "img" / f"study_{name}.png", TITLES.get(name, name))
        pack(folder, args.docs / "study" / f"{name}.tar.xz")
        check_archive(args.docs / "study" / f"{name}.tar.xz")
    fill(args.docs / "results.md", parts)


if __name__ == "__main__":
    main()
