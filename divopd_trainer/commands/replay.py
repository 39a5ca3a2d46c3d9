"""`divopd replay`: any composer preset over recorded rollouts, as they arrived or at other producer loads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from divopd_gym.errors import ConfigError

from ..cli_options import Parser, console, whole_number

__all__ = ["main"]


NO_CAP, AUTO = "none", "auto"
REPLAYED = "vanilla,divopd-base,divopd,no-cap,top-b"
STRESSED = "vanilla,divopd-base,divopd,divopd-cost,auto"


def _cap(text: str) -> int | str:
    low = text.lower()
    return AUTO if low == AUTO else NO_CAP if low in (NO_CAP, "null") else whole_number(1)(text)


def _parser() -> Parser:
    parser = Parser(
        "replay",
        "Run composer presets over the rollouts that a run recorded. Every preset gets the same turns, with the same\n"
        "policy versions, at the same updates; only what is chosen differs.\n"
        "With --load, producers and learner are simulated instead: so many episodes in flight, each as long as recorded.",
    )
    parser.add_argument("run", metavar="RUN", help="run directory")
    parser.add_argument(
        "--presets",
        metavar="A,B,..",
        help="composer presets, separated by commas; 'divopd:8' is another cap, 'auto' is 'divopd:auto', "
        f"'divopd-cost:4000' another budget of tokens (default: {REPLAYED}; with --load {STRESSED})",
    )
    parser.add_argument(
        "--load",
        metavar="N,M,..",
        help="simulate these numbers of episodes in flight, with the recorded durations, and print a table of each",
    )
    parser.add_argument(
        "--cost_model",
        choices=("rows", "merged", "both"),
        default="both",
        help="with --load, what the learner forwards: one sequence a turn, or turns that share a prefix merged",
    )
    parser.add_argument(
        "--lazy",
        action="store_true",
        help="with --load, the teacher scores a rollout only when the composer's pool has room for it",
    )
    parser.add_argument(
        "--updates", type=whole_number(1), metavar="N", help="with --load, updates to simulate (as recorded)"
    )
    parser.add_argument(
        "--pace",
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
        "--cap",
        type=_cap,
        metavar="N",
        help="turns a rollout in the first sweep, k, 'none' or 'auto' (as recorded)",
    )
    parser.add_argument(
        "--token_budget",
        type=whole_number(1),
        metavar="N",
        help="divopd-cost: tokens forwarded an update (what divopd would)",
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
    from ..records import read_run
    from ..replay import Variant, compare, load_stream, results_table

    texts = args.presets or (STRESSED if args.load else REPLAYED)
    presets = [name.strip() for name in str(texts).split(",") if name.strip()]
    variants = [Variant.parse(name) for name in presets]
    if not presets:
        raise ConfigError(f"--presets is empty; expected names separated by commas, such as {REPLAYED}.")
    if not 0 < args.tail <= 1:
        raise ConfigError(f"tail is {args.tail}; expected a share above 0 and up to 1.")
    if args.pace is not None and not args.pace > 0:
        raise ConfigError(f"pace is {args.pace}; expected a number above 0.")
    loads = _loads(args.load) if args.load is not None else []
    if loads and args.pace is not None:
        raise ConfigError(
            "--load and --pace were both given; expected one: --load simulates when turns arrive, --pace spreads them."
        )
    overrides = {
        name: getattr(args, name)
        for name in (
            "batch_rows",
            "pool_multiplier",
            "max_staleness",
            "max_pending_age",
            "seed",
            "token_budget",
        )
        if getattr(args, name) is not None
    }
    if args.cap is not None:
        overrides["cap"] = None if args.cap == NO_CAP else args.cap
    run = read_run(args.run)
    stream = load_stream(run)
    if loads:
        return _stress(args, run, stream, variants, loads, overrides)
    if args.pace is not None:
        stream.settings |= {name: value for name, value in overrides.items() if name == "batch_rows"}
        stream = stream.paced(args.pace)
    results = compare(stream, presets, tail=args.tail, **overrides)
    figures = {
        "run": str(args.run),
        "settings": stream.settings | overrides,
        "pace": args.pace,
        "tail": args.tail,
        "notices": stream.notices,
        "presets": {
            result.preset: result.summary | {"same_as_recorded": result.same_as_recorded}
            for result in results
        },
    }
    del figures["settings"]["preset"]
    if args.json != "-":
        _print(results_table(results, _title(args.run, stream)), results, stream.notices)
    _write(figures, args.json)
    return 0


def _loads(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise ConfigError(
            f"load is {text!r}; expected whole numbers of episodes in flight, 1 or more, such as 2,6,16."
        )
    return [int(part) for part in parts]


def _stress(args, run, stream, variants, loads: Sequence[int], overrides: dict) -> int:
    from ..stress import load_workload, simulate, stress_table

    workload = load_workload(run, stream.settings)
    models = ("rows", "merged") if args.cost_model == "both" else (args.cost_model,)
    options = {"lazy": args.lazy, "updates": args.updates}
    screen = None if args.json == "-" else console()
    tables = []
    for model in models:
        for load in loads:
            results = [
                simulate(workload, variant, load, cost_model=model, **options, **overrides)
                for variant in variants
            ]
            presets = {result.variant: result.figures for result in results}
            tables.append({"load": load, "cost_model": model, "lazy": args.lazy, "presets": presets})
            if screen is not None:
                screen.print(stress_table(results))
    figures = {
        "run": str(args.run),
        "settings": {
            name: value for name, value in (stream.settings | overrides).items() if name != "preset"
        },
        "updates": args.updates or workload.updates,
        "learner": {"fixed_s": workload.learner.fixed_s, "per_token_s": workload.learner.per_token_s},
        "notices": workload.notices,
        "loads": tables,
    }
    if screen is not None:
        for notice in workload.notices:
            screen.print(f"Note: {notice}", style="yellow")
    _write(figures, args.json)
    return 0


def _write(figures: dict, target: str | None) -> None:
    if target == "-":
        print(json.dumps(figures, indent=1))
    elif target:
        path = Path(target)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(figures, indent=1) + "\n", "utf-8")
        print(f"Written to {path}")


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
