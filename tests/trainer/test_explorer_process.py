"""The explorer as a process: deaths are noticed and mended, nothing is lost, and nothing is left running."""

import multiprocessing
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from fakes import ENV_ID

from divopd_trainer.explorer import ExplorerConfig, ExplorerDied, ExplorerHung, ExplorerProcess, RolloutBuffer
from divopd_trainer.explorer.channel import Channel
from divopd_trainer.explorer.messages import (
    Evaluate,
    ExplorerState,
    Fatal,
    GetState,
    GroupDone,
    PolicyLoaded,
    PoolStatus,
    Ready,
    RolloutDone,
    SetPolicy,
)
from divopd_trainer.explorer.tasks import Frontier, Ticket
from divopd_trainer.explorer.worker import Explorer
from divopd_trainer.turns import Rollout

HERE = Path(__file__).parent


def config(**more):
    given = {
        "env_id": ENV_ID,
        "env_kwargs": {"tasks": 20},
        "workers": 2,
        "engine": "fakes:build",
        "engine_kwargs": {"student": {"delay_s": 0.002}},
        "prompt_style": "tiny",
        "max_turns": 8,
        "max_tokens": 20,
        "batch_rows": 8,
        "load": None,
        "max_concurrent": 2,
        "heartbeat_s": 0.1,
        "start_timeout_s": 60,
        "step_timeout_s": 10,
    }
    return ExplorerConfig.from_mapping({**given, **more})


@pytest.fixture
def started():
    """Start explorers; at the end each is stopped and must have left no process."""
    explorers = []

    def start(cfg=None, **more):
        explorer = ExplorerProcess(cfg or config(), **more)
        explorers.append(explorer)
        explorer.start()
        until(lambda: explorer.heartbeat is not None)
        return explorer

    yield start
    for explorer in explorers:
        pids = [explorer.pid, *explorer.env_pids]
        explorer.stop(5.0)
        assert not [pid for pid in pids if pid and alive(pid)]


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(condition, timeout=60.0):
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def collect(explorer, rollouts, n):
    """Take rollouts until there are n in all, watching the explorer's health as a learner does."""
    deadline = time.monotonic() + 60
    while len(rollouts) < n:
        explorer.check_health(20.0)
        assert time.monotonic() < deadline, "waited in vain"
        if explorer.rollout_buffer.wait(0.1):
            rollouts += explorer.rollout_buffer.drain()
        elif explorer.exhausted:
            break
    return rollouts


def test_talks_plays_evaluates_and_stops(started):
    explorer = started()
    assert explorer.ready.info["tasks"] == 20
    assert explorer.ready.info["env_versions"] == {"counter": "1"}
    rollouts = collect(explorer, [], 5)
    assert [r.rollout_id for r in rollouts[:5]] == [0, 1, 2, 3, 4]
    assert all(t.valid for r in rollouts for t in r.turns)

    explorer.send(SetPolicy(3, "v3", 3))
    until(lambda: explorer.loaded_version == 3)
    explorer.send(PoolStatus(3, 0, 8))
    reply = explorer.request(GetState(explorer.new_request_id()), 20)
    assert reply.state["next_rollout_id"] >= 5
    assert ExplorerState.from_dict(reply.state).schedule["finished"] == reply.state["next_rollout_id"]

    done = explorer.request(Evaluate(explorer.new_request_id(), 3, "v3", episodes=4, max_turns=8), 30)
    assert done.error is None and done.version == 3 and done.result["episodes"] == 4
    asked = explorer.new_request_id()
    explorer.send(Evaluate(asked, 3, "v3", episodes=2, max_turns=8))
    assert explorer.eval_results.get(timeout=30).request_id == asked
    assert explorer.metrics_queue.get_nowait()["explorer/in_flight"] >= 0

    # Ctrl-C reaches the whole group; only the trainer decides what it means.
    os.kill(explorer.pid, signal.SIGINT)
    for pid in explorer.env_pids:
        os.kill(pid, signal.SIGINT)
    collect(explorer, rollouts, len(rollouts) + 5)
    assert explorer.restarts == 0


