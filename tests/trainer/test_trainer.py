"""The learner on TRL with an explorer that needs no process: exactness, one update a batch, records, resume."""

import functools
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from learner_fakes import VOCAB, FakeExplorer, config, random_rollout, save_student
from ports import free_port
from transformers import AutoModelForCausalLM
from two_ranks import capture

from divopd_gym.errors import ConfigError
from divopd_trainer.explorer.messages import EvalDone, ExplorerDied, PoolStatus
from divopd_trainer.metrics_log import read_metrics
from divopd_trainer.records import read_batches, read_rollouts
from divopd_trainer.trainer import DivOPDTrainer, TrainingError
from divopd_trainer.turns import Rollout, Segment, make_turn


@pytest.fixture(scope="module")
def student(tmp_path_factory):
    return save_student(tmp_path_factory.mktemp("student"))


def build(
    tmp_path, student, play=random_rollout, *, explorer=None, limit=None, kind=DivOPDTrainer, **changes
):
    changes.setdefault("learner_threads", 1)
    make = explorer or (lambda state, path: FakeExplorer(play, limit=limit, state=state))
    return kind(config(tmp_path, student, **changes), explorer=make)


def lines(tmp_path, kind="train"):
    return read_metrics(tmp_path / "run", [kind])


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()


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


def test_an_update_with_a_non_finite_gradient_changes_nothing_and_is_counted(tmp_path, student):
    class Poisoned(DivOPDTrainer):
        def token_loss(self, logp, micro):
            loss = super().token_loss(logp, micro)
            return loss * float("nan") if self.state.global_step == 1 else loss

    class Watch(Poisoned):
        seen = []

        def _sync_weight(self):
            super()._sync_weight()
            Watch.seen.append(weights(self.model))

    build(tmp_path, student, kind=Watch).train()
    start, first, second, third = Watch.seen
    assert not torch.equal(start, first) and torch.equal(first, second) and not torch.equal(second, third)
    assert [line["skipped"] for line in lines(tmp_path)] == [0, 1, 0]
    assert lines(tmp_path)[-1]["skipped_updates"] == 1
    assert bool(torch.isfinite(third).all())


def test_too_many_non_finite_updates_in_a_row_stop_the_run_with_a_reason(tmp_path, student):
    class Poisoned(DivOPDTrainer):
        def token_loss(self, logp, micro):
            return super().token_loss(logp, micro) * float("nan")

    trainer = build(tmp_path, student, kind=Poisoned, updates=9, max_nonfinite_updates=3)
    with pytest.raises(TrainingError, match="3 updates in a row"):
        trainer.train()
    assert trainer.rollout_worker.stopped and len(lines(tmp_path)) == 2


def test_a_dead_explorer_ends_the_run_with_its_cause_and_a_checkpoint(tmp_path, student):
    class Dying(FakeExplorer):
        def send(self, message):
            super().send(message)
            if self.loaded_version == 2:
                self.error = ExplorerDied("exit code 9")
                self.ahead = 0

    trainer = build(tmp_path, student, explorer=lambda s, p: Dying(random_rollout, state=s), updates=9)
    with pytest.raises(ExplorerDied, match="exit code 9"):
        trainer.train()
    done = lines(tmp_path)[-1]["update"]
    assert (tmp_path / "run" / "checkpoints" / f"checkpoint-{done}" / "manifest.json").exists()


def test_when_the_tasks_are_used_up_the_run_ends_with_a_short_batch(tmp_path, student):
    trainer = build(tmp_path, student, limit=3, updates=50)
    trainer.train()
    rows = [line["rows"] for line in lines(tmp_path)]
    assert sum(rows) == 9 and rows[-1] == 1 and lines(tmp_path)[-1]["short"]
    assert trainer.session.stop_reason is None


