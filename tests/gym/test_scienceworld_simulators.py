"""ScienceWorld's simulators: processes that die, hang, are shared, and end with their program."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from scienceworld_fakes import ID, SLOW, gone, make, own_simulators, simulators, start  # noqa: F401

pytest.importorskip("scienceworld", reason="the simulator comes with the package scienceworld")

from divopd_gym import ResetNeeded  # noqa: E402
from divopd_gym.envs.scienceworld.wire import SimulatorDied  # noqa: E402
from divopd_gym.pool import EnvError  # noqa: E402
from divopd_gym.pool_sync import SyncEnvPool  # noqa: E402

pytestmark = [pytest.mark.env, pytest.mark.timeout(1800)]


def test_a_simulator_that_dies_costs_the_episode_and_nothing_else():
    env, _, _ = start("boil/0")
    pid = env.unwrapped._connection.pid
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(SimulatorDied, match="not failed"):
        env.step("look around")
    with pytest.raises(ResetNeeded):
        env.step("look around")
    _, info = env.reset(options={"task": "boil/0"})
    assert info["turns"] == 0 and env.unwrapped._connection.pid != pid
    os.kill(env.unwrapped._connection.pid, signal.SIGKILL)
    # Between two episodes it is nobody's loss.
    assert env.reset(options={"task": "boil/0"})[1]["turns"] == 0
    env.close()


def test_a_simulator_that_hangs_is_killed():
    env, _, _ = start("boil/0", isolation="process", call_timeout_s=900.0)
    pid = env.unwrapped._connection.pid
    env.unwrapped.call_timeout_s = 1.0
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(SimulatorDied, match="did not answer"):
        env.step("look around")
    assert gone(pid)
    env.close()


def test_a_pool_reports_a_dead_simulator_and_plays_on():
    kwargs = {"split": "all", "simplification": "easy", "call_timeout_s": 900.0}
    with SyncEnvPool(ID, kwargs, workers=2, step_timeout_s=900, reset_timeout_s=900) as pool:
        with pool.lend(900) as one, pool.lend(900) as two:
            one.reset(task="boil/0")
            two.reset(task="melt/0")
            pids = {p.pid for p in simulators()}
            assert 1 <= len(pids) <= 2
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            for env, task in ((one, "boil/0"), (two, "melt/0")):
                with pytest.raises(EnvError, match="SimulatorDied.*not failed"):
                    env.step("look around")
                assert env.reset(task=task)[1]["task"] == task
        assert pool.counters["deaths"] == 0 and pool.counters["env_errors"] == 2
        pids = {p.pid for p in simulators()}
    assert all(map(gone, pids))


def test_environments_share_few_simulators_and_the_last_one_ends_them():
    envs = [make(simulators=2) for _ in range(5)]
    for env in envs:
        env.reset(options={"task": "melt/1"})
    pids = {env.unwrapped._connection.pid for env in envs}
    assert len(pids) == 2
    own = make(isolation="process")
    own.reset(options={"task": "melt/1"})
    assert own.unwrapped._connection.pid not in pids
    pids.add(own.unwrapped._connection.pid)
    for env in [*envs, own]:
        env.close()
        env.close()
    assert all(map(gone, pids))


SCRIPT = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)
import gymnasium, divopd_gym
env = gymnasium.make("divopd_gym/ScienceWorld-v0", split="all", isolation=sys.argv[1], call_timeout_s=900.0)
env.reset(options={"task": "boil/0"})
print(env.unwrapped._connection.pid, flush=True)
if sys.argv[2] == "exit":
    os._exit(0)
if sys.argv[2] == "fork":
    if os.fork() == 0:
        time.sleep(600)
while True:
    time.sleep(0.1)  # a signal just before a long sleep would be heard at its end
"""


@pytest.mark.parametrize(
    "isolation, end", [("shared", "exit"), ("shared", "SIGINT"), ("shared", "fork"), ("process", "SIGKILL")]
)
def test_no_simulator_outlives_its_program(isolation, end):
    command = [sys.executable, "-c", SCRIPT, isolation, end]
    # As from a terminal: Ctrl-C goes to the whole group.
    program = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        pid = int(program.stdout.readline())
        assert psutil.pid_exists(pid)
        if end == "fork":
            # A child that lives on holds none of its parent's connections.
            time.sleep(1)
            program.kill()
        elif end != "exit":
            os.killpg(program.pid, getattr(signal, end))
        assert gone(pid)
    finally:
        os.killpg(program.pid, signal.SIGKILL)
        program.wait(60)
        program.stdout.close()


def test_a_forked_child_must_reset_and_leaves_its_parents_episode_alone():
    env, _, _ = start("boil/0")
    child = os.fork()
    if child == 0:
        code = 1
        try:
            env.step("look around")
        except ResetNeeded:
            env.reset(options={"task": "melt/0"})
            code = 0 if env.step("look around")[4]["turns"] == 1 else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert env.step("look around")[4]["task"] == "boil/0"
    env.close()


@pytest.mark.parametrize("episodes", [20, pytest.param(1000, marks=SLOW)])
def test_resets_leave_memory_threads_and_descriptors_flat(episodes):
    env = make(isolation="process", simplification="easy")
    tasks = [f"find-plant/{n}" for n in range(10)]
    measured = []
    for episode in range(episodes):
        env.reset(options={"task": tasks[episode % len(tasks)]})
        env.step("look around")
        if episode in (episodes // 2, episodes - 1):
            simulator = psutil.Process(env.unwrapped._connection.pid)
            measured += [
                (p.num_threads(), p.num_fds(), p.memory_info().rss / 1e6)
                for p in (psutil.Process(), simulator)
            ]
    for before, after in zip(measured[:2], measured[2:]):
        assert after[1] <= before[1] + 2 and after[2] <= before[2] + 60
        assert after[0] <= before[0] + 3
    env.close()
