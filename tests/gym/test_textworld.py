"""TextWorld's own games, generated and from files, played by the real interpreter."""

import os
import random
import subprocess
import sys
from pathlib import Path

import gymnasium
import pytest

pytest.importorskip("textworld", reason="the games need the package textworld")

import divopd_gym  # noqa: E402, F401
from divopd_gym import ConfigError, DataNotFoundError  # noqa: E402
from divopd_gym.checks import check_text_env  # noqa: E402
from divopd_gym.envs.textworld.games import FAMILIES, game_file, get_family  # noqa: E402
from divopd_gym.pool_sync import SyncEnvPool  # noqa: E402
from divopd_gym.prompts import get_prompt  # noqa: E402

pytestmark = pytest.mark.env
ID = "divopd_gym/TextWorld-v0"
SETTINGS = {
    "coin_collector": {"level": 2},
    "treasure_hunter": {"level": 3},
    "cooking": {"recipe": 1, "take": 1, "go": 6, "open": 1},
    "custom": None,
}


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """A cache of compiled games of the module's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def make(**kwargs):
    return gymnasium.make(ID, disable_env_checker=True, **kwargs)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_games_own_way_wins_with_its_last_command_and_scores_one(family):
    env = make(family=family, settings=SETTINGS[family])
    _, info = env.reset(options={"task": env.unwrapped.tasks[1]})
    assert info["task_type"] == family and info["goal"]
    total, ends = 0.0, []
    for command in env.unwrapped.gold_path():
        assert command in info["admissible_actions"]
        _, reward, terminated, _, info = env.step(command)
        total, ends = total + reward, [*ends, terminated]
    assert ends == [False] * (len(ends) - 1) + [True]
    assert info["success"] and info["score"] == pytest.approx(1.0) and total == pytest.approx(1.0)
    env.close()


def test_the_projects_own_checks_pass():
    check_text_env(make(num_tasks=2), turns=3)


def test_the_expert_wins_from_wherever_it_is_called():
    env = make(settings={"level": 3})
    _, info = env.reset(options={"task": env.unwrapped.tasks[0]})
    expert = env.unwrapped.expert()
    for command in ["go south", "go north", "go west", "nonsense"]:
        env.step(command)
    for _ in range(12):
        *_, terminated, _, info = env.step(expert.act())
        if terminated:
            break
    assert info["success"]
    env.close()


@pytest.mark.parametrize(
    "command", ["quit", "restart", "save", "look. quit", "RESTORE", "undo", "", "\x00\x07", "script"]
)
def test_commands_to_the_interpreter_and_none_at_all_change_nothing(command):
    env = make()
    _, info = env.reset(options={"task": env.unwrapped.tasks[0]})
    _, reward, terminated, truncated, after = env.step(command)
    assert not after["valid_action"] and not terminated and not truncated and reward == 0
    assert after["admissible_actions"] == info["admissible_actions"]
    for gold in env.unwrapped.gold_path():
        *_, after = env.step(gold)
    assert after["success"]
    env.close()


def test_random_and_malformed_commands_raise_nothing():
    rng = random.Random(0)
    env = make(family="cooking", settings=SETTINGS["cooking"], max_turns=None)
    env.reset(options={"task": env.unwrapped.tasks[0]})
    pool = [
        "x" * 10_000,
        "食べる リンゴ",
        "\ud800",
        "take all. drop all",
        "\t\n",
        "open open open",
        "%n%s%d",
        "'\"`;",
        "0",
    ]
    for _ in range(300):
        letters = "".join(chr(rng.randrange(1, 0x2FF)) for _ in range(rng.randrange(0, 60)))
        *_, terminated, _, info = env.step(rng.choice([letters, rng.choice(pool), "go north"]))
        if terminated:
            env.reset(options={"task": env.unwrapped.tasks[0]})
    assert 0 <= info["score"] <= 1
    env.close()


def test_a_game_file_by_path_and_a_folder_of_them_play_the_same(tmp_path):
    family = get_family("coin_collector")
    path = game_file(family, family.settings({"level": 2}), 7)
    for games in (path, [path], path.parent):
        env = make(games=games)
        task = next(t for t in env.unwrapped.tasks if t.endswith("7.z8"))
        first, _ = env.reset(options={"task": task})
        assert first.startswith("-= ") and env.unwrapped.gold_path()
        env.close()


def test_the_same_seed_gives_the_same_game_and_others_differ():
    one, two = make(num_tasks=2, settings={"level": 2}), make(num_tasks=2, settings={"level": 2})
    texts = [env.reset(options={"task": env.unwrapped.tasks[n]})[0] for env in (one, two) for n in (0, 1)]
    assert texts[:2] == texts[2:] and texts[0] != texts[1]


def test_a_pool_plays_it_and_its_expert():
    with (
        SyncEnvPool(ID, {"settings": {"level": 2}, "num_tasks": 2}, workers=1) as pool,
        pool.lend(120) as env,
    ):
        _, info = env.reset(task="coin_collector/level=2/0")
        while not info["success"]:
            *_, terminated, truncated, info = env.step(env.expert_act())
            assert not truncated
        assert terminated


@pytest.mark.parametrize(
    "kwargs, kind, words",
    [
        ({"family": "chess"}, ConfigError, "coin_collector"),
        ({"settings": {"levle": 3}}, ConfigError, "level"),
        ({"settings": {"level": -1}}, ConfigError, "at least 0"),
        ({"games": "nowhere.z8"}, DataNotFoundError, "does not exist"),
        ({"num_tasks": 0}, ConfigError, "at least 1"),
    ],
)
def test_bad_arguments_are_refused_with_a_remedy(kwargs, kind, words):
    with pytest.raises(kind, match=words):
        make(**kwargs)


def test_a_difficulty_that_the_generator_does_not_have_is_refused():
    env = make(settings={"level": 999})
    with pytest.raises(ConfigError, match="level.*999"):
        env.reset(options={"task": env.unwrapped.tasks[0]})


def test_a_reply_gives_its_command_back():
    for style in ("think", "action", "tiny"):
        prompt = get_prompt(ID, style)
        assert prompt.parse(prompt.reply("take red apple"), {}).action == "take red apple"


THREADS = """
import threading, gymnasium, divopd_gym
from divopd_gym.core import TextEnv
found, gate = {}, threading.Barrier(6)

