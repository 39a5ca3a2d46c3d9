"""What users of other environments reported, as rules that hold for every environment here (field reports 9, 10, 17)."""

import gc
import os
import random
import tempfile
import threading

import gymnasium
import psutil
import pytest

import divopd_gym  # noqa: F401  (registers the ids)
from divopd_gym.pool_sync import SyncEnvPool
from divopd_gym.prompts import get_prompt

pytestmark = [pytest.mark.env, pytest.mark.timeout(900)]
SLOW = [pytest.mark.slow, pytest.mark.timeout(3600)]
# Environment: the package that it needs, arguments, four tasks.
PLACES = {
    "ALFWorld": (
        "textworld",
        {"split": "generated"},
        ["tiny/pick_and_place_simple/6", "tiny/look_at_obj_in_light/1", "tiny/pick_heat_then_place_in_recep/3",
         "tiny/pick_two_obj_and_place/5"],
    ),
    "ScienceWorld": (
        "scienceworld",
        {"split": "all", "call_timeout_s": 600.0, "simulators": 1},
        ["boil/0", "find-plant/12", "grow-plant/125", "test-conductivity/7"],
    ),
    "WebShop": ("numpy", {"num_products": 40}, ["0", "1", "2", "3"]),
    "TextWorld": (
        "textworld",
        {"settings": {"level": 2}, "num_tasks": 2},
        ["coin_collector/level=2/0", "coin_collector/level=2/1", "coin_collector/level=2/0", "coin_collector/level=2/1"],
    ),
}  # fmt: skip
MOST_TURNS = 12


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    """Simulators, compiled games and temporary files of the test's own; the folder of the last."""
    monkeypatch.setenv("DIVOPD_RUN_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    temp = tmp_path / "temp"
    temp.mkdir()
    monkeypatch.setenv("TMPDIR", str(temp))
    monkeypatch.setattr(tempfile, "tempdir", str(temp))
    return temp


def make(name):
    package, kwargs, tasks = PLACES[name]
    pytest.importorskip(package)
    return gymnasium.make(f"divopd_gym/{name}-v0", disable_env_checker=True, **kwargs), tasks


def next_action(rng, info):
    listed = info["admissible_actions"]
    if listed:
        return rng.choice(listed)
    template = rng.choice(info["action_templates"])
    while "OBJ" in template:
        template = template.replace("OBJ", rng.choice(info["objects"]), 1)
    return template


@pytest.mark.parametrize("name", PLACES)
def test_episodes_in_parallel_in_turns_and_in_series_are_the_same(name):
    environment, tasks = make(name)
    environment.close()

    def play(env, task, number, heard):
        """An episode turn by turn, as a generator; what was heard goes into `heard`."""
        rng = random.Random(number)
        observation, info = (
            env.reset(options={"task": task}) if isinstance(env, gymnasium.Env) else env.reset(task)
        )
        heard.append((observation, info))
        for _ in range(MOST_TURNS):
            yield
            action = next_action(rng, info)
            *outcome, info = env.step(action)
            heard.append((action, *outcome, info))
            if outcome[2] or outcome[3]:
                return

    series = [[] for _ in tasks]
    for number, task in enumerate(tasks):
        env, _ = make(name)
        for _ in play(env, task, number, series[number]):
            pass
        env.close()
    # Four environments of one process, one turn each.
    turns = [[] for _ in tasks]
    envs = [make(name)[0] for _ in tasks]
    left = [play(env, task, n, turns[n]) for n, (env, task) in enumerate(zip(envs, tasks))]
    while left:
        left = [episode for episode in left if next(episode, "over") != "over"]
    for env in envs:
        env.close()
    # Two processes at the same time.
    parallel = [[] for _ in tasks]
    arguments = {"step_timeout_s": 600, "reset_timeout_s": 600}
    with SyncEnvPool(f"divopd_gym/{name}-v0", PLACES[name][1], workers=2, **arguments) as pool:

        def work(number):
            with pool.lend(600) as env:
                for _ in play(env, tasks[number], number, parallel[number]):
                    pass

        threads = [threading.Thread(target=work, args=(n,)) for n in range(len(tasks))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(800)
    assert turns == series
    assert parallel == series
    assert all(len(episode) > 1 for episode in series)


def test_a_gold_path_solves_a_game_of_every_task_type_in_the_words_that_the_prompt_shows():
    env, _ = make("ALFWorld")
    prompt = get_prompt("divopd_gym/ALFWorld-v0", "think")
    placed = set()
    types = {env.unwrapped.task_type(task): task for task in env.unwrapped.tasks[:60]}
    assert len(types) == 6
    for task_type, task in types.items():
        observation, info = env.reset(options={"task": task})
        for action in env.unwrapped.gold_path():
            # The player reads every word of it: placing is said as this game's rules say it.
            assert f"'{action}'" in prompt.user(info["turns"], observation, info, [])
            if action.startswith(("move ", "put ")):
                placed.add(action.split()[0])
                other = action.replace("move ", "put ").replace(" to ", " in/on ")
                assert f"'{other}'" not in prompt.user(info["turns"], observation, info, [])
            observation, *_, info = env.step(action)
            assert observation != "Nothing happens."
        assert info["success"], task_type
    assert placed == {env.unwrapped.versions()["wording"]}
    versions = env.unwrapped.versions()
    assert {"divopd", "gymnasium", "alfworld", "textworld", "wording", "data"} <= set(versions)
    assert all(isinstance(version, str) and version for version in versions.values())


def measure(env):
    """Resident MB, threads, descriptors and mapped files of this process and its simulator."""
    gc.collect()
    processes = [psutil.Process()]
    connection = getattr(env.unwrapped, "_connection", None)
    if connection is not None:
        processes.append(psutil.Process(connection.pid))
    return [
        (
            p.memory_info().rss / 1e6,
            p.num_threads(),
            p.num_fds(),
            sum(1 for _ in p.memory_maps(grouped=False)),
        )
        for p in processes
    ]


def assert_flat(before, after, most_mb):
    for then, now in zip(before, after):
        assert now[0] <= then[0] + most_mb, (before, after)
        # A simulator's compiler and collector threads, and their memory, come and go.
        assert now[1] <= then[1] + 3 and now[2] <= then[2] + 2 and now[3] <= then[3] + 40, (before, after)


@pytest.mark.parametrize("resets", [40, pytest.param(1000, marks=SLOW)])
@pytest.mark.parametrize("name", PLACES)
def test_resets_leave_memory_threads_and_descriptors_flat(name, resets, folders):
    env, tasks = make(name)
    rng = random.Random(0)

    def play(count):
        for number in range(count):
            _, info = env.reset(options={"task": tasks[number % 4]})
            for _ in range(2):
                *_, terminated, truncated, info = env.step(next_action(rng, info))
                if terminated or truncated:
                    break

    play(resets // 5 + 8)
    before = measure(env)
    play(resets)
    after = measure(env)
    print(name, before, after)
    assert_flat(before, after, 30)
    env.close()
    assert [entry for entry in os.listdir(folders) if not entry.startswith("pytest")] == []


@pytest.mark.parametrize("cycles", [12, pytest.param(1000, marks=SLOW)])
@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize("closed", [True, False])
def test_environments_made_and_closed_or_forgotten_leave_nothing(name, cycles, closed, folders):
    _, tasks = make(name)

    def cycle(count):
        for number in range(count):
            env, _ = make(name)
            env.reset(options={"task": tasks[number % 4]})
            env.step("look around")
            if closed:
                env.close()
            del env
            if not closed and number % 20 == 19:
                gc.collect()

    # One that stays, so that what is shared is not ended and started again.
    stays, _ = make(name)
    stays.reset(options={"task": tasks[0]})
    cycle(cycles // 5 + 4)
    before = measure(stays)
    cycle(cycles)
    after = measure(stays)
    print(name, closed, before, after)
    assert_flat(before, after, 30)
    stays.close()
    gc.collect()
    assert [entry for entry in os.listdir(folders) if not entry.startswith("pytest")] == []
