import dataclasses

import pytest
from run_fakes import fake_run

from divopd_gym.errors import ConfigError
from divopd_trainer.records import RecordError, read_run
from divopd_trainer.replay import ReplayTurn, Variant, load_stream
from divopd_trainer.stress import (
    FIGURES,
    Episode,
    LearnerTime,
    Workload,
    load_workload,
    simulate,
    stress_table,
)

SETTINGS = dict(
    preset="divopd", batch_rows=4, pool_multiplier=4, cap=2, max_staleness=2, max_pending_age=8, seed=0
)


def episode(play_s=4.0, score_s=0.0, turns=4, valid=True):
    light = [
        ReplayTurn(0, i, 0, float(i), valid, 0, 10 * (i + 1), 5 if valid else 0, 5) for i in range(turns)
    ]
    return Episode(play_s, score_s, tuple(light), turns)


def workload(*episodes, learner=(1.0, 0.0), updates=10, **settings):
    return Workload(list(episodes), LearnerTime(*learner), 0.0, updates, SETTINGS | settings)


def run(load, name="divopd", work=None, **more):
    return simulate(work or workload(episode()), Variant.parse(name), load, **more).figures


def test_a_slow_producer_makes_the_learner_wait_and_wastes_nothing():
    # A batch of 4 turns every 4 s, an update of 1 s: 4 s of waiting at first, then 3 s an update.
    figures = run(1)
    assert figures["wait_s"] == pytest.approx(4 + 9 * 3)
    assert figures["learner_s"] == pytest.approx(10)
    assert figures["never_used_share"] == 0 and figures["dropped_stale"] == 0
    assert figures["arrived_per_trained"] == 1 and figures["scored_per_trained"] == 1


def test_a_producer_that_outruns_the_learner_leaves_stale_rows_unused_rollouts_and_unused_scores():
    figures = run(16)
    assert figures["arrived_per_trained"] > 2
    assert figures["dropped_stale"] > 0 and figures["never_used_share"] > 0.1
    assert figures["scored_per_trained"] == pytest.approx(figures["arrived_per_trained"])
    # Episodes of equal length end together, and each such flood serves two updates of 1 s before it is stale.
    assert figures["wait_s"] == pytest.approx(4 + 4 * 2)


def test_versions_follow_the_simulated_clock_and_not_the_record():
    # Updates of 1 s, episodes of 4 s with a turn a second: at staleness 2 the first turns of each are too old.
    figures = run(4, work=workload(episode(), max_staleness=1))
    assert figures["dropped_stale"] > 0
    recorded = dataclasses.replace(
        episode(), turns=tuple(dataclasses.replace(t, policy_version=50) for t in episode().turns)
    )
    assert run(4, work=workload(recorded, max_staleness=1)) == figures


def test_learner_time_follows_the_tokens_of_the_cost_model():
    work = workload(episode(), learner=(0.5, 0.01))
    # The four turns of one rollout: 10 + 20 + 30 + 40 tokens apart, 40 merged.
    assert run(1, work=work, cost_model="rows")["learner_s"] == pytest.approx(10 * (0.5 + 1.0))
    assert run(1, work=work, cost_model="merged")["learner_s"] == pytest.approx(10 * (0.5 + 0.4))
    assert run(1, work=work, cost_model="rows")["forwarded_per_trained"] == pytest.approx(100 / 20)


def test_eager_scores_delay_arrival_and_lazy_ones_the_update():
    work = workload(episode(score_s=0.5))
    assert run(1, work=work)["wait_s"] == pytest.approx(4.5 + 9 * 3)
    assert run(1, work=work, lazy=True)["wait_s"] == pytest.approx(4.5 + 9 * (3 - 0.5) + 9 * 0.5)


@pytest.mark.parametrize("lazy", [False, True])
def test_lazy_scoring_saves_what_the_pool_never_sees(lazy):
    figures = run(16, lazy=lazy)
    assert figures["scored_per_trained_lazy"] <= 0.75 * figures["scored_per_trained"]
    assert figures["scored_per_trained_lazy"] >= 1
    few = run(1, lazy=lazy)
    assert few["scored_per_trained_lazy"] == few["scored_per_trained"] == 1


