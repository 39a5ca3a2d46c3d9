"""The environments without a model: one game, an expert, a vector of games, and a pool of processes.

python examples/gym_only.py        # houses made on the spot; nothing is downloaded, no torch is needed
"""

from __future__ import annotations

import argparse
import random

import gymnasium

import divopd_gym  # noqa: F401  (registers the environments)
from divopd_gym.pool import EnvPool

ENV_ID = "divopd_gym/ALFWorld-v0"
HOUSES = {"split": "generated", "family": "tiny", "subset": "valid", "num_tasks": 20}


def play(env: gymnasium.Env, choose, task: str | None = None) -> dict:
    """One episode; `choose(observation, info)` gives the action. Returns the last info."""
    observation, info = env.reset(seed=0, options={"task": task} if task else None)
    over = False
    while not over:
        observation, _, terminated, truncated, info = env.step(choose(observation, info))
        over = terminated or truncated
    return info


def one_game() -> tuple[dict, dict]:
    """Play one house at random, then along its gold path."""
    with gymnasium.make(ENV_ID, **HOUSES) as env:
        task = env.unwrapped.tasks[0]
        rng = random.Random(0)
        lost = play(env, lambda observation, info: rng.choice(info["admissible_actions"]), task)
        print(f"{task}\n  {lost['goal']}")
        print(f"  at random: success {lost['success']} after {lost['turns']} turns ({lost['done_reason']})")
        env.reset(options={"task": task})
        path = iter(env.unwrapped.gold_path())
        won = play(env, lambda observation, info: next(path), task)
        print(f"  gold path: success {won['success']} after {won['turns']} turns")
    return lost, won


def many_games(games: int = 3) -> list[str]:
    """Several houses as one Gymnasium vector environment; a game that is over begins another by itself."""
    envs = gymnasium.make_vec(ENV_ID, num_envs=games, vectorization_mode="sync", **HOUSES)
    try:
        observations, _ = envs.reset(seed=0)
        observations, rewards, *_ = envs.step(["look"] * games)
        print(f"{games} games at once: rewards {rewards.tolist()}")
        return list(observations)
    finally:
        envs.close()


def in_processes(games: int = 4) -> int:
    """Houses in processes of their own, played by an expert that knows only what it reads."""
    won = 0
    with EnvPool.sync(ENV_ID, HOUSES, 2) as pool:
        for number in range(games):
            with pool.lend() as env:
                env.reset(task=env.call("tasks")[number])
                over = False
                while not over:
                    _, _, terminated, truncated, info = env.step(env.expert_act())
                    over = terminated or truncated
                won += info["success"]
    print(f"the searching expert won {won} of {games} houses")
    return won


def main() -> None:
    """Show all of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--games", type=int, default=4, help="houses that the expert plays (4)")
    games = parser.parse_args().games
    one_game()
    many_games()
    in_processes(games)


if __name__ == "__main__":
    main()
