"""Runs for the report's tests: several methods and seeds with metrics alone, and token texts for a run."""

import json
import math

import numpy as np
import yaml

from divopd_trainer.records import RunWriter

SPEED = {"vanilla": 30, "divopd-base": 22, "divopd": 12, "turnopd": 18, "tcod-f2b": 25, "divopd-r": 11}


def metric_run(path, method="divopd", seed=0, updates=40, every=4, noise=0.02, accounts=True, **config):
    """Write config.yaml and metrics.jsonl of a run; success rises at the method's speed. Returns the path."""
    rng = np.random.default_rng([*str(seed).encode(), *method.encode()])
    path.mkdir(parents=True, exist_ok=True)
    settings = dict(method=method, seed=seed, run_dir=str(path), updates=updates, max_concurrent=16) | config
    (path / "config.yaml").write_text(yaml.safe_dump(settings))
    with RunWriter(path) as writer:

        def when(update, wall):
            return dict(update=update, policy_version=update, wall_s=wall, env_turns=100 * update)

        for update in range(updates + 1):
            if update:
                account = dict(
                    generator_s=3 + rng.random(), teacher_s=1 + rng.random(), generator_tokens=9000,
                    teacher_tokens=12000,
                )  # fmt: skip
                writer.write_metrics(
                    kind="train", **when(update, 5 * update), rows=64, dead_rows=0, trained_tokens=1000,
                    forwarded_tokens=8000, forwarded_tokens_rows=30000, effective_rollouts=12 + rng.normal(),
                    top1_share=0.1 + 0.02 * rng.random(), turns_per_rollout=4.0, grad_norm=1.0,
                    kl_per_token=math.exp(-update / 20) + 0.05 * rng.random(), dropped_stale=int(rng.integers(9)),
                    learner_s=2 + 0.2 * rng.random(), wait_s=rng.random(), pending=9, unread=0,
                    valid_rollouts=16 * update, never_used=2 * update, staleness={"0": 40, "1": 24},
                    **(account if accounts else {}),
                )  # fmt: skip
            if update % every == 0:
                rate = 0.2 + 0.7 * (1 - math.exp(-update / SPEED.get(method, 20))) + noise * rng.normal()
                rate = min(1.0, max(0.0, rate))
                kinds = {kind: {"success_rate": rate, "episodes": 60} for kind in ("pick", "look")}
                writer.write_metrics(
                    kind="eval", **when(update, 5 * update + 1), success_rate=rate, done_rate=rate, score=rate,
                    episodes=120, per_type=kinds,
                )  # fmt: skip
    return path


def curve_run(path, rates, method="divopd", seed=0, tokens=100, **config):
    """A run whose evaluations after updates 0, 1, 2, ... have the given success rates."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.yaml").write_text(
        yaml.safe_dump(dict(method=method, seed=seed, run_dir=str(path)) | config)
    )
    with RunWriter(path) as writer:
        for update, rate in enumerate(rates):
            at = dict(update=update, policy_version=update, wall_s=10.0 * update, env_turns=0)
            if update:
                writer.write_metrics(
                    kind="train", **at, trained_tokens=tokens, learner_s=2.0, generator_s=5.0, teacher_s=3.0
                )
            writer.write_metrics(kind="eval", **at, success_rate=rate, episodes=100)
    return path


def write_tokenizer(folder, words):
    """A byte-level tokenizer.json with these pieces, as the tokenizers library would write it."""
    folder.mkdir(parents=True, exist_ok=True)
    data = {
        "model": {"type": "BPE", "vocab": {word: place for place, word in enumerate(words)}, "merges": []},
        "decoder": {"type": "ByteLevel"},
        "pre_tokenizer": None,
        "added_tokens": [{"id": len(words), "content": "<|end|>"}],
    }
    (folder / "tokenizer.json").write_text(json.dumps(data))