class Interrupting(FakeExplorer):
    """Sends SIGINT to its own process when the learner waits with a certain version."""

    def __init__(self, play, at, **more):
        super().__init__(play, **more)
        self.at = at

    def send(self, message):
        super().send(message)
        if isinstance(message, PoolStatus) and message.update == self.at:
            self.at = None
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("at", [0, 2])
def test_ctrl_c_writes_a_checkpoint_and_a_resumed_run_repeats_the_undisturbed_one(tmp_path, student, at):
    """Field report 11: pool, tasks and staleness go on; nothing is trained twice and nothing received is lost."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    reference = build(
        whole, student, updates=5, explorer=lambda s, p: FakeExplorer(random_rollout, state=s, ahead=3)
    )
    reference.train()

    first = build(
        broken, student, updates=5, explorer=lambda s, p: Interrupting(random_rollout, at, state=s, ahead=3)
    )
    handler = signal.getsignal(signal.SIGINT)
    first.train()
    assert first.session.stop_reason == "SIGINT" and first.rollout_worker.stopped
    assert signal.getsignal(signal.SIGINT) is handler
    assert first.state.global_step < 5

    with pytest.raises(ConfigError, match="already holds a run"):
        build(broken, student, updates=5)
    again = build(
        broken, student, updates=5, resume_from_checkpoint="true",
        explorer=lambda s, p: FakeExplorer(random_rollout, state=s, ahead=3),
    )  # fmt: skip
    again.train()

    assert torch.equal(weights(again.model), weights(reference.model))
    for name in (
        "update",
        "rows",
        "env_turns",
        "pool",
        "unread",
        "valid_rollouts",
        "never_used",
        "staleness",
        "loss",
    ):
        found = [line[name] for line in lines(broken)]
        assert found == [line[name] for line in lines(whole)], name
    chosen = [key for batch in read_batches(broken / "run")[0] for key in batch.selected]
    assert len(chosen) == len(set(chosen)) == 20
    assert chosen == [key for batch in read_batches(whole / "run")[0] for key in batch.selected]
    ids = [rollout.rollout_id for rollout in read_rollouts(broken / "run")]
    assert ids == sorted(set(ids))


def test_a_resumed_finished_run_trains_no_further_update(tmp_path, student):
    build(tmp_path, student).train()
    again = build(tmp_path, student, resume_from_checkpoint=True)
    again.train()
    assert again.state.global_step == 3 and [line["update"] for line in lines(tmp_path)] == [1, 2, 3]


def test_a_damaged_checkpoint_costs_one_checkpoint_not_the_run(tmp_path, student):
    build(tmp_path, student, save_every=1).train()
    newest = tmp_path / "run" / "checkpoints" / "checkpoint-3"
    (newest / "model.safetensors").write_bytes(b"cut")
    with pytest.warns(UserWarning, match="checkpoint-3 is damaged"):
        again = build(tmp_path, student, resume_from_checkpoint=True)
    again.train()
    assert [line["update"] for line in lines(tmp_path)] == [1, 2, 3]


class Evaluating(FakeExplorer):
    """Answers evaluations, some of them wrongly."""

    def evaluated(self, message):
        result = {"success_rate": 0.5, "done_rate": 0.5, "score": 0.5, "episodes": 2, "per_type": {}}
        wrong = message.version == 2
        self.eval_results.put(
            EvalDone(
                message.request_id, None if message.version == 3 else result, "no", message.version + wrong
            )
        )
        assert Path(message.path).exists()


def test_an_evaluation_line_carries_exactly_the_version_it_was_asked_for(tmp_path, student):
    """Field report 22: an answer for another version is no result."""
    trainer = build(
        tmp_path, student, explorer=lambda s, p: Evaluating(random_rollout, state=s), updates=4,
        eval_every=1, eval_at_start=True, eval_at_end=True,
    )  # fmt: skip
    trainer.train()
    found = [(line["update"], line["policy_version"]) for line in lines(tmp_path, "eval")]
    assert found == [(0, 0), (1, 1), (4, 4)]
    assert trainer.session.lost_evaluations == 2


def test_an_explorer_that_dies_after_the_last_update_costs_the_evaluation_and_not_the_student(
    tmp_path, student
):
    class Dying(FakeExplorer):
        def evaluated(self, message):
            self.error = ExplorerDied("exit code 9")

    trainer = build(
        tmp_path, student, explorer=lambda s, p: Dying(random_rollout, state=s), updates=2, eval_at_end=True
    )
    trainer.train()
    assert trainer.state.global_step == 2 and trainer.session.lost_evaluations == 1
    assert lines(tmp_path, "eval") == []


def test_every_line_says_which_weights_the_explorer_had(tmp_path, student):
    build(tmp_path, student, updates=4, weight_sync_steps=2, eval_every=0).train()
    assert [(line["update"], line["policy_version"]) for line in lines(tmp_path)] == [
        (1, 0), (2, 2), (3, 2), (4, 4),
    ]  # fmt: skip


def test_turns_without_the_teachers_candidates_are_refused_when_the_loss_needs_them(tmp_path, student):
    trainer = build(tmp_path, student, divergence="forward_kl_topk")
    with pytest.raises(TrainingError, match="needs the teacher's candidates"):
        trainer.train()


@pytest.mark.parametrize("divergence, beta", [("forward_kl_topk", 0.0), ("jsd_topk", 0.5), ("jsd_topk", 1.0)])
def test_divergences_over_the_teachers_candidates_train(tmp_path, student, divergence, beta):
    def play(explorer, rid):
        rollout = random_rollout(explorer, rid)
        rng = np.random.default_rng(rid)
        for turn in rollout.turns:
            n = turn.n_tokens
            ids = np.stack([rng.permutation(VOCAB)[:4] for _ in range(n)]).astype(np.int32)
            ids[:, 3] = -1
            logp = np.log(np.tile([0.5, 0.3, 0.1, np.nan], (n, 1))).astype(np.float32)
            object.__setattr__(turn, "teacher_topk_ids", ids)
            object.__setattr__(turn, "teacher_topk_logprobs", logp)
        return rollout

    build(tmp_path, student, play, divergence=divergence, beta=beta).train()
    assert all(
        math.isfinite(line["loss"]) and line["loss"] > 0 and line["grad_norm"] > 0 for line in lines(tmp_path)
    )


def test_evaluations_that_fall_behind_keep_no_more_than_a_few_policies(tmp_path, student):
    class Silent(FakeExplorer):
        def evaluated(self, message):
            """It takes its time."""

    trainer = build(
        tmp_path, student, explorer=lambda s, p: Silent(random_rollout, state=s), updates=10, eval_every=1,
        eval_timeout_s=0.01,
    )  # fmt: skip
    kept = []
    written = trainer.session.policy_written
    trainer.session.policy_written = lambda v: (written(v), kept.append(len(trainer.policy_files._pins)))
    trainer.train()
    assert max(kept) == 6
    # Six that never ended, and three for which there was no room.
    assert trainer.session.lost_evaluations == 9


def test_an_update_that_fails_leaves_a_checkpoint_that_says_what_is_lost(tmp_path, student):
    notes = []
    trainer = build(tmp_path, student, explorer=lambda s, p: FakeExplorer(random_rollout, state=s), updates=3)
    trainer.session.progress.note = notes.append
    step = trainer.training_step

    def failing(*args, **kwargs):
        if trainer.state.global_step == 1:
            raise MemoryError("no room")
        return step(*args, **kwargs)

    trainer.training_step = failing
    with pytest.raises(MemoryError):
        trainer.train()
    assert any("4 rows of the update that failed are lost" in note for note in notes)
