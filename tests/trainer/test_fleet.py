"""Several explorers that feed one learner: every task once, unique numbers, shared load, deaths mended."""

import os
import signal
import sys
import threading
import time
from collections import deque

import pytest
from test_explorer_process import alive, collect, config, until

from divopd_gym.errors import ConfigError
from divopd_trainer.costs import COSTS
from divopd_trainer.explorer import ExplorerDied, ExplorerProcess, RolloutBuffer
from divopd_trainer.explorer.fleet import ExplorerFleet, make_explorer, split_config
from divopd_trainer.explorer.messages import (
    Evaluate,
    ExplorerState,
    GetState,
    Heartbeat,
    PoolStatus,
    Ready,
    SetPolicy,
)
from divopd_trainer.turns import Rollout


@pytest.fixture
def started():
    """Start fleets; at the end each is stopped and must have left no process."""
    fleets = []

    def start(cfg, count=2, **more):
        fleet = ExplorerFleet(cfg, count, **more)
        fleets.append(fleet)
        fleet.start()
        until(lambda: all(member.heartbeat for member in fleet.members))
        return fleet

    yield start
    for fleet in fleets:
        pids = [*(member.pid for member in fleet.members), *fleet.env_pids]
        fleet.stop(5.0)
        assert not [pid for pid in pids if pid and alive(pid)]


def test_explorers_share_the_tasks_and_number_rollouts_in_order_of_arrival(started):
    fleet = started(config(epochs=1))
    rollouts = collect(fleet, [], 20)
    until(lambda: fleet.exhausted)
    assert [r.rollout_id for r in rollouts] == list(range(20))
    assert len({r.task for r in rollouts}) == 20
    assert all(turn.rollout_id == r.rollout_id for r in rollouts for turn in r.turns)
    first, second = (member.state().schedule["finished"] for member in fleet.members)
    assert (first, second) == (10, 10)
    until(lambda: fleet.heartbeat.counters["episodes"] == 20)
    assert len(fleet.env_pids) == 2


def test_a_killed_explorer_costs_what_it_had_in_flight_and_the_others_go_on(started):
    cfg = config(epochs=1, engine_kwargs={"student": {"delay_s": 0.02}})
    fleet = started(cfg)
    fleet.send(SetPolicy(5, "v5", 5))
    until(lambda: fleet.loaded_version == 5)
    rollouts = collect(fleet, [], 4)
    killed, other = (member.pid for member in fleet.members)
    os.kill(killed, signal.SIGKILL)
    collect(fleet, rollouts, 20)
    until(lambda: fleet.exhausted)
    assert [member.restarts for member in fleet.members] == [1, 0] and fleet.restarts == 1
    assert fleet.members[0].pid != killed and fleet.members[1].pid == other
    assert [r.rollout_id for r in rollouts] == list(range(20)) and len({r.task for r in rollouts}) == 20
    assert {t.policy_version for r in rollouts[-4:] for t in r.turns} == {5}


def test_an_explorer_that_dies_too_often_ends_the_run_and_is_named(started):
    fleet = started(config(), max_restarts=0)
    os.kill(fleet.members[1].pid, signal.SIGKILL)
    with pytest.raises(ExplorerDied, match=r"Explorer 2 of 2: .*SIGKILL"):
        while True:
            fleet.check_health(20.0)
            time.sleep(0.02)


def test_a_fleet_resumed_from_its_state_plays_every_task_once_also_with_other_worker_numbers(started):
    cfg = config(epochs=1, engine_kwargs={"student": {"delay_s": 0.02}})
    fleet = started(cfg)
    rollouts = collect(fleet, [], 6)
    state = fleet.request(GetState(fleet.new_request_id()), 5).state
    kept = rollouts + fleet.rollout_buffer.drain()
    kept = [r for r in kept if r.rollout_id < state["next_rollout_id"]]
    fleet.stop(5.0)
    again = started(config(epochs=1, workers=4, max_concurrent=4), state=state)
    rest = collect(again, [], 20 - len(kept))
    assert [r.rollout_id for r in kept + rest] == list(range(20))
    assert len({r.task for r in kept + rest}) == 20
    until(lambda: len(again.env_pids) == 4)


def test_evaluations_are_played_by_the_first_with_exactly_these_weights(started):
    fleet = started(config())
    asked = fleet.new_request_id()
    fleet.send(Evaluate(asked, 3, "v3", episodes=4, max_turns=8))
    done = fleet.eval_results.get(timeout=30)
    assert (done.request_id, done.version, done.result["episodes"]) == (asked, 3, 4)
    until(lambda: fleet.heartbeat.counters["evaluations"] == 1)


