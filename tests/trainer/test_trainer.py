"""The learner on TRL with an explorer that needs no process: exactness, one update a batch, records, ranks."""

import functools
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from learner_fakes import VOCAB, FakeExplorer
from ports import free_port
from trainer_fakes import build, lines, weights
from transformers import AutoModelForCausalLM
from two_ranks import capture

from divopd_trainer.records import read_batches, read_rollouts
from divopd_trainer.trainer import DivOPDTrainer
from divopd_trainer.turns import Rollout, Segment, make_turn


def test_a_run_trains_and_leaves_config_metrics_rollouts_and_checkpoint(tmp_path, student):
    trainer = build(tmp_path, student)
    before = weights(trainer.model)
    trainer.train()
    run = tmp_path / "run"
    assert not torch.equal(before, weights(trainer.model))
    assert (run / "config.yaml").exists() and (
        run / "checkpoints" / "checkpoint-3" / "manifest.json"
    ).exists()
    assert len(list(read_rollouts(run))) == trainer.session.collator.counters["rollouts"] > 0
    batches, settings = read_batches(run)
    assert [b.update for b in batches] == [1, 2, 3] and settings["batch_rows"] == 4
    assert trainer.rollout_worker.stopped


def test_every_metric_line_says_update_version_environment_turns_and_time(tmp_path, student):
    """Field report 23: one writer, one set of axes."""
    build(tmp_path, student).train()
    text = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in text]
    for record in records:
        assert {"kind", "update", "policy_version", "wall_s", "env_turns"} <= set(record)
    assert {"train", "explorer"} <= {r["kind"] for r in records}
    wall = [r["wall_s"] for r in records]
    assert wall == sorted(wall)
    wanted = (
        "rows dead_rows forwarded_tokens forwarded_tokens_rows trained_tokens effective_rollouts top1_share"
    )
    wanted += " turns_per_rollout kl_per_token dropped_stale learner_s wait_s loss grad_norm lr pool unread staleness"
    for record in lines(tmp_path):
        assert set(wanted.split()) <= set(record)


def test_versions_are_completed_updates_and_the_first_sync_is_version_zero(tmp_path, student):
    trainer = build(tmp_path, student)
    trainer.train()
    sent = [m for m in trainer.rollout_worker.sent if type(m).__name__ == "SetPolicy"]
    assert [m.version for m in sent] == [0, 1, 2, 3]
    assert trainer.rollout_worker.model_version == trainer.model_version == 3


def test_policy_files_are_gone_when_the_run_ends(tmp_path, student):
    trainer = build(tmp_path, student)
    folder = trainer.policy_files.folder
    trainer.train()
    assert not folder.exists()


def test_one_batch_is_one_optimizer_step_however_many_micro_batches(tmp_path, student):
    class Count(DivOPDTrainer):
        steps = 0

        def create_optimizer(self, *args, **kwargs):
            optimizer = super().create_optimizer(*args, **kwargs)
            inner = optimizer.step

            @functools.wraps(inner)
            def step(*a, **k):
                Count.steps += 1
                return inner(*a, **k)

            optimizer.step = step
            return optimizer

    trainer = build(tmp_path, student, kind=Count, max_microbatch_tokens=1, batch_rows=6, cap=3)
    trainer.train()
    assert Count.steps == 3
    assert all(line["micro_batches"] > 1 for line in lines(tmp_path))


def own_scores(student):
    """A teacher that is the student itself, scored by the learner's own forward of the very same batch."""
    model = AutoModelForCausalLM.from_pretrained(
        student, dtype=torch.float32, attn_implementation="sdpa"
    ).train()

    def rollout(explorer, rid):
        rng = np.random.default_rng(rid)
        segment = Segment(rid)
        segment.append(rng.integers(2, VOCAB, 6))
        start, end = segment.append(rng.integers(2, VOCAB, 3))
        ids = torch.tensor(segment.token_ids[None].astype(np.int64))
        with torch.no_grad():
            hidden = model.base_model(
                input_ids=ids,
                position_ids=torch.arange(end)[None],
                attention_mask=torch.ones_like(ids),
                use_cache=False,
            ).last_hidden_state[0, start - 1 : end - 1]
            logp = torch.log_softmax(model.lm_head(hidden).float(), -1)
            logp = logp.gather(1, ids[0, start:end, None])[:, 0]
        turn = make_turn(
            rollout_id=rid,
            index=0,
            segment=segment,
            start=start,
            end=end,
            student_logprobs=logp.numpy(),
            teacher_logprobs=logp.numpy(),
        )
        return Rollout(rid, turns=[turn], turns_played=1)

    return rollout


