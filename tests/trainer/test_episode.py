"""One episode: ids that only grow, limits in their order, faults that cost one episode."""

import asyncio
import dataclasses

import numpy as np
import pytest
from fakes import END, ByteCodec, CounterEnv, FakeStudent, FakeTeacher, LocalHandle, teacher_logprob

from divopd_gym.errors import ConfigError
from divopd_gym.prompts import get_prompt
from divopd_trainer.controller import TCODB2F, GuidedOPD, StudentOnly
from divopd_trainer.engines.base import TokenScores
from divopd_trainer.explorer.counters import Counters
from divopd_trainer.explorer.episode import (
    EpisodeFailure,
    EpisodeLimits,
    renumber,
    run_episode,
    score_rollout,
)


def play(task="3/0", *, env=None, student=None, teacher=None, history="accumulate", **more):
    student = student or FakeStudent()
    given = {
        "rollout_id": 5,
        "task": task,
        "env": LocalHandle(env or CounterEnv()),
        "student": student,
        "teacher": teacher,
        "codec": ByteCodec(),
        "prompt": get_prompt("divopd_test/Counter-v0", "tiny", history=history),
        "history": history,
        "limits": EpisodeLimits(max_turns=8, max_tokens=20),
    }
    return asyncio.run(run_episode(**{**given, **more}))


def test_solved_task_ends_with_success():
    rollout = play("3/0", teacher=FakeTeacher())
    assert (rollout.success, rollout.done, rollout.done_reason) == (True, True, "success")
    assert rollout.turns_played == len(rollout.turns) == 3
    assert [t.action for t in rollout.turns] == ["go 1", "go 2", "go 3"]
    assert rollout.score == 1.0 and rollout.reward == pytest.approx(1.0)
    assert all(t.valid for t in rollout.turns)


def test_accumulate_is_one_segment_and_each_prompt_begins_with_all_before_it():
    student = FakeStudent()
    rollout = play(student=student)
    segment = rollout.turns[0].segment
    assert all(t.segment is segment for t in rollout.turns)
    for turn, request in zip(rollout.turns, student.requests):
        assert np.array_equal(request.prompt_ids, turn.prompt_ids)
        assert np.array_equal(request.prompt_ids, segment.token_ids[: turn.start])
    for before, after in zip(rollout.turns, rollout.turns[1:]):
        assert after.start > before.end
    assert len({str(r.cache_key) for r in student.requests}) == 1


def test_window_is_a_segment_per_turn_showing_the_last_n_pairs():
    student = FakeStudent()
    rollout = play("4/2", student=student, history="window:1")
    assert len(rollout.segments) == 4
    assert [s.index for s in rollout.segments] == [0, 1, 2, 3]
    last = ByteCodec().decode(rollout.turns[3].prompt_ids)
    assert "go 3" in last and "go 2" not in last
    assert all(r.cache_key is None for r in student.requests)


def test_ids_are_those_of_the_engine_even_if_their_text_would_encode_differently():
    class Odd(FakeStudent):
        async def generate(self, request):
            generation = await super().generate(request)
            # A broken byte: decoded it becomes a replacement character of three bytes.
            generation.token_ids = np.insert(generation.token_ids, 0, 0xC3).astype(np.int32)
            generation.logprobs = np.insert(generation.logprobs, 0, -1.0).astype(np.float32)
            return generation

    rollout = play(student=Odd(), limits=EpisodeLimits(max_turns=2, max_tokens=20))
    first = rollout.turns[0]
    assert first.response_ids.tolist() == [0xC3, *b"go 1", END]
    assert rollout.turns[1].prompt_ids[first.start : first.end].tolist() == first.response_ids.tolist()


def test_teacher_scores_one_call_a_segment_and_entry_i_scores_token_start_plus_i():
    teacher = FakeTeacher()
    rollout = play(teacher=teacher)
    assert len(teacher.scored) == 1
    for turn in rollout.turns:
        positions = np.arange(turn.start, turn.end)
        assert np.allclose(turn.teacher_logprobs, teacher_logprob(turn.response_ids, positions))
        gap = float((turn.student_logprobs.astype(float) - turn.teacher_logprobs).sum())
        assert turn.score == pytest.approx(gap)


def test_window_turns_are_scored_one_by_one():
    teacher = FakeTeacher()
    rollout = play(teacher=teacher, history="window:0")
    assert len(teacher.scored) == len(rollout.turns)
    assert all(t.valid for t in rollout.turns)


