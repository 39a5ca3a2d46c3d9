"""What of the turns made is trained, scored and lost at several loads: the real explorer, collator and composer.

Engines cost nothing but a wait; the learner is a pause four times as long as a batch takes to make (at --slower 4).
Prints a row a setting, or with --json one JSON object of them all: turns made an update and, as shares of them, scored, trained, stale before any batch could
have them ("never"), stale after a batch passed them over ("passed"); then the share of time that the learner waited and
the mean length of rollouts made and trained.

    python benchmarks/pacing.py --updates 100 [--json]
"""

import argparse
import asyncio
import json
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PATHS = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "tests" / "trainer")]
sys.path[:0] = PATHS

from fakes import ENV_ID, ByteCodec, FakeStudent, FakeTeacher  # noqa: E402

from divopd_trainer.collator import PackOptions, TurnCollator  # noqa: E402
from divopd_trainer.composer import BatchComposer  # noqa: E402
from divopd_trainer.explorer import ExplorerConfig, ExplorerProcess  # noqa: E402
from divopd_trainer.explorer.engines import Engines  # noqa: E402
from divopd_trainer.explorer.messages import PoolStatus, SetPolicy  # noqa: E402

ROWS, CONCURRENT, TURN_S, LENGTHS = 32, 8, 0.04, tuple(range(2, 13))


class Student(FakeStudent):
    """Takes a while to load."""

    async def load_weights(self, source, version):
        await asyncio.sleep(float(source))
        await super().load_weights(source, version)


def build(config):
    return Engines(Student(delay_s=TURN_S), ByteCodec(), FakeTeacher(delay_s=0.01))


def measure(preset, load, slower, updates, load_s):
    """One setting; a dict of figures."""
    config = ExplorerConfig(
        env_id=ENV_ID, env_kwargs={"tasks": 5000, "lengths": LENGTHS}, workers=CONCURRENT, engine="pacing:build",
        pool="fakes:make_pool", prompt_style="tiny", max_turns=12, max_tokens=20, batch_rows=ROWS, load=load,
        max_concurrent=CONCURRENT, lazy_scoring=True,
    )  # fmt: skip
    explorer = ExplorerProcess(config)
    composer = BatchComposer(preset, batch_rows=ROWS)
    rollouts, passed, stale, trained = [], 0, 0, []
    learner_s = slower * ROWS * TURN_S / CONCURRENT

    class Source:
        """Keeps what passes."""

        rollout_buffer = explorer.rollout_buffer
        exhausted = False
        check_health = staticmethod(explorer.check_health)

    collator = TurnCollator(
        Source, composer, PackOptions(), on_status=lambda *status: explorer.send(PoolStatus(*status))
    )
    collator.weighting = type(
        "Seen", (), {"annotate": staticmethod(rollouts.append), "weights": lambda *a: None}
    )
    collator._share = lambda update, rows: [[]]
    explorer.start()
    begun, waited = time.perf_counter(), 0.0
    try:
        for update in range(1, updates + 1):
            asked = time.perf_counter()
            batch = collator.poll(update, 60.0)
            waited += time.perf_counter() - asked
            passed, stale = passed + batch.facts["passed_over"], stale + batch.facts["dropped_stale"]
            trained += batch.rows
            time.sleep(learner_s)
            explorer.send(SetPolicy(update, str(load_s), update))
        seconds = time.perf_counter() - begun
    finally:
        explorer.stop(2.0)
    made = [turn for rollout in rollouts for turn in rollout.turns]
    ids = {turn.rollout_id for turn in trained}
    done = rollouts[: int(len(rollouts) * 0.95)]
    lengths = [len(r.turns) for r in done], [len(r.turns) for r in done if r.rollout_id in ids]
    scored = sum(turn.teacher_logprobs is not None for turn in made)
    return {
        "made": len(made) / updates, "scored": scored / len(made), "trained": len(trained) / len(made),
        "never": (stale - passed) / len(made),
        "passed": passed / len(made), "waited": waited / seconds,
        "length made": sum(lengths[0]) / len(lengths[0]), "length trained": sum(lengths[1]) / len(lengths[1]),
    }  # fmt: skip


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, default=100)
    parser.add_argument(
        "--slower", type=float, default=4.0, help="learner's time over that of making a batch"
    )
    parser.add_argument("--loads", type=float, nargs="+", default=[1.0, 3.0])
    parser.add_argument("--presets", nargs="+", default=["vanilla", "divopd"])
    parser.add_argument("--load_s", type=float, default=0.1, help="seconds that loading weights takes")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    args = parser.parse_args(argv)
    os.environ["PYTHONPATH"] = os.pathsep.join([*PATHS, os.environ.get("PYTHONPATH", "")])
    rows = []
    for load in args.loads:
        for preset in args.presets:
            figures = measure(preset, load, args.slower, args.updates, args.load_s)
            rows.append({"load": load, "preset": preset, **{n: round(v, 4) for n, v in figures.items()}})
            shown = (
                f"{name} {value:.1f}" if name[:4] in ("made", "leng") else f"{name} {value:.1%}"
                for name, value in figures.items()
            )
            if not args.json:
                print(f"load {load:g} {preset}: " + ", ".join(shown), flush=True)
    if args.json:
        settings = {"updates": args.updates, "slower": args.slower, "batch_rows": ROWS}
        print(json.dumps({"benchmark": "pacing", **settings, "rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