def test_together_they_play_no_further_ahead_than_the_pace_of_one(started):
    """Nobody trains: what is under way must come to rest at load x batch x staleness, or an episode each beyond."""
    fleet = started(config(env_kwargs={"tasks": 400}, load=1.0, batch_rows=32, max_staleness=2, max_turns=4))
    fleet.send(PoolStatus(0, 0, 0))
    rollouts, quiet = [], 0
    while quiet < 20:
        before = len(rollouts)
        if fleet.rollout_buffer.wait(0.1):
            rollouts += fleet.rollout_buffer.drain()
        quiet = quiet + 1 if len(rollouts) == before else 0
    valid = sum(len(r.valid_turns) for r in rollouts)
    assert 16 <= valid <= 2 * 32 + 2 * 4
    # The learner waits: both begin again, and stop again.
    fleet.send(PoolStatus(1, 0, 32))
    until(lambda: fleet.rollout_buffer.wait(0.1))


class Member:
    """What a fleet needs of an explorer."""

    def __init__(self, config, *, state=None, max_restarts=2, buffer=None):
        import threading

        self.config, self.saved, self.buffer = config, state, buffer
        self.lock = threading.RLock()
        self.ready = self.heartbeat = None
        self.able, self.exhausted, self.restarts, self.loaded_version = True, False, 0, 0
        self.sent, self.failures = [], deque()

    def send(self, message):
        self.sent.append(message)

    def state(self):
        return ExplorerState({"own": self.config.share[0]}, 7, {"turns": 2.0})


def fake_fleet(count=3, **more):
    given = {"workers": 8, "max_concurrent": 7, "load": 3.0, "pool_turns": 100, "probe_rollouts": 16}
    return ExplorerFleet(config(**{**given, **more}), count, make=Member)


def test_what_the_learner_needs_is_shared_among_those_that_can_deliver():
    fleet = fake_fleet()
    fleet.send(PoolStatus(4, 10, 8, 5))
    assert [m.sent[-1] for m in fleet.members] == [PoolStatus(4, 3, 3, 1)] * 3
    fleet.members[1].able = False
    fleet.rollout_buffer.put(Rollout(0))
    fleet.send(PoolStatus(4, 10, 8, 5))
    assert fleet.members[0].sent[-1] == PoolStatus(4, 5, 4, 2)
    for member in fleet.members:
        member.able = False
    fleet.send(PoolStatus(4, 0, 1))
    assert fleet.members[2].sent[-1].wanted == 1
    fleet.send(SetPolicy(3, "v3", 3))
    assert {m.sent[-1].version for m in fleet.members} == {3}


def test_a_version_counts_as_loaded_when_every_explorer_has_it():
    fleet = fake_fleet(2)
    fleet.members[0].loaded_version = 4
    assert fleet.loaded_version == 0
    fleet.members[1].loaded_version = 3
    assert fleet.loaded_version == 3


def test_heartbeats_add_up_and_what_is_no_amount_does_not():
    fleet = fake_fleet(2)
    assert fleet.heartbeat is None
    gauges = {"in_flight": 3.0, "expected_turns": 4.0, "policy_version": 2.0}
    fleet.members[0].heartbeat = Heartbeat({"turns": 5.0}, gauges, (1, 2))
    first = fleet.heartbeat
    assert first is fleet.heartbeat and first.counters == {"turns": 5.0}
    other = {"in_flight": 1.0, "expected_turns": 8.0, "policy_version": 1.0}
    fleet.members[1].heartbeat = Heartbeat({"turns": 2.0}, other, (3,))
    both = fleet.heartbeat
    assert both.counters == {"turns": 7.0} and both.pids == (1, 2, 3)
    assert both.gauges == {"in_flight": 4.0, "expected_turns": 6.0, "policy_version": 1.0}


def test_a_fleet_is_ready_when_all_are_and_a_restart_is_news():
    fleet = fake_fleet(2)
    fleet.members[0].ready = Ready({"n": 0}, {})
    assert fleet.ready is None
    fleet.members[1].ready = Ready({"n": 1}, {})
    assert fleet.ready.info == {"n": 1} and fleet.ready is fleet.ready
    fleet.members[0].ready = Ready({"n": 2}, {})
    assert fleet.ready.info == {"n": 2}


def test_the_state_of_a_fleet_holds_that_of_every_explorer_and_the_next_number():
    fleet = fake_fleet(2)
    fleet.members[1].buffer.put(Rollout(7))
    fleet.members[0].buffer.put(Rollout(7))
    assert [r.rollout_id for r in fleet.rollout_buffer.drain()] == [0, 1]
    state = fleet.state()
    assert state.next_rollout_id == 2 and state.counters == {"turns": 4.0}
    again = ExplorerFleet(fleet.config, 2, state=state.to_dict(), make=Member)
    assert [m.saved["schedule"]["own"] for m in again.members] == [0, 1]
    again.members[1].buffer.put(Rollout(0))
    assert again.rollout_buffer.get().rollout_id == 2


