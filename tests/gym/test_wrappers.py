import json
import warnings

import gymnasium
import pytest
from hypothesis import given
from hypothesis import strategies as st

from divopd_gym.errors import ConfigError
from divopd_gym.wrappers import (
    HandoffPolicy,
    NoProgress,
    ReplayPrefix,
    StepLimit,
    TeacherHandoff,
    Transcript,
    made_progress,
)


class Corridor(gymnasium.Env):
    """Walk right `length` times; "wait" is valid and changes nothing, anything else is invalid."""

    def __init__(self, length=4, listed=True, clock=False):
        self.length, self.listed, self.clock = length, listed, clock
        self.asked = []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.asked.append(options)
        self.at = self.turns = 0
        return "at 0", self._info(True)

    def step(self, action):
        self.turns += 1
        word = action.strip().lower()
        moved = word == "right"
        self.at += moved
        over = self.at >= self.length
        info = self._info(moved or word == "wait")
        text = f"at {self.at}" + (f" at {self.turns} o'clock" if self.clock else "")
        return text, (1.0 / self.length if moved else 0.0), over, False, info

    def _info(self, valid):
        over = self.at >= self.length
        listed = ["wait", "right"] + [f"look {self.at}"] if self.listed else None
        return {
            "task": "corridor",
            "goal": "get to the end",
            "admissible_actions": listed,
            "score": self.at / self.length,
            "success": over,
            "valid_action": valid,
            "done_reason": "success" if over else None,
            "turns": self.turns,
        }


def play(env, actions, **reset):
    env.reset(**reset)
    return [env.step(action) for action in actions]


# ---- step limit


def test_step_limit_truncates_with_its_reason():
    *_, before, last = play(StepLimit(Corridor(), 3), ["wait"] * 3)
    assert not before[3] and before[4]["done_reason"] is None
    assert (last[2], last[3], last[4]["done_reason"]) == (False, True, "turn_limit")


def test_success_at_the_last_turn_goes_before_the_limit():
    last = play(StepLimit(Corridor(2), 2), ["right"] * 2)[-1]
    assert (last[2], last[3], last[4]["done_reason"]) == (True, False, "success")


def test_step_limit_starts_again_with_each_episode():
    env = StepLimit(Corridor(), 2)
    for _ in range(2):
        assert [outcome[3] for outcome in play(env, ["wait"] * 2)] == [False, True]


@pytest.mark.parametrize("value", [0, -1, 2.5, None, True])
def test_limits_that_are_no_number_of_turns_are_refused(value):
    with pytest.raises(ConfigError, match="max_turns"):
        StepLimit(Corridor(), value)
    if value is not None:
        with pytest.raises(ConfigError, match="patience"):
            NoProgress(Corridor(), value)
        with pytest.raises(ConfigError, match="patience"):
            HandoffPolicy(value, 1)


# ---- no progress


@pytest.mark.parametrize(
    ("action", "previous", "valid", "before", "after", "progress"),
    [
        ("a", None, True, ["x"], ["x"], True),
        ("a", "b", True, ["x"], ["x"], True),
        ("a", "a", True, ["x", "y"], ["y", "x", "x"], False),
        ("a", "a", True, ["x"], ["x", "y"], True),
        ("Go  To bed", " go to BED ", True, ["x"], ["x"], False),
        ("a", "b", False, ["x"], ["y"], False),
        ("a", None, False, ["x"], ["y"], False),
    ],
)
def test_no_progress_is_an_invalid_action_or_a_repeated_one_with_an_unchanged_set(
    action, previous, valid, before, after, progress
):
    assert made_progress(action, previous, valid, before, after) is progress


def test_observations_decide_where_no_actions_are_listed():
    assert not made_progress("a", "a", True, None, None, "same ", "same")
    assert made_progress("a", "a", True, None, None, "one", "two")
    assert not made_progress("a", "a", True, None, None)


