"""ALFWorld in a pool of processes against the same environment in this process: how it grows with the workers, in one run.

    python benchmarks/alfworld_pool.py [--workers 1 4 16] [--seconds 10] [--family tiny] [--data DIR --split valid_seen]

Each worker plays random admissible actions, episode after episode, from a seed of its own. Prints one JSON object: turns per
second of wall time (resets included), CPU milliseconds a turn (this process and the workers together), the workers' own
memory in MB (what they share with each other left out), and the seconds until the pool was ready.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Callable

import gymnasium
import psutil

import divopd_gym  # noqa: F401  (registers the ids)
from divopd_gym.pool import EnvPool

ID = "divopd_gym/ALFWorld-v0"
MAX_TURNS = 30


def in_process(env_kwargs: dict, seconds: float) -> dict:
    """One environment without a pool."""
    env = gymnasium.make(ID, **env_kwargs)
    env.reset(seed=0)
    rng, turns, episodes, over, info = random.Random(0), 0, 0, True, {}
    cpu, began = time.process_time(), time.perf_counter()
    while (spent := time.perf_counter() - began) < seconds:
        if over:
            episodes += 1
            _, info = env.reset(seed=episodes)
        _, _, terminated, truncated, info = env.step(rng.choice(info["admissible_actions"]))
        over, turns = terminated or truncated, turns + 1
    cpu = time.process_time() - cpu
    env.close()
    return {"episodes": episodes, **figures(turns, spent, cpu)}


async def in_pool(env_kwargs: dict, workers: int, seconds: float) -> dict:
    """So many environments in a pool, all of them played at once."""
    began = time.perf_counter()
    pool = EnvPool(ID, env_kwargs, workers=workers, recycle_after=None)
    await pool.start()
    try:
        handles = [await pool.acquire() for _ in range(workers)]
        await asyncio.gather(*(play(handle, n, lambda turns: turns >= 5) for n, handle in enumerate(handles)))
        ready = time.perf_counter() - began
        cpu, began = cpu_s(pool.pids()), time.perf_counter()

        def late(turns: int) -> bool:
            return time.perf_counter() - began >= seconds

        played = await asyncio.gather(*(play(handle, n, late) for n, handle in enumerate(handles)))
        spent, cpu = time.perf_counter() - began, cpu_s(pool.pids()) - cpu
        own = sum(psutil.Process(pid).memory_full_info().uss for pid in pool.pids()) / 1e6
        for handle in handles:
            pool.release(handle)
    finally:
        await pool.close()
    turns, episodes = (sum(column) for column in zip(*played, strict=True))
    row = {"workers": workers, "episodes": episodes, **figures(turns, spent, cpu)}
    return row | {"workers_own_mb": round(own), "ready_s": round(ready, 1)}


async def play(handle, number: int, enough: Callable[[int], bool]) -> tuple[int, int]:
    """Episodes from a worker's own seeds until it is enough; turns and episodes."""
    rng, turns, episodes, over, info = random.Random(number), 0, 0, True, {}
    while not enough(turns):
        if over:
            episodes += 1
            _, info = await handle.reset(seed=1000 * number + episodes)
        _, _, terminated, truncated, info = await handle.step(rng.choice(info["admissible_actions"]))
        over, turns = terminated or truncated, turns + 1
    return turns, episodes


def cpu_s(pids: list[int]) -> float:
    """CPU seconds of this process and of others so far."""
    times = [psutil.Process(pid).cpu_times() for pid in pids]
    return time.process_time() + sum(t.user + t.system for t in times)


def figures(turns: int, seconds: float, cpu: float) -> dict:
    return {
        "turns": turns,
        "turns_per_s": round(turns / seconds, 1),
        "turns_per_cpu_s": round(turns / max(cpu, 1e-3), 1),
        "cpu_ms_per_turn": round(1e3 * cpu / max(turns, 1), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--seconds", type=float, default=10, help="of playing, a number of workers")
    parser.add_argument("--family", default="tiny", help="of the generated houses")
    parser.add_argument("--data", help="folder of the benchmark's games; without it generated houses")
    parser.add_argument("--split", default="valid_seen", help="of the benchmark's games")
    args = parser.parse_args()
    kwargs: dict = {"max_turns": MAX_TURNS}
    kwargs |= {"split": args.split, "data_dir": args.data} if args.data else {"family": args.family}
    report = {
        "benchmark": "alfworld_pool",
        "source": f"the benchmark's games, {args.split}"
        if args.data
        else f"generated houses, family {args.family}",
        "seconds": args.seconds,
        "in_process": in_process(kwargs, args.seconds),
        "pool": [asyncio.run(in_pool(kwargs, workers, args.seconds)) for workers in args.workers],
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
