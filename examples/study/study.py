"""The study of docs/results.md: makes the models that are missing, runs what is not done yet, writes the figures.

    python examples/study/study.py --jobs 2

Every part is a plain `divopd` command, printed before it runs. What is done is not done again, so the same command
goes on after an interruption.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = "examples/study"
MODELS = Path("runs/study-models")
ROWS, TCOD = f"{HERE}/vanilla-rows.yaml", f"{HERE}/tcod-f2b.yaml"
EIGHT = f"vanilla,divopd,{ROWS},divopd-cost,divopd-base,divopd-r,turnopd,{TCOD},divopd-turnopd"
COMPARISONS = [
    ("alfworld", EIGHT, "3"),
    ("alfworld", "vanilla,divopd", "3,4"),
    ("scienceworld", "vanilla,divopd,divopd-cost", "3"),
]
"""(settings, methods, seeds)."""

ENV = "divopd_gym/ScienceWorld-v0"
TASKS = '{"task_types": ["lifespan-longest-lived", "lifespan-shortest-lived"], "simplification": "easy", "split": "train"}'
SHAPE = "tiny:layers=2,width=160,heads=5,mlp=448,positions=2048"


def divopd(*words: str) -> None:
    """Run one command and pass its failure on."""
    print(f"\n$ divopd {shlex.join(words)}", flush=True)
    code = subprocess.run([sys.executable, "-m", "divopd_trainer.cli", *words], cwd=ROOT).returncode
    if code:
        raise SystemExit(code)


def once(target: Path, *words: str) -> None:
    """Run a command that makes `target`, unless it is there."""
    if not target.exists():
        divopd(*words, "--out", str(target))


def scienceworld_models(folder: Path) -> None:
    """A teacher that knows the tasks, and a student that knows them too and plays like a half random player."""
    expert, noisy = folder / "expert.jsonl.zst", folder / "noisy.jsonl.zst"
    record = ["expert", "--env_id", ENV, "--env_kwargs", TASKS, "--max_turns", "12", "--workers", "1"]
    train = [
        "sft",
        "--env_id",
        ENV,
        "--max_tokens",
        "2048",
        "--observation_weight",
        "0.1",
        "--dtype",
        "float32",
    ]
    once(expert, *record, "--noise", "0.1", "0.3", "--episodes", "400", "--repeats", "6")
    once(
        folder / "teacher",
        *train,
        "--model",
        SHAPE,
        "--episodes",
        str(expert),
        "--updates",
        "250",
        "--matrix_lr",
        "0.02",
    )
    once(noisy, *record, "--noise", "0.5", "--clean", "0", "--episodes", "200", "--seed", "7")
    once(
        folder / "student", *train, "--model", str(folder / "teacher"), "--episodes", str(noisy), "--follow", "executed",
        "--updates", "40", "--lr", "1e-3", "--matrix_lr", "0.01", "--warmup", "5",
    )  # fmt: skip


def main() -> None:
    """Parse the options and run the parts one after another."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", default="runs/study", help="where the runs go, from the project's root (runs/study)"
    )
    parser.add_argument("--jobs", default="1", help="runs at once (1)")
    parser.add_argument("--only", choices=["alfworld", "scienceworld"], help="one of the two benchmarks")
    parser.add_argument(
        "--docs", help="folder whose results.md gets the figures; none: only the reports are written"
    )
    options = parser.parse_args()
    os.chdir(ROOT)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    MODELS.mkdir(parents=True, exist_ok=True)
    for name, methods, seeds in COMPARISONS:
        if options.only not in (None, name):
            continue
        if name == "scienceworld":
            scienceworld_models(MODELS)
        config, out = f"{HERE}/{name}.yaml", f"{options.out}/{name}"
        words = ["compare", "--config", config, "--out", out, "--methods", methods, "--seeds", seeds]
        divopd(*words, "--jobs", options.jobs, "--progress", "plain")
    for name in sorted({name for name, *_ in COMPARISONS if options.only in (None, name)}):
        # The comparisons' own reports know their own runs alone.
        runs = sorted(str(done.parent) for done in Path(options.out, name).glob("*/seed-*/finished.json"))
        divopd("report", *runs, "--out", f"{options.out}/{name}/report.html")
    if options.docs:
        command = [sys.executable, f"{HERE}/results.py", options.out, "--docs", options.docs]
        raise SystemExit(subprocess.run(command).returncode)


if __name__ == "__main__":
    main()
