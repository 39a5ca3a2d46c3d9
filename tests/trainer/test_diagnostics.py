import math

import numpy as np
import pytest
from run_fakes import fake_run

from divopd_trainer.diagnostics import (
    DEPTH_BANDS,
    batch_facts,
    depth_band,
    depth_outcome,
    disagreement_std,
    run_diagnostics,
    scored_per_trained,
    staleness_histogram,
)
from divopd_trainer.records import BatchRecord, RunWriter, read_run
from divopd_trainer.turns import Rollout, Segment, make_turn


def rollout(rollout_id, gaps, *, success=False, version=0, scored=True, actor="student"):
    """One turn a list of gaps: the student's log-prob minus the teacher's, a token each."""
    made = Rollout(rollout_id, success=success, turns_played=len(gaps))
    segment = Segment(rollout_id)
    for index, gap in enumerate(gaps):
        segment.append([1, 2])
        start, end = segment.append(range(len(gap)))
        made.turns.append(
            make_turn(
                rollout_id=rollout_id,
                index=index,
                segment=segment,
                start=start,
                end=end,
                student_logprobs=np.array(gap) - 5.0,
                teacher_logprobs=np.full(len(gap), -5.0) if scored else None,
                policy_version=version,
                actor=actor,
            )
        )
    return made


def test_disagreement_is_summed_by_rollout_before_its_spread_is_taken():
    # Sums 3, -1 and 1: mean 1, squared distances 4, 4 and 0.
    rows = [(7, 1.0), (8, -1.0), (7, 2.0), (9, 4.0), (9, -3.0)]
    assert disagreement_std(rows) == pytest.approx(math.sqrt(8 / 3))
    assert disagreement_std([(1, 5.0), (1, -2.0)]) == 0 and disagreement_std([]) == 0


def test_depth_bands_begin_and_end_where_their_names_say():
    assert [depth_band(i) for i in (0, 1, 2, 4, 5, 9, 10, 19, 20, 500)] == [
        "1", "2", "3-5", "3-5", "6-10", "6-10", "11-20", "11-20", "21+", "21+",
    ]  # fmt: skip


def test_selected_turns_are_counted_by_depth_and_outcome():
    selected = [(1, 0), (1, 3), (2, 0), (2, 30), (1, 4)]
    table = depth_outcome(selected, {1: True, 2: False})
    assert table == {
        "success": dict.fromkeys(DEPTH_BANDS, 0) | {"1": 1, "3-5": 2},
        "failure": dict.fromkeys(DEPTH_BANDS, 0) | {"1": 1, "21+": 1},
    }
    assert depth_outcome(selected, {1: True})["unknown"] == dict.fromkeys(DEPTH_BANDS, 0) | {"1": 1, "21+": 1}


def test_a_row_of_the_newest_weights_has_age_0():
    assert staleness_histogram([4, 4, 3, 2], update=5) == {0: 2, 1: 1, 2: 1}
    assert staleness_histogram([], update=5) == {}


def test_scored_per_trained_is_unknown_before_training():
    assert scored_per_trained(300, 120) == 2.5 and scored_per_trained(300, 0) is None


def test_facts_of_a_batch_leave_dead_rows_out():
    one, two = rollout(1, [[1.0, 1.0], [2.0]]), rollout(2, [[0.5, -0.5]])
    dead = rollout(3, [[9.0]] * 4, scored=False)
    facts = batch_facts([*one.turns, *two.turns, dead.turns[3]])
    # Rollout 1 brings 2 + 2, rollout 2 brings 0; turns 0, 1 and 0.
    assert facts == {"disagreement_std": pytest.approx(2.0), "depth_mean": pytest.approx(1 / 3)}
    assert batch_facts([dead.turns[0]]) == {"disagreement_std": 0.0, "depth_mean": 0.0}


def test_diagnostics_of_a_run_by_hand(tmp_path):
    rollouts = [
        rollout(0, [[1.0, 1.0], [2.0], [0.0] * 4], success=True),
        rollout(1, [[0.5, -0.5], [1.0]], version=1),
        rollout(2, [[1.0, 2.0, 3.0]], scored=False, version=1),
        rollout(3, [[1.0] * 50], actor="teacher"),
    ]
    with RunWriter(tmp_path) as writer:
        for made in rollouts:
            writer.write_rollout(made)
        writer.write_batch(BatchRecord(1, [(0, 0), (0, 1)]))
        writer.write_batch(BatchRecord(2, [(0, 2), (1, 0), (1, 1), (2, 0), (99, 0)]))
    found = run_diagnostics(read_run(tmp_path))
    assert found.updates == 2 and found.lost_rows == 1
    # Teacher tokens: 2 + 1 + 4 of rollout 0, 2 + 1 of rollout 1. Trained: 2 + 1, then 4 + 2 + 1.
    assert (found.scored_tokens, found.trained_tokens, found.scored_per_trained) == (10, 10, 1.0)
    # Batch 1 holds one rollout; in batch 2 rollout 0 brings 0 and rollout 1 brings 0 + 1.
    assert [line["disagreement_std"] for line in found.by_update] == pytest.approx([0.0, 0.5])
    assert [line["depth_mean"] for line in found.by_update] == pytest.approx([0.5, 1.0])
    assert found.disagreement_std == pytest.approx(0.25)
    assert found.staleness == {0: 5, 1: 1}
    assert {name: sum(bands.values()) for name, bands in found.depth_outcome.items()} == {
        "success": 3, "failure": 3, "unknown": 1,
    }  # fmt: skip
    assert found.depth_outcome["success"] == dict.fromkeys(DEPTH_BANDS, 0) | {"1": 1, "2": 1, "3-5": 1}


def test_offline_figures_agree_with_the_train_lines(tmp_path):
    run = read_run(fake_run(tmp_path / "run", updates=5))
    found = run_diagnostics(run)
    lines = run.lines("train")
    assert found.trained_tokens == sum(line["trained_tokens"] for line in lines)
    expected = {}
    for line in lines:
        for age, rows in line["staleness"].items():
            expected[int(age)] = expected.get(int(age), 0) + rows
    assert found.staleness == expected


def test_a_run_without_batches_has_rollouts_and_no_figures(tmp_path):
    with RunWriter(tmp_path) as writer:
        writer.write_rollout(rollout(0, [[1.0]]))
    found = run_diagnostics(read_run(tmp_path))
    assert found.scored_tokens == 1 and found.disagreement_std is None and found.scored_per_trained is None
