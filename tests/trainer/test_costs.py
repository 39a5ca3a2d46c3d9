"""Costs of generator and teacher, from totals that only rise until an explorer is started again."""

import threading
import time
from types import SimpleNamespace

from divopd_trainer.costs import COSTS, CostMeter, engine_costs, work_clock
from divopd_trainer.report.collect import end_to_end_s


def test_totals_add_up_over_teachers_and_engines_without_counters_cost_nothing():
    student = SimpleNamespace(counters={"generate_s": 2.0, "generated_tokens": 30, "prefill_tokens": 70})
    teachers = [
        SimpleNamespace(
            counters={"score_s": 1.5, "scored_tokens": 100, "generate_s": 0.5, "generated_tokens": 5}
        ),
        SimpleNamespace(counters={"score_s": 1.0, "scored_tokens": 20}),
        object(),
        None,
    ]
    assert engine_costs(student, teachers) == {
        "generator_s": 2.0, "generator_tokens": 100, "teacher_s": 3.0, "teacher_tokens": 125,
    }  # fmt: skip


def test_each_update_gets_what_was_spent_since_the_last_and_a_restart_begins_at_zero():
    meter = CostMeter()
    spent = [meter.since_last(dict.fromkeys(COSTS, total))["teacher_s"] for total in (5.0, 8.0, 8.0, 2.0)]
    assert spent == [5.0, 3.0, 0.0, 2.0]
    assert meter.since_last({"episodes": 3.0}) == {}


def test_on_one_cpu_thread_neighbours_cost_nothing():
    stop = threading.Event()

    def busy():
        while not stop.is_set():
            pass

    neighbour = threading.Thread(target=busy)
    clock = work_clock("cpu", 1)
    neighbour.start()
    try:
        begun = clock()
        time.sleep(0.2)
        waited = clock() - begun
    finally:
        stop.set()
        neighbour.join()
    begun = clock()
    while clock() - begun < 0.02:
        pass
    assert waited < 0.1


def test_where_others_do_the_work_seconds_count():
    for clock in (work_clock("cuda", 1), work_clock("cpu", 4)):
        begun = clock()
        time.sleep(0.05)
        assert clock() - begun >= 0.05


def test_the_report_counts_the_learners_own_work_and_all_its_seconds_where_no_more_is_known():
    line = {"generator_s": 1.0, "teacher_s": 2.0, "learner_s": 10.0}
    assert end_to_end_s(line) == 13.0
    assert end_to_end_s({**line, "learner_work_s": 4.0}) == 7.0
    assert end_to_end_s({"generator_s": 1.0, "learner_s": 10.0}) is None
