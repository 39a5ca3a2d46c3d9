"""How busy generator, teacher and learner are in a short real `divopd train` on the tiny models, method by method.

    python benchmarks/idle.py [--methods vanilla divopd] [--updates 12] [--keep DIR]

Runs examples/tiny/divopd.yaml without evaluations and checkpoints and reads its metrics.jsonl. Prints one JSON object.
Everything is counted from the end of the first update to the end of the last: before that models are loaded and pools filled.
Shares are of that time by the clock. On a CPU with one thread each, generator_s, teacher_s and learner_work_s are CPU seconds
of the thread that computes, so what a share lacks to 1 is waiting, for work or for a core; wait_s and learner_s are by the clock.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from divopd_trainer.metrics_log import read_metrics

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "examples" / "tiny" / "divopd.yaml"


def summary(lines: list[dict]) -> dict:
    """Shares, seconds and rates of one run.

    Args:
        lines: Its metrics; two or more train lines.

    Raises:
        SystemExit: There are fewer.
    """
    train = [line for line in lines if line["kind"] == "train"]
    if len(train) < 2:
        raise SystemExit(f"The run has {len(train)} updates; two or more are needed. Raise --updates.")
    first, counted = train[0], train[1:]
    wall = counted[-1]["wall_s"] - first["wall_s"]

    def total(name: str) -> float:
        return sum(line.get(name) or 0 for line in counted)

    explorer = [line for line in lines if line["kind"] == "explorer"]
    produced = counted[-1]["env_turns"] - first["env_turns"]
    result = {"updates": len(counted), "wall_s": round(wall, 2)}
    for name in ("wait_s", "learner_s", "learner_work_s", "sync_s", "generator_s", "teacher_s"):
        result[name] = round(total(name), 2)
    for name in ("wait", "learner", "learner_work", "generator", "teacher"):
        result[f"{name}_share"] = round(total(f"{name}_s") / wall, 4)
    for name in ("trained_tokens", "forwarded_tokens", "generator_tokens", "teacher_tokens"):
        result[f"{name}_per_s"] = round(total(name) / wall, 1)
    result |= {
        "turns_arrived": produced,
        "turns_trained": int(total("rows")),
        "turns_trained_share": round(total("rows") / max(produced, 1), 4),
        "turns_stale": int(total("dropped_stale")),
        "first_update_s": round(first["wall_s"], 2),
    }
    if explorer:
        result["turns_played_in_all"] = explorer[-1]["turns"]
    return result


def run(method: str, updates: int, folder: Path) -> dict:
    """Train with one method; the summary of its records."""
    settings = {
        "method": method, "updates": updates, "run_dir": folder, "eval_every": 0, "eval_at_start": "false",
        "eval_at_end": "false", "save_every": 0, "lr_scheduler_type": "constant", "lr_scheduler_kwargs": "{}",
        "warmup_steps": 0, "progress": "plain",
    }  # fmt: skip
    words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "divopd_trainer.cli", "train", "--config", str(CONFIG), *words]
    # Standard output is for the one JSON object.
    code = subprocess.run(command, cwd=ROOT, stdout=sys.stderr).returncode
    if code:
        raise SystemExit(f"divopd train --method {method} ended with status {code}; its message is above.")
    return summary(read_metrics(folder))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--methods", nargs="+", default=["vanilla", "divopd"])
    parser.add_argument("--updates", type=int, default=12)
    parser.add_argument("--keep", type=Path, help="folder for the runs; default a temporary one")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        place = (args.keep or Path(folder)).resolve()
        methods = {method: run(method, args.updates, place / method) for method in args.methods}
    print(
        json.dumps({"benchmark": "idle", "config": "examples/tiny/divopd.yaml", "methods": methods}, indent=1)
    )


if __name__ == "__main__":
    main()
