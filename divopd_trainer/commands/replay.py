"""`divopd replay`: any composer preset over recorded rollouts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from divopd_gym.errors import ConfigError

from ..cli_options import Parser, console, whole_number

__all__ = ["main"]


NO_CAP = "none"


def _cap(text: str) -> int | str:
    return NO_CAP if text.lower() in (NO_CAP, "null") else whole_number(1)(text)


def _parser() -> Parser:
    parser = Parser(
        "replay",
        "Run composer presets over the rollouts that a run recorded. Every preset gets the same turns, with the same\n"
        "policy versions, at the same updates; only what is chosen differs.",
    )
    parser.add_argument("run", metavar="RUN", help="run directory")
    parser.add_argument(
        "--presets",
        default="vanilla,divopd-base,divopd,no-cap,top-b",
        metavar="A,B,..",
        help="composer presets, separated by commas",
    )
    parser.add_argument(
        "--load",
        type=float,
        metavar="X",
        help="spread the arrivals anew: this many batches of valid turns an update, whole rollouts, recorded version "
        "lags; without it arrivals are as recorded",
    )
    parser.add_argument(
        "--tail",
        type=float,
        default=1.0,
        metavar="X",
        help="composition figures are means over this last share of the updates, 0 to 1",
    )
    number = whole_number(0)
    parser.add_argument(
        "--batch_rows", type=whole_number(1), metavar="N", help="turns a batch, B (as recorded)"
    )
    parser.add_argument(
        "--pool_multiplier", type=whole_number(1), metavar="N", help="pool in batches, c (as recorded)"
    )
    parser.add_argument(
        "--cap", type=_cap, metavar="N", help="turns a rollout in the first sweep, k, or 'none' (as recorded)"
    )
    parser.add_argument("--max_staleness", type=number, metavar="N", help="versions, delta (as recorded)")
    parser.add_argument("--max_pending_age", type=number, metavar="N", help="updates, W (as recorded)")
    parser.add_argument("--seed", type=int, metavar="N", help="of the uniform orders (as recorded)")
    parser.add_argument(
        "--json", metavar="FILE", help="write the figures there too; - for standard output alone"
    )
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the command."""
    args = _parser().parse(argv)
    from ..composer import PRESETS
    from ..records import read_run
    from ..replay import compare, load_stream, results_table

    presets = [name.strip() for name in str(args.presets).split(",") if name.strip()]
    unknown = [name for name in presets if name not in PRESETS]
    if unknown or not presets:
        raise ConfigError(
            f"Unknown presets {unknown}; choose from {', '.join(PRESETS)}, separated by commas."
        )
    if not 0 < args.tail <= 1:
        raise ConfigError(f"tail is {args.tail}; expected a share above 0 and up to 1.")
    if args.load is not None and not args.load > 0:
        raise ConfigError(f"load is {args.load}; expected a number above 0.")
    overrides = {
        name: getattr(args, name)
        for name in ("batch_rows", "pool_multiplier", "max_staleness", "max_pending_age", "seed")
        if getattr(args, name) is not None
    }
    if args.cap is not None:
        overrides["cap"] = None if args.cap == NO_CAP else args.cap
    stream = load_stream(read_run(args.run))
    if args.load is not None:
        stream.settings |= {name: value for name, value in overrides.items() if name == "batch_rows"}
        stream = stream.paced(args.load)
    results = compare(stream, presets, tail=args.tail, **overrides)
    figures = {
        "run": str(args.run),
        "settings": stream.settings | overrides,
        "load": args.load,
        "tail": args.tail,
        "notices": stream.notices,
        "presets": {
            result.preset: result.summary | {"same_as_recorded": result.same_as_recorded}
            for result in results
        },
    }
    del figures["settings"]["preset"]
    if args.json == "-":
        print(json.dumps(figures, indent=1))
        return 0
    _print(results_table(results, _title(args.run, stream)), results, stream.notices)
    if args.json:
        target = Path(args.json)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(figures, indent=1) + "\n", "utf-8")
        print(f"Written to {target}")
    return 0


def _title(run: str, stream) -> str:
    rollouts = len({turn.rollout_id for _, turns in stream.arrivals for turn in turns})
    turns = sum(len(turns) for _, turns in stream.arrivals)
    return f"{run}: {turns:,} turns of {rollouts:,} rollouts over {len(stream.arrivals):,} updates"


def _print(table, results, notices: Sequence[str]) -> None:
    screen = console()
    screen.print(table)
    for result in results:
        if result.same_as_recorded is not None:
            same, total = result.same_as_recorded
            screen.print(
                f"{result.preset}: {same} of {total} batches are the very ones that the run trained on."
            )
    for notice in notices:
        screen.print(f"Note: {notice}", style="yellow")
