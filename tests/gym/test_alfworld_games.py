"""ALFWorld on the benchmark's own games: identical to ALFWorld's own environment, splits, gold paths, the expert."""

import hashlib
import json
import os
import random
import shutil
import sys
import tarfile
from pathlib import Path

import gymnasium
import pytest

pytest.importorskip("textworld", reason="the engine needs the packages alfworld and textworld")

import divopd_gym  # noqa: E402, F401
from divopd_gym import DataNotFoundError  # noqa: E402
from divopd_gym.checks import check_text_env  # noqa: E402
from divopd_gym.envs.alfworld.engine import engine  # noqa: E402
from divopd_gym.envs.alfworld.games import digest, find_split, read_game, task_type  # noqa: E402
from divopd_gym.envs.alfworld.world import TASK_TYPES  # noqa: E402

pytestmark = pytest.mark.env
ID = "divopd_gym/ALFWorld-v0"


@pytest.fixture(scope="session")
def data(shared_data, tmp_path_factory):
    """The unpacked games."""
    root = tmp_path_factory.mktemp("alfworld")
    with tarfile.open(shared_data("alfworld.tar.xz")) as archive:
        archive.extractall(root, filter="data")
    yield root
    shutil.rmtree(root, ignore_errors=True)


@pytest.fixture(scope="session")
def stock(tmp_path_factory):
    """ALFWorld's own environment, as its documentation builds it."""
    argv = sys.argv
    os.environ.setdefault("ALFWORLD_DATA", str(tmp_path_factory.mktemp("unused")))
    import textworld
    from alfworld.agents.environment.alfred_tw_env import AlfredDemangler, AlfredInfos
    from textworld.envs.pddl import PddlEnv
    from textworld.envs.wrappers import Filter

    wanted = textworld.EnvInfos(won=True, admissible_commands=True, extras=["gamefile"])
    env = Filter(AlfredInfos(AlfredDemangler(PddlEnv(wanted), shuffle=False)))
    yield env
    sys.argv = argv


def script(session, rng):
    """A winning list of actions with wrong turns in between; random ones where no walkthrough is stored."""
    path = list(session.walkthrough or [])
    for action in path[:-1]:
        yield action
        if rng.random() < 0.4:
            thing = " ".join(action.split()[-2:])
            yield rng.choice(
                ["look", "inventory", "help", "dance", f"examine {thing}", action, action.title()]
            )
    if path:
        yield path[-1]
    for _ in range(3 if path else 12):
        yield rng.choice(session.last.admissible)


# In parts, since ALFWorld's own environment takes seconds a game on a busy machine: 60 games in all.
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(10))
def test_texts_commands_and_won_are_those_of_alfworlds_own_environment(data, stock, part):
    rng = random.Random(part)
    games = []
    for split, count in (("valid_seen", 21), ("valid_unseen", 21), ("valid_train", 9), ("train", 9)):
        listed = find_split(split, data)
        games += [listed.path(t) for t in random.Random(split).sample(listed.tasks, count)]
    games = games[part::10]
    assert len(games) == 6
    turns = 0
    for game in games:
        session = engine().start(read_game(game))
        stock.load(str(game))
        text, infos = stock.reset()
        ours, theirs = hashlib.sha256(), hashlib.sha256()

        def note(total, text, won, commands):
            total.update(json.dumps([text, bool(won), list(commands)]).encode())

        note(ours, session.last.text, session.last.won, session.last.admissible)
        note(theirs, text, infos["won"], infos["admissible_commands"])
        for action in script(session, rng):
            reply = session.step(action)
            text, _, _, infos = stock.step(action)
            note(ours, reply.text, reply.won, reply.admissible)
            note(theirs, text, infos["won"], infos["admissible_commands"])
            turns += 1
        assert ours.hexdigest() == theirs.hexdigest(), game
    assert turns > 40


@pytest.mark.parametrize(
    ("split", "counts"),
    [
        ("valid_seen", (35, 13, 27, 16, 25, 24)),
        ("valid_unseen", (24, 18, 31, 23, 21, 17)),
        ("valid_train", (46, 19, 37, 25, 28, 45)),
        ("train", (9, 9, 9, 9, 9, 9)),
    ],
)
def test_a_split_holds_the_games_that_alfworld_plays(data, split, counts):
    listed = find_split(split, data)
    kinds = [task_type(t) for t in listed.tasks]
    assert tuple(kinds.count(t) for t in TASK_TYPES) == counts
    assert list(listed.tasks) == sorted(listed.tasks)
    assert not any("Sliced" in t or "movable" in t for t in listed.tasks)
    assert all(listed.path(t).is_file() for t in listed.tasks)


@pytest.mark.parametrize("split", ["valid_seen", "valid_unseen"])
def test_gold_paths_win_in_the_players_words(data, split):
    env = gymnasium.make(ID, split=split, data_dir=data)
    for task in random.Random(1).sample(env.unwrapped.tasks, 20):
        env.reset(options={"task": task})
        path = env.unwrapped.gold_path()
        assert not any("_bar_" in action for action in path)
        for action in path:
            *_, terminated, truncated, info = env.step(action)
            if terminated:
                break
        assert info["success"] and not truncated


def test_games_without_a_walkthrough_have_no_gold_path(data):
    env = gymnasium.make(ID, split="valid_train", data_dir=data)
    env.reset(seed=0)
    assert env.unwrapped.gold_path() is None