@pytest.mark.parametrize("history", ["accumulate", "window:2"])
def test_context_overflow_truncates_the_episode_and_its_scored_turns_still_train(history):
    env = CounterEnv(lengths=(50,), grow=10)
    limits = EpisodeLimits(max_turns=50, max_tokens=20, max_model_len=400)
    student = FakeStudent()
    rollout = play("50/0", env=env, student=student, teacher=FakeTeacher(), limits=limits, history=history)
    assert rollout.done_reason == "context_overflow"
    assert rollout.meta["truncated"] and not rollout.done
    assert len(rollout.turns) >= 2 and all(t.valid for t in rollout.turns)
    assert all(len(r.prompt_ids) + r.max_tokens <= 400 for r in student.requests)


def test_overflow_noticed_by_the_engine_alone_ends_the_episode_the_same_way():
    env = CounterEnv(lengths=(50,), grow=10)
    limits = EpisodeLimits(max_turns=50, max_tokens=20)
    rollout = play("50/0", env=env, student=FakeStudent(max_len=400), teacher=FakeTeacher(), limits=limits)
    assert rollout.done_reason == "context_overflow" and all(t.valid for t in rollout.turns)


def test_horizon_ends_the_episode_before_the_context_is_looked_at():
    rollout = play("3/0", limits=EpisodeLimits(max_turns=2, max_tokens=20, max_model_len=10_000))
    assert (rollout.done_reason, rollout.turns_played, rollout.done) == ("turn_limit", 2, False)


def test_horizon_shortens_but_never_lengthens_a_rollout():
    assert play("3/0", max_turns=2).turns_played == 2
    limits = EpisodeLimits(max_turns=2, max_tokens=20)
    assert play("3/0", limits=limits, max_turns=99).turns_played == 2


def test_unparsable_or_refused_action_is_sent_flagged_and_counted():
    student = FakeStudent(skill=0.0)
    rollout = play("3/0", student=student, teacher=FakeTeacher())
    assert rollout.turns_played == 8 and rollout.meta["invalid_actions"] == 8
    assert [t.action for t in rollout.turns] == ["go 0"] * 8
    assert not any(t.action_valid for t in rollout.turns) and all(t.valid for t in rollout.turns)


def test_reply_cut_by_length_is_closed_before_the_next_prompt():
    student = FakeStudent(rambles=True)
    rollout = play(student=student, limits=EpisodeLimits(max_turns=2, max_tokens=5))
    first, second = rollout.turns
    assert first.stop_reason == "length" and first.n_tokens == 5
    assert second.prompt_ids[first.end] == END


@pytest.mark.parametrize("teacher", [FakeTeacher(nan=True), FakeTeacher(none=True)])
def test_missing_teacher_scores_make_dead_rows_and_no_exception(teacher):
    rollout = play(teacher=teacher)
    assert rollout.success and not any(t.valid for t in rollout.turns)


def test_ids_that_mean_something_else_to_the_teacher_are_masked():
    shared = np.ones(259, bool)
    shared[END] = False
    rollout = play(teacher=FakeTeacher(), teacher_vocabulary=shared)
    for turn in rollout.turns:
        assert turn.valid_mask().tolist() == [True] * (turn.n_tokens - 1) + [False]


def test_candidates_that_the_student_does_not_have_are_absent():
    class Listing(FakeTeacher):
        async def score(self, token_ids, spans, topk=0):
            found = await super().score(token_ids, spans)
            ids = [np.tile(np.array([5, END, 10_000], np.int32), (len(f), 1)) for f in found]
            return [TokenScores(f, i, np.log(np.full(i.shape, 0.3))) for f, i in zip(found, ids)]

    shared = np.ones(259, bool)
    shared[END] = False
    for turn in play(teacher=Listing(), teacher_vocabulary=shared, topk=3).turns:
        assert turn.teacher_topk_ids.tolist() == [[5, -1, -1]] * turn.n_tokens


def test_policy_version_is_that_of_each_turn():
    class Learning(FakeStudent):
        async def generate(self, request):
            generation = await super().generate(request)
            self.policy_version += 1
            return generation

    rollout = play(student=Learning(version=3))
    assert [t.policy_version for t in rollout.turns] == [3, 4, 5]
    assert rollout.policy_versions == (3, 5)


def test_failed_generation_is_one_failed_episode_with_its_cause():
    with pytest.raises(EpisodeFailure, match=r"3/0.*answered 500"):
        play(student=FakeStudent(fail_on="next is 2"))


def test_lengths_are_clipped_before_a_request_is_sent_and_a_refused_one_is_sent_once():
    """Field report 26: a request that cannot fit never leaves, and a refusal is not tried again."""
    student = FakeStudent()
    limits = EpisodeLimits(max_turns=8, max_tokens=20, max_model_len=90)
    play(student=student, env=CounterEnv(grow=2), limits=limits)
    assert student.requests
    assert all(len(r.prompt_ids) + r.max_tokens <= 90 and r.max_tokens >= 1 for r in student.requests)
    assert min(r.max_tokens for r in student.requests) < 20

    refusing = FakeStudent(refuses=True)
    with pytest.raises(EpisodeFailure):
        play(student=refusing)
    assert len(refusing.requests) == 1


