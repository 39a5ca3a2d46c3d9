"""Episodes in a pool: lending, time-outs, workers that die and are replaced, errors of environments."""

import asyncio
import os
import pickle
import signal

import pytest
from pool_fakes import FAKE, episode, gone, run, until

from divopd_gym.errors import ConfigError, PoolError, WorkerDied, WorkerTimeout
from divopd_gym.pool import EnvError, EnvPool
from divopd_gym.pool_sync import SyncEnvPool


def test_four_episodes_in_parallel_equal_the_same_four_in_series():
    tasks = ["a", "b", "c", "d"]

    async def play(workers):
        async with EnvPool(FAKE, {}, workers) as pool:

            async def one(task):
                async with pool.lend() as env:
                    return await episode(env, task)

            return await asyncio.gather(*map(one, tasks)), pool.counters

    (parallel, counters), (series, _) = run(play(4)), run(play(1))
    assert parallel == series
    assert (counters["episodes"], counters["turns"]) == (4, 12)


def test_without_a_task_the_seed_decides():
    async def work():
        async with EnvPool(FAKE) as pool, pool.lend() as env:
            assert (await env.reset(seed=5))[0] == "start of seed 5"
            assert env.task == "seed 5"

    run(work())


@pytest.mark.parametrize("start_method", ["spawn", "fork"])
def test_other_start_methods_work_too(start_method):
    async def work():
        async with EnvPool(FAKE, {}, 2, start_method=start_method) as pool:
            async with pool.lend() as env:
                await episode(env, "a")
            return pool.pids()

    assert all(map(gone, run(work())))


@pytest.mark.parametrize("task", ["hang", "stop"])
def test_a_hanging_turn_is_killed_and_the_worker_replaced(task):
    async def work():
        async with EnvPool(FAKE, {}, 1, step_timeout_s=0.3) as pool:
            async with pool.lend() as env:
                await env.reset(task)
                hung = env.pid
                with pytest.raises(
                    WorkerTimeout, match=rf"0.3 s in step\(\), task '{task}', turn 0.*time-out"
                ):
                    await env.step("go")
                with pytest.raises(WorkerDied):
                    await env.step("x")
            await until(lambda: gone(hung))
            async with pool.lend(20) as env:
                assert env.pid != hung
                await episode(env, "a")
            assert (pool.counters["timeouts"], pool.counters["restarts"]) == (1, 1)

    run(work())


def test_kill_9_in_the_middle_of_a_turn_is_noticed_long_before_the_time_out():
    async def work():
        async with EnvPool(FAKE, {}, 2, step_timeout_s=500) as pool:
            async with pool.lend() as env:
                await env.reset("hang")
                step = asyncio.ensure_future(env.step("go"))
                await asyncio.sleep(0.2)
                os.kill(env.pid, signal.SIGKILL)
                with pytest.raises(WorkerDied, match="SIGKILL.*task 'hang', turn 0") as caught:
                    await asyncio.wait_for(step, 20)
            assert caught.value.exitcode == -9
            await until(lambda: len(pool.pids()) == 2)
            async with pool.lend() as env:
                await episode(env, "a")

    run(work())


def test_a_worker_that_exits_reports_its_exit_code():
    async def work():
        async with EnvPool(FAKE) as pool, pool.lend() as env:
            await env.reset("exit")
            with pytest.raises(WorkerDied, match="exit code 3"):
                await env.step("go")

    run(work())


def test_death_of_an_idle_worker_is_noticed_and_mended():
    async def work():
        async with EnvPool(FAKE, {}, 2) as pool:
            first = pool.pids()
            os.kill(first[0], signal.SIGKILL)
            await until(lambda: pool.counters["restarts"] == 1 and len(pool.pids()) == 2)
            assert first[0] not in pool.pids() and first[1] in pool.pids()

    run(work())


def test_restarts_are_capped_with_the_last_cause_in_the_message():
    async def work():
        async with EnvPool(FAKE, {}, 1, max_restarts=2) as pool:
            for _ in range(3):
                async with pool.lend(20) as env:
                    await env.reset("exit")
                    with pytest.raises(WorkerDied):
                        await env.step("go")
            for _ in range(2):
                with pytest.raises(PoolError, match="failed 3 times.*max_restarts.*exit code 3"):
                    await pool.acquire(20)
            assert pool.counters["restarts"] == 2

    run(work())


