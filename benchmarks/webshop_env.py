"""Turns of WebShop in each form of observation, and many environments one after the other, in one run.

Prints JSON. Example: python benchmarks/webshop_env.py --data-dir DIR --tagger spacy:en_core_web_sm
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import time
from pathlib import Path

import gymnasium
import numpy as np

import divopd_gym  # noqa: F401
from divopd_gym.envs.webshop.site import MODES


def turns(env: gymnasium.Env, count: int) -> dict[str, float]:
    """Play experts' and random episodes by turns; milliseconds per turn."""
    rng = random.Random(0)
    wall, used, resets = [], [], []
    episode = 0
    while len(wall) < count:
        began = time.perf_counter()
        observation, info = env.reset(seed=episode)
        resets.append(time.perf_counter() - began)
        expert = env.unwrapped.expert() if episode % 2 else None
        if expert:
            expert.reset(observation, info)
        while not info["done_reason"]:
            action = expert.act() if expert else rng.choice(info["admissible_actions"])
            began, cpu = time.perf_counter(), time.process_time()
            observation, _, _, _, info = env.step(action)
            wall.append(time.perf_counter() - began)
            used.append(time.process_time() - cpu)
            if expert:
                expert.observe(action, observation, info)
        episode += 1
    return {
        "turns": len(wall),
        "mean_ms": _ms(np.mean(wall)),
        "median_ms": _ms(np.median(wall)),
        "p99_ms": _ms(np.quantile(wall, 0.99)),
        "mean_cpu_ms": _ms(np.mean(used)),
        "reset_median_ms": _ms(np.median(resets)),
    }


def _ms(seconds: float) -> float:
    return round(float(seconds) * 1e3, 3)


def usage() -> dict[str, float]:
    """Resident memory, threads and open descriptors of this process."""
    gc.collect()
    status = Path("/proc/self/status").read_text()

    def value(key: str) -> int:
        return int(status.split(key)[1].split()[0])

    return {
        "rss_mb": round(value("VmRSS:") / 1024, 1),
        "threads": value("Threads:"),
        "descriptors": len(os.listdir("/proc/self/fd")),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", help="folder of the benchmark's files; else the generated catalogue")
    parser.add_argument("--tagger", help="noun tagger, see WebShopEnv")
    parser.add_argument("--turns", type=int, default=1000)
    parser.add_argument(
        "--cycles", type=int, default=1000, help="environments made and closed, after 200 more"
    )
    args = parser.parse_args()
    kwargs = {"data_dir": args.data_dir, "tagger": args.tagger}
    began = time.perf_counter()
    gymnasium.make("divopd_gym/WebShop-v0", **kwargs).close()
    first = time.perf_counter() - began
    result = {"benchmark": "webshop_env", "first_make_s": round(first, 2), "modes": {}}
    for mode in MODES:
        env = gymnasium.make("divopd_gym/WebShop-v0", observation_mode=mode, **kwargs)
        result["modes"][mode] = turns(env, args.turns)
        env.close()
    warm_up, before = min(200, args.cycles), None
    for number in range(warm_up + args.cycles):
        if number == warm_up:
            before = usage()
        env = gymnasium.make("divopd_gym/WebShop-v0", **kwargs)
        _, info = env.reset(seed=number)
        env.step(f"search[{info['goal']}]")
        env.close()
    result["cycles"] = {str(warm_up): before, str(warm_up + args.cycles): usage()}
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
