"""Who acts: the student alone, a teacher that helps a stuck student, a teacher that fades out."""

import asyncio

import pytest
from fakes import ByteCodec, CounterEnv, FakeStudent, FakeTeacher, LocalHandle

from divopd_gym.errors import ConfigError
from divopd_gym.prompts import get_prompt
from divopd_trainer.controller import TCODB2F, GuidedOPD, Recovery, StudentOnly
from divopd_trainer.explorer.episode import EpisodeLimits, run_episode
from divopd_trainer.registry import build

HERE = {"run_seed": 0, "task": "t", "attempt": 0, "update": 0, "evaluating": False}


def play(controller, *, skill=0.0, task="9/0", max_turns=20, **more):
    student, teacher = FakeStudent(skill=skill), FakeTeacher()
    rollout = asyncio.run(
        run_episode(
            rollout_id=1,
            task=task,
            env=LocalHandle(CounterEnv()),
            student=student,
            teacher=teacher,
            codec=ByteCodec(),
            prompt=get_prompt("divopd_test/Counter-v0", "tiny"),
            limits=EpisodeLimits(max_turns=max_turns, max_tokens=20),
            controller=controller,
            **more,
        )
    )
    return rollout


def actors(rollout):
    return "".join(turn.actor[0] for turn in rollout.turns)


def test_teacher_takes_over_after_patience_turns_without_progress_for_the_budget():
    # A student that is always wrong: 3 wrong turns, 2 turns of help ... until the help of the whole rollout is used up.
    rollout = play(Recovery(patience=3, budget=2), max_turns=10)
    assert actors(rollout) == "sss" + "tt" + "sssss"
    assert [t.valid for t in rollout.turns] == [t.actor == "student" for t in rollout.turns]
    assert rollout.turns_played == 10
    summary = rollout.meta["controller"]
    assert (summary["name"], summary["teacher_turns"], summary["handoffs"]) == ("recovery", 2, 1)


def test_student_that_makes_progress_is_left_alone():
    assert set(actors(play(Recovery(patience=1, budget=9), skill=1.0, max_turns=9))) == {"s"}


def test_no_help_before_the_warm_up_nor_in_evaluations():
    recovery = Recovery(patience=1, budget=5, warmup_updates=10)
    assert "t" not in actors(play(recovery, update=9))
    assert "t" in actors(play(recovery, update=10))
    assert "t" not in actors(play(recovery, update=10, evaluating=True))


def test_guided_probability_falls_from_one_to_zero_at_four_fifths_of_the_run():
    guided = GuidedOPD(updates=100)
    assert guided.probability(0) == 1.0
    assert guided.probability(40) == pytest.approx(0.5)
    assert guided.probability(80) == guided.probability(100) == 0.0


def test_guided_teacher_share_is_the_probability_and_a_replay_draws_the_same():
    guided = GuidedOPD(updates=100)

    def draw(attempt):
        episode = guided.begin(**{**HERE, "attempt": attempt, "update": 40})
        return [episode.actor(turn) for turn in range(20)]

    draws = [draw(attempt) for attempt in range(50)]
    share = sum(a == "teacher" for d in draws for a in d) / 1000
    assert 0.45 < share < 0.55
    assert draws == [draw(attempt) for attempt in range(50)]
    assert {guided.begin(**{**HERE, "update": 90}).actor(t) for t in range(20)} == {"student"}


def test_controllers_are_found_by_name_with_their_options():
    assert build("controller", "student") == StudentOnly()
    options = {"patience": 2, "budget": 6, "warmup_updates": 50}
    assert build("controller", "recovery", options).patience == 2
    assert build("controller", "guided", {}, {"updates": 40, "seed": 1}) == GuidedOPD(40)


def test_b2f_replays_all_but_the_last_action_and_one_less_every_few_updates():
    b2f = TCODB2F(every=4)
    assert [b2f.replayed_turns(6, update) for update in (0, 3, 4, 8, 20, 100)] == [5, 5, 4, 3, 0, 0]
    episode = b2f.begin(**{**HERE, "update": 8, "reference": list("abcdef")})
    assert [episode.actor(t) for t in range(5)] == ["replay"] * 3 + ["student"] * 2
    assert [episode.replayed(t) for t in range(3)] == list("abc")
    assert b2f.begin(**{**HERE, "evaluating": True}).actor(0) == "student"


def test_b2f_without_a_reference_names_the_task_and_the_way_out():
    with pytest.raises(ConfigError, match="none for task.*tcod-f2b"):
        TCODB2F().begin(**HERE)


@pytest.mark.parametrize(
    "name, options, words",
    [
        ("recover", {}, "recover.*guided"),
        ("recovery", {"patients": 2}, "patients"),
        ("recovery", {"patience": 0}, "patience is 0"),
        ("guided", {}, "updates"),
        ("guided", {"updates": 0}, "updates=0"),
    ],
)
def test_unknown_or_impossible_setting_is_refused_by_name(name, options, words):
    with pytest.raises(ConfigError, match=words):
        build("controller", name, options)