def test_failed_scoring_is_one_failed_episode():
    with pytest.raises(EpisodeFailure, match="teacher is gone"):
        play(teacher=FakeTeacher(fail_after=0))


def test_broken_environment_is_one_failed_episode():
    with pytest.raises(EpisodeFailure, match="broken"):
        play(env=CounterEnv(fail=("3/0",)))


def test_hanging_engine_fails_the_episode_at_its_deadline():
    limits = EpisodeLimits(max_turns=5, max_tokens=9, episode_timeout_s=0.05)
    with pytest.raises(EpisodeFailure, match=r"student's reply.*episode_timeout_s"):
        play(student=FakeStudent(delay_s=30), limits=limits)


def test_caches_are_forgotten_however_the_episode_ends():
    student, teacher = FakeStudent(), FakeTeacher()
    play(student=student, teacher=teacher)
    assert student.forgotten == teacher.forgotten == [("episode", 5)]
    broken = FakeStudent(refuses=True)
    with pytest.raises(EpisodeFailure):
        play(student=broken)
    assert broken.forgotten == [("episode", 5)]


def test_seed_of_a_request_is_unique_and_the_same_in_a_replay():
    seeds = {}
    for run_seed in range(2):
        for task in ("2/0", "3/1", "4/2"):
            for attempt in range(3):
                student = FakeStudent(skill=0.5)
                rollout = play(task, student=student, run_seed=run_seed, attempt=attempt)
                seeds[run_seed, task, attempt] = [r.seed for r in student.requests]
                again = FakeStudent(skill=0.5)
                replayed = play(task, student=again, run_seed=run_seed, attempt=attempt)
                assert [r.seed for r in again.requests] == seeds[run_seed, task, attempt]
                assert [t.action for t in replayed.turns] == [t.action for t in rollout.turns]
    flat = [s for some in seeds.values() for s in some]
    assert len(set(flat)) == len(flat) > 40


def test_teacher_turns_stay_in_the_history_and_never_train():
    class EveryOther(StudentOnly):
        def begin(self, **_):
            episode = super().begin()
            episode.actor = lambda turn: "teacher" if turn % 2 else "student"
            return episode

    student, teacher = FakeStudent(), FakeTeacher()
    rollout = play("4/2", student=student, teacher=teacher, controller=EveryOther())
    assert [t.actor for t in rollout.turns] == ["student", "teacher"] * 2
    assert [t.valid for t in rollout.turns] == [True, False] * 2
    assert rollout.turns_played == 4
    assert len({id(t.segment) for t in rollout.turns}) == 1
    assert [spans for _, spans in teacher.scored] == [
        [(t.start, t.end) for t in rollout.turns if t.actor == "student"]
    ]


def test_guided_episodes_carry_the_teachers_replies_as_turns_to_imitate():
    teacher = FakeTeacher()
    rollout = play("4/2", student=FakeStudent(), teacher=teacher, controller=GuidedOPD(updates=10), update=4)
    by_teacher = [t for t in rollout.turns if t.actor == "teacher"]
    assert 0 < len(by_teacher) < 4
    for turn in by_teacher:
        assert turn.imitated and turn.trainable and turn.valid and turn.score == 0.0
        assert np.isnan(turn.student_logprobs).all() and turn.valid_mask().all()
        assert np.allclose(
            turn.teacher_logprobs, -0.1 - 0.001 * np.arange(turn.n_tokens)
        )  # as it was sampled
    scored = [span for _, spans in teacher.scored for span in spans]
    assert scored == [(t.start, t.end) for t in rollout.turns if t.actor == "student"]
    assert rollout.meta["controller"]["teacher_turns"] == len(by_teacher)


def test_imitated_tokens_that_the_student_reads_otherwise_are_masked():
    vocabulary = np.ones(300, bool)
    vocabulary[ord("g")] = False
    rollout = play(
        "2/0", teacher=FakeTeacher(), controller=GuidedOPD(updates=10), teacher_vocabulary=vocabulary
    )
    assert [t.actor for t in rollout.turns] == ["teacher"] * 2  # b is 1 at the start
    assert all(t.valid and t.valid_mask().tolist() == [False, True, True, True, True] for t in rollout.turns)


def test_imitated_replies_without_a_single_shared_token_cannot_train():
    nothing = np.zeros(300, bool)
    rollout = play("2/0", teacher=FakeTeacher(), controller=GuidedOPD(updates=10), teacher_vocabulary=nothing)
    assert {t.why_not for t in rollout.turns} == {"no_valid_token"}