def test_the_teacher_scores_only_turns_that_are_fresh_but_reads_their_whole_prefix():
    # The first three turns are of version 0, the last two of the version that the first update made.
    work = workload(
        episode(play_s=1.0), episode(play_s=7.5, turns=5), learner=(4.0, 0.0), max_staleness=1, updates=2
    )
    figures = run(2, work=work)
    assert figures["scored_per_trained_lazy"] < figures["scored_per_trained"]
    saved_scores = 1 - figures["scored_per_trained_lazy"] / figures["scored_per_trained"]
    saved_reads = 1 - figures["read_per_trained_lazy"] / figures["read_per_trained"]
    assert saved_reads < saved_scores


def test_reading_is_counted_by_segment_up_to_the_deepest_scored_turn():
    # One rollout of four turns a batch, 5 tokens each: 40 tokens are read and 20 trained.
    figures = run(1)
    assert figures["read_per_trained"] == figures["read_per_trained_lazy"] == pytest.approx(40 / 20)


def test_rollouts_that_were_never_scored_are_left_out_with_a_notice(tmp_path):
    path = fake_run(tmp_path / "run", updates=4)
    data = read_run(path)
    rollouts = list(data.rollouts())
    for rollout in rollouts[:3]:
        rollout.turns = [
            dataclasses.replace(turn, teacher_logprobs=None, valid=False) for turn in rollout.turns
        ]
    data.rollouts = lambda: iter(rollouts)
    work = load_workload(data, load_stream(data).settings)
    assert len(work.episodes) == len(rollouts) - 3
    assert any("3 rollouts were never scored" in notice for notice in work.notices)


def test_the_gate_costs_scores_even_of_what_it_discards():
    work = workload(episode(), episode(valid=False))
    figures = run(2, work=work)
    assert figures["scored_per_trained_lazy"] >= 1.5


@pytest.mark.parametrize("load", [2, 6, 16])
def test_auto_wastes_no_more_rollouts_than_the_best_fixed_cap(tmp_path, load):
    path = fake_run(tmp_path / "run", updates=15)
    data = read_run(path)
    work = load_workload(data, load_stream(data).settings)

    def unused(name):
        return run(load, name, work, updates=40)["never_used_share"]

    assert unused("auto") <= min(unused(f"divopd:{k}") for k in (1, 2, 4, 8, 16)) + 0.02


def test_a_run_is_read_with_its_durations(tmp_path):
    data = read_run(fake_run(tmp_path / "run", updates=8))
    work = load_workload(data, load_stream(data).settings)
    assert work.updates == 8 and work.settings["batch_rows"] == 16
    first = next(iter(data.rollouts()))
    assert work.episodes[0].play_s == pytest.approx(first.timings["total_s"])
    assert work.learner.of(2000) > 0
    figures = simulate(work, Variant.parse("divopd-cost"), 4, updates=5).figures
    assert set(figures) == set(FIGURES) and figures["rows_per_update"] > 0


def test_the_fit_is_a_line_where_that_makes_sense_and_a_proportion_elsewhere():
    line = LearnerTime.fit([(100, 2.0), (200, 3.0), (300, 4.0)])
    assert (line.fixed_s, line.per_token_s) == (pytest.approx(1.0), pytest.approx(0.01))
    assert LearnerTime.fit([(100, 3.0), (300, 1.0)]) == LearnerTime(0.0, 0.01)
    assert LearnerTime.fit([(100, 2.0), (100, 4.0)]) == LearnerTime(0.0, 0.03)
    with pytest.raises(RecordError, match="learner_s"):
        LearnerTime.fit([(0, 1.0)])


def test_what_cannot_be_simulated_is_refused_and_never_runs_on_for_ever():
    with pytest.raises(ConfigError, match="load is 0"):
        run(0)
    with pytest.raises(RecordError, match="max_staleness is 0"):
        run(2, work=workload(episode(), max_staleness=0))
    with pytest.raises(RecordError, match="valid"):
        run(2, work=workload(episode(valid=False)))


def test_the_table_has_a_column_a_variant():
    work = workload(episode())
    table = stress_table([simulate(work, Variant.parse(name), 2) for name in ("vanilla", "auto")])
    assert [column.header for column in table.columns] == ["", "vanilla", "auto"]
    assert table.row_count == len(FIGURES)
