"""What the explorer itself costs: episodes and turns a second with engines and environments that cost nothing.

Prints JSON. Two ways in one run: "play" is the episode loop alone, "process" the whole explorer in its process with
everything that a run does (schedule, pacing, scoring, counters, pickling to the trainer), once for every number of
episodes in flight.

    python benchmarks/explorer.py --episodes 2000 --concurrent 1 16 64
"""

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np  # noqa: E402

from divopd_gym.prompts import get_prompt  # noqa: E402
from divopd_trainer.engines.base import Generation  # noqa: E402
from divopd_trainer.explorer import ExplorerConfig, ExplorerProcess  # noqa: E402
from divopd_trainer.explorer.engines import Engines  # noqa: E402
from divopd_trainer.explorer.episode import EpisodeLimits, run_episode, score_rollout  # noqa: E402

TURNS, END = 20, 256
OBSERVATION = "you arrive at shelf 1. on the shelf 1, you see a book 1, a cd 2, and a vase 1."
INFO = {"task": "t", "goal": "put a vase in safe.", "admissible_actions": ["look"], "valid_action": True}
REPLY = np.array([*b"go to desk 1", END], np.int32)
LOGPROBS = np.full(len(REPLY), -0.5, np.float32)


class Engine:
    """Student and teacher; answers at once."""

    policy_version = 0

    async def generate(self, request):
        return Generation(REPLY, LOGPROBS, "end_of_turn", 0)

    async def score(self, token_ids, spans, topk=0):
        return [LOGPROBS for _ in spans]

    async def load_weights(self, source, version):
        self.policy_version = version

    def forget(self, cache_key):
        pass


class Codec:
    """Bytes."""

    end_of_turn_ids = (END,)

    def start(self, system, user):
        return self.extend(user)

    def extend(self, user, *, closed=True):
        return np.frombuffer(user.encode(), np.uint8).astype(np.int32)

    def closes(self, ids):
        return True

    def decode(self, ids):
        return "go to desk 1"


class Env:
    """Handle and pool in one: an episode of so many turns."""

    counters = {"restarts": 0}

    def __init__(self):
        self.turns = 0

    async def start(self):
        pass

    async def close(self):
        pass

    async def acquire(self):
        return Env()

    def release(self, handle):
        pass

    def pids(self):
        return []

    async def call(self, name):
        return [f"t{i}" for i in range(1000)] if name == "tasks" else {}

    async def reset(self, task=None, seed=None):
        self.turns = 0
        return OBSERVATION, INFO

    async def step(self, action):
        self.turns += 1
        done = self.turns == TURNS
        return OBSERVATION, float(done), done, False, {**INFO, "success": done, "score": float(done)}


def make_pool(env_id, env_kwargs, workers, config):
    return Env()


def build(config):
    return Engines(Engine(), Codec(), Engine())


async def play(episodes):
    """The episode loop alone."""
    engine, codec, prompt = Engine(), Codec(), get_prompt("x", "tiny")
    for i in range(episodes):
        rollout = await run_episode(
            rollout_id=i, task="t", env=Env(), student=engine, codec=codec, prompt=prompt,
            limits=EpisodeLimits(max_turns=TURNS), score=False,
        )  # fmt: skip
        await score_rollout(rollout, engine)


def cpu_s(pid):
    """User and system seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def process(episodes, concurrent):
    """The explorer in its process, with so many episodes in flight."""
    config = ExplorerConfig(
        env_id="x", engine="explorer:build", pool="explorer:make_pool", prompt_style="tiny", workers=concurrent,
        max_concurrent=concurrent, max_turns=TURNS, load=None,
    )  # fmt: skip
    explorer = ExplorerProcess(config)
    explorer.start()
    try:
        begun, cpu = time.perf_counter(), cpu_s(explorer.pid)
        done = 0
        while done < episodes:
            explorer.check_health(30.0)
            explorer.rollout_buffer.wait(0.1)
            done += len(explorer.rollout_buffer.drain())
        return done, time.perf_counter() - begun, cpu_s(explorer.pid) - cpu
    finally:
        explorer.stop()


def figures(episodes, seconds, cpu):
    turns = episodes * TURNS
    return {
        "episodes_per_s": round(episodes / seconds, 1),
        "turns_per_s": round(turns / seconds, 1),
        "cpu_us_per_turn": round(1e6 * cpu / turns, 1),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--concurrent", type=int, nargs="+", default=[16], help="episodes in flight")
    args = parser.parse_args()
    begun, cpu = time.perf_counter(), time.process_time()
    asyncio.run(play(args.episodes))
    report = {"benchmark": "explorer", "turns_per_episode": TURNS, "episodes": args.episodes}
    report["play"] = figures(args.episodes, time.perf_counter() - begun, time.process_time() - cpu)
    report["process"] = [
        {"concurrent": number, **figures(*process(args.episodes, number))} for number in args.concurrent
    ]
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