def play(n):
    gate.wait()
    env = gymnasium.make("divopd_gym/TextWorld-v0", settings={"level": 2}, first_seed=n // 2, disable_env_checker=True)
    text, info = env.reset(options={"task": env.unwrapped.tasks[0]})
    told = [text]
    for action in env.unwrapped.gold_path():
        text, *_, info = env.step(action)
        told.append(text)
    env.close()
    found[n] = (info["success"], told)

threads = [threading.Thread(target=play, args=(n,)) for n in range(6)]
[t.start() for t in threads]
[t.join() for t in threads]
assert len(found) == 6, sorted(found)
assert all(success for success, _ in found.values())
assert all(found[n][1] == found[n + 1][1] for n in (0, 2, 4))
print("as one after another")
"""


def test_threads_of_a_fresh_process_make_and_play_games_as_one_after_another(tmp_path):
    """TextWorld's parsers are the process's: without a lock nearly every thread fails, games on disk or not."""
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[2])}
    for _ in ("games are made", "games are there"):
        done = subprocess.run(
            [sys.executable, "-c", THREADS], env=env, capture_output=True, text=True, timeout=200
        )
        assert "as one after another" in done.stdout, done.stderr[-3000:]


def test_a_cache_that_cannot_be_written_is_said_with_the_remedy(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    env = make(settings={"level": 2})
    with pytest.raises(DataNotFoundError, match="set XDG_CACHE_HOME"):
        env.reset(seed=1)
