"""The base of all environments: books, limits, spaces; and that the checker catches what it is there for."""

import copy
import pickle
import subprocess
import sys

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from hypothesis import given, settings
from hypothesis import strategies as st

from divopd_gym import ConfigError, DivOPDError, ResetNeeded, errors
from divopd_gym.checks import EnvCheckError, check_text_env
from divopd_gym.core import DoneReason, Outcome, TextEnv
from divopd_gym.spaces import TextSpace


class Corridor(TextEnv):
    """Go right `length` times; every place gives a part of the score."""

    lengths = (2, 3, 4)
    reward_bug = 0.0
    flags_nonsense = True
    ends_on_success = True

    @property
    def tasks(self):
        return tuple(f"corridor/{n}" for n in self.lengths)

    def _start(self, task, seed, options):
        if options:
            raise ConfigError(f"unknown {options}")
        self.length, self.place = int(task.split("/")[1]), 0
        return "reach the end", Outcome("You stand at the left end.", admissible_actions=["left", "right"])

    def _play(self, action):
        known = action in ("left", "right")
        if known:
            self.place = max(0, self.place + (1 if action == "right" else -1))
        done = self.place == self.length
        return Outcome(
            f"You stand at place {self.place}." if known else "What?",
            score=self.place / self.length,
            over=done and self.ends_on_success,
            success=done,
            valid_action=known or not self.flags_nonsense,
            admissible_actions=["left", "right"],
        )

    def step(self, action):
        observation, reward, *rest = super().step(action)
        return observation, reward + self.reward_bug, *rest

    def gold_path(self):
        return ["right"] * self.length


def test_the_checker_accepts_a_right_environment():
    check_text_env(Corridor())
    check_env(Corridor())


@pytest.mark.parametrize(
    ("bug", "rule"),
    [
        ({"reward_bug": 0.1}, "increment of the score"),
        ({"flags_nonsense": False}, "nonsense is flagged"),
        ({"ends_on_success": False}, "success ends the episode"),
        ({"lengths": ()}, "has tasks"),
        ({"gold_path": lambda self: ["right", "left"]}, "gold path solves"),
    ],
)
def test_the_checker_names_the_broken_rule(bug, rule):
    broken = type("Broken", (Corridor,), bug)()
    with pytest.raises(EnvCheckError, match=rule):
        check_text_env(broken)


def test_rewards_add_up_to_the_final_score():
    env = Corridor()
    _, info = env.reset(options={"task": "corridor/4"})
    total = 0.0
    for action in ["right", "right", "left", "right", "right", "right"]:
        _, reward, terminated, _, info = env.step(action)
        total += reward
    assert terminated and info["success"] and info["done_reason"] == "success"
    assert total == pytest.approx(info["score"]) == 1.0


def test_the_turn_limit_truncates_and_success_in_the_last_turn_terminates():
    env = Corridor(max_turns=2)
    env.reset(options={"task": "corridor/3"})
    env.step("right")
    *_, terminated, truncated, info = env.step("right")
    assert (terminated, truncated, info["done_reason"]) == (False, True, "turn_limit")
    env.reset(options={"task": "corridor/2"})
    env.step("right")
    *_, terminated, truncated, info = env.step("right")
    assert (terminated, truncated, info["done_reason"]) == (True, False, "success")


def test_without_a_limit_an_episode_goes_on():
    env = Corridor(max_turns=None)
    env.reset(seed=0)
    for _ in range(200):
        *_, truncated, _ = env.step("left")
        assert not truncated


def test_stepping_before_reset_or_after_the_end_asks_for_a_reset():
    env = Corridor()
    with pytest.raises(ResetNeeded, match="before reset"):
        env.step("right")
    env.reset(options={"task": "corridor/2"})
    env.step("right")
    env.step("right")
    with pytest.raises(ResetNeeded, match="success"):
        env.step("left")
    env.reset(options={"task": "corridor/2"})
    env.step("right")


def test_the_seed_decides_the_task_and_all_tasks_come_up():
    env = Corridor()
    drawn = [env.reset(seed=s)[1]["task"] for s in range(40)]
    assert drawn == [env.reset(seed=s)[1]["task"] for s in range(40)]
    assert set(drawn) == set(env.tasks)


def test_naming_a_task_does_not_change_what_later_episodes_draw():
    one, two = Corridor(), Corridor()
    one.reset(seed=5)
    two.reset(seed=5, options={"task": "corridor/4"})
    assert [one.reset()[1]["task"] for _ in range(10)] == [two.reset()[1]["task"] for _ in range(10)]


