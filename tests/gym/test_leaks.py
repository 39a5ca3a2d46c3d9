"""Nothing grows: temporary files, file descriptors, threads, memory."""

import gc
import os
import random
import tempfile
import threading
from pathlib import Path

import gymnasium
import psutil
import pytest

import divopd_gym  # noqa: F401  (registers the ids)
from divopd_gym.pool_sync import SyncEnvPool

ALF = "divopd_gym/ALFWorld-v0"
GENERATED = {"split": "generated", "family": "tiny"}
SLOW = [pytest.mark.slow, pytest.mark.timeout(3600)]
pytestmark = pytest.mark.env


@pytest.fixture
def temp(tmp_path, monkeypatch):
    """A temporary folder of the test's own, for this process and those it starts."""
    pytest.importorskip("textworld")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def files_of(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file() and p.name != "lock")


def measure(pids):
    """(resident MB, file descriptors, threads, deleted but mapped files), summed over processes."""
    processes = [psutil.Process(pid) for pid in pids]
    mapped = 0
    for pid in pids:
        mapped += sum("(deleted)" in line for line in Path(f"/proc/{pid}/maps").read_text().splitlines())
    return (
        sum(p.memory_info().rss for p in processes) / 1e6,
        sum(p.num_fds() for p in processes),
        sum(p.num_threads() for p in processes),
        mapped,
    )


def play(env, rng, turns):
    _, info = env.reset(seed=rng.randrange(1 << 30))
    for _ in range(turns):
        *_, terminated, truncated, info = env.step(rng.choice(info["admissible_actions"]))
        if terminated or truncated:
            break


@pytest.mark.parametrize("episodes", [100, pytest.param(1000, marks=SLOW)])
def test_pooled_episodes_leave_nothing_in_the_temp_folder(temp, episodes):
    rng = random.Random(0)
    with SyncEnvPool(ALF, GENERATED, workers=2, recycle_after=episodes // 4) as pool:
        for _ in range(episodes):
            with pool.lend(120) as env:
                play(env, rng, 4)
        assert files_of(temp) == []
        assert pool.counters["recycled"] >= 3
        assert pool.counters["deaths"] == 0
    assert list(temp.glob("divopd-pool-*")) == []


@pytest.mark.parametrize("episodes", [100, pytest.param(1000, marks=SLOW)])
def test_a_worker_does_not_grow_with_its_episodes(temp, episodes):
    rng = random.Random(0)
    with SyncEnvPool(ALF, GENERATED, workers=1, recycle_after=None) as pool:
        with pool.lend() as env:
            for _ in range(40):  # caches fill
                play(env, rng, 4)
            before = measure(pool.pids())
            for _ in range(episodes):
                play(env, rng, 4)
            after = measure(pool.pids())
    assert after[1:] == before[1:]
    assert after[0] - before[0] < 25


@pytest.mark.parametrize("cycles", [50, pytest.param(1000, marks=SLOW)])
def test_making_and_closing_environments_keeps_memory_threads_and_descriptors_flat(temp, cycles):
    rng = random.Random(0)

    def cycle():
        env = gymnasium.make(ALF, **GENERATED)
        play(env, rng, 2)
        env.close()

    for _ in range(20):
        cycle()
    gc.collect()
    before, threads = measure([os.getpid()]), threading.active_count()
    for _ in range(cycles):
        cycle()
    gc.collect()
    after = measure([os.getpid()])
    assert files_of(temp) == []
    assert after[1:] == before[1:]
    assert threading.active_count() == threads
    assert after[0] - before[0] < 25


def test_pools_opened_and_closed_leave_no_process_descriptor_or_thread(temp):
    def cycle():
        with SyncEnvPool(ALF, GENERATED, workers=2) as pool, pool.lend() as env:
            env.reset(seed=1)

    cycle()
    gc.collect()
    me = psutil.Process()
    before = (me.num_fds(), threading.active_count(), len(me.children(recursive=True)))
    for _ in range(5):
        cycle()
    gc.collect()
    after = (me.num_fds(), threading.active_count(), len(me.children(recursive=True)))
    # Fewer is possible: what an earlier test left for the collector may go in between.
    assert all(now <= then for now, then in zip(after, before)), (before, after)


def test_a_closed_pool_has_closed_its_loop(temp):
    before, descriptors = set(threading.enumerate()), psutil.Process().num_fds()
    with SyncEnvPool(ALF, GENERATED, workers=1) as pool, pool.lend() as env:
        env.reset(seed=1)
        loop = pool._loop
    assert loop.is_closed()
    assert not set(threading.enumerate()) - before
    assert (
        psutil.Process().num_fds() <= descriptors + 2
    )  # the forkserver's two pipes, if this test is the first
