"""Time of one `compose` call, by pool size and preset, as JSON.

Usage: python benchmarks/composer.py [--sizes 256 10000 1000000] [--presets divopd top-b]

The pool is B*c turns of 20-turn rollouts (c = 4, k = 4). "unread" is the other question: B = 64 with that many
turns waiting.
"""

import argparse
import json
import random
import statistics
import time
from collections import namedtuple

from divopd_trainer.composer import BatchComposer

Turn = namedtuple("Turn", "rollout_id index policy_version score valid")


def stream(n: int, seed: int = 0) -> list[Turn]:
    rng = random.Random(seed)
    return [Turn(i // 20, i % 20, 0, rng.gauss(0, 1), rng.random() > 0.05) for i in range(n)]


def best_and_median_ms(preset: str, batch_rows: int, turns: list[Turn], repeats: int) -> tuple[float, float]:
    times = []
    for _ in range(repeats):
        composer = BatchComposer(preset, batch_rows)
        start = time.perf_counter()
        composer.compose(1, turns)
        times.append(1e3 * (time.perf_counter() - start))
    return round(min(times), 3), round(statistics.median(times), 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[256, 1_000, 10_000, 100_000, 1_000_000])
    parser.add_argument(
        "--presets", nargs="+", default=["vanilla", "gate-only", "divopd-base", "divopd", "no-cap", "top-b"]
    )
    args = parser.parse_args()
    rows = []
    for size in args.sizes:
        turns = stream(size)
        repeats = max(1, min(50, 200_000 // size))
        for preset in args.presets:
            rows_of_batch = size if preset == "vanilla" else size // 4
            pool = best_and_median_ms(preset, rows_of_batch, turns, repeats)
            unread = best_and_median_ms(preset, 64, turns, repeats)
            rows.append(
                {"turns": size, "preset": preset, "pool_ms_best": pool[0], "pool_ms_median": pool[1],
                 "unread_ms_best": unread[0], "unread_ms_median": unread[1], "repeats": repeats}
            )  # fmt: skip
    print(json.dumps({"benchmark": "composer", "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