def test_stop_without_grace_waits_for_no_message_that_is_being_sent(started):
    # The second Ctrl-C may come while the main thread is inside a send that a hanging explorer never reads.
    explorer = started()
    pid = explorer.pid
    with explorer._send_lock:
        stopper = threading.Thread(target=explorer.stop, args=(0.0,), daemon=True)
        stopper.start()
        stopper.join(30.0)
        assert not stopper.is_alive() and not alive(pid)


def test_killed_environment_worker_costs_one_episode_and_is_replaced(started):
    env_kwargs = {"tasks": 12, "hang": ["3/1"]}
    explorer = started(config(env_kwargs=env_kwargs, epochs=1, step_timeout_s=60, workers=2))
    # One worker hangs in the middle of a turn; it is killed from outside, long before its time-out.
    rollouts = collect(explorer, [], 11)
    assert len(explorer.env_pids) == 2
    for pid in explorer.env_pids:
        os.kill(pid, signal.SIGKILL)
    until(lambda: explorer.exhausted)
    assert [f.task for f in explorer.failures] == ["3/1"] and "SIGKILL" in explorer.failures[0].why
    assert len({r.task for r in rollouts}) == 11
    until(lambda: explorer.heartbeat.counters["env_restarts"] >= 2)
    until(lambda: len(explorer.env_pids) == 2)
    assert explorer.restarts == 0


def test_hanging_environment_fails_its_episode_at_the_time_out_and_the_run_goes_on(started):
    env_kwargs = {"tasks": 6, "hang": ["3/1"], "die": ["4/2"]}
    explorer = started(config(env_kwargs=env_kwargs, epochs=2, step_timeout_s=0.5))
    rollouts = collect(explorer, [], 8)
    until(lambda: explorer.exhausted)
    assert sorted(f.task for f in explorer.failures) == ["3/1", "3/1", "4/2", "4/2"]
    assert sorted({r.task for r in rollouts}) == ["2/0", "2/3", "3/4", "4/5"] and len(rollouts) == 8


def test_killed_explorer_is_restarted_and_every_task_is_played_once(started):
    explorer = started(config(epochs=1, engine_kwargs={"student": {"delay_s": 0.02}}))
    explorer.send(SetPolicy(5, "v5", 5))
    until(lambda: explorer.loaded_version == 5)
    rollouts = collect(explorer, [], 6)
    first, workers = explorer.pid, explorer.env_pids
    os.kill(first, signal.SIGKILL)
    collect(explorer, rollouts, 20)
    until(lambda: explorer.exhausted)
    rollouts += explorer.rollout_buffer.drain()
    assert explorer.restarts == 1 and explorer.pid != first
    assert not [pid for pid in (first, *workers) if alive(pid)]
    assert len(rollouts) == 20 and len({r.task for r in rollouts}) == 20
    assert [r.rollout_id for r in rollouts] == list(range(20))
    assert {t.policy_version for r in rollouts[-8:] for t in r.turns} == {5}
    until(lambda: explorer.heartbeat.counters["episodes"] >= 14)


def test_explorer_that_dies_too_often_is_reported_with_its_signal(started):
    explorer = started(max_restarts=0)
    os.kill(explorer.pid, signal.SIGKILL)
    with pytest.raises(ExplorerDied, match=r"SIGKILL.*0 of 0 restarts"):
        while True:
            explorer.check_health(20.0)
            time.sleep(0.02)
    with pytest.raises(ExplorerDied):
        explorer.request(GetState(1), 5)
    assert explorer.idle


