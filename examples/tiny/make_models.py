"""Make the tiny teacher and the warm student from nothing: expert episodes, a tokenizer, training, measurements.

    python examples/tiny/make_models.py --out examples/tiny/models

Stages, each skipped if its result is there: record the searching expert with mistakes; train a tokenizer and the teacher;
let the teacher and two weak students play while the expert comments (DAgger) and train the teacher on; make a student
able and let it imitate a half random player; evaluate teacher and student.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

ENV = "divopd_gym/ALFWorld-v0"
TEACHER = "tiny:layers=4,width=256,heads=8,mlp=640"
STUDENT = "tiny:layers=4,width=192,heads=6,mlp=576"
HOUSES = {"split": "generated", "family": "tiny", "num_tasks": 2500}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", default="examples/tiny/models", help="folder for teacher/ and student/")
    parser.add_argument("--work", default="runs/tiny", help="folder for recordings and unfinished models")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1, help="processes that record")
    parser.add_argument("--episodes", type=int, default=10_000, help="expert episodes")
    parser.add_argument("--updates", type=int, default=260, help="of the teacher's first training")
    parser.add_argument("--played", type=int, default=1_200, help="episodes a round")
    parser.add_argument("--more_updates", type=int, default=250, help="a round")
    parser.add_argument(
        "--student_updates", type=int, default=90, help="of a weak student for the last round"
    )
    parser.add_argument(
        "--sparring_updates", type=int, default=200, help="of a stronger student for the last round"
    )
    parser.add_argument(
        "--able_updates", type=int, default=250, help="more of the shipped student, well shown"
    )
    parser.add_argument("--noisy", type=int, default=2_500, help="episodes of a player that is half random")
    parser.add_argument("--noisy_updates", type=int, default=100, help="of the shipped student on those")
    parser.add_argument("--evaluate", type=int, default=200, help="held-out houses")
    args = parser.parse_args()

    import torch

    from divopd_trainer.expert import record_expert
    from divopd_trainer.sft import train_sft

    torch.set_num_threads(1)
    work, out = Path(args.work), Path(args.out)
    work.mkdir(parents=True, exist_ok=True)
    figures: dict = {}

    def stage(name: str, make, *given, **options) -> None:
        note = work / f"{name}.json"
        if not note.exists():
            begun, wall = time.process_time(), time.time()
            result = make(*given, **options) or {}
            result.update(
                stage_cpu_s=round(time.process_time() - begun, 1), wall_s=round(time.time() - wall, 1)
            )
            note.write_text(json.dumps(result, indent=1))
        figures[name] = json.loads(note.read_text())
        print(name, figures[name], flush=True)

    recordings = [work / "expert.jsonl.zst"]
    stage("expert", record_expert,
        ENV, HOUSES, args.episodes, noise=(0.1, 0.3), seed=args.seed, out=recordings[0], workers=args.workers,
    )  # fmt: skip
    teacher = work / "teacher-0"
    stage("teacher-0", train_sft,
        TEACHER, recordings, teacher, env_id=ENV, updates=args.updates,
        batch_tokens=2048, lr=2e-3, matrix_lr=0.02, decay=0.3, observation_weight=0.1, seed=args.seed, dtype="float32",
        log_every=20, quiet=True,
    )  # fmt: skip
    for name, updates in (("student", args.student_updates), ("student-long", args.sparring_updates)):
        stage(name, train_sft,
            STUDENT, recordings, work / name, tokenizer=teacher, env_id=ENV, updates=updates, batch_tokens=2048,
            lr=2e-3, matrix_lr=0.02, decay=0.5, observation_weight=0.1, max_episodes=2000, seed=args.seed,
            dtype="float32", log_every=20, quiet=True,
        )  # fmt: skip
    # Who plays while the expert comments: the teacher itself, twice, then students of two strengths. A teacher that never
    # saw a student's failures agrees with them (it names the expert's action in 70 % of the student's states), and then
    # distillation lowers the KL and success alike.
    rounds = [
        [(None, args.played, 0.3, (0.0, 0.1))],
        [(None, args.played, 0.3, (0.0, 0.1))],
        [(work / "student", 500, 0.1, 0.0), (work / "student-long", 400, 0.1, 0.0)],
    ]
    for number, players in enumerate(rounds, 1):
        for place, (player, episodes, mix, noise) in enumerate(players):
            played = work / f"played-{number}-{place}.jsonl.zst"
            houses = {**HOUSES, "first_seed": 10_000 * (2 * number + place)}
            stage(f"played-{number}-{place}", record_expert,
                ENV, houses, episodes, noise=noise, seed=1000 + 10 * number + place, out=played, workers=0, repeats=1,
                concurrency=64, policy=player or teacher, policy_mix=mix,
            )  # fmt: skip
            recordings.append(played)
        previous, teacher = teacher, work / f"teacher-{number}"
        stage(f"teacher-{number}", train_sft,
            previous, _mixed(recordings, number), teacher, env_id=ENV, updates=args.more_updates, batch_tokens=2048,
            lr=1e-3, matrix_lr=0.01, warmup=10, decay=1.0, observation_weight=0.05, seed=args.seed + number,
            dtype="float32", log_every=20, quiet=True,
        )  # fmt: skip
    # The student that ships knows the task and plays it badly: more of the same training, then a player with one random
    # action in two is imitated, mistakes included. A student that lacks the knowledge itself gains nothing in a demo's time.
    stage("student-able", train_sft,
        work / "student-long", _mixed(recordings, 5), work / "student-able", env_id=ENV, updates=args.able_updates,
        batch_tokens=2048, lr=2e-3, matrix_lr=0.02, warmup=10, decay=0.6, observation_weight=0.05, seed=args.seed + 3,
        dtype="float32", log_every=25, quiet=True,
    )  # fmt: skip
    noisy = work / "noisy.jsonl.zst"
    stage("noisy", record_expert,
        ENV, HOUSES, args.noisy, noise=0.5, clean=0.0, repeats=3, seed=77, out=noisy, workers=0,
    )  # fmt: skip
    student = work / "student-noisy"
    stage("student-noisy", train_sft,
        work / "student-able", noisy, student, env_id=ENV, follow="executed", updates=args.noisy_updates,
        batch_tokens=2048, lr=1e-3, matrix_lr=0.01, warmup=10, decay=0.7, observation_weight=0.05, seed=args.seed,
        dtype="float32", log_every=20, quiet=True,
    )  # fmt: skip
    for name, folder in (("teacher", teacher), ("student", student)):
        _publish(folder, out / name)
        for greedy in (True, False):
            note = f"eval-{name}-{'greedy' if greedy else 't1'}"
            stage(note, _evaluate, out / name, args.evaluate, greedy)
    (out / "figures.json").write_text(json.dumps(figures, indent=1) + "\n")


def _mixed(recordings: list[Path], seed: int) -> list[dict]:
    """All that was played, and of what the expert showed as much, at most 1,200 episodes."""
    import random

    from divopd_trainer.expert import read_episodes

    played = [e for path in recordings[1:] for e in read_episodes(path)]
    shown = read_episodes(recordings[0])
    return played + random.Random(seed).sample(shown, min(len(shown), len(played), 1200))


def _publish(source: Path, target: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from divopd_trainer.tiny import save_model

    model = AutoModelForCausalLM.from_pretrained(source, dtype="float32")
    save_model(model, AutoTokenizer.from_pretrained(source), target, "bfloat16")


def _evaluate(folder: Path, houses: int, greedy: bool) -> dict:
    """Strict success on held-out houses, per task type, with Wilson intervals."""
    import asyncio
    from collections import defaultdict

    from transformers import AutoTokenizer

    from divopd_gym.prompts import get_prompt
    from divopd_trainer.chat import ChatCodec
    from divopd_trainer.engines.local import LocalStudent
    from divopd_trainer.evaluate import evaluate
    from divopd_trainer.expert import InProcessPool
    from divopd_trainer.metrics import wilson_interval

    codec = ChatCodec(AutoTokenizer.from_pretrained(folder))
    engine = LocalStudent(folder, max_slots=32, stop_ids=codec.end_of_turn_ids)
    pool = InProcessPool(ENV, {**HOUSES, "subset": "valid", "num_tasks": houses}, 32)

    async def play():
        await pool.start()
        handle = await pool.acquire()
        tasks = list(await handle.call("tasks"))
        pool.release(handle)
        return await evaluate(
            engine, pool, codec, get_prompt(ENV, "tiny", "accumulate"), tasks, temperature=1.0, greedy=greedy,
            concurrency=32, max_tokens=32,
        )  # fmt: skip

    try:
        result = asyncio.run(play())
    finally:
        engine.close()
    by_type: dict[str, list[bool]] = defaultdict(list)
    for one in result.results:
        by_type["all"].append(one.success)
        by_type[one.task_type].append(one.success)
    return {
        "greedy": greedy,
        "turns": round(sum(r.turns for r in result.results) / houses, 2),
        "invalid_actions": round(
            sum(r.invalid_actions for r in result.results) / sum(r.turns for r in result.results), 4
        ),
        "success": {
            name: [sum(won), len(won), *(round(x, 3) for x in wilson_interval(sum(won), len(won)))]
            for name, won in by_type.items()
        },
    }


if __name__ == "__main__":
    main()
