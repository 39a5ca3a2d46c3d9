"""Every preset trains: ten updates with the shipped tiny models on generated houses, and its own mark on the run."""

import math
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
import yaml

from divopd_trainer.config import DivOPDConfig
from divopd_trainer.methods import method_names
from divopd_trainer.metrics_log import read_metrics
from divopd_trainer.records import read_batches, read_rollouts
from divopd_trainer.report import write_report
from divopd_trainer.running import run

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
MODELS = ROOT / "examples" / "tiny" / "models"
UPDATES, ROWS = 10, 8
QUICK_DEPTH = {
    "horizon_kwargs": {"warmup_updates": 1, "probe_every": 5},
    "probe_rollouts": 2,
    "max_turns": 10,
}

CHANGES = {
    "divopd-r": {"recovery_patience": 1, "recovery_budget": 2},
    "tcod-f2b": {"horizon_kwargs": {"every": 2}},
    "tcod-b2f": {"controller_kwargs": {"every": 1}, "max_turns": 25},
    "turnopd": QUICK_DEPTH,
    "turnopd-depth": QUICK_DEPTH,
    "divopd-turnopd": QUICK_DEPTH,
    # Eight in the paper; two show as well that a group stays together.
    "atod": {"attempts_per_task": 2},
    "retire-opd": {"attempts_per_task": 2, "weighting_kwargs": {"window": 2}},
    "mopd": {"teachers": {"itself": str(MODELS / "student")}, "teacher_routing": {"*1": "itself"}},
    # Short questions: the tiny teacher reads slowly and understands none.
    "sage": {"review_kwargs": {"text_chars": 100, "max_tokens": 2}},
    "eff-opd": {"extrapolate_every": 4, "extrapolate_episodes": 2},
}


class Outcome:
    """A finished run, read back from its directory."""

    def __init__(self, config):
        self.config = config
        self.lines = read_metrics(config.run_dir, ["train"])
        self.rollouts = list(read_rollouts(config.run_dir))
        self.turns = {(t.rollout_id, t.index): t for r in self.rollouts for t in r.turns}
        self.trained = [
            self.turns[key] for batch in read_batches(config.run_dir)[0] for key in batch.selected
        ]

    @property
    def meta(self):
        return [rollout.meta for rollout in self.rollouts]


@pytest.fixture
def settings(tmp_path):
    values = yaml.safe_load((ROOT / "examples" / "tiny" / "divopd.yaml").read_text())
    for name in ("lr_scheduler_type", "warmup_steps", "lr_scheduler_kwargs", "cap", "method"):
        values.pop(name, None)
    values |= {
        "model": str(MODELS / "student"),
        "teacher": str(MODELS / "teacher"),
        "run_dir": str(tmp_path / "run"),
        "env_kwargs": {"family": "tiny", "subset": "train", "num_tasks": 300},
        "eval_env_kwargs": {"family": "tiny", "subset": "valid", "num_tasks": 2},
        "max_turns": 8,
        "batch_rows": ROWS,
        "load": 2.0,
        "max_concurrent": 3,
        "env_workers": 2,
        "updates": UPDATES,
        "eval_every": 0,
        "eval_at_start": False,
        "eval_at_end": False,
        "save_every": 0,
        "progress": "none",
        "stop_grace_s": 5.0,
    }
    return lambda method: {**values, "method": method, **CHANGES.get(method, {})}


# --- What each method leaves behind --------------------------------------------------------------------------------


def probes_run_to_full_depth_and_others_are_cut(done):
    full = done.config.max_turns
    probes = [meta for meta in done.meta if meta.get("probe")]
    assert len(probes) >= 2 * done.config.probe_rollouts - 1
    assert all(meta["horizon"] == full for meta in probes)
    cut = [r for r in done.rollouts if r.meta["horizon"] < full]
    assert cut and all(not r.meta.get("probe") and r.turns_played <= r.meta["horizon"] for r in cut)


def depth_grows_front_to_back(done):
    by_update = defaultdict(set)
    for meta in done.meta:
        by_update[meta["update"]].add(meta["horizon"])
    depths = {meta["horizon"] for meta in done.meta}
    assert min(depths) == 1 and len(depths) >= 3
    assert max(by_update[0]) < max(by_update[max(by_update)])


def replayed_turns_stand_before_the_students_and_train_nothing(done):
    replayed = [[t.actor for t in r.turns].count("replay") for r in done.rollouts]
    assert max(replayed) > 0
    for rollout, count in zip(done.rollouts, replayed):
        assert all(t.actor == "replay" for t in rollout.turns[:count])
        assert count == rollout.meta["controller"]["replayed_turns"] or not rollout.turns[count:]
    assert {t.actor for t in done.trained} == {"student"}


def replies_of_the_teacher_are_imitated_among_the_students_own(done):
    trained = Counter(t.actor for t in done.trained)
    assert trained["teacher"] > 0 and trained["student"] > 0
    assert all(t.info["imitate"] for t in done.trained if t.actor == "teacher")


