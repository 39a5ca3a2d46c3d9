"""Turns and memory of ScienceWorld here against ScienceWorld's own environment: the same actions, in one run.

    python benchmarks/scienceworld_env.py [--envs 1 4 16] [--seconds 30] [--paths FILE] [--at_most 600]

Each environment lives in a process of its own, as in a pool, and plays gold paths one after the other. `--paths` names
a JSON file with {"paths": [{"task", "var", "gold"}]} made without simplifications; without it a few are made first.
Both sides are made ready before the clock starts, and every environment has then played some turns. Prints one JSON
object: turns per second of wall time, turns per second of CPU time of all processes, resident MB of the simulators and
of everything. What is not ready within --at_most seconds from the start is left out and named in "not_ready".
"""

import argparse
import json
import multiprocessing
import os
import sys
import time

import gymnasium
import psutil

import divopd_gym  # noqa: F401  (registers the ids)

ID = "divopd_gym/ScienceWorld-v0"
DEFAULT = ("boil/0", "find-plant/0", "chemistry-mix/0", "melt/0", "power-component/0", "grow-plant/0")


class Ours:
    """This project's environment."""

    def __init__(self):
        self.env = gymnasium.make(
            ID, split="all", simplification="", max_turns=None, disable_env_checker=True
        )
        self.env.reset(options={"task": "boil/0"})
        self.simulator = self.env.unwrapped._connection.pid

    def load(self, task, variation):
        self.env.reset(options={"task": f"{task}/{variation}"})

    def turn(self, action):
        _, _, terminated, truncated, info = self.env.step(action)
        return terminated or truncated, info["raw_score"]


class Stock:
    """ScienceWorld's own environment, as its examples use it."""

    def __init__(self):
        from scienceworld import ScienceWorldEnv

        self.env = ScienceWorldEnv("", envStepLimit=10_000)
        self.simulator = self.env._gateway.java_process.pid

    def load(self, task, variation):
        self.env.load(task, variation, "")
        self.env.reset()

    def turn(self, action):
        _, _, done, info = self.env.step(action)
        return done, info["score"]


def player(kind, number, paths, pipe, warm_up):
    env = kind()
    turns = episodes = solved = 0
    until = None

    def paused():
        """Whether to stop: at the end of the warm-up wait for the clock, then play until it has run out."""
        nonlocal until, turns, episodes, solved
        if until is None:
            if turns < warm_up:
                return False
            pipe.send((os.getpid(), env.simulator))
            until = pipe.recv()
            turns = episodes = solved = 0
        return time.time() >= until

    index = number
    while not paused():
        path = paths[index % len(paths)]
        index += 1
        env.load(path["task"], path["var"])
        done, score = False, 0
        for action in path["gold"]:
            if paused():
                break
            done, score = env.turn(action)
            turns += 1
            if done:
                break
        episodes += done
        solved += score == 100
    pipe.send((turns, episodes, solved))
    pipe.recv()


def usage(pids):
    """CPU seconds and resident MB of some processes."""
    cpu = resident = 0.0
    for pid in pids:
        process = psutil.Process(pid)
        times = process.cpu_times()
        cpu += times.user + times.system
        resident += process.memory_info().rss / 1e6
    return cpu, resident


def measure(kind, count, paths, seconds, warm_up, until):
    """One side with so many environments; None when they are not ready by `until` (of time.time)."""
    context = multiprocessing.get_context("spawn")
    pairs = [context.Pipe() for _ in range(count)]
    processes = [
        context.Process(target=player, args=(kind, n, paths, theirs, warm_up), daemon=True)
        for n, (_, theirs) in enumerate(pairs)
    ]
    began = time.time()
    for process in processes:
        process.start()
    found = []
    for ours, _ in pairs:
        if not ours.poll(max(0.0, until - time.time())):
            for process in processes:
                process.kill()
                process.join(30)
            return None
        found.append(ours.recv())
    ready = time.time() - began
    players, simulators = [p for p, _ in found], sorted({s for _, s in found})
    start = time.time()
    cpu = usage(players + simulators)[0]
    for ours, _ in pairs:
        ours.send(start + seconds)
    results = [ours.recv() for ours, _ in pairs]
    wall = time.time() - start
    spent, memory = usage(players + simulators)
    of_simulators = usage(simulators)[1]
    for ours, _ in pairs:
        ours.send(None)
    for process in processes:
        process.join(30)
    turns = sum(r[0] for r in results)
    return {
        "turns": turns,
        "episodes": sum(r[1] for r in results),
        "solved": sum(r[2] for r in results),
        "turns_per_s": round(turns / wall, 2),
        "turns_per_cpu_s": round(turns / max(spent - cpu, 1e-9), 2),
        "cpu_s": round(spent - cpu, 1),
        "simulators": len(simulators),
        "simulators_mb": round(of_simulators),
        "all_mb": round(memory),
        "ready_s": round(ready, 1),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--envs", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--warm-up", type=int, default=20, help="turns of each environment before the clock")
    parser.add_argument("--paths")
    parser.add_argument("--at_most", type=float, default=600, help="seconds after which nothing new begins")
    args = parser.parse_args()
    until = time.time() + args.at_most
    if args.paths:
        with open(args.paths) as file:
            paths = json.load(file)["paths"]
    else:
        env = gymnasium.make(ID, split="all", simplification="").unwrapped
        paths = [
            {"task": t.split("/")[0], "var": int(t.split("/")[1]), "gold": env.gold_path_of(t)}
            for t in DEFAULT
        ]
        env.close()
    report = {"benchmark": "scienceworld_env", "seconds": args.seconds, "envs": {}, "not_ready": []}
    for count in args.envs:
        ours = measure(Ours, count, paths, args.seconds, args.warm_up, until)
        stock = measure(Stock, count, paths, args.seconds, args.warm_up, until) if ours else None
        if stock is None:
            report["not_ready"].append(f"{count} {'stock' if ours else 'ours'}")
            continue
        report["envs"][str(count)] = {
            "ours": ours,
            "stock": stock,
            "times_the_turns_per_s": round(ours["turns_per_s"] / max(stock["turns_per_s"], 1e-9), 1),
            "times_the_turns_per_cpu_s": round(
                ours["turns_per_cpu_s"] / max(stock["turns_per_cpu_s"], 1e-9), 1
            ),
            "share_of_the_simulators_memory": round(ours["simulators_mb"] / stock["simulators_mb"], 3),
        }
        print(json.dumps({str(count): report["envs"][str(count)]}), file=sys.stderr, flush=True)
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