def test_the_projects_own_checks_pass_on_real_games(data):
    check_text_env(gymnasium.make(ID, split="valid_unseen", data_dir=data), turns=3)


def test_a_task_id_is_the_games_folder_inside_its_split(data):
    env = gymnasium.make(ID, split="valid_seen", data_dir=data)
    task = env.unwrapped.tasks[0]
    assert env.reset(options={"task": task})[1]["task"] == task
    assert (Path(data) / "json_2.1.1" / "valid_seen" / task / "game.tw-pddl").is_file()


@pytest.mark.parametrize("variable", ["DIVOPD_DATA", "ALFWORLD_DATA"])
def test_data_is_found_by_argument_then_by_environment_variable(data, variable, monkeypatch, tmp_path):
    for name in ("DIVOPD_DATA", "ALFWORLD_DATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, str(data))
    assert len(gymnasium.make(ID, split="train").unwrapped.tasks) == 54
    with pytest.raises(DataNotFoundError, match="data_dir"):
        gymnasium.make(ID, split="train", data_dir=tmp_path)
    (tmp_path / "alfworld").symlink_to(data)
    monkeypatch.setenv("DIVOPD_DATA", str(tmp_path))
    assert len(gymnasium.make(ID, split="train", task_types=["look_at_obj_in_light"]).unwrapped.tasks) == 9


def test_folders_that_alfworld_skips_are_skipped(data, tmp_path):
    good = find_split("train", data)
    task = good.tasks[0]
    text = good.path(task).read_text()
    folders = {
        task: text,
        "pick_and_place_with_movable_recep-Mug-Box-Shelf-1/trial_1": text,
        "pick_heat_then_place_in_recep-AppleSliced-None-Fridge-1/trial_1": text,
        "wash_the_car-Car-None-Garage-1/trial_1": text,
        "pick_and_place_simple-Mug-None-Shelf-1/half_written": text[: len(text) // 2].replace(
            "solvable", "s"
        ),
        "pick_and_place_simple-Mug-None-Shelf-1/unsolvable": json.dumps(
            {**json.loads(text), "solvable": False}
        ),
    }
    for name, content in folders.items():
        folder = tmp_path / "json_2.1.1" / "train" / name
        folder.mkdir(parents=True)
        (folder / "game.tw-pddl").write_text(content)
    empty = tmp_path / "json_2.1.1" / "train" / "pick_and_place_simple-Mug-None-Shelf-1" / "no_game"
    empty.mkdir()
    (empty / "traj_data.json").write_text("{}")
    listed = find_split("train", tmp_path)
    assert listed.tasks == (task,)
    assert listed.skipped == {
        "movable or sliced": 2,
        "other task type": 1,
        "not marked solvable": 2,
        "no game": 1,
    }


def test_an_empty_split_and_a_damaged_game_are_refused_with_the_remedy(data, tmp_path):
    (tmp_path / "json_2.1.1" / "valid_seen").mkdir(parents=True)
    with pytest.raises(DataNotFoundError, match="no playable game.*download"):
        find_split("valid_seen", tmp_path)
    broken = tmp_path / "game.tw-pddl"
    broken.write_text('{"solvable": true, "gram')
    with pytest.raises(DataNotFoundError, match="download the data again"):
        read_game(broken)


def test_the_datas_digest_depends_on_its_games(data):
    one, two = find_split("train", data), find_split("train", data, ("look_at_obj_in_light",))
    assert digest(one) == digest(find_split("train", data)) != digest(two)
    versions = gymnasium.make(ID, split="train", data_dir=data).unwrapped.versions()
    assert versions["data"] == digest(one) and versions["wording"] == "move"


@pytest.mark.parametrize("split", ["valid_seen", "valid_unseen"])
def test_the_searching_expert_wins_real_games(data, split):
    env = gymnasium.make(ID, split=split, data_dir=data, max_turns=50)
    # DIVOPD_ALL_GAMES=1 plays the whole split.
    tasks = env.unwrapped.tasks
    if not os.environ.get("DIVOPD_ALL_GAMES"):
        tasks = random.Random(2).sample(tasks, 30)
    won = {t: [] for t in TASK_TYPES}
    for task in tasks:
        observation, info = env.reset(options={"task": task})
        expert = env.unwrapped.expert()
        expert.reset(observation, info)
        ended = False
        while not ended:
            action = expert.act()
            observation, _, terminated, truncated, info = env.step(action)
            expert.observe(action, observation, {})
            ended = terminated or truncated
        won[task_type(task)].append(info["success"])
    print(split, {t: f"{sum(w)}/{len(w)}" for t, w in won.items()})
    assert sum(map(sum, won.values())) >= 0.95 * len(tasks)


def test_games_that_come_later_are_found_in_the_same_process(tmp_path):
    split = tmp_path / "json_2.1.1" / "valid_seen"
    split.mkdir(parents=True)
    with pytest.raises(DataNotFoundError, match="no playable game"):
        find_split("valid_seen", tmp_path)
    for number in (1, 2):
        trial = split / f"pick_and_place_simple-Mug-None-Desk-30{number}" / "trial_T"
        trial.mkdir(parents=True)
        (trial / "game.tw-pddl").write_text('{"solvable": true}')
        assert len(find_split("valid_seen", tmp_path).tasks) == number
