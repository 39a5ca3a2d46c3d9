"""The benchmarks as one suite: every part in turn, its JSON into bench.json, all tables onto one page.

    make bench                                        # everything; runs/bench/bench.json and runs/bench/benchmarks.md
    python benchmarks/suite.py --docs                 # the page into docs/benchmarks.md, its figures beside it
    python benchmarks/suite.py --only learner,engine_context --keep
    python benchmarks/suite.py --render --docs        # the page again from what was measured

Exit status 1 when a part failed (the others have run all the same), 130 when it was stopped. Parts run one at a time and none
outlives the suite. A plain clone has all that it needs; --alfworld-data and --webshop-data take the benchmarks' own files.
"""

from __future__ import annotations

import argparse
import gzip
import json
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from suite_machine import load_average, machine, now, versions  # noqa: E402
from suite_page import page  # noqa: E402
from suite_run import JSON_FILE, ROOT, Part, Suite  # noqa: E402
from suite_tables import TABLES  # noqa: E402

_SMALL_BYTES = 100_000


class Sizes:
    """Sizes of the parts, multiplied by a scale."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __call__(self, size: float, least: int = 1) -> str:
        """One size, as a word of a command."""
        return str(max(least, round(size * self.scale)))

    def all(self, *sizes: float, least: int = 1) -> list[str]:
        """Several sizes; those that became equal are one."""
        return list(dict.fromkeys(self(size, least) for size in sizes))

    def seconds(self, seconds: float) -> str:
        """A duration, as a word of a command."""
        return f"{max(0.5, seconds * self.scale):g}"


def parts(scale: float = 1.0, alfworld: str | None = None, webshop: str | None = None) -> list[Part]:
    """The suite's parts, in the order in which they run and stand on the page.

    Args:
        scale: Multiplies sizes, repeats and durations.
        alfworld: Folder of ALFWorld's games; None = generated houses.
        webshop: Folder of WebShop's files; None = a generated catalogue.
    """
    n = Sizes(scale)

    def part(name: str, title: str, about: str, deadline_s: float, script: str, *words: str) -> Part:
        return Part(
            name, title, about, (f"{script}.py", *words), deadline_s * max(1.0, scale), TABLES[script]
        )

    houses = ("--data", alfworld) if alfworld else ()
    shop = ("--data-dir", webshop) if webshop else ()
    return [
        part(
            "alfworld", "ALFWorld against ALFWorld's own environment",
            "The same games and random admissible actions on both sides, turn by turn in one process.", 150,
            "alfworld_env", "--games", n(8), "--turns", n(25), *houses,
        ),
        part(
            "alfworld_pool", "ALFWorld by workers",
            "The environment in `EnvPool`'s processes, all played at once, against the same environment without a pool.",
            120, "alfworld_pool", "--workers", *n.all(1, 4, 16), "--seconds", n.seconds(6), *houses,
        ),
        part(
            "scienceworld", "ScienceWorld against its own environment, by environments",
            "Gold paths, an environment a process, five turns each before the clock. Stock starts a simulator for each; ours share a "
            "few. Short, to fit the suite: `--seconds 30 --warm-up 20` gives the Java machines of both sides more time to warm up.",
            165, "scienceworld_env", "--envs", *n.all(1, 4, 16), "--seconds", n.seconds(6), "--warm-up", n(5), "--at_most", "142",
        ),
        part(
            "webshop", "WebShop",
            "Turns of an expert and of random shoppers, by form of observation; then environments made and closed one after the other.",
            90, "webshop_env", "--turns", n(1000, 20), "--cycles", n(1000, 20), *shop,
        ),
        part(
            "webshop_search", "WebShop's search by size of the catalogue",
            "The same queries compiled and in NumPy alone (the way of catalogues up to 50,000 listings either way).", 150,
            "webshop_search", "--documents", *n.all(10_000, 100_000, least=500), "--queries", n(400, 20), *shop,
        ),
        part(
            "webshop_oracle", "WebShop's search against Lucene's answers",
            "Queries whose answers were recorded from the original's search engine, over the same listings.", 90,
            "webshop_oracle", *(("--queries", n(4000, 20)) if scale < 1 else ()), *shop,
        ),
        part(
            "explorer", "What the explorer itself costs",
            "Engines and environments that answer at once: what is left is the explorer's own work.", 90, "explorer",
            "--episodes", n(600, 5), "--concurrent", *n.all(1, 16, 64),
        ),
        part(
            "engine_concurrency", "Local engine by conversations at once",
            "Generation on a prefix cache against computing every prompt again each turn; teacher scores once a segment against "
            "once a turn. One CPU thread.", 120, "engine",
            "--models", "2M", "--concurrency", *n.all(1, 4, 16), "--turns", n(10, 2),
        ),
        part(
            "engine_context", "Local engine by length of the history",
            "The same with conversations of 10, 20 and 40 turns, whose contexts grow to 1,460 tokens.", 180, "engine",
            "--models", "2M", "--concurrency", n(4), "--turns", *n.all(10, 20, 40, least=2), "--backends", "dense",
        ),
        part(
            "learner", "Learner: merged packing against one row a turn, by length of the history",
            "One update (forward and backward) on the same rows under three layouts: turns of a rollout that share a prefix in one "
            "sequence, a sequence a turn, and TRL's planner and collator.", 210, "learner",
            "--turns", *n.all(10, 20, 40, least=4), "--whole-rollouts", n(2), "--repeats", n(2),
        ),
        part(
            "composer", "Composing a batch, from 256 to a million turns",
            "Time of one `compose` call. One row a size composes from a pool of four batches, the other a batch of 64 while all the "
            "other turns wait.", 150, "composer",
            "--sizes", *n.all(256, 1000, 10_000, 100_000, 1_000_000, least=64),
            "--presets", "vanilla", "divopd-base", "divopd", "top-b",
        ),
        part(
            "pacing", "Pacing: what is made, scored, trained and lost",
            "The real explorer, collator and composer with engines that only wait.", 180, "pacing",
            "--json", "--updates", n(30, 4), "--loads", "1", "3",
        ),
        part(
            "idle", "Idle shares of a real run",
            "`divopd train` on the tiny models, generated houses, learner and generator on the same cores; counted from the end of "
            "the first update to the end of the last.", 240, "idle",
            "--methods", "vanilla", "divopd", "--updates", n(12, 3),
        ),
        part(
            "report_page", "A run's report in a browser", "Headless Chromium.", 90, "report_page", "--browser",
            "--episodes", n(600, 20), "--updates", n(60, 5),
        ),
    ]  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run the suite; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help="names of parts, with commas between")
    parser.add_argument("--list", action="store_true", help="show the parts and their commands, run nothing")
    parser.add_argument(
        "--scale", type=float, default=1.0, help="multiplies sizes, repeats and durations (1)"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "bench", help="folder (runs/bench)")
    parser.add_argument("--keep", action="store_true", help="keep other parts of a bench.json already there")
    parser.add_argument("--render", action="store_true", help="run nothing: the page from bench.json alone")
    parser.add_argument("--docs", action="store_true", help="write docs/benchmarks.md and its figures")
    parser.add_argument("--docs-dir", type=Path, default=ROOT / "docs", help=argparse.SUPPRESS)
    parser.add_argument(
        "--minutes", type=float, default=19.0, help="for all parts together, times scale (19)"
    )
    parser.add_argument("--alfworld-data", help="folder of ALFWorld's games; default generated houses")
    parser.add_argument("--webshop-data", help="folder of WebShop's files; default a generated catalogue")
    args = parser.parse_args(argv)
    if not args.scale > 0:
        parser.error(f"--scale is {args.scale:g}; expected more than 0.")
    everything = parts(args.scale, args.alfworld_data, args.webshop_data)
    wanted = args.only.split(",") if args.only else [part.name for part in everything]
    if unknown := sorted(set(wanted) - {part.name for part in everything}):
        names = ", ".join(part.name for part in everything)
        parser.error(f"--only names {', '.join(unknown)}; expected some of {names}.")
    if args.list:
        for part in everything:
            print(f"{part.name} (at most {part.deadline_s:g} s): {' '.join(part.command)}")
        return 0
    chosen = [part for part in everything if part.name in wanted]
    hidden = {folder: f"{name}_DIR" for name, folder in _data(args).items()}
    return run(chosen, everything, args, hidden)


def run(chosen: Sequence[Part], everything: Sequence[Part], args: argparse.Namespace, hidden: dict) -> int:
    """Measure the chosen parts, write bench.json and the page; returns the exit status."""
    if args.render:
        path = args.out / JSON_FILE
        if not path.exists():
            print(f"--render found no {JSON_FILE} in {args.out}; expected one. Run the suite first.")
            return 2
        publish(json.loads(path.read_text("utf-8")), everything, args)
        return 0
    facts = {"date": now(), "scale": args.scale, "data": sorted(_data(args)), "load_average": load_average()}
    facts |= {"machine": machine(), "versions": versions()}
    suite = Suite(args.out, facts, hidden=hidden, say=_say, keep=args.keep)

    def stop(signum: int, frame: object) -> None:
        raise KeyboardInterrupt

    # SIGINT too: a script's background ignores it.
    previous = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    began = time.monotonic()
    try:
        failed = suite.run(chosen, 60 * args.minutes * max(1.0, args.scale))
    except KeyboardInterrupt:
        print(
            f"Stopped. What was measured is in {suite.write()}; go on with --keep --only and the parts left."
        )
        return 130
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    publish(suite.report, everything, args)
    print(f"{len(chosen)} parts in {(time.monotonic() - began) / 60:.1f} minutes.")
    if failed:
        print(f"Failed: {', '.join(failed)}; each one's messages are in {args.out}/NAME.log.")
        print(f"Remedy: mend it, then python benchmarks/suite.py --keep --only {','.join(failed)}")
    return 1 if failed else 0


def publish(report: dict, everything: Sequence[Part], args: argparse.Namespace) -> Path:
    """Write the page, and with --docs the figures beside it; returns the page's path."""
    if not args.docs:
        path = args.out / "benchmarks.md"
        path.write_text(page(report, everything, JSON_FILE), "utf-8")
    else:
        path = args.docs_dir / "benchmarks.md"
        figures = json.dumps(report, separators=(",", ":")).encode() + b"\n"
        small = len(figures) < _SMALL_BYTES
        name = "benchmarks.json" if small else "benchmarks.json.gz"
        (args.docs_dir / "benchmarks.json").unlink(missing_ok=True)
        (args.docs_dir / "benchmarks.json.gz").unlink(missing_ok=True)
        (args.docs_dir / name).write_bytes(figures if small else gzip.compress(figures, mtime=0))
        path.write_text(page(report, everything, name), "utf-8")
        shutil.copyfile(path, args.out / "benchmarks.md")
    print(f"Page: {path}")
    return path


def _say(line: str) -> None:
    print(line, flush=True)


def _data(args: argparse.Namespace) -> dict[str, str]:
    given = {"ALFWORLD": args.alfworld_data, "WEBSHOP": args.webshop_data}
    return {name: folder for name, folder in given.items() if folder}


if __name__ == "__main__":
    sys.exit(main())
