"""ScienceWorld played by its real simulator: exactness, rules, ends of processes."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import gymnasium
import psutil
import pytest
from gymnasium.utils.env_checker import check_env

pytest.importorskip("scienceworld", reason="the simulator comes with the package scienceworld")

import divopd_gym  # noqa: E402, F401
from divopd_gym import ConfigError, ResetNeeded  # noqa: E402
from divopd_gym.checks import check_text_env  # noqa: E402
from divopd_gym.core import INFO_KEYS  # noqa: E402
from divopd_gym.envs.scienceworld import gold as gold_module  # noqa: E402
from divopd_gym.envs.scienceworld import host  # noqa: E402
from divopd_gym.envs.scienceworld.java import find_simulator  # noqa: E402
from divopd_gym.envs.scienceworld.tasks import TASKS, simplifications_for  # noqa: E402
from divopd_gym.envs.scienceworld.wire import SimulatorDied  # noqa: E402
from divopd_gym.pool import EnvError  # noqa: E402
from divopd_gym.pool_sync import SyncEnvPool  # noqa: E402

pytestmark = [pytest.mark.env, pytest.mark.timeout(1800)]
ID = "divopd_gym/ScienceWorld-v0"
SLOW = [pytest.mark.slow, pytest.mark.timeout(7200)]
PATIENCE_S = 120.0


@pytest.fixture(scope="module", autouse=True)
def own_simulators(tmp_path_factory):
    """Simulators and gold paths of the module's own, so that no other program's are touched."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DIVOPD_RUN_DIR", str(tmp_path_factory.mktemp("run")))
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def make(**kwargs):
    kwargs = {"split": "all", "simplification": "", "max_turns": None, "call_timeout_s": 900.0, **kwargs}
    return gymnasium.make(ID, disable_env_checker=True, **kwargs)


def start(task, **kwargs):
    env = make(**kwargs)
    return env, *env.reset(options={"task": task})


def trajectory(env, task, actions):
    """All that the player sees, turn by turn."""
    seen = [env.reset(options={"task": task})]
    for action in actions:
        seen.append(env.step(action))
        if seen[-1][2]:
            break
    return seen


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    """The given gold paths: (task id, actions)."""
    shared = Path(__file__).resolve().parents[2] / ".." / "shared" / "data"
    path = Path(os.environ.get("DIVOPD_GOLDEN", shared)) / "scienceworld" / "gold_paths.json"
    if not path.exists():
        pytest.skip(f"golden file {path} is not beside the checkout")
    return [(f"{p['task']}/{p['var']}", p["gold"]) for p in json.loads(path.read_text())["paths"]]


def simulators():
    return [p for p in psutil.process_iter(["cmdline"]) if is_ours(p)]


def is_ours(process):
    if "ScienceWorldHost" not in " ".join(process.info["cmdline"] or ()):
        return False
    try:
        return process.environ().get("DIVOPD_RUN_DIR") == os.environ["DIVOPD_RUN_DIR"]
    except psutil.Error:
        return False


def gone(pid):
    """Wait until a process is no more, not even as a zombie."""
    deadline = time.monotonic() + PATIENCE_S
    while psutil.pid_exists(pid):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


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


# Processes.


def test_a_simulator_that_dies_costs_the_episode_and_nothing_else():
    env, _, _ = start("boil/0")
    pid = env.unwrapped._connection.pid
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(SimulatorDied, match="not failed"):
        env.step("look around")
    with pytest.raises(ResetNeeded):
        env.step("look around")
    _, info = env.reset(options={"task": "boil/0"})
    assert info["turns"] == 0 and env.unwrapped._connection.pid != pid
    os.kill(env.unwrapped._connection.pid, signal.SIGKILL)
    # Between two episodes it is nobody's loss.
    assert env.reset(options={"task": "boil/0"})[1]["turns"] == 0
    env.close()


def test_a_simulator_that_hangs_is_killed():
    env, _, _ = start("boil/0", isolation="process", call_timeout_s=900.0)
    pid = env.unwrapped._connection.pid
    env.unwrapped.call_timeout_s = 1.0
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(SimulatorDied, match="did not answer"):
        env.step("look around")
    assert gone(pid)
    env.close()


