"""The learner when something goes wrong or ends: failed updates, interruptions, resume, evaluations."""

import math
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from learner_fakes import VOCAB, FakeExplorer, random_rollout
from trainer_fakes import build, lines, weights

from divopd_gym.errors import ConfigError
from divopd_trainer.explorer.messages import EvalDone, ExplorerDied, PoolStatus
from divopd_trainer.records import read_batches, read_rollouts
from divopd_trainer.trainer import DivOPDTrainer, TrainingError


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


def test_an_evaluation_that_a_killed_run_had_not_finished_is_made_up_for_or_counted_as_lost(
    tmp_path, student
):
    class Silent(FakeExplorer):
        def evaluated(self, message):
            asked.append(message.version)

    asked, notes = [], []

    def go(**more):
        trainer = build(
            tmp_path, student, explorer=lambda s, p: Silent(random_rollout, state=s), eval_every=1, save_every=1,
            keep_checkpoints=9, eval_timeout_s=0.01, **more,
        )  # fmt: skip
        trainer.session.progress.note = notes.append
        asked.clear()
        trainer.train()
        return trainer.session

    go(updates=4)
    assert asked == [1, 2, 3]
    session = go(updates=3, resume_from_checkpoint=str(tmp_path / "run" / "checkpoints" / "checkpoint-2"))
    # The weights of update 2 are the checkpoint's own.
    assert asked == [2]
    # That of update 1, and that of update 2, which does not end here either.
    assert session.lost_evaluations == 2
    assert sum("update 1 is lost: the run ended before it did" in note for note in notes) == 1


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
