"""A pool ends with everything it started, however its program ends."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pytest
from pool_fakes import FAKE, episode, gone, run, until

from divopd_gym.errors import PoolError, WorkerDied
from divopd_gym.pool import EnvPool
from divopd_gym.pool_temp import PoolTemp

HERE = Path(__file__).parent


def test_close_ends_every_worker_also_one_that_hangs():
    async def work():
        pool = EnvPool(FAKE, {}, 3)
        await pool.start()
        pids = pool.pids()
        env = await pool.acquire()
        await env.reset("hang")
        step = asyncio.ensure_future(env.step("go"))
        waiting = [asyncio.ensure_future(pool.acquire()) for _ in range(4)]
        await asyncio.sleep(0.05)
        await pool.close()
        assert all(map(gone, pids))
        ended = await asyncio.wait_for(asyncio.gather(step, *waiting, return_exceptions=True), 10)
        assert isinstance(ended[0], WorkerDied)
        assert sum(isinstance(e, PoolError) for e in ended[1:]) == 2
        await pool.close()

    run(work())


def test_an_event_loop_that_ends_without_close_leaves_no_worker():
    async def work():
        pool = EnvPool(FAKE, {}, 2)
        await pool.start()
        return pool, pool.pids()

    pool, pids = run(work())
    run(until(lambda: all(map(gone, pids))))
    assert pool.pids() == []


def test_temp_folder_is_as_before_after_episodes_kills_and_close(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    async def work():
        async with EnvPool(FAKE, {"leave_file": True}, 2, recycle_after=5) as pool:
            for i in range(30):
                async with pool.lend(20) as env:
                    await episode(env, "a")
                    if i % 10 == 3:
                        os.kill(env.pid, signal.SIGKILL)
                        with pytest.raises(WorkerDied):
                            await env.reset("a")
            files = [p for p in tmp_path.rglob("*") if p.is_file() and p.name != "lock"]
            assert all(p.is_relative_to(next(tmp_path.glob("divopd-pool-*"))) for p in files)

    run(work())
    assert list(tmp_path.glob("divopd-pool-*")) == []


def test_folder_of_a_pool_that_was_killed_is_swept_by_the_next_and_a_live_one_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    live = PoolTemp()
    dead = tmp_path / "divopd-pool-dead"
    dead.mkdir()
    (dead / "lock").touch()
    PoolTemp().close()
    assert not dead.exists()
    assert live.path.exists()
    live.close()


SCRIPT = """
import asyncio, os, sys, time
sys.path.insert(0, {here!r})
if __name__ != "__main__":
    open({flag!r}, "w").close()
from divopd_gym.pool import EnvPool
async def main():
    pool = EnvPool({env!r}, {{}}, 2, step_timeout_s=100)
    await pool.start()
    env = await pool.acquire()
    await env.reset("hang")
    step = asyncio.ensure_future(env.step("go"))
    await asyncio.sleep(0.1)
    print(*pool.pids(), flush=True)
    {then}
if __name__ == "__main__":
    asyncio.run(main())
"""


def start_script(tmp_path, then):
    flag, script = tmp_path / "imported-by-a-worker", tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT).format(here=str(HERE), flag=str(flag), env=FAKE, then=then))
    environ = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(HERE.parents[1])}
    process = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ,
        start_new_session=True,
    )  # fmt: skip
    line = process.stdout.readline()
    assert line, process.communicate(timeout=20)[1]
    return process, list(map(int, line.split())), flag


def test_workers_end_with_a_parent_that_is_killed(tmp_path):
    process, pids, _ = start_script(tmp_path, "await asyncio.sleep(100)")
    process.kill()
    process.communicate(timeout=20)
    run(until(lambda: all(map(gone, pids))))


@pytest.mark.parametrize(
    "then", ["raise RuntimeError('no close')", "os.kill(os.getpid(), 15)", "sys.exit(3)"]
)
def test_workers_and_files_are_gone_after_a_program_that_ends_without_close(tmp_path, then):
    process, pids, flag = start_script(tmp_path, then)
    process.communicate(timeout=30)
    run(until(lambda: all(map(gone, pids))))
    if "kill" not in then:
        assert list(tmp_path.glob("divopd-pool-*")) == []
    assert not flag.exists(), "a worker imported the main script"


def test_ctrl_c_reaches_the_program_and_not_its_workers(tmp_path):
    # The loop's own handler: another one is not heard before the loop wakes, if the signal comes just before it waits.
    then = "asyncio.get_running_loop().add_signal_handler(2, lambda: print('interrupted', flush=True)); "
    then += "print('listening', flush=True); await asyncio.sleep(100)"
    process, pids, _ = start_script(tmp_path, then)
    assert process.stdout.readline() == "listening\n"
    os.killpg(process.pid, signal.SIGINT)
    assert process.stdout.readline() == "interrupted\n"
    time.sleep(0.3)
    assert not any(map(gone, pids))
    process.kill()
    process.communicate(timeout=30)
    run(until(lambda: all(map(gone, pids))))
