"""A run that looks like a run, made without models: for tests of what reads run directories."""

import math
from collections import Counter
from pathlib import Path

import numpy as np
import yaml

from divopd_trainer.composer import BatchComposer
from divopd_trainer.records import BatchRecord, RunWriter
from divopd_trainer.turns import Rollout, Segment, make_turn

TYPES = ("pick_and_place_simple", "look_at_obj_in_light", "pick_clean_then_place_in_recep")
ACTIONS = ("go to cabinet 1", "open cabinet 1", "take mug 1 from cabinet 1", "go to sinkbasin 1", "look")


def fake_rollout(rid, version, turns, rng, success=False, dead=0.0, tokens=6):
    segment = Segment(rid, 0, rng.integers(5, 500, 40))
    kind = TYPES[rid % len(TYPES)]
    rollout = Rollout(
        rid,
        task=f"tiny/{kind}/{rid}",
        turns_played=turns,
        success=success,
        done=success,
        score=float(success),
        reward=float(success),
        done_reason="success" if success else "turn_limit",
        policy_versions=(version, version),
        timings={"total_s": 0.1 * turns},
    )
    for t in range(turns):
        start, end = segment.append(rng.integers(5, 500, tokens))
        actor = "teacher" if turns > 6 and t in (4, 5) and rid % 4 == 0 else "student"
        student = -rng.exponential(0.5, tokens)
        teacher = student - rng.normal(0.25 * math.exp(-version / 20), 0.6, tokens)
        rollout.turns.append(
            make_turn(
                rollout_id=rid,
                index=t,
                segment=segment,
                start=start,
                end=end,
                student_logprobs=student,
                teacher_logprobs=None if rng.random() < dead or actor == "teacher" else teacher,
                policy_version=version,
                actor=actor,
                action=ACTIONS[(rid + t) % len(ACTIONS)],
                action_valid=bool(rng.random() < 0.85),
                observation="-= Welcome =-\nYou are in a room. <b>You see</b> a cabinet 1 & a sinkbasin 1."
                if t == 0
                else "You arrive at cabinet 1. The cabinet 1 is closed.",
            )
        )
        segment.append(rng.integers(5, 500, 20))
    return rollout


def fake_run(path, updates=20, preset="divopd", rows=16, load=1.6, seed=0, teacher=True):
    """Write a whole run directory; returns its path."""
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    settings = dict(
        preset=preset, batch_rows=rows, pool_multiplier=4, cap=4, max_staleness=2, max_pending_age=8
    )
    config = dict(
        method=preset, model="tiny/student", teacher="tiny/teacher", updates=updates, max_concurrent=16
    )
    (path / "config.yaml").write_text(yaml.safe_dump(config))
    composer = BatchComposer(**settings, seed=0)
    rid = env_turns = trained = forwarded = 0
    with RunWriter(path, settings=settings | {"seed": 0}) as writer:

        def when(update, wall):
            return dict(update=update, policy_version=update, wall_s=wall, env_turns=env_turns)

        def evaluate(update, wall):
            rate = 0.2 + 0.6 * (1 - math.exp(-update / 12)) + rng.normal(0, 0.02)
            per_type = {kind: {"success_rate": round(rate, 3), "episodes": 40} for kind in TYPES}
            writer.write_metrics(
                kind="eval",
                **when(update, wall),
                success_rate=rate,
                done_rate=rate,
                score=rate,
                episodes=120,
                per_type=per_type,
            )

        if teacher:
            writer.write_metrics(
                kind="eval",
                **when(0, 0.5),
                who="teacher",
                success_rate=0.92,
                done_rate=0.93,
                score=0.92,
                episodes=120,
                per_type={},
            )
        evaluate(0, 1.0)
        for update in range(1, updates + 1):
            arrivals = []
            while sum(turn.valid for turn in arrivals) < load * rows:
                solved = bool(rng.random() < 0.2 + 0.6 * (1 - math.exp(-update / 12)))
                version = max(update - 1 - int(rng.integers(0, 2)), 0)
                turns = int(rng.integers(5, 12)) if solved else 15
                rollout = fake_rollout(rid, version, turns, rng, solved, dead=0.1)
                writer.write_rollout(rollout)
                arrivals += [turn for turn in rollout.turns if turn.actor == "student"]
                env_turns += turns
                rid += 1
            batch = composer.compose(update, arrivals)
            writer.write_batch(
                BatchRecord.of(
                    update, batch, arrivals, versions=(max(update - 2, 0), update - 1), unread=composer.unread
                )
            )
            per = {}
            longest = {}
            for turn in batch.selected:
                per[turn.rollout_id] = per.get(turn.rollout_id, 0) + turn.seq_len
                longest[turn.rollout_id] = max(longest.get(turn.rollout_id, 0), turn.seq_len)
            share = np.array(list(per.values())) / sum(per.values())
            trained += sum(int(turn.valid_mask().sum()) for turn in batch.selected)
            forwarded += sum(longest.values())
            gaps = [-turn.score / turn.n_tokens for turn in batch.selected]
            writer.write_metrics(
                kind="train",
                **when(update, 1 + 2.0 * update),
                rows=len(batch.selected),
                dead_rows=sum(not turn.valid for turn in batch.selected),
                forwarded_tokens=sum(longest.values()),
                forwarded_tokens_rows=sum(per.values()),
                trained_tokens=sum(int(turn.valid_mask().sum()) for turn in batch.selected),
                effective_rollouts=float(1 / (share**2).sum()),
                top1_share=float(share.max()),
                turns_per_rollout=len(batch.selected) / len(per),
                kl_per_token=-float(np.mean(gaps)),
                dropped_stale=batch.dropped_stale,
                learner_s=1.2 + 0.1 * rng.random(),
                wait_s=0.5 * rng.random(),
                loss=0.1,
                grad_norm=1.0,
                learning_rate=1e-4,
                pool=batch.pool,
                pending=len(batch.pending),
                staleness={
                    str(age): n
                    for age, n in Counter(update - 1 - t.policy_version for t in batch.selected).items()
                },
                unread=composer.unread,
            )
            writer.write_metrics(
                kind="explorer",
                **when(update, 2.0 * update),
                in_flight=int(rng.integers(10, 17)),
                success_rate=0.2 + 0.6 * (1 - math.exp(-update / 12)),
                episodes=rid,
                tokens_per_s=300 + 20 * rng.random(),
            )
            if update % 4 == 0 or update == updates:
                evaluate(update, 1.5 + 2.0 * update)
    return path
