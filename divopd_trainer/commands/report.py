"""`divopd report`: one HTML page, and its curves as PNG, SVG and CSV."""

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
        "Write one self-contained HTML page (no outside requests) of one run, or of several: runs that differ only in "
        "their seed are one method, shown as mean and band; methods are compared. Every curve is also written as PNG, "
        "SVG and CSV.",
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", help="run directories")
    parser.add_argument(
        "--out", metavar="DIR", help="directory, or FILE.html (default: report.html in the first run)"
    )
    parser.add_argument("--title", help="heading of the page")
    parser.add_argument(
        "--labels",
        metavar="A,B,..",
        help="a name a run; runs of one name are one method (default: by their configuration)",
    )
    parser.add_argument(
        "--baseline",
        metavar="METHOD",
        help="method that costs are compared with (default: vanilla, else the first)",
    )
    parser.add_argument(
        "--target",
        type=_rate,
        metavar="RATE",
        help="success rate, 0 to 1, that costs are compared at (default: the largest multiple of 0.05 that every seed "
        "of the baseline reaches)",
    )
    parser.add_argument(
        "--episodes",
        type=whole_number(1),
        metavar="N",
        help="episodes whose text the page carries, all runs together (default: as many as keep it below 20 MB)",
    )
    parser.add_argument(
        "--teacher", metavar="FILE.json", help="the teacher's evaluation, as divopd eval --out wrote it"
    )
    parser.add_argument(
        "--curves",
        "--png",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="write every curve as PNG, SVG and CSV too",
    )
    return parser


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = -1.0
    if not 0 < rate <= 1:
        raise argparse.ArgumentTypeError(
            f"{text} is no success rate; expected a number above 0, 1 at most, e.g. 0.6"
        )
    return rate


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
        args.runs,
        args.out,
        title=args.title,
        png=args.curves,
        curves=args.curves,
        episodes=args.episodes,
        labels=labels,
        teacher=teacher,
        baseline=args.baseline,
        target=args.target,
    )
    print(files.html)
    if files.curves:
        count = len({path.stem for path in files.curves})
        kinds = "PNG, SVG and CSV" if files.pngs else "SVG and CSV"
        print(f"{files.curves[0].parent}/ ({count} curves as {kinds})")
    for notice in files.notices:
        print(f"Note: {notice}")
    return 0