def test_an_episode_that_goes_well_forgives_earlier_restarts():
    async def work():
        async with EnvPool(FAKE, {}, 1, max_restarts=1) as pool:
            for _ in range(3):
                async with pool.lend(20) as env:
                    await env.reset("exit")
                    with pytest.raises(WorkerDied):
                        await env.step("go")
                async with pool.lend(20) as env:
                    await episode(env, "a")
            assert pool.counters["restarts"] == 3

    run(work())


def test_workers_are_renewed_after_their_episodes():
    async def work():
        async with EnvPool(FAKE, {}, 1, recycle_after=2) as pool:
            pids = []
            for _ in range(6):
                async with pool.lend(20) as env:
                    pids.append(env.pid)
                    await episode(env, "a")
            assert len(set(pids)) == 3 and pids[0] == pids[1] and pids[2] == pids[3]
            assert (pool.counters["recycled"], pool.counters["deaths"], pool.counters["restarts"]) == (
                3,
                0,
                0,
            )
            await until(lambda: all(map(gone, set(pids))))

    run(work())


@pytest.mark.parametrize("task", ["raise", "raise unpicklable", "unpicklable info"])
def test_an_exception_of_the_environment_names_the_task_and_the_worker_survives(task):
    async def work():
        async with EnvPool(FAKE) as pool, pool.lend() as env:
            await env.reset(task)
            with pytest.raises(EnvError, match=rf"step\(\) \(task '{task}'\)") as caught:
                await env.step("go")
            pid = env.pid
            await episode(env, "a")
            assert env.pid == pid
            assert pool.counters["env_errors"] == 1
            return caught.value

    error = run(work())
    assert isinstance(error, PoolError)
    assert error.task == task and error.trace
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.task, copy.cause) == (str(error), error.task, error.cause)
    if task == "raise":
        assert isinstance(error.__cause__, ValueError) and error.cause == "ValueError"


def test_a_failing_reset_names_the_task():
    async def work():
        async with EnvPool(FAKE) as pool, pool.lend() as env:
            with pytest.raises(EnvError, match="'bad reset'.*KeyError"):
                await env.reset("bad reset")

    run(work())


def test_large_observations_come_through():
    async def work():
        async with EnvPool(FAKE) as pool, pool.lend() as env:
            await env.reset("big")
            assert len((await env.step("go"))[4]["big"]) == 3_000_000

    run(work())


def test_a_call_given_up_half_way_does_not_leak_its_answer_into_the_next_episode():
    async def work():
        async with EnvPool(FAKE, {"length": 50}) as pool:
            for _ in range(20):
                async with pool.lend(20) as env:
                    await env.reset("a")
                    step = asyncio.ensure_future(env.step("late"))
                    await asyncio.sleep(0)
                    step.cancel()
                    await asyncio.gather(step, return_exceptions=True)
                async with pool.lend(20) as env:
                    assert (await env.reset("b"))[0] == "start of b"
                    assert (await env.step("x"))[0] == "x 1"
            assert pool.counters["deaths"] == 0

    run(work())


def test_a_call_given_up_and_never_answered_costs_the_worker_not_the_next_episode():
    async def work():
        async with EnvPool(FAKE, {}, 1, step_timeout_s=0.3) as pool:
            async with pool.lend() as env:
                await env.reset("hang")
                hung, step = env.pid, asyncio.ensure_future(env.step("go"))
                await asyncio.sleep(0.05)
                step.cancel()
                await asyncio.gather(step, return_exceptions=True)
            async with pool.lend(20) as env:
                assert env.pid != hung
                await episode(env, "a")

    run(work())


def test_expert_is_told_everything_that_was_played_and_asking_twice_changes_nothing():
    async def work():
        async with EnvPool(FAKE) as pool, pool.lend() as env:
            with pytest.raises(EnvError, match=r"before reset\(\)"):
                await env.expert_act()
            await env.reset("a")
            await env.step("x")
            assert await env.expert_act() == "start of a | x>x 1"
            assert await env.expert_act() == "start of a | x>x 1"
            await env.step("y")
            assert await env.expert_act() == "start of a | x>x 1 | y>y 2"
            await env.reset("b")
            assert await env.expert_act() == "start of b"

    run(work())


def test_methods_and_attributes_can_be_called_by_name():
    async def work():
        async with EnvPool(FAKE) as pool, pool.lend() as env:
            assert (await env.call("add", 1, 2), await env.call("secret")) == (3, 7)
            with pytest.raises(EnvError, match="no_such_thing"):
                await env.call("no_such_thing")

    run(work())