def test_workers_episodes_load_and_servers_are_split_without_a_rest():
    parts = split_config(config(workers=8, max_concurrent=7, load=3.0, pool_turns=100, probe_rollouts=16), 3)
    assert [p.workers for p in parts] == [3, 3, 2] and [p.max_concurrent for p in parts] == [3, 2, 2]
    assert {p.load for p in parts} == {1.0} and {p.pool_turns for p in parts} == {34}
    assert [p.share for p in parts] == [(0, 3), (1, 3), (2, 3)] and {p.probe_rollouts for p in parts} == {16}
    urls = ("a", "b", "c", "d")
    served = config(engine="vllm", student="s", student_urls=urls, teacher_urls=("t",), workers=2)
    parts = split_config(served, 2)
    assert [p.student_urls for p in parts] == [("a", "c"), ("b", "d")]
    assert [p.teacher_urls for p in parts] == [("t",)] * 2
    assert split_config(served, 1)[0].workers == 2


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"workers": 2}, "workers 2 to share.*Raise env_workers"),
        ({"max_concurrent": 1}, "max_concurrent 1 to share"),
        ({"engine": "vllm", "student": "s", "student_urls": ("a",)}, r"student_urls names 1 server"),
    ],
)
def test_too_little_to_share_is_refused_with_the_remedy(changes, message):
    with pytest.raises(ConfigError, match=message):
        split_config(config(**{"workers": 9, "max_concurrent": 9, **changes}), 3)


def test_a_checkpoint_of_another_number_of_explorers_is_refused_with_the_remedy():
    state = fake_fleet(2).state().to_dict()
    for count in (1, 3):
        with pytest.raises(ConfigError, match="Resume with explorers: 2"):
            make_explorer(config(workers=3, max_concurrent=3), count, state=state)
    alone = ExplorerState({"size": 3}, 1).to_dict()
    with pytest.raises(ConfigError, match="Resume with explorers: 1"):
        make_explorer(config(), 2, state=alone)
    assert isinstance(make_explorer(config(), 1, state=alone), ExplorerProcess)
    assert isinstance(make_explorer(config(), 2, state=state), ExplorerFleet)


def test_more_explorers_than_tasks_end_with_the_cause():
    fleet = ExplorerFleet(config(env_kwargs={"tasks": 1}), 2)
    with pytest.raises(ExplorerDied, match="There are 1 tasks for 2 explorers"):
        fleet.start()
    assert not [m.pid for m in fleet.members if m.pid and alive(m.pid)]
    assert isinstance(fleet.rollout_buffer, RolloutBuffer)


def test_one_explorer_resumed_with_more_environment_workers_plays_every_task_once():
    slow = {"student": {"delay_s": 0.02}}
    first = make_explorer(config(epochs=1, engine_kwargs=slow))
    again = None
    try:
        first.start()
        kept = collect(first, [], 6)
        state = first.state()
        kept = [r for r in kept + first.rollout_buffer.drain() if r.rollout_id < state.next_rollout_id]
        first.stop(5.0)
        again = make_explorer(config(epochs=1, workers=5, max_concurrent=5), state=state.to_dict())
        again.start()
        rest = collect(again, [], 20 - len(kept))
        assert [r.rollout_id for r in kept + rest] == list(range(20))
        assert len({r.task for r in kept + rest}) == 20
    finally:
        for explorer in (first, again):
            if explorer is not None:
                explorer.stop(5.0)


def test_explorers_that_are_told_things_at_the_same_time_never_wait_for_each_other(monkeypatch):
    fleet = ExplorerFleet(config(epochs=1), 2)
    monkeypatch.setattr(ExplorerProcess, "_send", lambda self, message: None)
    for member in fleet.members:
        member._ready_event.set()

    def talk(number):
        for _ in range(5000):
            fleet.members[number].send(PoolStatus(1, 2, 3, 4))

    switching = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=talk, args=(number,), daemon=True) for number in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        sys.setswitchinterval(switching)
    assert not any(thread.is_alive() for thread in threads)


def test_engine_totals_go_on_rising_when_one_explorer_is_started_again():
    fleet = ExplorerFleet(config(), 2)

    def spent(first, second):
        for member, value in zip(fleet.members, (first, second)):
            member.heartbeat = Heartbeat(dict.fromkeys(COSTS, value), {})
        return fleet.heartbeat.counters["teacher_s"]

    assert [spent(1000.0, 1000.0), spent(1010.0, 0.0), spent(1010.0, 5.0)] == [2000.0, 2010.0, 2015.0]