@pytest.mark.parametrize("history", ["accumulate", "window:2"])
def test_b2f_replays_into_the_history_without_loss_and_the_student_goes_on_from_there(history):
    student, teacher = FakeStudent(), FakeTeacher()
    rollout = play(
        "4/2", student=student, teacher=teacher, controller=TCODB2F(every=4), history=history, update=4
    )
    # Four actions, the last one never replayed, one less after four updates.
    assert [t.actor for t in rollout.turns] == ["replay"] * 2 + ["student"] * 2
    assert [t.action for t in rollout.turns] == ["go 1", "go 2", "go 3", "go 4"]
    assert [t.valid for t in rollout.turns] == [False, False, True, True]
    assert rollout.success and rollout.turns_played == 4 and rollout.meta["invalid_actions"] == 0
    assert rollout.meta["controller"] == {"name": "tcod-b2f", "replayed_turns": 2}
    assert len(student.requests) == 2
    for turn, request in zip(rollout.turns[2:], student.requests):
        assert np.array_equal(request.prompt_ids, turn.prompt_ids)
    if history == "accumulate":
        segment = rollout.turns[0].segment
        text = ByteCodec().decode(segment.token_ids)
        assert [text.count(f"go {n}") for n in (1, 2, 3, 4)] == [1, 1, 1, 1]
        for before, after in zip(rollout.turns, rollout.turns[1:]):
            assert after.segment is segment and after.start > before.end
    assert rollout.policy_versions == (0, 0)


def test_b2f_at_evaluation_replays_nothing():
    rollout = play("4/2", controller=TCODB2F(), evaluating=True)
    assert {t.actor for t in rollout.turns} == {"student"}


def test_a_replay_that_solves_the_task_leaves_no_row():
    class All(TCODB2F):
        def replayed_turns(self, length, update):
            return length

    student, teacher = FakeStudent(), FakeTeacher()
    rollout = play("3/1", student=student, teacher=teacher, controller=All())
    assert rollout.success and {t.actor for t in rollout.turns} == {"replay"}
    assert not any(t.trainable for t in rollout.turns) and rollout.policy_versions is None
    assert student.requests == [] and teacher.scored == []


def test_a_replay_that_does_not_fit_the_context_truncates_the_episode():
    limits = EpisodeLimits(max_turns=8, max_tokens=4, max_model_len=70)
    rollout = play("4/2", controller=TCODB2F(every=100), limits=limits)
    assert rollout.done_reason == "context_overflow" and not rollout.success
    assert {t.actor for t in rollout.turns} == {"replay"}


def test_evaluation_is_the_student_alone():
    teacher = FakeTeacher()
    rollout = play(teacher=teacher, controller=GuidedOPD(updates=10), evaluating=True, score=False)
    assert {t.actor for t in rollout.turns} == {"student"}
    assert teacher.requests == [] and teacher.scored == []


def test_controller_that_needs_a_missing_teacher_says_so():
    with pytest.raises(EpisodeFailure, match="there is none; configure a teacher"):
        play(controller=GuidedOPD(updates=10))


def test_renumbered_rollout_agrees_with_itself():
    rollout = renumber(play(teacher=FakeTeacher(), history="window:1"), 77)
    assert rollout.rollout_id == 77
    assert {t.rollout_id for t in rollout.turns} == {s.rollout_id for s in rollout.segments} == {77}


def test_scoring_later_equals_scoring_at_once():
    at_once = play(teacher=FakeTeacher())
    later = play()
    assert not any(t.valid for t in later.turns)
    asyncio.run(score_rollout(later, FakeTeacher()))
    assert [t.score for t in later.turns] == [t.score for t in at_once.turns]


@pytest.mark.parametrize("history", ["window", "window:x", "window:-1", "all"])
def test_unknown_history_is_refused(history):
    with pytest.raises(ConfigError, match="accumulate"):
        play(history=history, prompt=get_prompt("x", "tiny"))


@pytest.mark.parametrize("field", ["max_turns", "max_tokens", "max_model_len", "episode_timeout_s"])
def test_impossible_limit_is_refused_by_name(field):
    with pytest.raises(ConfigError, match=field):
        EpisodeLimits(**{field: 0})


def test_turns_too_old_to_train_are_left_unscored_and_say_so():
    student, teacher = FakeStudent(skill=0.0), FakeTeacher()
    rollout = play("3/0", student=student, teacher=teacher, score=False)
    rollout.turns = [dataclasses.replace(t, policy_version=t.index // 4) for t in rollout.turns]
    asyncio.run(score_rollout(rollout, teacher, oldest_version=1))
    assert [t.valid for t in rollout.turns] == [False] * 4 + [True] * 4
    assert all(t.info.get("unscored") == ("stale" if t.index < 4 else None) for t in rollout.turns)
    counters = Counters()
    counters.episode(rollout, scored=True)
    assert counters.totals["unscored_turns"] == 4 and counters.totals["dead_rows"] == 0