def test_workers_see_the_environment_variables_of_now_not_those_of_the_first_pool(monkeypatch):
    for value in ("one", "two"):
        monkeypatch.setenv("DIVOPD_TEST_VARIABLE", value)
        with SyncEnvPool(FAKE, workers=1) as pool, pool.lend(20) as env:
            assert env.call("variable", "DIVOPD_TEST_VARIABLE") == value


def test_environments_are_lent_first_come_first_served():
    async def work():
        order = []
        async with EnvPool(FAKE) as pool:

            async def one(i):
                async with pool.lend() as env:
                    order.append(i)
                    await episode(env, "a")

            await asyncio.gather(*(one(i) for i in range(6)))
        assert order == list(range(6))

    run(work())


def test_giving_up_waiting_loses_no_worker():
    async def work():
        async with EnvPool(FAKE) as pool:
            held = await pool.acquire()
            with pytest.raises(PoolError, match="within 0.05 s.*more workers"):
                await pool.acquire(0.05)
            waiting = asyncio.ensure_future(pool.acquire())
            await asyncio.sleep(0)
            pool.release(held)  # handed over, and cancelled before it could be taken
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            async with pool.lend(10) as env:
                await episode(env, "a")

    run(work())


def test_a_released_handle_is_refused_and_releasing_twice_does_nothing():
    async def work():
        async with EnvPool(FAKE) as pool:
            env = await pool.acquire()
            pool.release(env)
            pool.release(env)
            with pytest.raises(PoolError, match="released handle"):
                await env.reset("a")
            first = await pool.acquire()
            with pytest.raises(PoolError, match="became free"):
                await pool.acquire(0.05)
            pool.release(first)

    run(work())


def test_a_worker_that_cannot_be_built_fails_the_start_with_its_cause():
    async def work():
        pool = EnvPool(FAKE, {"fail_at_start": True}, 2)
        with pytest.raises(PoolError, match="ValueError: cannot be built"):
            await pool.start()
        assert pool.pids() == []
        with pytest.raises(PoolError, match="closed"):
            await pool.acquire()

    run(work())


def test_an_unknown_environment_fails_the_start():
    async def work():
        with pytest.raises(PoolError, match="NoSuch"):
            await EnvPool("pool_envs:fakes/NoSuch-v0").start()

    run(work())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"workers": 0}, "workers is 0"),
        ({"step_timeout_s": 0}, "step_timeout_s is 0"),
        ({"recycle_after": 0}, "recycle_after is 0"),
        ({"start_method": "teleport"}, "'teleport'.*forkserver"),
        ({"env_kwargs": {"f": lambda: None}}, "cannot be sent to another process"),
    ],
)
def test_arguments_that_cannot_work_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        EnvPool(FAKE, **arguments)


def test_blocking_pool_does_the_same_without_asyncio():
    with SyncEnvPool(FAKE, {}, workers=2) as pool:
        pids = pool.pids()
        with pool.lend() as env:
            assert env.reset("a")[0] == "start of a"
            assert env.step("x")[0] == "x 1"
            assert env.expert_act() == "start of a | x>x 1"
            assert env.call("add", 1, 2) == 3
            env.reset("raise")
            with pytest.raises(EnvError):
                env.step("go")
        assert pool.counters["episodes"] == 2
    assert all(map(gone, pids))
    with pytest.raises(PoolError, match="not running"):
        pool.acquire()
    assert isinstance(EnvPool.sync(FAKE), SyncEnvPool)


@pytest.mark.env
def test_four_real_episodes_in_parallel_equal_the_same_four_in_series():
    pytest.importorskip("textworld")
    arguments = ("divopd_gym/ALFWorld-v0", {"split": "generated", "family": "tiny"})

    async def play(env, task):
        heard = [await env.reset(task)]
        over = False
        while not over:
            action = await env.expert_act()
            heard.append((action, *await env.step(action)))
            over = heard[-1][3] or heard[-1][4]
        return heard

    async def work(workers):
        async with EnvPool(*arguments, workers) as pool:
            async with pool.lend() as env:
                tasks = list(await env.call("tasks"))[:4]

            async def one(task):
                async with pool.lend() as env:
                    return await play(env, task)

            return await asyncio.gather(*map(one, tasks))

    parallel, series = run(work(4)), run(work(1))
    assert parallel == series
    assert all(episode[-1][5]["success"] for episode in parallel)