@given(action=st.text(), valid=st.booleans(), sets=st.tuples(*[st.none() | st.lists(st.text())] * 2))
def test_a_first_turn_makes_progress_exactly_if_it_is_valid(action, valid, sets):
    assert made_progress(action, None, valid, *sets) is valid


def test_no_progress_counts_consecutive_turns_and_progress_clears_the_count():
    actions = ["wait", "wait", "WAIT ", "right", "nonsense", "right", "right"]
    counts = [outcome[4]["no_progress"] for outcome in play(NoProgress(Corridor(9)), actions)]
    assert counts == [0, 1, 2, 0, 1, 0, 0]


def test_no_progress_only_counts_unless_given_a_patience():
    assert not any(outcome[3] for outcome in play(NoProgress(Corridor()), ["wait"] * 20))


def test_no_progress_truncates_at_its_patience_with_its_reason():
    outcomes = play(NoProgress(Corridor(), patience=2), ["wait"] * 3)
    assert [outcome[3] for outcome in outcomes] == [False, False, True]
    assert outcomes[-1][4]["done_reason"] == "no_progress"


def test_no_progress_starts_again_with_each_episode():
    env = NoProgress(Corridor())
    play(env, ["wait", "wait"])
    _, info = env.reset()
    assert info["no_progress"] == 0
    assert env.step("wait")[4]["no_progress"] == 0


@pytest.mark.parametrize(("clock", "counts"), [(False, [0, 1, 2]), (True, [0, 0, 0])])
def test_without_listed_actions_the_observation_tells_progress(clock, counts):
    outcomes = play(NoProgress(Corridor(listed=False, clock=clock)), ["wait"] * 3)
    assert [outcome[4]["no_progress"] for outcome in outcomes] == counts


# ---- hand-off policy


def feed(policy, turns):
    """Each turn: (action, valid). The admissible set never changes. Returns who acts after each."""
    return [policy.observe(action, valid, ["x"], ["x"]) for action, valid in turns]


def test_teacher_takes_over_after_patience_turns_and_keeps_its_whole_budget():
    policy = HandoffPolicy(patience=2, budget=3)
    assert policy.acting == "student"
    assert feed(policy, [("bad", False)]) == ["student"]
    assert feed(policy, [("bad", False)]) == ["teacher"]
    assert feed(policy, [("t1", True), ("t2", True)]) == ["teacher"] * 2
    assert feed(policy, [("t3", True)]) == ["student"]
    assert (policy.teacher_turns, policy.budget_left, policy.handoffs) == (3, 0, 1)


def test_budget_holds_for_the_whole_rollout():
    policy = HandoffPolicy(patience=1, budget=2)
    feed(policy, [("bad", False)] * 50)
    assert policy.teacher_turns == 2
    assert policy.acting == "student"


def test_counter_starts_again_at_hand_back_and_it_may_trigger_again():
    policy = HandoffPolicy(patience=2, budget=5, return_on_progress=True)
    assert feed(policy, [("bad", False), ("bad", False)]) == ["student", "teacher"]
    assert feed(policy, [("bad", False), ("t", True)]) == ["teacher", "student"]
    assert policy.no_progress == 0
    assert feed(policy, [("bad", False), ("bad", False)]) == ["student", "teacher"]
    assert (policy.handoffs, policy.budget_left) == (2, 3)


def test_return_on_progress_is_off_by_default():
    policy = HandoffPolicy(patience=1, budget=4)
    assert feed(policy, [("bad", False), ("t", True)]) == ["teacher", "teacher"]


def test_the_turn_after_hand_back_is_compared_with_the_teachers_last_action():
    policy = HandoffPolicy(patience=1, budget=1)
    feed(policy, [("bad", False), ("t", True)])
    policy.observe("t", True, ["x"], ["x"])
    assert policy.no_progress == 1


