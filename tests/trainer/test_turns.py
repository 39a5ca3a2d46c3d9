import pickle

import numpy as np
import pytest

from divopd_trainer.turns import Actor, Rollout, Segment, StopReason, TurnError, WhyNot, make_turn, score_turn


def turn_of(n=3, prompt=2, teacher="same", **kwargs):
    segment = Segment(7, 0, np.arange(prompt + n))
    student = -np.arange(1, n + 1, dtype=np.float32)
    if isinstance(teacher, str):
        teacher = student - 0.5
    return make_turn(
        rollout_id=7, index=0, segment=segment, start=prompt, end=prompt + n, student_logprobs=student,
        teacher_logprobs=teacher, **kwargs,
    )  # fmt: skip


def test_segment_grows_and_earlier_arrays_stay():
    segment = Segment(1)
    assert segment.append([1, 2]) == (0, 2)
    seen = segment.token_ids
    assert segment.append(np.array([3])) == (2, 3)
    assert segment.token_ids.dtype == np.int32 and segment.token_ids.tolist() == [1, 2, 3]
    assert seen.tolist() == [1, 2]


def test_turn_points_into_its_segment():
    turn = turn_of()
    assert turn.prompt_ids.tolist() == [0, 1] and turn.response_ids.tolist() == [2, 3, 4]
    assert (turn.n_tokens, turn.seq_len) == (3, 5)


def test_score_is_the_signed_sum_of_student_minus_teacher():
    student, teacher = [-1.0, -2.0, -3.0], [-0.5, -4.0, -3.25]
    segment = Segment(0, 0, np.arange(4))
    turn = make_turn(
        rollout_id=0, index=0, segment=segment, start=1, end=4, student_logprobs=student,
        teacher_logprobs=teacher,
    )  # fmt: skip
    assert turn.valid and turn.why_not is None
    assert turn.score == pytest.approx(-0.5 + 2.0 + 0.25)
    masked = score_turn(turn, teacher, [True, False, True])
    assert masked.score == pytest.approx(-0.5 + 0.25)
    assert masked.segment is turn.segment


@pytest.mark.parametrize(
    ("change", "why_not"),
    [
        (dict(actor=Actor.TEACHER), WhyNot.NOT_STUDENT),
        (dict(actor="replay"), WhyNot.NOT_STUDENT),
        (dict(prompt_truncated=True), WhyNot.PROMPT_TRUNCATED),
        (dict(stop_reason=StopReason.ERROR), WhyNot.GENERATION_FAILED),
        (dict(n=0, teacher=[]), WhyNot.NO_TOKENS),
        (dict(prompt=0), WhyNot.NO_TOKENS),
        (dict(teacher=None), WhyNot.NO_TEACHER_SCORES),
        (dict(teacher=[-1.0, -1.0]), WhyNot.TEACHER_SCORES_MISALIGNED),
        (dict(teacher_mask=[True, True]), WhyNot.TEACHER_MASK_MISALIGNED),
        (dict(teacher_mask=[False] * 3), WhyNot.NO_VALID_TOKEN),
        (dict(teacher=[np.nan, -np.inf, np.nan]), WhyNot.NO_VALID_TOKEN),
    ],
)
def test_gate_names_why_a_turn_carries_no_loss(change, why_not):
    turn = turn_of(**change)
    assert not turn.valid and turn.why_not == why_not.value and turn.score == 0.0
    assert not turn.valid_mask().any() and turn.valid_mask().shape == (turn.n_tokens,)


@pytest.mark.parametrize("stop_reason", ["end_of_turn", "length", "context_overflow"])
def test_a_cut_reply_still_trains(stop_reason):
    assert turn_of(stop_reason=stop_reason).valid


def test_tokens_without_a_teacher_score_are_masked_alone():
    turn = turn_of(teacher=[-1.5, np.nan, -3.5], teacher_mask=[True, True, True])
    assert turn.valid and turn.valid_mask().tolist() == [True, False, True]
    assert turn.score == pytest.approx(1.0)


def test_spans_and_logprobs_that_do_not_fit_are_refused():
    segment = Segment(0, 0, np.arange(3))
    with pytest.raises(TurnError, match="append the response"):
        make_turn(rollout_id=0, index=0, segment=segment, start=2, end=5, student_logprobs=[0, 0, 0])
    with pytest.raises(TurnError, match="one log-prob"):
        make_turn(rollout_id=0, index=0, segment=segment, start=1, end=3, student_logprobs=[0.0])
    with pytest.raises(TurnError, match="nobody"):
        turn_of(actor="nobody")


def test_pickled_rollout_keeps_its_shared_segment():
    segment = Segment(3, 0, np.arange(10))
    turns = [
        make_turn(
            rollout_id=3, index=i, segment=segment, start=2 + 3 * i, end=4 + 3 * i, student_logprobs=[0, -1],
            teacher_logprobs=[-1, -1],
        )
        for i in range(2)
    ]  # fmt: skip
    back = pickle.loads(pickle.dumps(Rollout(3, "task", turns=turns)))
    assert back.segments == [back.turns[0].segment] and back.turns[1].segment is back.turns[0].segment
    assert [t.score for t in back.valid_turns] == [t.score for t in turns]


def test_extra_draws_stay_with_the_turn_when_it_is_scored_again():
    drawn = np.arange(6).reshape(3, 2)
    turn = turn_of(teacher=None, extra_ids=drawn)
    assert turn.extra_ids.dtype == np.int32 and turn.extra_teacher_logprobs is None
    scored = score_turn(turn, [-1.0] * 3, extra_teacher_logprobs=-np.ones((3, 2)))
    assert scored.valid and np.array_equal(scored.extra_ids, drawn)
    assert scored.extra_teacher_logprobs.dtype == np.float32
    # A ranking must not depend on what else was drawn.
    assert scored.score == score_turn(turn, [-1.0] * 3).score


def test_extra_draws_that_are_not_one_row_a_token_are_refused():
    for drawn in (np.zeros((2, 2)), np.zeros(3)):
        with pytest.raises(TurnError, match="extra draws of shape"):
            turn_of(extra_ids=drawn)


def test_scores_that_do_not_belong_to_the_extra_draws_make_a_turn_invalid():
    for turn in (
        turn_of(extra_ids=np.zeros((3, 2)), extra_teacher_logprobs=np.zeros((3, 1))),
        turn_of(extra_teacher_logprobs=np.zeros((3, 1))),
    ):
        assert turn.why_not == WhyNot.TEACHER_SCORES_MISALIGNED