def test_stopped_in_the_middle_and_resumed_from_the_state_every_task_is_played_once(started):
    explorer = started(config(epochs=1, engine_kwargs={"student": {"delay_s": 0.02}}))
    rollouts = collect(explorer, [], 6)
    state = explorer.state()
    kept = rollouts + explorer.rollout_buffer.drain()
    kept = [r for r in kept if r.rollout_id < state.next_rollout_id]
    explorer.stop(5.0)
    again = started(config(epochs=1), state=state.to_dict())
    rest = collect(again, [], 20 - len(kept))
    assert len(kept) + len(rest) == 20 and len({r.task for r in kept + rest}) == 20
    assert [r.rollout_id for r in kept + rest] == list(range(20))


def test_explorer_that_cannot_start_says_why():
    explorer = ExplorerProcess(config(engine="fakes:no_such"))
    with pytest.raises(ExplorerDied, match="fakes:no_such"):
        explorer.start()
    assert explorer.restarts == 0
    explorer.stop(1.0)
    assert not alive(explorer.pid)


def test_hanging_explorer_is_killed_and_reported(started):
    explorer = started(max_restarts=0)
    os.kill(explorer.pid, signal.SIGSTOP)
    with pytest.raises(ExplorerHung, match="silent"):
        while True:
            explorer.check_health(0.5)
            time.sleep(0.05)
    until(lambda: not alive(explorer.pid))


def test_explorer_and_its_workers_vanish_when_the_trainer_is_killed():
    script = (
        f"import sys, time; sys.path[:0] = [{str(HERE)!r}]\n"
        "from test_explorer_process import config, until\n"
        "from divopd_trainer.explorer import ExplorerProcess\n"
        "if __name__ == '__main__':\n"
        "    e = ExplorerProcess(config()); e.start(); until(lambda: len(e.env_pids) == 2)\n"
        "    print(e.pid, *e.env_pids, flush=True); time.sleep(60)\n"
    )
    trainer = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=HERE.parents[1]
    )
    try:
        pids = [int(word) for word in trainer.stdout.readline().split()]
        assert len(pids) == 3 and all(map(alive, pids))
    finally:
        trainer.kill()
        trainer.wait(10)
    until(lambda: not any(map(alive, pids)), timeout=15)


def test_trainer_that_forgets_to_stop_ends_and_leaves_nothing():
    script = (
        f"import sys; sys.path[:0] = [{str(HERE)!r}]\n"
        "from test_explorer_process import config, until\n"
        "from divopd_trainer.explorer import ExplorerProcess\n"
        "if __name__ == '__main__':\n"
        "    e = ExplorerProcess(config()); e.start(); until(lambda: len(e.env_pids) == 2)\n"
        "    print(e.pid, *e.env_pids, flush=True)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=HERE.parents[1], timeout=180
    )
    assert done.returncode == 0, done.stderr
    pids = [int(word) for word in done.stdout.split()]
    assert len(pids) == 3
    until(lambda: not any(map(alive, pids)), timeout=10)


def test_buffer_keeps_order_and_counts_valid_turns():
    buffer = RolloutBuffer()
    with pytest.raises(queue.Empty):
        buffer.get_nowait()
    assert not buffer.wait(0.0)
    for rid in range(4):
        buffer.put(Rollout(rid))
    assert buffer.get().rollout_id == 0 and len(buffer) == buffer.qsize() == 3
    assert buffer.get(timeout=1.0).rollout_id == 1
    assert [r.rollout_id for r in buffer.drain()] == [2, 3]
    assert len(buffer) == 0 and buffer.valid_turns == 0


