"""ALFWorld on generated houses, played by the real engine. No data is needed."""

import io
import os
import random
import subprocess
import sys
import tempfile
import threading
from dataclasses import replace
from pathlib import Path

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env

pytest.importorskip("textworld", reason="the engine needs the packages alfworld and textworld")

import divopd_gym  # noqa: E402, F401
from divopd_gym import ConfigError, DataNotFoundError, ResetNeeded  # noqa: E402
from divopd_gym.checks import check_text_env  # noqa: E402
from divopd_gym.envs.alfworld import engine as engine_module  # noqa: E402
from divopd_gym.envs.alfworld.engine import engine  # noqa: E402
from divopd_gym.envs.alfworld.houses import FAMILIES, HouseFamily, house_from_id, task_ids  # noqa: E402
from divopd_gym.envs.alfworld.translate import translate  # noqa: E402

pytestmark = pytest.mark.env
ID = "divopd_gym/ALFWorld-v0"


def make(**kwargs):
    return gymnasium.make(ID, **kwargs)


def play(env, actions):
    return [env.step(action) for action in actions]


@pytest.mark.filterwarnings("error")
def test_gymnasiums_own_checks_pass_without_warnings():
    check_env(make(num_tasks=12).unwrapped)


def test_the_projects_own_checks_pass():
    check_text_env(make(num_tasks=12), tasks=task_ids("tiny", 6))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_gold_path_wins_with_its_last_action(family):
    env = make(family=family, num_tasks=12, max_turns=None)
    for task in env.unwrapped.tasks:
        env.reset(options={"task": task})
        outcomes = play(env, env.unwrapped.gold_path())
        assert [o[2] for o in outcomes] == [False] * (len(outcomes) - 1) + [True]
        assert outcomes[-1][4]["success"] and outcomes[-1][4]["done_reason"] == "success"


def test_every_gold_action_is_admissible():
    env = make(family="large", num_tasks=6, max_turns=None)
    for task in env.unwrapped.tasks:
        _, info = env.reset(options={"task": task})
        for action in env.unwrapped.gold_path():
            assert action in info["admissible_actions"]
            *_, info = env.step(action)
            assert info["valid_action"]


def test_the_first_observation_is_the_room_and_the_task_without_the_banner():
    env = make()
    observation, info = env.reset(options={"task": "tiny/pick_and_place_simple/6"})
    assert observation.startswith("You are in the middle of a room.")
    assert observation.endswith("\n\nYour task is to: " + info["goal"])


def test_an_action_that_is_not_listed_costs_a_turn_and_is_flagged():
    env = make(max_turns=4)
    observation, info = env.reset(seed=1)
    place = next(a for a in info["admissible_actions"] if a.startswith("go to"))
    for action, known in [(place.title(), False), ("dance", False), (f"  {place}\n", True), (place, False)]:
        observation, _, terminated, truncated, info = env.step(action)
        assert info["valid_action"] == known and (observation == "Nothing happens.") != known
    assert truncated and info["turns"] == 4 and info["done_reason"] == "turn_limit"


def test_the_same_seed_gives_the_same_episode_and_options_name_a_task():
    one, two = make(), make()
    assert one.reset(seed=11) == two.reset(seed=11)
    task = one.unwrapped.tasks[17]
    assert one.reset(seed=1, options={"task": task}) == two.reset(seed=2, options={"task": task})
    beyond = "tiny/pick_and_place_simple/1234567"
    assert one.reset(options={"task": beyond})[1]["task"] == beyond


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"split": "test"}, "valid_seen"),
        ({"family": "huge"}, "tiny"),
        ({"subset": "test"}, "train or valid"),
        ({"task_types": ["pick"]}, "pick_and_place_simple"),
        ({"task_types": "pick_and_place_simple"}, "list"),
        ({"num_tasks": 0}, "at least one"),
        ({"max_turns": 0}, "max_turns"),
    ],
)
def test_arguments_that_cannot_work_are_refused_at_once(kwargs, message):
    with pytest.raises(ConfigError, match=message):
        make(**kwargs)


