"""ScienceWorld played by its real simulator: exactness and rules."""

import json
import os
import random
import shutil
import subprocess
from pathlib import Path

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env
from scienceworld_fakes import ID, SLOW, make, own_simulators, start, trajectory  # noqa: F401

pytest.importorskip("scienceworld", reason="the simulator comes with the package scienceworld")

from divopd_gym import ConfigError, ResetNeeded  # noqa: E402
from divopd_gym.checks import check_text_env  # noqa: E402
from divopd_gym.core import INFO_KEYS  # noqa: E402
from divopd_gym.envs.scienceworld import gold as gold_module  # noqa: E402
from divopd_gym.envs.scienceworld import host  # noqa: E402
from divopd_gym.envs.scienceworld.java import find_simulator  # noqa: E402
from divopd_gym.envs.scienceworld.tasks import TASKS, simplifications_for  # noqa: E402

pytestmark = [pytest.mark.env, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    """The given gold paths: (task id, actions)."""
    shared = Path(__file__).resolve().parents[2] / ".." / "shared" / "data"
    path = Path(os.environ.get("DIVOPD_GOLDEN", shared)) / "scienceworld" / "gold_paths.json"
    if not path.exists():
        pytest.skip(f"golden file {path} is not beside the checkout")
    return [(f"{p['task']}/{p['var']}", p["gold"]) for p in json.loads(path.read_text())["paths"]]


# Exactness.


@pytest.mark.parametrize("step", [12, pytest.param(1, marks=SLOW)])
def test_every_given_gold_path_ends_at_100(golden, step):
    env = make()
    failed = {}
    for task, actions in golden[::step]:
        *_, info = trajectory(env, task, actions)[-1]
        if not (info["success"] and info["raw_score"] == 100 and info["done_reason"] == "success"):
            failed[task] = info["raw_score"]
    env.close()
    assert failed == {}


@pytest.mark.parametrize("count, length", [(6, 12), pytest.param(30, 60, marks=SLOW)])
def test_episodes_in_turn_mixed_and_in_fresh_simulators_are_the_same(golden, count, length):
    # Every second one with other simplifications, which are global in the simulator too.
    plays = [
        (task, actions[:length], "easy" if n % 2 else "")
        for n, (task, actions) in enumerate(golden[:: 60 // count])
    ]
    one_by_one = {}
    for task, actions, simplification in plays:
        env = make(simplification=simplification, simulators=1)
        one_by_one[task] = trajectory(env, task, actions)
        env.close()
    rng = random.Random(0)
    mixed = {task: make(simplification=s, simulators=1) for task, _, s in plays}
    seen = {task: [env.reset(options={"task": task})] for task, env in mixed.items()}
    assert len({env.unwrapped._connection.pid for env in mixed.values()}) == 1
    left = {task: list(actions) for task, actions, _ in plays}
    while left:
        task = rng.choice(sorted(left))
        seen[task].append(mixed[task].step(left[task].pop(0)))
        if seen[task][-1][2] or not left[task]:
            del left[task]
    for env in mixed.values():
        env.close()
    assert seen == one_by_one
    for task, actions, simplification in plays[:: max(1, count // 3)]:
        env = make(simplification=simplification, isolation="process")
        assert trajectory(env, task, actions) == one_by_one[task]
        env.close()


@pytest.mark.parametrize("turns", [25, pytest.param(400, marks=SLOW)])
def test_what_is_left_out_of_a_turn_changes_nothing(turns):
    """Against the simulator's own front: its looks, its history, its debugging, its parser."""
    rng = random.Random(1)
    simulator = find_simulator(1536)
    lean, plain = host.connect(simulator, 1), host.connect(simulator, 1)
    tasks = [f"{task} {rng.randrange(n)}".split() for task, n in TASKS.items()]
    others = ["inventory", "look around", "wait1", "0", "nonsense", "open the Door", "task", "objects", ""]
    others += ["teleport to kitchen", "teleport  to The foundry", "teleport", "teleport to apple"]
    played = 0
    while played < turns:
        task, variation = rng.choice(tasks)
        simplified = simplifications_for(task, rng.choice(["", "easy"]))
        states = [
            c.load_task(task, int(variation), simplified, way, 900)
            for c, way in ((lean, "lean"), (plain, "plain"))
        ]
        for _ in range(12):
            valid = lean.ask("V", "", 900).decode().split("\n")
            action = rng.choice(valid) if rng.random() < 0.8 else rng.choice(others)
            states = [c.turn(action, 900) for c in (lean, plain)]
            assert states[0] == states[1], (task, variation, action)
            played += 1
            if states[0].completed or states[0].score < 0:
                break
    lean.close()
    plain.close()


def test_asking_for_valid_actions_does_not_disturb_the_world(golden):
    task, actions = next((t, a) for t, a in golden if t.startswith("grow-plant"))
    env = make()
    plain = trajectory(env, task, actions[:30])
    seen = [env.reset(options={"task": task})]
    for action in actions[:30]:
        valid = env.unwrapped.valid_actions()
        # While a question is open, its answers are all there is.
        assert len(valid) > 100 or valid == [str(number) for number in range(len(valid))]
        assert "reset task" not in valid
        seen.append(env.step(action))
    assert seen == plain
    env.close()


def test_the_shipped_classes_are_what_the_source_compiles_to(tmp_path):
    javac = shutil.which("javac")
    if javac is None:
        pytest.skip("there is no Java compiler")
    folder = Path(host.__file__).parent / "host"
    jar = find_simulator(64).jar
    command = [
        javac,
        "-nowarn",
        "--release",
        "11",
        "-cp",
        jar,
        "-d",
        tmp_path,
        folder / "ScienceWorldHost.java",
    ]
    subprocess.run(list(map(str, command)), check=True, timeout=600)
    built = {p.name: p.read_bytes() for p in tmp_path.glob("*.class")}
    shipped = {p.name: p.read_bytes() for p in folder.glob("*.class")}
    assert sorted(built) == sorted(shipped)
    version = subprocess.run([javac, "-version"], capture_output=True, text=True, timeout=600).stdout
    if version.startswith("javac 17."):
        assert built == shipped


# Rules.


@pytest.mark.filterwarnings("error")
def test_gymnasiums_own_checks_pass_without_warnings():
    env = make(split="train", task_types=["find-plant"], max_turns=30)
    check_env(env.unwrapped)
    env.close()


def test_the_projects_own_checks_pass():
    check_text_env(make(simplification="easy"), tasks=["find-non-living-thing/3"], turns=3)


def test_info_tells_forms_and_objects_apart_and_lists_no_actions():
    env, observation, info = start("find-plant/0")
    assert observation.startswith("This room is called the") and set(INFO_KEYS) < set(info)
    assert info["admissible_actions"] is None and info["goal"].startswith("Your task is to find")
    assert "focus on OBJ" in info["action_templates"] and "reset task" not in info["action_templates"]
    assert "hallway" in info["objects"] and (info["task_type"], info["variation"]) == ("find-plant", 0)
    env.close()


def test_turns_are_counted_here_and_the_limit_holds_whatever_the_simulator_counts():
    env, _, _ = start("boil/0", max_turns=4)
    infos = [env.step(action) for action in ("nonsense", "look around", "wait", "inventory")]
    assert [i[4]["turns"] for i in infos] == [1, 2, 3, 4] and [i[4]["moves"] for i in infos] == [0, 0, 11, 11]
    assert [i[3] for i in infos] == [False, False, False, True] and infos[-1][4][
        "done_reason"
    ] == "turn_limit"
    env.close()


def test_etos_limits_go_by_task():
    env = make(split="eto_test", max_turns="eto")
    env.reset(options={"task": "find-plant/230"})
    assert env.unwrapped.max_turns == 15
    with pytest.raises(ConfigError, match="none of ETO's"):
        env.reset(options={"task": "inclined-plane-determine-angle/0"})
    env.close()


@pytest.mark.parametrize("action", ["reset task", "Reset  the Task", " reset\ttask ", "\x01reset task"])
def test_reset_task_is_no_action(action):
    env, _, _ = start("boil/0")
    env.step("wait1")
    *_, info = env.step(action)
    assert not info["valid_action"] and info["moves"] == 2
    env.close()


def test_a_wrong_focus_fails_the_task_at_score_0():
    env, _, _ = start("find-plant/12", simplification="easy")
    total = 0.0
    for action in ["look around", "focus on chair"]:
        _, reward, terminated, truncated, info = env.step(action)
        total += reward
    assert terminated and not truncated and not info["success"] and info["done_reason"] == "failure"
    assert info["raw_score"] == -100 and info["score"] == 0.0 and total == pytest.approx(0.0)
    assert info["best_score"] > 0
    with pytest.raises(ResetNeeded):
        env.step("look around")
    assert env.reset(options={"task": "find-plant/12"})[1]["raw_score"] >= 0
    env.close()


def test_an_episodes_return_is_its_final_score_where_the_start_gives_points():
    env, _, info = start("find-plant/12", simplification="easy")
    assert info["raw_score"] > 0 and info["score"] == 0.0
    assert env.step("look around")[1] == pytest.approx(info["raw_score"] / 100)
    env.close()


def test_a_question_is_asked_with_its_answers_or_answered_by_the_first():
    asked, _, _ = start("grow-plant/125")
    first, _, _ = start("grow-plant/125", ambiguous="first")
    for action in ["open door to greenhouse", "go to greenhouse", "pick up seed jar"]:
        assert asked.step(action)[0] == first.step(action)[0]
    several = "move peach seed in seed jar to flower pot 2"
    observation, *_, info = asked.step(several)
    assert observation.startswith("Ambiguous request") and info["valid_action"] and info["options"] > 1
    assert info["admissible_actions"] == [str(n) for n in range(info["options"])]
    answered, *_, told = first.step(several)
    assert told["options"] == 0 and told["admissible_actions"] is None and told["turns"] == 4
    assert asked.step("0")[0] == answered
    # Anything but a number is swallowed, as upstream.
    asked.step(several)
    *_, info = asked.step("look around")
    assert not info["valid_action"] and info["options"] == 0
    asked.close()
    first.close()


def test_unknown_tasks_and_variations_out_of_range_are_refused():
    env = make()
    for task, words in [("cook/0", "no task"), ("boil/30", "0 to 29"), ("boil/-1", "0 to 29")]:
        with pytest.raises(ConfigError, match=words):
            env.reset(options={"task": task})
    with pytest.raises(ConfigError, match="unknown"):
        env.reset(options={"task": "boil/0", "seed": 1})
    for kwargs, words in [
        ({"ambiguous": "guess"}, "ask, first"),
        ({"isolation": "thread"}, "shared, process"),
        ({"simplification": "EASY"}, "choose from"),
        ({"split": "valid"}, "divopd_train"),
        ({"max_turns": "eto"}, "eto_ split"),
    ]:
        with pytest.raises(ConfigError, match=words):
            make(**kwargs)
    env.close()


def test_gold_paths_are_made_once_kept_on_disk_and_solve_their_task():
    env, observation, info = start("find-non-living-thing/0", simplification="easy")
    there = set(gold_module.gold_folder().rglob("*.json"))
    path = env.unwrapped.gold_path()
    kept = list(set(gold_module.gold_folder().rglob("*.json")) - there)
    assert len(kept) == 1 and json.loads(kept[0].read_text())["actions"] == path
    before = kept[0].stat().st_mtime_ns
    expert = env.unwrapped.expert()
    expert.reset(observation, info)
    for _ in range(len(path) + 4):
        # One turn is somebody else's.
        action = "teleport to kitchen" if info["turns"] == 1 else expert.act()
        observation, _, terminated, _, info = env.step(action)
        expert.observe(action, observation, info)
        if terminated:
            break
    assert info["success"] and kept[0].stat().st_mtime_ns == before
    env.close()


@pytest.mark.parametrize("turns", [60, pytest.param(5000, marks=SLOW)])
def test_random_and_malformed_actions_raise_nothing(turns):
    rng = random.Random(2)
    env, _, info = start("chemistry-mix/3", simplification="easy", max_turns=200)
    odd = ["", " ", "x" * 10_000, "\x00\x1b[2J", "打开 门", "\ud800", "a the an", "0", "-1", "99999999999", "OBJ", "\n\n",
           "move move to to", "%s %n", "'; DROP", "objects", "help", "task"]  # fmt: skip
    for _ in range(turns):
        template = rng.choice(info["action_templates"])
        while "OBJ" in template:
            template = template.replace("OBJ", rng.choice(info["objects"] or ["air"]), 1)
        action = template if rng.random() < 0.6 else rng.choice(odd)
        _, _, terminated, truncated, info = env.step(action)
        assert 0 <= info["score"] <= 1
        if terminated or truncated:
            task = rng.choice(sorted(TASKS))
            _, info = env.reset(options={"task": f"{task}/{rng.randrange(TASKS[task])}"})
    env.close()


def test_vector_environments_play_it():
    envs = gymnasium.make_vec(
        ID,
        num_envs=2,
        vectorization_mode="async",
        split="train",
        task_types=["find-plant"],
        call_timeout_s=900.0,
    )
    observations, _ = envs.reset(seed=3)
    assert len(observations) == 2 and all(o.startswith("This") for o in observations)
    _, _, terminated, _, _ = envs.step(("look around", "inventory"))
    assert not terminated.any()
    envs.close()
