"""The task schedule: every task once an epoch, whatever fails, stops or is resumed."""

import json
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from divopd_gym.errors import ConfigError
from divopd_trainer.explorer.tasks import Frontier, TaskSchedule

TASKS = [f"t{i}" for i in range(10)]


def drain(schedule):
    tickets = []
    while (ticket := schedule.take()) is not None:
        tickets.append(ticket)
    return tickets


def test_every_task_exactly_once_an_epoch_in_another_order():
    tickets = drain(TaskSchedule(TASKS, seed=3, epochs=3))
    epochs = [[t.task for t in tickets if t.epoch == e] for e in range(3)]
    assert all(sorted(epoch) == sorted(TASKS) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert [t.attempt for t in tickets] == [e for e in range(3) for _ in TASKS]


def test_order_follows_from_the_seed_alone():
    orders = [[t.task for t in drain(TaskSchedule(TASKS, seed=s, epochs=1))] for s in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]


def test_group_attempts_come_together_with_numbers_of_their_own():
    tickets = drain(TaskSchedule(TASKS, group=4, epochs=2))
    assert len(tickets) == 80
    assert all(len({t.task for t in tickets[i : i + 4]}) == 1 for i in range(0, 80, 4))
    assert len({(t.task, t.attempt) for t in tickets}) == 80
    assert max(t.attempt for t in tickets) == 7


def test_dropped_task_does_not_freeze_the_schedule_nor_a_resume():
    schedule = TaskSchedule(TASKS, epochs=2)
    tickets = drain(schedule)
    for ticket in tickets[:10]:
        schedule.finish(ticket, dropped=ticket.task == "t4")
    assert schedule.frontier.epoch == 1 and schedule.frontier.dropped == 1
    again = TaskSchedule(TASKS, epochs=2)
    again.load_state_dict(json.loads(json.dumps(schedule.state_dict())))
    assert sorted(t.task for t in drain(again)) == sorted(TASKS)
    assert again.frontier.dropped == 1


def test_called_off_episode_is_handed_out_again_first():
    schedule = TaskSchedule(TASKS)
    first, second, third = schedule.take(), schedule.take(), schedule.take()
    schedule.give_back(third)
    schedule.give_back(first)
    assert [schedule.take(), schedule.take()] == [first, third]
    assert second in schedule.in_flight


def test_finishing_twice_or_without_flight_counts_once():
    schedule = TaskSchedule(TASKS)
    ticket = schedule.take()
    assert schedule.finish(ticket) and not schedule.finish(ticket)
    assert schedule.frontier.finished == 1


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 7), st.integers(1, 3), st.integers(0, 10_000), st.integers(1, 6))
def test_stop_anywhere_and_resume_plays_every_task_at_most_once_an_epoch_and_loses_none(
    n, group, seed, workers
):
    """Workers finish in any order; the run stops and resumes again and again, with episodes in flight."""
    rng = random.Random(seed)
    tasks, epochs = TASKS[:n], 2
    played: Counter = Counter()
    state = None
    for _ in range(200):
        schedule = TaskSchedule(tasks, seed=seed, group=group, epochs=epochs)
        if state is not None:
            schedule.load_state_dict(json.loads(json.dumps(state)))
        flying = []
        for _ in range(rng.randint(0, 8)):
            while len(flying) < workers and (ticket := schedule.take()) is not None:
                flying.append(ticket)
            if flying:
                ticket = flying.pop(rng.randrange(len(flying)))
                assert schedule.finish(ticket, dropped=rng.random() < 0.1)
                played[ticket.epoch, ticket.task, ticket.attempt] += 1
        state = schedule.state_dict()
        if schedule.exhausted:
            break
    assert schedule.exhausted and not schedule.in_flight
    assert set(played.values()) == {1}
    assert len(played) == n * group * epochs == schedule.frontier.finished
    assert {a for _, _, a in played} == set(range(group * epochs))


def test_mirror_of_the_frontier_needs_only_the_tickets():
    schedule = TaskSchedule(TASKS, group=2, epochs=2)
    mirror = Frontier.from_state(schedule.state_dict())
    tickets = drain(schedule)
    random.Random(0).shuffle(tickets)
    for ticket in tickets[:33]:
        schedule.finish(ticket)
        mirror.finish(ticket)
    assert mirror.state_dict() == schedule.frontier.state_dict()


@pytest.mark.parametrize(
    "change, name",
    [({"tasks": TASKS[:9]}, "digest"), ({"seed": 1}, "seed"), ({"group": 2}, "group")],
)
def test_state_of_another_schedule_is_refused_by_name(change, name):
    state = TaskSchedule(TASKS).state_dict()
    given_ = {"tasks": TASKS, **change}
    with pytest.raises(ConfigError, match=name):
        TaskSchedule(given_.pop("tasks"), **given_).load_state_dict(state)


@pytest.mark.parametrize("tasks, word", [([], "empty"), (["a", "b", "a"], "'a'")])
def test_impossible_task_list_is_refused(tasks, word):
    with pytest.raises(ConfigError, match=word):
        TaskSchedule(tasks)
