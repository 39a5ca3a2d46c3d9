"""Environments on a Ray cluster of two nodes, both on this machine: the pool's promises, and the loss of a node."""

import asyncio
import importlib.util
import os
import secrets
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest
from pool_fakes import FAKE, episode, gone, until

from divopd_gym.errors import ConfigError, PoolError, WorkerDied, WorkerTimeout
from divopd_gym.pool import EnvError

HAS_RAY = importlib.util.find_spec("ray") is not None
pytestmark = [
    pytest.mark.env,
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not HAS_RAY, reason="Ray is not installed; pip install 'divopd[ray]'"),
]
if HAS_RAY:
    from divopd_gym.ray_pool import RayEnvPool
    from divopd_gym.ray_worker import NoRoom

HERE = Path(__file__).parent
PATHS = os.pathsep.join([str(HERE), str(HERE.parents[1])])


class Nodes:
    """A cluster of two nodes, the second of which can be lost and come back; see ray_nodes.py."""

    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "ray_nodes.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.address, self.first = self.process.stdout.readline().split()
        self.second = None
        self.add()

    def add(self):
        self.second = self.tell("add")

    def lose(self):
        self.tell("lose")

    def tell(self, word):
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def end(self):
        started = {process.pid for process in psutil.Process(self.process.pid).children(recursive=True)}
        self.process.stdin.close()
        try:
            self.process.wait(30)
        finally:
            self.process.kill()
            self.process.wait()
        all_gone(started)