def test_the_depth_of_a_horizon_goes_with_what_was_received_and_survives_a_death(started):
    depth = {
        "horizon": "turnopd",
        "horizon_kwargs": {"warmup_updates": 2, "min_turns": 1},
        "probe_rollouts": 3,
    }
    explorer = started(config(env_kwargs={"tasks": 200, "lengths": (50,)}, max_turns=4, epochs=1, **depth))
    rollouts = collect(explorer, [], 6)
    state = explorer.state()
    assert state.depth["to_begin"] == 0 and state.depth["horizon"]["smoothed"] is not None
    assert sum(bool(r.meta.get("probe")) for r in rollouts) == 3
    smoothed = state.depth["horizon"]["smoothed"]
    explorer.kill()
    until(lambda: explorer.restarts == 1)
    until(lambda: explorer.rollout_buffer.wait(0.1))
    rollouts = collect(explorer, rollouts, len(rollouts) + 10)
    # The round is over: the restarted explorer begins no other one, and knows how deep to go.
    assert sum(bool(r.meta.get("probe")) for r in rollouts) == 3
    assert explorer.state().depth["horizon"]["smoothed"] == smoothed


def test_what_is_sent_while_a_restarted_explorer_is_told_everything_again_comes_last():
    process, sent, others = ExplorerProcess(config()), [], []

    def slow(message):
        sent.append(message)
        if not others:
            # The learner begins to wait and hands over new weights at this very moment.
            news = (SetPolicy(2, "v2", 2), PoolStatus(2, 0, 64))
            others.append(threading.Thread(target=lambda: [process.send(one) for one in news]))
            others[0].start()
            time.sleep(0.2)

    process._send = slow
    process.send(SetPolicy(1, "v1", 1))
    process.send(PoolStatus(1, 64, 0))
    schedule = {"size": 4, "epoch": 0, "finished_in": {}, "finished": 0, "dropped": 0}
    process._receive(Ready({}, {"schedule": schedule, "depth": None}), None)
    others[0].join(10)
    assert [m.version for m in sent if isinstance(m, SetPolicy)] == [1, 2]
    assert [m.wanted for m in sent if isinstance(m, PoolStatus)] == [0, 64]
    assert (process._last_policy.version, process._last_pool.wanted) == (2, 64)


def test_nothing_is_exhausted_before_its_last_rollout_is_in_the_buffer():
    class Buffer(RolloutBuffer):
        def put(self, rollout):
            seen.append(process.exhausted)
            super().put(rollout)

    seen, ticket = [], Ticket(0, 0, "a", 0)
    process = ExplorerProcess(config(epochs=1), buffer=Buffer())
    process._frontier = Frontier(1)
    process._receive(RolloutDone(Rollout(0), ticket), None)
    assert seen == [False]
    assert process.exhausted


def test_no_state_lies_between_the_episodes_of_a_group():
    class Buffer(RolloutBuffer):
        def put(self, rollout):
            super().put(rollout)
            asker = threading.Thread(target=lambda: seen.append(process.state()))
            asker.start()
            asker.join(0.1)
            askers.append(asker)

    seen, askers = [], []
    process = ExplorerProcess(config(epochs=1), buffer=Buffer())
    process._frontier = Frontier(3)
    group = tuple(RolloutDone(Rollout(i), Ticket(0, i, "a", i)) for i in range(3))
    process._receive(GroupDone(group), None)
    for asker in askers:
        asker.join(10)
    assert [(state.next_rollout_id, state.schedule["finished"]) for state in seen] == [(3, 3)] * 3


def test_what_cannot_be_pickled_is_said_and_is_no_silence():
    ours, theirs = multiprocessing.Pipe()
    channel = Channel(theirs)
    channel.send(PolicyLoaded(1))
    channel.send(Fatal(lambda: None))
    channel.send(PolicyLoaded(2))
    said = [ours.recv() for _ in range(3)]
    assert [type(one) for one in said] == [PolicyLoaded, Fatal, PolicyLoaded]
    assert "must be picklable" in said[1].message


def test_a_restarted_explorer_paces_itself_from_the_weights_that_it_begins_with():
    explorer = Explorer(config(), ExplorerState(), None, SetPolicy(200, "v200", 200))
    assert explorer.pacer.version == explorer.pacer.composed == 200