def test_unknown_tasks_and_options_are_refused():
    env = make(task_types=["pick_and_place_simple"])
    for options in ({"task": "small/pick_and_place_simple/3"}, {"task": "nonsense"}, {"game": 3}):
        with pytest.raises(ConfigError):
            env.reset(options=options)
    with pytest.raises(ResetNeeded):
        make().unwrapped.gold_path()


def test_missing_data_says_what_where_and_how_to_mend_it(tmp_path, monkeypatch):
    monkeypatch.delenv("DIVOPD_DATA", raising=False)
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path / "nowhere"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(DataNotFoundError) as error:
        make(split="valid_seen")
    for part in ("valid_seen", "nowhere", "divopd data download alfworld", "data_dir", "generated"):
        assert part in str(error.value)


def test_a_family_of_ones_own_can_be_played():
    family = HouseFamily("nano", (4, 5), (2, 3), task_types=("pick_and_place_simple",), openable=False)
    env = make(family=family, num_tasks=5)
    _, info = env.reset(seed=0)
    assert info["task"].startswith("nano/pick_and_place_simple/")
    assert play(env, env.unwrapped.gold_path())[-1][2]


def test_arguments_and_streams_of_the_process_stay_as_they_are():
    code = """
import sys, gymnasium, divopd_gym
sys.argv = ["mine", "--flag"]
out = sys.stdout
env = gymnasium.make("divopd_gym/ALFWorld-v0")
env.reset(seed=0); env.step("look"); env.reset(seed=1)
assert sys.argv == ["mine", "--flag"] and sys.stdout is out
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == ""


def test_several_environments_of_a_process_interleave():
    tasks = task_ids("tiny", 4)
    alone = {}
    for task in tasks:
        env = make()
        env.reset(options={"task": task})
        alone[task] = play(env, env.unwrapped.gold_path())
    envs = {task: make() for task in tasks}
    paths, played = {}, {task: [] for task in tasks}
    for task, env in envs.items():
        env.reset(options={"task": task})
        paths[task] = env.unwrapped.gold_path()
    for turn in range(max(map(len, paths.values()))):
        for task, env in envs.items():
            if turn < len(paths[task]):
                played[task].append(env.step(paths[task][turn]))
    assert played == alone


def test_threads_do_not_corrupt_each_other():
    tasks = task_ids("tiny", 6)
    found = {}

    def run(task):
        env = make()
        env.reset(options={"task": task})
        found[task] = play(env, ["look", "inventory", *env.unwrapped.gold_path()])[-1][4]["success"]

    threads = [threading.Thread(target=run, args=(task,)) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == dict.fromkeys(tasks, True)


def test_a_forked_child_plays_on_by_itself():
    env = make()
    env.reset(options={"task": task_ids("tiny", 1)[0]})
    path = env.unwrapped.gold_path()
    play(env, path[:1])
    child = os.fork()
    if child == 0:
        won = False
        try:
            won = play(env, path[1:])[-1][2]
        finally:
            os._exit(0 if won else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert play(env, path[1:])[-1][2]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_vector_environments_play(mode):
    envs = gymnasium.make_vec(ID, num_envs=2, vectorization_mode=mode, max_turns=2)
    try:
        observations, infos = envs.reset(seed=1)
        assert all("Your task is to" in o for o in observations)
        single = make(max_turns=2)
        assert observations[0] == single.reset(seed=1)[0]
        for _ in range(3):
            observations, _, _, truncated, infos = envs.step(("inventory", "look"))
        assert all("Your task is to" in o for o in observations)
    finally:
        envs.close()


def test_nothing_is_left_behind_over_many_episodes(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    env = make(family="tiny", num_tasks=40)

    def turn_round(count):
        for number in range(count):
            env.reset(seed=number % 40)
            play(env, ["look", "go to nowhere"])
            make().close()

    turn_round(60)
    files, open_files = list(tmp_path.iterdir()), len(os.listdir("/proc/self/fd"))
    mapped = Path("/proc/self/maps").read_text().count("libdownward")
    turn_round(200)
    assert list(tmp_path.iterdir()) == files == []
    assert len(os.listdir("/proc/self/fd")) == open_files
    assert Path("/proc/self/maps").read_text().count("libdownward") == mapped
    assert translate.cache_info().currsize <= translate.cache_info().maxsize


def test_a_missing_package_names_the_remedy(monkeypatch):
    monkeypatch.setattr(engine_module, "_engine", None)
    monkeypatch.setitem(sys.modules, "textworld", None)
    with pytest.raises(DataNotFoundError, match="pip install"):
        engine()


def test_versions_name_packages_wording_and_data():
    versions = make().unwrapped.versions()
    assert (
        versions["alfworld"] == "0.4.2" and versions["textworld"] == "1.7.0" and versions["wording"] == "move"
    )
    assert versions["data"] != make(family="small").unwrapped.versions()["data"]


def episode(env, noise, rng, limit):
    observation, info = env.reset(options={"task": env.task})
    expert = env.unwrapped.expert()
    expert.reset(observation, info)
    for _ in range(limit):
        action = expert.act()
        if rng.random() < noise:
            action = rng.choice([*info["admissible_actions"], "go to cabinet 9", "dance"])
        observation, _, terminated, _, info = env.step(action)
        expert.observe(action, observation, info)
        if terminated:
            return True
    return False


def test_the_searching_expert_wins_every_clean_episode_of_a_tiny_house():
    env = make(num_tasks=90, subset="valid", max_turns=30)
    won = []
    for task in env.unwrapped.tasks:
        env.task = task
        won.append(episode(env, 0.0, random.Random(0), 30))
    assert all(won)


def test_the_searching_expert_recovers_from_random_actions():
    env = make(num_tasks=90, subset="valid", max_turns=50)
    won = []
    for task in env.unwrapped.tasks:
        env.task = task
        won.append(episode(env, 0.2, random.Random(task), 50))
    assert sum(won) >= 0.97 * len(won)


def test_the_expert_knows_nothing_that_was_not_shown():
    # Two houses that read the same up to a turn get the same action, wherever things really are.
    histories, met_again = {}, 0
    family = HouseFamily(
        "alike", (3, 3), (2, 3), ("Desk", "Shelf", "SideTable"), ("Pen", "Book", "CD"), wordings=1
    )
    env = make(family=family, num_tasks=60, task_types=["pick_and_place_simple"])
    for task in env.unwrapped.tasks:
        observation, info = env.reset(options={"task": task})
        expert = env.unwrapped.expert()
        expert.reset(observation, info)
        history = (observation,)
        for _ in range(4):
            action = expert.act()
            met_again += history in histories
            assert histories.setdefault(history, action) == action
            observation, _, terminated, _, info = env.step(action)
            expert.observe(action, observation, {})
            history += (action, observation)
            if terminated:
                break
    assert met_again > 60


def test_losing_stdout_does_not_matter():
    env = make()
    before, sys.stdout = sys.stdout, io.StringIO()
    try:
        env.reset(seed=123)
        printed = sys.stdout.getvalue()
    finally:
        sys.stdout = before
    assert printed == ""


@pytest.mark.parametrize("cut", [60, 400, -40])
def test_a_damaged_problem_is_refused_and_the_engine_plays_on(cut):
    source = house_from_id("tiny/pick_and_place_simple/778").source
    with pytest.raises(DataNotFoundError, match="damaged"):
        engine().start(replace(source, problem=source.problem[:cut]))
    assert engine().start(source).step("look").understood


def test_infos_name_the_task_type():
    _, info = make().reset(options={"task": "tiny/look_at_obj_in_light/3"})
    assert info["task_type"] == "look_at_obj_in_light"


def test_a_house_is_loaded_without_touching_the_disk(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    engine().start(house_from_id("tiny/pick_and_place_simple/777").source)
    assert list(tmp_path.iterdir()) == []