def test_budget_zero_never_calls_the_teacher():
    assert set(feed(HandoffPolicy(1, 0), [("bad", False)] * 5)) == {"student"}


def test_policy_is_as_new_after_reset():
    policy = HandoffPolicy(1, 2)
    feed(policy, [("bad", False)] * 2)
    policy.reset()
    assert (policy.acting, policy.budget_left, policy.no_progress, policy.handoffs) == ("student", 2, 0, 0)


@given(
    patience=st.integers(1, 4),
    budget=st.integers(0, 6),
    back=st.booleans(),
    turns=st.lists(st.tuples(st.sampled_from("ab"), st.booleans()), max_size=40),
)
def test_teacher_never_exceeds_its_budget_nor_acts_before_patience_is_spent(patience, budget, back, turns):
    policy = HandoffPolicy(patience, budget, back)
    stuck, previous, played = 0, None, 0
    for action, valid in turns:
        acting = policy.acting
        after = policy.observe(action, valid, ["x"], ["x"])
        moved = valid and action != previous
        stuck, previous = (0 if moved else stuck + 1), action
        if acting == "teacher":
            played += 1
            if after == "student":
                stuck = 0
        elif after == "teacher":
            assert stuck >= patience
    assert played == policy.teacher_turns <= budget
    assert policy.budget_left == budget - played


# ---- teacher hand-off


def test_teacher_plays_inside_step_and_the_student_goes_on_from_there():
    asked = []

    def teacher(observation, info):
        asked.append((observation, info["turns"]))
        return "right"

    env = TeacherHandoff(Corridor(8), teacher, patience=2, budget=3)
    _, info = env.reset()
    assert (info["teacher_turns"], info["teacher_budget"]) == ([], 3)
    assert env.step("nonsense")[4]["teacher_turns"] == []
    observation, reward, terminated, _, info = env.step("nonsense")
    assert observation == "at 3"
    assert reward == pytest.approx(3 / 8)
    assert not terminated
    assert [t["action"] for t in info["teacher_turns"]] == ["right"] * 3
    assert [t["observation"] for t in info["teacher_turns"]] == ["at 0", "at 1", "at 2"]
    assert info["teacher_budget"] == 0
    assert asked == [("at 0", 2), ("at 1", 3), ("at 2", 4)]
    assert [env.step("nonsense")[4]["teacher_turns"] for _ in range(4)] == [[]] * 4


def test_episode_that_the_teacher_ends_is_over():
    env = TeacherHandoff(Corridor(2), lambda observation, info: "right", patience=1, budget=6)
    env.reset()
    observation, reward, terminated, _, info = env.step("nonsense")
    assert (observation, reward, terminated, info["success"]) == ("at 2", 1.0, True, True)
    assert len(info["teacher_turns"]) == 2


def test_an_inner_limit_stops_the_teacher():
    env = TeacherHandoff(StepLimit(Corridor(9), 3), lambda observation, info: "right", patience=1, budget=6)
    env.reset()
    *_, truncated, info = env.step("nonsense")
    assert truncated and len(info["teacher_turns"]) == 2


def test_an_expert_is_told_of_every_turn_and_acts_as_teacher():
    class Expert:
        def reset(self, observation, info):
            self.seen = [observation]

        def act(self):
            return "right"

        def observe(self, action, observation, info):
            self.seen.append((action, observation))

    expert = Expert()
    env = TeacherHandoff(Corridor(9), expert, patience=1, budget=2)
    for _ in range(2):
        env.reset()
        env.step("wait")
        env.step("nonsense")
        assert expert.seen == [
            "at 0",
            ("wait", "at 0"),
            ("nonsense", "at 0"),
            ("right", "at 1"),
            ("right", "at 2"),
        ]


def test_return_of_an_episode_is_its_final_score_with_a_teacher_too():
    env = TeacherHandoff(Corridor(7), lambda observation, info: "right", patience=1, budget=2)
    env.reset()
    total, info = 0.0, {}
    for action in ["right", "nonsense", "right", "wait"]:
        _, reward, _, _, info = env.step(action)
        total += reward
    assert total == pytest.approx(info["score"])


