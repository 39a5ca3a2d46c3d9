"""CPU time of ALFWorld here against ALFWorld's own environment: the same games and actions, in one run.

    python benchmarks/alfworld_env.py [--data DIR] [--split valid_seen] [--games 10] [--turns 25]

With --data the benchmark's games are played, without it large generated houses. Prints one JSON object: CPU
milliseconds per turn and for the next game (load and reset) on both sides, the ratios, and whether every text, every
list of admissible commands and every `won` was the same. Both sides run in this process, turn by turn, so a busy
machine slows both.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from pathlib import Path

import gymnasium

import divopd_gym  # noqa: F401


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", help="folder of the benchmark's games; without it large generated houses")
    parser.add_argument("--split", default="valid_seen")
    parser.add_argument("--games", type=int, default=10)
    parser.add_argument("--turns", type=int, default=25, help="random admissible actions per game")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(compare(args, Path(folder)), indent=2))


def compare(args: argparse.Namespace, folder: Path) -> dict:
    rng = random.Random(args.seed)
    env, games = ours(args, rng, folder)
    stock = theirs(folder)
    times: dict[str, list[float]] = {"our_turn": [], "their_turn": [], "our_next": [], "their_next": []}
    same = True
    # The first game of a process also pays for imports and parsers, on both sides; it is not counted.
    for number, (task, path) in enumerate(games):
        counted = times if number else {key: [] for key in times}
        _, info = clocked(counted["our_next"], env.reset, options={"task": task})
        _, infos = clocked(counted["their_next"], lambda p=path: (stock.load(p), stock.reset())[1])
        same &= info["admissible_actions"] == infos["admissible_commands"]
        for _ in range(args.turns):
            action = rng.choice(info["admissible_actions"])
            text, _, ended, _, info = clocked(counted["our_turn"], env.step, action)
            their_text, _, _, infos = clocked(counted["their_turn"], stock.step, action)
            same &= text == their_text and info["success"] == infos["won"]
            same &= info["admissible_actions"] == infos["admissible_commands"]
            if ended:
                break
    result = {
        "benchmark": "alfworld_env",
        "games": len(games) - 1,
        "turns": len(times["our_turn"]),
        "source": f"the benchmark's games, {args.split}" if args.data else "large generated houses",
        "versions": env.unwrapped.versions(),
        "identical": same,
    }
    for what in ("turn", "next"):
        one, other = times[f"our_{what}"], times[f"their_{what}"]
        name = "turn" if what == "turn" else "next_game"
        result[f"{name}_cpu_ms"] = {
            "divopd_gym": summary(one),
            "alfworld": summary(other),
            "ratio_of_means": round(sum(other) / sum(one), 1),
            "ratio_of_medians": round(statistics.median(other) / statistics.median(one), 1),
        }
    return result


def ours(args: argparse.Namespace, rng: random.Random, folder: Path):
    kwargs: dict = {"split": args.split, "data_dir": args.data} if args.data else {"family": "large"}
    env = gymnasium.make("divopd_gym/ALFWorld-v0", max_turns=None, **kwargs)
    tasks = rng.sample(list(env.unwrapped.tasks), args.games + 1)
    if args.data:
        from divopd_gym.envs.alfworld.games import find_split

        split = find_split(args.split, args.data)
        return env, [(task, str(split.path(task))) for task in tasks]
    from divopd_gym.envs.alfworld.houses import house_from_id

    games = []
    for number, task in enumerate(tasks):
        source = house_from_id(task).source
        path = folder / f"{number}.tw-pddl"
        game = {"pddl_domain": source.domain, "grammar": source.grammar, "pddl_problem": source.problem}
        path.write_text(json.dumps({**game, "walkthrough": list(source.walkthrough or ())}))
        games.append((task, str(path)))
    return env, games


def theirs(folder: Path):
    os.environ.setdefault("ALFWORLD_DATA", str(folder))
    import textworld
    from alfworld.agents.environment.alfred_tw_env import AlfredDemangler, AlfredInfos
    from textworld.envs.pddl import PddlEnv
    from textworld.envs.wrappers import Filter

    wanted = textworld.EnvInfos(won=True, admissible_commands=True, extras=["gamefile"])
    return Filter(AlfredInfos(AlfredDemangler(PddlEnv(wanted), shuffle=False)))


def clocked(times: list[float], call, *args, **kwargs):
    start = time.process_time()
    result = call(*args, **kwargs)
    times.append(1e3 * (time.process_time() - start))
    return result


def summary(times: list[float]) -> dict[str, float]:
    return {"mean": round(statistics.fmean(times), 3), "median": round(statistics.median(times), 3)}


if __name__ == "__main__":
    main()