def test_unknown_tasks_options_and_actions_are_refused_with_the_remedy():
    env = Corridor()
    with pytest.raises(ConfigError, match="env.unwrapped.tasks"):
        env.reset(options={"task": "corridor/99"})
    with pytest.raises(ConfigError):
        env.reset(options={"tusk": "corridor/2"})
    env.reset()
    with pytest.raises(ConfigError, match="texts"):
        env.step(3)
    with pytest.raises(ConfigError, match="max_turns"):
        Corridor(max_turns=0)
    with pytest.raises(ConfigError, match="render_mode"):
        Corridor(render_mode="human")


def test_infos_share_no_lists_between_turns():
    env = Corridor()
    _, first = env.reset()
    first["admissible_actions"].append("fly")
    *_, second = env.step("right")
    assert "fly" not in second["admissible_actions"]


def test_rendering_shows_the_last_turn():
    env = Corridor(render_mode="ansi")
    env.reset(options={"task": "corridor/3"})
    assert env.render() == "You stand at the left end."
    env.step("right")
    assert env.render() == "> right\nYou stand at place 1."


def test_done_reasons_are_plain_texts():
    assert str(DoneReason.TURN_LIMIT) == DoneReason.TURN_LIMIT == "turn_limit"


@given(st.text(max_size=50))
@settings(max_examples=100, deadline=None)
def test_any_unicode_text_is_in_the_space(text):
    assert text in TextSpace(50)


def test_the_space_refuses_other_things_and_what_is_too_long():
    space = TextSpace(3)
    assert "abc" in space and "" in space
    assert "abcd" not in space and 3 not in space and ["a"] not in space
    with pytest.raises(ConfigError):
        TextSpace(0)


def test_samples_follow_the_seed_and_lie_in_the_space():
    one, two = TextSpace(seed=3), TextSpace(seed=3)
    drawn = [one.sample() for _ in range(50)]
    assert drawn == [two.sample() for _ in range(50)]
    assert all(text in one for text in drawn) and len(set(drawn)) > 40
    assert pickle.loads(pickle.dumps(one)) == one and one != TextSpace(5) and copy.deepcopy(one) == one
    assert one.from_jsonable(one.to_jsonable(drawn)) == drawn


def test_shared_memory_gives_back_every_character():
    from gymnasium.vector.utils import create_shared_memory, read_from_shared_memory, write_to_shared_memory

    space = TextSpace(20)
    memory = create_shared_memory(space, n=3)
    view = read_from_shared_memory(space, memory, n=3)
    texts = ["", "aé漢\U0001f600\ud800", "x" * 20]
    for index, text in enumerate(texts):
        write_to_shared_memory(space, index, text, memory)
    assert copy.deepcopy(view) == tuple(texts)
    write_to_shared_memory(space, 2, "short", memory)
    assert view[2] == "short"
    assert isinstance(copy.deepcopy(view), tuple)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_vector_environments_carry_texts(mode):
    kind = gymnasium.vector.SyncVectorEnv if mode == "sync" else gymnasium.vector.AsyncVectorEnv
    envs = kind([Corridor, Corridor])
    try:
        first, infos = envs.reset(seed=[0, 1], options={"task": "corridor/2"})
        assert first == ("You stand at the left end.",) * 2
        assert list(infos["turns"]) == [0, 0]
        observations, rewards, *_ = envs.step(("right", "wobble ☃"))
        assert tuple(observations) == ("You stand at place 1.", "What?")
        assert np.allclose(rewards, [0.5, 0.0])
    finally:
        envs.close()


@pytest.mark.parametrize("name", [n for n in errors.__all__ if n != "DivOPDError"])
def test_errors_share_one_base_and_survive_pickling(name):
    error = getattr(errors, name)("found x, expected y, do z")
    again = pickle.loads(pickle.dumps(error))
    assert isinstance(again, DivOPDError) and isinstance(again, ValueError | RuntimeError)
    assert str(again) == str(error)


def test_importing_the_package_needs_neither_torch_nor_textworld():
    code = "import divopd_gym, sys; assert not {'torch', 'textworld', 'alfworld'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("options", [{"task": "nope"}, {"task": 3}, {"colour": "red"}])
def test_a_reset_that_is_refused_leaves_no_episode_running(options):
    env = Corridor()
    env.reset(options={"task": "corridor/3"})
    with pytest.raises(ConfigError):
        env.reset(options=options)
    with pytest.raises(ResetNeeded):
        env.step("right")


@pytest.mark.parametrize("value", [0, -1, 2.5, "30"])
def test_a_limit_that_is_no_number_of_turns_is_refused(value):
    with pytest.raises(ConfigError, match="max_turns"):
        Corridor(max_turns=value)