@pytest.fixture(scope="module")
def nodes():
    # Processes of a cluster inherit the path to this test's environments, and know one another by the token.
    changes = {"PYTHONPATH": PATHS, "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in changes.items():
            patch.setenv(name, value)
        made = Nodes()
        try:
            yield made
        finally:
            made.end()


def all_gone(pids):
    # After a SIGKILL Ray's agents look for their parent a few times before they leave.
    deadline = time.monotonic() + 90
    while left := [pid for pid in pids if not gone(pid)]:
        assert time.monotonic() < deadline, f"left running: {left}"
        time.sleep(0.1)


def run(work, deadline_s=100):
    return asyncio.run(asyncio.wait_for(work, deadline_s))


def test_episodes_experts_calls_and_errors_are_those_of_a_pool_of_processes(nodes):
    from divopd_gym.pool import EnvPool

    async def play(pool):
        async with pool:

            async def one(task):
                async with pool.lend() as env:
                    return await episode(env, task)

            said = await asyncio.gather(*map(one, ("a", "b", "c")))
            async with pool.lend() as env:
                await env.reset("d")
                await env.step("x")
                said += [await env.expert_act(), await env.call("add", 2, 3), await env.call("secret")]
                with pytest.raises(EnvError, match="no such task") as found:
                    await env.reset("bad reset")
                said += [found.value.task, found.value.cause, type(found.value.__cause__)]
                await env.reset("unpicklable info")
                with pytest.raises(EnvError):
                    await env.step("go")
                said += await episode(env, "e")
            return said, pool.counters, pool.pids()

    ray_said, ray_counters, pids = run(play(RayEnvPool(FAKE, {}, 2, address=nodes.address)))
    said, counters, _ = run(play(EnvPool(FAKE, {}, 2)))
    assert ray_said == said and ray_counters == counters and pids == []


def test_hanging_and_dying_environments_are_replaced_and_renewed_ones_recycled(nodes):
    async def work():
        async with RayEnvPool(
            FAKE, {}, 1, address=nodes.address, step_timeout_s=2.0, recycle_after=4
        ) as pool:
            async with pool.lend() as env:
                await env.reset("hang")
                with pytest.raises(WorkerTimeout, match=r"2 s in step\(\), task 'hang', turn 0"):
                    await env.step("go")
                with pytest.raises(WorkerDied):
                    await env.step("x")
            async with pool.lend(60) as env:
                await env.reset("exit")
                with pytest.raises(WorkerDied, match=r"in step\(\), task 'exit', turn 0"):
                    await env.step("go")
            for task in "abcde":
                async with pool.lend(60) as env:
                    await episode(env, task)
            found = {name: pool.counters[name] for name in ("deaths", "timeouts", "restarts", "recycled")}
            assert found == {"deaths": 2, "timeouts": 1, "restarts": 2, "recycled": 1}

    run(work())


def test_losing_a_node_costs_its_episodes_only_and_they_go_on_when_it_returns(nodes):
    """Ten environments, eight of them on the second node."""

    async def work():
        # More deaths at once than max_restarts allows one after another.
        options = {"cpus": 1, "max_restarts": 6, "watch_s": 0.5, "room_timeout_s": 100}
        async with RayEnvPool(FAKE, {"length": 4}, 10, address=nodes.address, **options) as pool:
            envs = [await pool.acquire() for _ in range(10)]
            for number, env in enumerate(envs):
                await env.reset(f"task {number}")
                await env.step("x")
            second = nodes.second
            there = [env._worker.node == second for env in envs]
            assert sum(there) == 8
            await asyncio.to_thread(nodes.lose)
            outcomes = await asyncio.gather(*(env.step("x") for env in envs), return_exceptions=True)
            assert [isinstance(outcome, WorkerDied) for outcome in outcomes] == there
            assert [o[0] for o in outcomes if isinstance(o, tuple)] == ["x 2", "x 2"]
            for env in envs:
                pool.release(env)
            # What is left goes on playing; nothing else is free until the node is back.
            async with pool.lend(5) as one, pool.lend(5) as two:
                await episode(one, "a")
                with pytest.raises(PoolError, match="became free within 1 s"):
                    await pool.acquire(1)
                await asyncio.to_thread(nodes.add)
                more = [await pool.acquire(90) for _ in range(8)]
                for number, env in enumerate([*more, two]):
                    await episode(env, f"again {number}")
                assert {env._worker.node for env in more} == {nodes.second}
            assert pool.counters["deaths"] == 8 <= pool.counters["restarts"]

    run(work())


def test_idle_environments_of_a_lost_node_are_noticed_and_without_any_node_the_pool_gives_up(nodes):
    nodes.add()

    async def work():
        options = {"resources": {"second": 1}, "cpus": 4}
        options |= {"watch_s": 0.2, "room_timeout_s": 15.0}
        async with RayEnvPool(FAKE, {}, 2, address=nodes.address, **options) as pool:
            await asyncio.to_thread(nodes.lose)
            await until(lambda: pool.counters["deaths"] == 2, 60)
            with pytest.raises(PoolError, match="is lost and none could be placed again.*add nodes"):
                await pool.acquire(60)

    run(work())


def test_a_cluster_without_room_or_that_is_not_there_is_refused_with_the_remedy(nodes):
    async def crowded():
        async with RayEnvPool(FAKE, {}, 1, address=nodes.address, cpus=64, room_timeout_s=2):
            pass

    with pytest.raises(NoRoom, match="within 2 s.*add nodes, use fewer env_workers"):
        run(crowded())
    with pytest.raises(ConfigError, match="cpus is -1"):
        RayEnvPool(FAKE, {}, 1, cpus=-1)

    async def broken():
        async with RayEnvPool(FAKE, {"fail_at_start": True}, 1, address=nodes.address):
            pass

    with pytest.raises(PoolError, match="cannot be built"):
        run(broken())


SCRIPT = """
    import asyncio, os, sys, time
    import psutil
    from divopd_gym.ray_pool import RayEnvPool

    async def work():
        pool = RayEnvPool("pool_envs:fakes/Pool-v0", {}, 2, address="local")
        await pool.start()
        async with pool.lend() as env:
            print((await env.reset("a"))[0], flush=True)
            pids = [p.pid for p in psutil.Process().children(recursive=True)]
            print(*pids, flush=True)
            if sys.argv[1] == "wait":
                time.sleep(300)
        await pool.close()

    asyncio.run(work())
"""


@pytest.mark.parametrize("end", ["close", "kill"])
def test_a_local_cluster_ends_with_its_pool_or_with_its_process(end):
    env = os.environ | {"PYTHONPATH": PATHS}
    what = "wait" if end == "kill" else "leave"
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), what], env=env, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "start of a\n"
        pids = [int(word) for word in process.stdout.readline().split()]
        assert len(pids) >= 4
        if end == "kill":
            process.send_signal(signal.SIGKILL)
        process.wait(60)
    finally:
        process.kill()
        process.wait()
    all_gone(pids)