def the_teacher_takes_over_and_its_turns_train_nothing(done):
    assert (
        sum(
            meta["controller"]["teacher_turns"]
            for meta in done.meta
            if meta["controller"]["name"] == "recovery"
        )
        > 0
    )
    assert {t.actor for t in done.trained} == {"student"}


def groups_stay_together_and_are_compared(done):
    size = done.config.attempts_per_task
    tasks = [r.task for r in done.rollouts]
    assert all(len(set(tasks[i : i + size])) == 1 for i in range(0, len(tasks) - size + 1, size))
    for i in range(0, len(tasks) - size + 1, size):
        advantages = [r.meta["group_advantage"] for r in done.rollouts[i : i + size]]
        assert sum(advantages) == pytest.approx(0)
    assert all("group_advantage" in t.info for t in done.trained)


def turns_are_weighted_by_their_gap_and_surprise(done):
    groups_stay_together_and_are_compared(done)
    weights = {t.info["turn_weight"] for t in done.trained if t.valid}
    assert len(weights) > 2 and all(0 <= w <= 1 for w in weights)


def the_teacher_judged_every_trained_turn(done):
    assert all(t.info["sage"] in ("skip", "weak", "strong") for t in done.trained)
    assert all(t.teacher_topk_ids.shape[1] == 1 for t in done.trained)
    counts = Counter()
    for rollout in done.rollouts:
        counts.update(rollout.meta.get("sage", {}))
    assert counts["failed"] == counts["late"] == 0 and counts["weak"] + counts["strong"] + counts["skip"] > 0


def bridges_were_tried(done):
    outcomes = Counter(meta["bridge"]["outcome"] for meta in done.meta if "bridge" in meta)
    assert outcomes["failed"] == outcomes["diverged"] == 0, outcomes
    assert outcomes["kept"] + outcomes["not_better"] > 0, outcomes
    for rollout in done.rollouts:
        extra = rollout.turns[rollout.turns_played :]
        assert len(extra) == (rollout.meta.get("bridge", {}).get("outcome") == "kept")
        assert all(t.imitated and t.valid for t in extra)


def draws_beside_the_realised_token_are_scored(done):
    width = done.config.samples - 1
    assert all(
        t.extra_ids.shape == t.extra_teacher_logprobs.shape == (t.n_tokens, width)
        for t in done.trained
        if t.valid
    )


def each_task_has_the_teacher_it_is_routed_to(done):
    routed, others = [], []
    for rollout in done.rollouts:
        for turn in rollout.turns:
            if turn.valid and turn.policy_version == 0:
                gap = np.abs(turn.student_logprobs - turn.teacher_logprobs)[turn.valid_mask()].max()
                (routed if rollout.task.endswith("1") else others).append(float(gap))
    # Where the student is its own teacher there is no gap before the first update.
    assert routed and others and max(routed) < 1e-3 < max(others)


def extrapolations_were_tried(done):
    tried = read_metrics(done.config.run_dir, ["extrapolation"])
    assert tried and all(line["factor"] in line["factors"] for line in tried)


MARKS = {
    "turnopd": probes_run_to_full_depth_and_others_are_cut,
    "turnopd-depth": probes_run_to_full_depth_and_others_are_cut,
    "divopd-turnopd": probes_run_to_full_depth_and_others_are_cut,
    "tcod-f2b": depth_grows_front_to_back,
    "tcod-b2f": replayed_turns_stand_before_the_students_and_train_nothing,
    "guided-opd": replies_of_the_teacher_are_imitated_among_the_students_own,
    "divopd-r": the_teacher_takes_over_and_its_turns_train_nothing,
    "atod": turns_are_weighted_by_their_gap_and_surprise,
    "retire-opd": groups_stay_together_and_are_compared,
    "sage": the_teacher_judged_every_trained_turn,
    "future-bridge": bridges_were_tried,
    "async-opd": draws_beside_the_realised_token_are_scored,
    "mopd": each_task_has_the_teacher_it_is_routed_to,
    "eff-opd": extrapolations_were_tried,
}


@pytest.mark.parametrize("method", method_names())
def test_ten_updates_of_every_method_and_its_own_mark(method, settings, tmp_path):
    config = DivOPDConfig(**settings(method))
    result = run(config)
    assert result.update == UPDATES and result.final_model is not None
    done = Outcome(config)
    assert [line["update"] for line in done.lines] == list(range(1, UPDATES + 1))
    assert all(math.isfinite(line["loss"]) and math.isfinite(line["grad_norm"]) for line in done.lines)
    assert not any(line.get("skipped") for line in done.lines)
    assert any(line["loss"] != 0 for line in done.lines) or any(line["grad_norm"] > 0 for line in done.lines)
    keys = [(t.rollout_id, t.index) for t in done.trained]
    assert len(keys) == len(set(keys))
    if config.composer != "divopd-cost":  # that one spends tokens, not rows
        assert all(line["rows"] == ROWS for line in done.lines)
    if mark := MARKS.get(method):
        mark(done)
    assert write_report([config.run_dir], tmp_path / "report.html", png=False).html.stat().st_size > 10_000


def test_settings_and_marks_are_of_methods_that_exist():
    assert set(CHANGES) | set(MARKS) <= set(method_names())
