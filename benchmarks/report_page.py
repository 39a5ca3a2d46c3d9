"""The report of a long run: how large its page is, how long it takes to write, and how long to open in Chromium.

    python benchmarks/report_page.py [--episodes 3000] [--updates 200] [--turns 20] [--tokens 40] [--keep DIR]

Makes a run of that size with the records' own writer, writes its page, opens it headless, and prints one JSON object:
megabytes, seconds to write, milliseconds from navigation until the curves are drawn and until the episode list can
be used, and milliseconds to open another episode and its tokens. With --runs N the page compares N copies of it. With
--browser and no Chromium that starts it measures nothing and prints {"left_out": the reason}.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import yaml

from divopd_trainer.records import BatchRecord, RunWriter
from divopd_trainer.report import write_report
from divopd_trainer.turns import Rollout, Segment, make_turn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "trainer"))

PLACES = [
    "cabinet",
    "drawer",
    "countertop",
    "fridge",
    "microwave",
    "sinkbasin",
    "shelf",
    "garbagecan",
    "toaster",
    "stoveburner",
]
THINGS = [
    "mug",
    "plate",
    "apple",
    "egg",
    "knife",
    "spoon",
    "bread",
    "potato",
    "tomato",
    "lettuce",
    "pan",
    "pot",
    "cup",
    "bowl",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--episodes", type=int, default=3000)
    parser.add_argument("--updates", type=int, default=200)
    parser.add_argument("--turns", type=int, default=20, help="of an episode, on average")
    parser.add_argument("--tokens", type=int, default=40, help="of a response, on average")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--browser", action="store_true", help="nothing without a browser")
    parser.add_argument("--keep", help="folder for the run and the page; default a temporary one")
    args = parser.parse_args()
    if args.browser and (reason := no_browser()):
        print(json.dumps({"benchmark": "report_page", "left_out": reason}))
        return
    with tempfile.TemporaryDirectory() as folder:
        place = Path(args.keep or folder)
        print(json.dumps(measure(args, place, Path(folder)), indent=2))


def no_browser() -> str | None:
    """Why there is no browser, or None when one starts."""
    try:
        from report_browser import Browser, find_chromium

        if find_chromium() is None:
            return "no Chromium was found on the PATH"
        with tempfile.TemporaryDirectory() as folder, Browser(Path(folder) / "profile"):
            return None
    except Exception as error:
        return f"no Chromium could be started ({type(error).__name__}: {error})"


def measure(args: argparse.Namespace, place: Path, scratch: Path) -> dict:
    paths = [place / f"run{seed}" for seed in range(args.runs)]
    for seed, path in enumerate(paths):
        if not path.exists():
            make_run(path, args, seed)
    began = time.perf_counter()
    page = write_report(paths, place / "report.html", png=False).html
    result = {
        "benchmark": "report_page",
        "episodes": args.episodes,
        "updates": args.updates,
        "runs": args.runs,
        "recorded_mb": round(
            sum(f.stat().st_size for p in paths for f in p.rglob("*") if f.is_file()) / 1e6, 2
        ),
        "page_mb": round(page.stat().st_size / 1e6, 2),
        "write_s": round(time.perf_counter() - began, 2),
    }
    from report_browser import Browser, find_chromium

    if find_chromium() is None:
        return result | {"opened": "no Chromium here"}
    with Browser(scratch / "profile") as browser:
        result["list_ready_ms"] = browser.open(page)
        result["curves_drawn_ms"] = int(browser.js("document.documentElement.dataset.drawn"))
        result["load_event_ms"] = round(
            browser.js("performance.getEntriesByType('navigation')[0].loadEventEnd")
        )
        result["open_episode_ms"] = round(
            browser.js("""(async () => {
              const before = performance.now(), detail = document.querySelector('.detail');
              const id = document.querySelectorAll('.item')[5].dataset.id;
              document.querySelectorAll('.item')[5].click();
              while (!detail.querySelector('h3')?.textContent.startsWith('#' + id + ' '))
                await new Promise(requestAnimationFrame);
              detail.querySelector('.more')?.click();
              return performance.now() - before;
            })()""")
        )
        result["episodes_listed"] = browser.js("document.querySelector('.count').textContent")
        result["script_errors"] = browser.errors
        browser.picture(place / "report.png")
    return result


def make_run(path: Path, args: argparse.Namespace, seed: int) -> None:
    rng = np.random.default_rng(seed)
    path.mkdir(parents=True)
    config = dict(method="divopd", seed=seed, run_dir=str(path), max_concurrent=16, updates=args.updates)
    (path / "config.yaml").write_text(yaml.safe_dump(config))
    per_update = args.episodes / args.updates
    rid = 0
    with RunWriter(path) as writer:
        for update in range(args.updates + 1):
            at = dict(update=update, policy_version=update, wall_s=30.0 * update, env_turns=300 * update)
            arrivals = []
            while update and rid < update * per_update:
                rollout = make_rollout(rid, max(0, update - 1 - int(rng.integers(2))), args, rng)
                writer.write_rollout(rollout)
                arrivals += [(turn.rollout_id, turn.index) for turn in rollout.turns if turn.valid]
                rid += 1
            if update:
                chosen = rng.permutation(len(arrivals))[:64]
                writer.write_batch(BatchRecord(update, [arrivals[i] for i in chosen], arrivals))
                writer.write_metrics(
                    kind="train", **at, rows=64, dead_rows=0, trained_tokens=2500, forwarded_tokens=40000,
                    forwarded_tokens_rows=120000, effective_rollouts=12 + rng.normal(), top1_share=0.12,
                    turns_per_rollout=4.2, kl_per_token=0.2 + math.exp(-update / 60), grad_norm=1 + rng.random(),
                    dropped_stale=int(rng.integers(30)), pending=int(rng.integers(190)), unread=0, learner_s=9.0,
                    wait_s=rng.random(), generator_s=25.0, teacher_s=6.0, generator_tokens=9000, teacher_tokens=30000,
                    staleness={"0": 40, "1": 24}, valid_rollouts=16 * update, never_used=update,
                )  # fmt: skip
                writer.write_metrics(kind="explorer", **at, in_flight=14, success_rate=0.5, episodes=rid)
            if update % 5 == 0:
                rate = 0.1 + 0.7 * (1 - math.exp(-update / 70)) + 0.02 * rng.normal()
                writer.write_metrics(kind="eval", **at, success_rate=rate, episodes=140)


def make_rollout(rid: int, version: int, args: argparse.Namespace, rng: np.random.Generator) -> Rollout:
    segment = Segment(rid, 0, rng.integers(5, 30000, 60))
    success = bool(rng.random() < 0.5)
    turns = max(1, int(rng.normal(args.turns, 5)))
    thing, place = rng.choice(THINGS), rng.choice(PLACES)
    rollout = Rollout(
        rid, task=f"valid/pick_and_place/{rid}", success=success, done=success, score=float(success),
        done_reason="success" if success else "turn_limit", policy_versions=(version, version),
        meta={"goal": f"put a {thing} in {place} 1.", "task_type": "pick_and_place"},
    )  # fmt: skip
    for index in range(turns):
        count = max(2, int(rng.normal(args.tokens, args.tokens / 4)))
        # Frequent tokens are frequent, as in language.
        start, end = segment.append(np.minimum(rng.zipf(1.3, count), 30000))
        student = -rng.exponential(0.6, count)
        seen = ", ".join(f"a {rng.choice(THINGS)} {rng.integers(1, 9)}" for _ in range(rng.integers(1, 8)))
        where = f"{rng.choice(PLACES)} {rng.integers(1, 20)}"
        rollout.turns.append(
            make_turn(
                rollout_id=rid, index=index, segment=segment, start=start, end=end, student_logprobs=student,
                teacher_logprobs=student - rng.normal(0.2, 0.8, count), policy_version=version,
                action=f"go to {where}", action_valid=bool(rng.random() < 0.8),
                observation=f"You arrive at {where}. The {where} is open. In it, you see {seen}.",
            )
        )  # fmt: skip
        segment.append(rng.integers(5, 30000, 30))
    rollout.turns_played = turns
    return rollout


if __name__ == "__main__":
    main()