# ---- replayed prefix


def test_prefix_is_played_inside_reset():
    env = ReplayPrefix(Corridor(4), ["right", "wait"])
    observation, info = env.reset(options={"task": "corridor"})
    assert (observation, info["turns"]) == ("at 1", 2)
    assert info["prefix"] == [("at 0", "right"), ("at 1", "wait")]
    assert info["prefix_reward"] == pytest.approx(0.25)
    assert env.unwrapped.asked == [{"task": "corridor"}]
    assert env.step("right")[0] == "at 2"


def test_prefix_may_come_from_the_options_or_a_function():
    env = ReplayPrefix(Corridor(4), lambda observation, info: ["right"] * 2)
    assert env.reset()[0] == "at 2"
    assert env.reset(options={"prefix": ["right"]})[0] == "at 1"
    assert env.reset(options={"prefix": []})[0] == "at 0"
    assert env.unwrapped.asked == [None, None, None]


def test_prefix_that_ends_the_episode_is_refused_with_its_longest_length():
    with pytest.raises(ConfigError, match="'corridor' ended at action 2 of a prefix of 3.*at most 1"):
        ReplayPrefix(Corridor(2), ["right"] * 3).reset()


# ---- transcript


def test_transcript_writes_text_jsonl_and_html(tmp_path):
    path = tmp_path / "episodes.jsonl"
    env = Transcript(Corridor(2), path)
    play(env, ["right", "<b>\ud800", "right"])
    env.reset()
    env.step("wait")
    env.close()
    first, second = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    assert [turn["action"] for turn in first["turns"]] == ["right", "<b>\ud800", "right"]
    assert [turn["valid"] for turn in first["turns"]] == [True, False, True]
    assert (first["success"], first["score"], first["done_reason"]) == (True, 1.0, "success")
    assert (second["success"], second["done_reason"], len(second["turns"])) == (False, None, 1)
    assert env.to_jsonl() == path.read_text(encoding="utf-8")
    assert "1> right" in env.to_text() and "(invalid)" in env.to_text()
    page = env.to_html()
    assert "&lt;b&gt;" in page and "<b>\ud800" not in page
    page.encode("utf-8")
    assert "http" not in page


def test_transcript_keeps_the_last_episodes_only():
    env = Transcript(Corridor(), keep=2)
    for turns in range(4):
        play(env, ["wait"] * turns)
    assert [len(episode.turns) for episode in env.episodes] == [2, 3]
    assert env.episode is env.episodes[-1]


def test_wrappers_leave_what_they_wrap_unchanged():
    plain = play(Corridor(3), ["wait", "right", "nonsense", "right", "right"])
    env = Transcript(NoProgress(StepLimit(Corridor(3), 99)))
    wrapped = play(env, ["wait", "right", "nonsense", "right", "right"])
    for one, other in zip(plain, wrapped):
        assert one[:4] == other[:4]
        assert {**one[4], "no_progress": 0} == {**other[4], "no_progress": 0}


def test_a_transcript_makes_its_folder_before_the_first_episode(tmp_path):
    env = Transcript(Corridor(), tmp_path / "not" / "there" / "t.jsonl")
    assert env.path.parent.is_dir()


def test_no_prefix_is_an_empty_one():
    env = ReplayPrefix(Corridor(), lambda observation, info: None)
    _, info = env.reset(seed=0)
    assert info["prefix"] == []


def test_a_limit_that_the_environments_own_one_undercuts_is_told():
    env = Corridor()
    env.max_turns = 30
    with pytest.warns(UserWarning, match="max_turns=30 ends episodes before"):
        StepLimit(env, 50)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        StepLimit(env, 30)
        StepLimit(Corridor(), 50)