def test_a_teacher_equal_to_the_student_gives_exactly_zero_loss_and_gradient(tmp_path, student):
    """First rung of the ladder: whatever else is wrong, this is exact."""
    trainer = build(
        tmp_path,
        student,
        own_scores(student),
        updates=1,
        batch_rows=1,
        max_microbatch_tokens=9,
        weight_decay=0.0,
    )
    before = weights(trainer.model)
    trainer.train()
    (line,) = lines(tmp_path)
    assert line["loss"] == 0.0 and line["grad_norm"] == 0.0 and line["kl_per_token"] == 0.0
    assert line["logprob_drift"] == 0.0
    assert torch.equal(before, weights(trainer.model))


def test_a_biased_teacher_is_learned(tmp_path, student):
    """Replies of one token, sampled from the current student; the teacher likes even ids."""
    liked = np.full(VOCAB, math.log(0.1 / (VOCAB / 2)))
    liked[::2] = math.log(0.9 / (VOCAB / 2))
    holder = {}

    def play(explorer, rid):
        rng = np.random.default_rng(rid)
        segment = Segment(rid)
        segment.append(rng.integers(2, VOCAB, 4))
        with torch.no_grad():
            model = holder["trainer"].model
            ids = torch.tensor(segment.token_ids[None].astype(np.int64))
            logp = torch.log_softmax(model(ids).logits[0, -1].double(), -1).numpy()
        token = rng.choice(VOCAB, p=np.exp(logp) / np.exp(logp).sum())
        start, end = segment.append([token])
        turn = make_turn(
            rollout_id=rid,
            index=0,
            segment=segment,
            start=start,
            end=end,
            student_logprobs=logp[[token]],
            teacher_logprobs=liked[[token]],
            policy_version=max(explorer.loaded_version, 0),
        )
        return Rollout(rid, turns=[turn], turns_played=1)

    trainer = build(
        tmp_path,
        student,
        explorer=lambda state, path: FakeExplorer(play, ahead=32),
        updates=25,
        batch_rows=32,
        learning_rate=1e-2,
        max_staleness=1,
    )
    holder["trainer"] = trainer

    def even_share():
        with torch.no_grad():
            probs = torch.softmax(trainer.model(torch.arange(2, 34).reshape(8, 4)).logits[:, -1], -1)
        return float(probs[:, ::2].sum(1).mean())

    before = even_share()
    trainer.train()
    assert before < 0.6 and even_share() > 0.8


@pytest.fixture(scope="module")
def reference(tmp_path_factory, student):
    path = tmp_path_factory.mktemp("one")
    capture(student, path, path / "g", max_microbatch_tokens=10_000)
    return torch.load(path / "g-0.pt")


def close(found, expected):
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize(
    "changes",
    [
        {"max_microbatch_tokens": 1},
        {"max_microbatch_tokens": 40},
        {"merge_packing": False},
        {"merge_packing": False, "max_microbatch_tokens": 1},
        {"packing_layout": "packed"},
        {"packing_layout": "packed", "merge_packing": False, "max_microbatch_tokens": 60},
    ],
)
def test_gradient_does_not_depend_on_micro_batches_or_packing(tmp_path, student, reference, changes):
    """Field report 5, through the trainer's own step."""
    capture(student, tmp_path, tmp_path / "g", **changes)
    found = torch.load(tmp_path / "g-0.pt")
    assert close(found["gradient"], reference["gradient"]) < 1e-5


def test_two_ranks_take_the_same_step_as_one(tmp_path, student, reference):
    """Field report 5: gloo, two processes, the real trainer."""
    port = free_port()
    script = Path(__file__).with_name("two_ranks.py")
    ranks = []
    for rank in range(2):
        env = os.environ | {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1", "PYTHONPATH": str(script.parents[2]), "ACCELERATE_USE_CPU": "true",
        }  # fmt: skip
        command = [sys.executable, str(script), student, str(tmp_path), str(tmp_path / "g")]
        ranks.append(
            subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    try:
        outputs = [process.communicate(timeout=200)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [p.returncode for p in ranks] == [0, 0], "\n".join(outputs)
    found = [torch.load(tmp_path / f"g-{rank}.pt") for rank in range(2)]
    assert torch.equal(found[0]["weights"], found[1]["weights"])
    assert close(found[0]["gradient"], reference["gradient"]) < 1e-5
    assert lines(tmp_path)[0]["rows"] == 8 and len(lines(tmp_path)) == 1


def test_the_learning_rate_runs_over_updates_not_over_rows_or_tasks(tmp_path, student):
    """Field report 7: 6 updates of 4 rows from rollouts of 3 turns; tasks, rows and updates are counted apart."""
    build(tmp_path, student, updates=6, lr_scheduler_type="linear", learning_rate=1.2e-3).train()
    found = [line["lr"] for line in lines(tmp_path)]
    assert found == pytest.approx([1.2e-3, 1.0e-3, 0.8e-3, 0.6e-3, 0.4e-3, 0.2e-3])
    last = lines(tmp_path)[-1]
    assert (last["update"], last["rows"]) == (6, 4)
    assert last["env_turns"] == 3 * last["valid_rollouts"]
