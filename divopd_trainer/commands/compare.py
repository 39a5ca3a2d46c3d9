"""`divopd compare`: several methods over several seeds, and the report that compares them."""

from __future__ import annotations

import argparse
import shlex
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from divopd_gym.errors import ConfigError

from ..cli_options import named_file, read_yaml

__all__ = ["main"]

_TINY = "examples/tiny/divopd.yaml"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="divopd compare",
        usage="divopd compare [FILE.yaml] [options] [--NAME VALUE ...]",
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        description="Run several methods with several seeds, one run after another or --jobs at once, and write a report that compares "
        "them. Runs that are done are not repeated and interrupted ones go on, so the same command resumes. Every other "
        "option goes to `divopd train` (see its help): --updates 40 --learning_rate 1e-4 ...",
    )
    parser.add_argument(
        "--methods",
        default="vanilla,divopd",
        metavar="A,B,..",
        help="presets (`divopd methods` lists them) or preset files",
    )
    parser.add_argument(
        "--seeds", default="3", metavar="N|A,B,..", help="how many seeds from 0, or which ones"
    )
    parser.add_argument(
        "--config",
        metavar="FILE.yaml",
        help=f"settings that all runs share, or the first word; {_TINY} where there is one",
        default=argparse.SUPPRESS,
    )
    parser.add_argument("--out", default="runs/compare", metavar="DIR", help="where runs and report go")
    parser.add_argument(
        "--timeout_s", type=float, metavar="S", help="seconds a run may take; none: no limit", default=None
    )
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="runs at once; more disturb each other's times"
    )
    parser.add_argument(
        "--baseline",
        metavar="METHOD",
        help="method that costs are compared with; none: vanilla",
        default=None,
    )
    parser.add_argument("--dry_run", action="store_true", help="print the commands and start nothing")
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the command."""
    from ..comparison import Plan, run_all
    from ..config_files import parse_config

    args, settings = _parser().parse_known_args(named_file(argv))
    config = getattr(args, "config", None) or _default_config()
    settings = ["--config", config, *settings]
    methods = [name.strip() for name in args.methods.split(",") if name.strip()]
    seeds = _seeds(args.seeds)
    if not methods:
        raise ConfigError("--methods is empty; expected names of presets, separated by commas.")
    if args.jobs < 1:
        raise ConfigError(f"--jobs is {args.jobs}; expected 1 or more.")
    out = Path(args.out)
    plan = Plan.of(out, methods, seeds, settings)
    read_yaml(config)
    for run in plan.runs:
        # What cannot work is refused before the first run, not after the ninth.
        parse_config([*settings, *run.command()])
    if args.dry_run:
        for run in plan.runs:
            print(shlex.join(["divopd", "train", *settings, *run.command()]))
        return 0
    # A script's background ignores Ctrl-C, and SIGTERM would not let the run in progress write its checkpoint.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    began = time.monotonic()
    failures = run_all(
        plan, note=lambda line: print(line, flush=True), timeout_s=args.timeout_s, jobs=args.jobs
    )
    done = [run for run in plan.runs if run.done]
    if done:
        _report(plan, done, args.baseline)
    print(f"{len(done)} of {len(plan.runs)} runs done in {(time.monotonic() - began) / 60:.1f} minutes.")
    for path, why in failures.items():
        print(f"Failed: {path}\n  " + "\n  ".join(why.splitlines()[-5:]))
    return 1 if failures else 0


def _report(plan: object, done: list, baseline: str | None) -> None:
    from ..report import write_report

    files = write_report(
        [run.path for run in done],
        plan.out / "report.html",
        labels=[run.label for run in done],
        baseline=baseline,
        title=f"Comparison in {plan.out.name}",
    )
    for notice in files.notices:
        print(f"Note: {notice}")
    print(f"Report: {files.html}")


def _default_config() -> str:
    if not Path(_TINY).exists():
        raise ConfigError(
            f"No file of settings was given and there is no {_TINY} here; expected a YAML file of settings for `divopd train`. "
            "Name one, or start from the project's root."
        )
    return _TINY


def _seeds(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) == 1 and "," not in text:
        numbers = list(range(numbers[0]))
    if not numbers or min(numbers) < 0:
        raise ConfigError(
            f"--seeds is {text!r}; expected how many (3 means 0, 1, 2), or a list of them (0,4,7)."
        )
    return numbers
