"""The demo: evaluate the teacher, distil the student, and show what happened in a table and a report.

Every part is a plain `divopd` command, printed before it runs, so that each can be repeated by hand.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CONFIG = "examples/tiny/divopd.yaml"


def free_run_dir(wanted: Path) -> Path:
    """The directory asked for, or the next number if a run is already there."""
    candidate, number = wanted, 1
    while candidate.exists() and any(candidate.iterdir()):
        number += 1
        candidate = wanted.with_name(f"{wanted.name}-{number}")
    return candidate


def divopd(*arguments: str) -> None:
    """Run one command and pass its failure on."""
    print(f"\n$ divopd {shlex.join(arguments)}", flush=True)
    code = subprocess.run([sys.executable, "-m", "divopd_trainer.cli", *arguments], cwd=ROOT).returncode
    if code:
        raise SystemExit(code)


def evaluations(run_dir: Path) -> list[dict]:
    """The run's evaluation lines, in order of policy version."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text("utf-8").splitlines()]
    return sorted((line for line in lines if line["kind"] == "eval"), key=lambda line: line["policy_version"])


def show(run_dir: Path, teacher: dict, seconds: float) -> None:
    """Print the result table."""
    from rich.console import Console
    from rich.table import Table

    points = evaluations(run_dir)
    table = Table(title="Strict success on held-out generated houses", title_justify="left")
    for name in ("who", "success", "95 %", "turns", "houses"):
        table.add_column(name, justify="left" if name == "who" else "right")
    rows = [("teacher", teacher), ("student before", points[0])]
    rows.append((f"student after {points[-1]['policy_version']} updates", points[-1]))
    for name, line in rows:
        interval = f"{100 * line['success_low']:.0f}-{100 * line['success_high']:.0f}"
        table.add_row(
            name, f"{line['success_rate']:.1%}", interval, f"{line['turns']:.1f}", str(line["episodes"])
        )
    console = Console()
    console.print(table)
    gain = 100 * (points[-1]["success_rate"] - points[0]["success_rate"])
    console.print(f"The student gained {gain:+.1f} points. The demo took {seconds / 60:.1f} minutes.")
    console.print(f"Report: {run_dir / 'report.html'} (opens offline; curves as PNG beside it)")


def main() -> None:
    """Parse the options and run the parts one after another."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--run_dir",
        type=Path,
        default=Path("runs/demo"),
        help="where the run goes, from the project's root (runs/demo)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of exploration and training (0)")
    parser.add_argument(
        "overrides", nargs="*", metavar="--NAME VALUE", help="more options of `divopd train`, after --"
    )
    options = parser.parse_args()
    began = time.monotonic()
    os.chdir(ROOT)
    run_dir = free_run_dir(options.run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    teacher_file = run_dir / "teacher_eval.json"
    config = ["--config", CONFIG]
    divopd("eval", *config, "--policy", "teacher", "--workers", "8", "--out", str(teacher_file))
    divopd("train", *config, "--run_dir", str(run_dir), "--seed", str(options.seed), *options.overrides)
    show(run_dir, json.loads(teacher_file.read_text("utf-8")), time.monotonic() - began)


if __name__ == "__main__":
    main()
