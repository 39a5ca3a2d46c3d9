"""`divopd report`: one HTML page and PNG curves."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from divopd_gym.errors import ConfigError

from ..cli_options import Parser, whole_number

__all__ = ["main"]


def _parser() -> Parser:
    parser = Parser(
        "report",
        "Write one self-contained HTML page (no outside requests) and PNG curves of one run, or of several compared.",
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", help="run directories")
    parser.add_argument("--out", metavar="FILE.html", help="the page (default: report.html in the first run)")
    parser.add_argument(
        "--labels", metavar="A,B,..", help="names of the runs (default: their directories' names)"
    )
    parser.add_argument(
        "--episodes",
        type=whole_number(2),
        default=60,
        metavar="N",
        help="episodes that the page carries, all runs together",
    )
    parser.add_argument(
        "--teacher", metavar="FILE.json", help="the teacher's evaluation, as divopd eval --out wrote it"
    )
    parser.add_argument(
        "--png", action=argparse.BooleanOptionalAction, default=True, help="draw PNG curves too"
    )
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the command."""
    args = _parser().parse(argv)
    from ..report import write_report

    labels = [name.strip() for name in args.labels.split(",")] if args.labels else None
    if labels is not None and len(labels) != len(args.runs):
        raise ConfigError(
            f"{len(labels)} labels for {len(args.runs)} runs; expected one label a run, separated by commas."
        )
    teacher = None
    if args.teacher is not None:
        try:
            teacher = json.loads(Path(args.teacher).read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{args.teacher} cannot be read as an evaluation ({error}); expected the JSON of `divopd eval --out`."
            ) from None
    files = write_report(
        args.runs, args.out, png=args.png, episodes=args.episodes, labels=labels, teacher=teacher
    )
    print(files.html)
    if files.pngs:
        print(f"{files.pngs[0].parent}/ ({len(files.pngs)} curves)")
    for notice in files.notices:
        print(f"Note: {notice}")
    return 0