def test_a_pool_reports_a_dead_simulator_and_plays_on():
    kwargs = {"split": "all", "simplification": "easy", "call_timeout_s": 900.0}
    with SyncEnvPool(ID, kwargs, workers=2, step_timeout_s=900, reset_timeout_s=900) as pool:
        with pool.lend(900) as one, pool.lend(900) as two:
            one.reset(task="boil/0")
            two.reset(task="melt/0")
            pids = {p.pid for p in simulators()}
            assert 1 <= len(pids) <= 2
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            for env, task in ((one, "boil/0"), (two, "melt/0")):
                with pytest.raises(EnvError, match="SimulatorDied.*not failed"):
                    env.step("look around")
                assert env.reset(task=task)[1]["task"] == task
        assert pool.counters["deaths"] == 0 and pool.counters["env_errors"] == 2
        pids = {p.pid for p in simulators()}
    assert all(map(gone, pids))


def test_environments_share_few_simulators_and_the_last_one_ends_them():
    envs = [make(simulators=2) for _ in range(5)]
    for env in envs:
        env.reset(options={"task": "melt/1"})
    pids = {env.unwrapped._connection.pid for env in envs}
    assert len(pids) == 2
    own = make(isolation="process")
    own.reset(options={"task": "melt/1"})
    assert own.unwrapped._connection.pid not in pids
    pids.add(own.unwrapped._connection.pid)
    for env in [*envs, own]:
        env.close()
        env.close()
    assert all(map(gone, pids))


SCRIPT = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)
import gymnasium, divopd_gym
env = gymnasium.make("divopd_gym/ScienceWorld-v0", split="all", isolation=sys.argv[1], call_timeout_s=900.0)
env.reset(options={"task": "boil/0"})
print(env.unwrapped._connection.pid, flush=True)
if sys.argv[2] == "exit":
    os._exit(0)
if sys.argv[2] == "fork":
    if os.fork() == 0:
        time.sleep(600)
time.sleep(600)
"""


@pytest.mark.parametrize(
    "isolation, end", [("shared", "exit"), ("shared", "SIGINT"), ("shared", "fork"), ("process", "SIGKILL")]
)
def test_no_simulator_outlives_its_program(isolation, end):
    command = [sys.executable, "-c", SCRIPT, isolation, end]
    # As from a terminal: Ctrl-C goes to the whole group.
    program = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        pid = int(program.stdout.readline())
        assert psutil.pid_exists(pid)
        if end == "fork":
            # A child that lives on holds none of its parent's connections.
            time.sleep(1)
            program.kill()
        elif end != "exit":
            os.killpg(program.pid, getattr(signal, end))
        assert gone(pid)
    finally:
        os.killpg(program.pid, signal.SIGKILL)
        program.wait(60)
        program.stdout.close()


def test_a_forked_child_must_reset_and_leaves_its_parents_episode_alone():
    env, _, _ = start("boil/0")
    child = os.fork()
    if child == 0:
        code = 1
        try:
            env.step("look around")
        except ResetNeeded:
            env.reset(options={"task": "melt/0"})
            code = 0 if env.step("look around")[4]["turns"] == 1 else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert env.step("look around")[4]["task"] == "boil/0"
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


@pytest.mark.parametrize("episodes", [20, pytest.param(1000, marks=SLOW)])
def test_resets_leave_memory_threads_and_descriptors_flat(episodes):
    env = make(isolation="process", simplification="easy")
    tasks = [f"find-plant/{n}" for n in range(10)]
    measured = []
    for episode in range(episodes):
        env.reset(options={"task": tasks[episode % len(tasks)]})
        env.step("look around")
        if episode in (episodes // 2, episodes - 1):
            simulator = psutil.Process(env.unwrapped._connection.pid)
            measured += [
                (p.num_threads(), p.num_fds(), p.memory_info().rss / 1e6)
                for p in (psutil.Process(), simulator)
            ]
    for before, after in zip(measured[:2], measured[2:]):
        assert after[1] <= before[1] + 2 and after[2] <= before[2] + 60
        assert after[0] <= before[0] + 3
    env.close()
