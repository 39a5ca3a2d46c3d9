"""Guided-OPD, ATOD, SAGE-OPD and RetireOPD: the published formulas with numbers worked by hand."""

import json
import math

import numpy as np
import pytest

from divopd_gym.errors import ConfigError
from divopd_trainer.packing import pack
from divopd_trainer.turns import Rollout, Segment, make_turn
from divopd_trainer.weighting_methods import ATODWeighting, GuidedWeighting, RetireWeighting, SAGEWeighting


def turn(student, teacher, *, rid=0, index=0, actor="student", info=None, top1=None):
    """A turn with these log-probs; NaN in the teacher's are tokens that are not valid."""
    segment = Segment(rid)
    segment.append([5, 6])
    start, end = segment.append(range(10, 10 + len(student)))
    return make_turn(
        rollout_id=rid, index=index, segment=segment, start=start, end=end, student_logprobs=student,
        teacher_logprobs=teacher, actor=actor, info=info,
        teacher_topk_ids=None if top1 is None else [[3]] * len(top1),
        teacher_topk_logprobs=None if top1 is None else np.log(np.array(top1))[:, None],
    )  # fmt: skip


def imitated(n, **more):
    return turn([math.nan] * n, [-1.0] * n, actor="teacher", info={"imitate": True}, **more)


def listed(arrays):
    return [array.tolist() for array in arrays]


# Guided-OPD.


def guided_rows(b):
    rollout = Rollout(0, turns=[turn([-1, -2], [-1, -1]), imitated(4, index=1)])
    if b is not None:
        rollout.meta["controller"] = {"name": "guided", "teacher_probability": b}
    GuidedWeighting().annotate(rollout)
    return rollout.turns


def test_guided_student_rows_weigh_one_minus_b_and_imitated_rows_are_rewarded_b():
    found = GuidedWeighting().weights(guided_rows(0.25), update=7)
    # Two rows: half each; 2 and 4 tokens share them.
    assert listed(found.weights) == [[0.75 / 4] * 2, [0.0] * 4]
    assert listed(found.rewards) == [[0.0] * 2, [0.25 / 8] * 4]


def test_guided_goes_by_the_b_that_played_the_rollout_not_by_the_update():
    rows = guided_rows(0.25)
    early, late = (GuidedWeighting().weights(rows, update) for update in (1, 1000))
    assert listed(early.weights) == listed(late.weights) and listed(early.rewards) == listed(late.rewards)


def test_an_episode_left_to_the_student_is_distilled_in_full():
    found = GuidedWeighting().weights(guided_rows(None)[:1], 1)
    assert listed(found.weights) == [[0.5, 0.5]] and listed(found.rewards) == [[0.0, 0.0]]


def test_imitated_rows_reach_the_learner_with_their_reward():
    rows = guided_rows(0.25)
    micros = pack(rows, GuidedWeighting().weights(rows, 1))
    rewards = np.concatenate([m.rewards[m.row == 1].numpy() for m in micros])
    assert rewards.tolist() == [0.25 / 8] * 4


def test_what_a_weighting_notes_is_json():
    json.dumps([t.info for t in guided_rows(0.25)])


# ATOD.


def test_atod_scales_go_from_distillation_to_reward():
    scales = ATODWeighting().scales
    assert scales(0) == (1.0, 1.0)
    assert scales(40) == pytest.approx((0.55, 1.5))
    assert scales(80) == pytest.approx((0.1, 2.0)) == scales(200)
    assert ATODWeighting(10, 0.5).scales(5) == pytest.approx((0.75, 1.5))


# Mean gaps 1, 2, 3 -> d = 0, 0.5, 1; mean surprises 2, 4, 3 -> h = 0, 1, 0.5.
TURNS = [
    turn([-1.0, -3.0], [-2.0, -2.0]),
    turn([-4.0, -4.0], [-2.0, -6.0], index=1),
    turn([-3.0], [-6.0], index=2),
]


def test_atod_turn_weights_need_both_small_gap_and_small_surprise_to_be_small():
    # w = 1 - (1 - d)(1 - h)
    assert ATODWeighting.turn_weights(TURNS) == pytest.approx([0.0, 1.0, 1.0])
    quarter = turn([-2.5, -2.5], [-1.0, -4.0], index=3)  # gap 1.5: d = 0.25; surprise 2.5: h = 0.25
    assert ATODWeighting.turn_weights([*TURNS, quarter])[3] == pytest.approx(1 - 0.75 * 0.75)


def test_atod_equal_turns_count_half_in_each_respect():
    same = [turn([-1.0], [-2.0], index=i) for i in range(3)]
    assert ATODWeighting.turn_weights(same) == [0.75] * 3
    assert ATODWeighting.turn_weights([]) == []


def test_atod_tokens_that_are_not_valid_do_not_count():
    masked = turn([-1.0, -3.0, -50.0], [-2.0, -2.0, math.nan])
    assert ATODWeighting.turn_weights([masked, *TURNS[1:]]) == pytest.approx([0.0, 1.0, 1.0])


def test_atod_adds_the_weighted_gap_and_the_group_advantage():
    rows = [turn([-1.0, -3.0], [-2.0, -2.0], info={"group_advantage": -1.5}), turn([-3.0], [-6.0], index=1)]
    rows[1].info["group_advantage"] = 2.0
    rollout = Rollout(0, turns=rows)
    weighting = ATODWeighting()
    weighting.annotate(rollout)
    assert [row.info["turn_weight"] for row in rows] == pytest.approx([0.0, 1.0])
    found = weighting.weights(rows, 40)  # kappa 0.55, rho 1.5
    assert np.concatenate(found.weights) == pytest.approx([0.0, 0.0, 0.55 / 2])
    assert np.concatenate(found.rewards) == pytest.approx([1.5 * -1.5 / 4] * 2 + [1.5 * 2.0 / 2])


def test_atod_compares_turns_over_the_whole_rollout_and_leaves_others_alone():
    rollout = Rollout(0, turns=[*TURNS, imitated(2, index=3), turn([-1.0], None, index=4)])
    for t in rollout.turns:
        t.info.pop("turn_weight", None)
    ATODWeighting().annotate(rollout)
    assert ["turn_weight" in t.info for t in rollout.turns] == [True, True, True, False, False]


@pytest.mark.parametrize("weighting", [ATODWeighting(), RetireWeighting()])
def test_rewards_without_groups_are_refused_with_the_remedy(weighting):
    with pytest.raises(ConfigError, match="0/0 has no group advantage.*attempts_per_task"):
        weighting.weights([turn([-1.0], [-1.0])], 1)
    dead = turn([-1.0], None)
    assert listed(weighting.weights([dead], 1).weights) == [[0.0]]


# SAGE.


def test_sage_weighs_verdict_times_confidence_with_mean_one():
    rows = [
        turn([-1, -1], [-1, -1], info={"sage": "weak"}, top1=[0.5, 1.0]),
        turn([-1, -1], [-1, -1], index=1, info={"sage": "strong"}, top1=[0.2, 0.8]),
        turn([-1], [-1], index=2, info={"sage": "skip"}, top1=[0.9]),
    ]
    # 0.5 * (0.5, 1) and 1.5 * (0.2, 0.8) and 0: sum 2.25 over 5 valid tokens, so all times 5 / 2.25 = 20 / 9.
    expected = [0.25, 0.5, 0.3, 1.2, 0.0]
    found = SAGEWeighting().weights(rows, 1)
    shares = [1 / 6, 1 / 6, 1 / 6, 1 / 6, 1 / 3]
    assert np.concatenate(found) == pytest.approx(np.array(expected) * 20 / 9 * shares, rel=1e-6)
    relative = np.concatenate(found) / shares
    assert relative.mean() == pytest.approx(1)


def test_sage_tokens_and_rows_that_are_not_valid_do_not_move_the_mean():
    rows = [
        turn([-1, -1], [-1, math.nan], info={"sage": "weak"}, top1=[0.5, 1.0]),
        turn([-1], None, index=1),
    ]
    assert listed(SAGEWeighting().weights(rows, 1)) == [[pytest.approx(0.5), 0.0], [0.0]]


def test_sage_a_batch_of_skipped_turns_weighs_nothing():
    rows = [turn([-1, -1], [-1, -1], info={"sage": "skip"}, top1=[0.5, 1.0])]
    assert listed(SAGEWeighting().weights(rows, 1)) == [[0.0, 0.0]]


def test_sage_refuses_turns_without_verdict_or_candidates():
    with pytest.raises(ConfigError, match="verdict None.*skip, weak, strong"):
        SAGEWeighting().weights([turn([-1], [-1], top1=[0.5])], 1)
    with pytest.raises(ConfigError, match="teacher_top_k"):
        SAGEWeighting().weights([turn([-1], [-1], info={"sage": "weak"})], 1)


# RetireOPD.


def watched(weighting, gaps, start=1, **more):
    for update, gap in enumerate(gaps, start):
        weighting.observe({"update": update, "kl_per_token": gap, "skipped": 0, **more})
    return weighting.retired_at


def test_retire_ends_distillation_when_the_gap_stops_shrinking():
    assert watched(RetireWeighting(window=2), [4, 3, 2, 1.5, 1.2, 1.0]) is None
    # 1.2 + 1.0 against 1.1 + 1.1: no smaller than before, seen after update 8.
    assert watched(RetireWeighting(window=2), [4, 3, 2, 1.5, 1.2, 1.0, 1.1, 1.1, 0.1]) == 8


def test_retire_also_waits_for_the_student_to_reach_its_part_of_the_teacher():
    weighting = RetireWeighting(window=1, success_ratio=0.8, teacher_success=0.5)
    assert watched(weighting, [1.0, 1.0]) is None
    weighting.observe_eval({"success_rate": 0.39})
    assert watched(weighting, [1.0], 3) is None
    weighting.observe_eval({"success_rate": 0.4})
    assert weighting.retired_at is None and watched(weighting, [1.0], 4) == 4


def test_retire_is_rewards_beside_distillation_and_then_rewards_alone_for_good():
    rows = [
        turn([-1, -1], [-2, -2], info={"group_advantage": 0.5}),
        turn([-1], [-2], index=1, info={"group_advantage": -1.0}),
    ]
    weighting = RetireWeighting(window=1)
    before = weighting.weights(rows, 1)
    assert listed(before.weights) == [[0.25, 0.25], [0.5]]
    assert listed(before.rewards) == [[0.125, 0.125], [-0.5]]
    assert watched(weighting, [1.0, 1.0, 0.1, 0.01]) == 2
    after = weighting.weights(rows, 5)
    assert listed(after.weights) == [[0.0, 0.0], [0.0]] and listed(after.rewards) == listed(before.rewards)


def test_retire_leaves_out_updates_that_were_skipped_or_have_no_gap():
    weighting = RetireWeighting(window=1)
    for gap in (None, math.nan):
        weighting.observe({"update": 1, "kl_per_token": gap})
    assert watched(weighting, [1.0, 2.0], skipped=1) is None
    assert weighting.state_dict()["gaps"] == []


def test_retire_goes_on_from_its_state():
    one = RetireWeighting(window=2, teacher_success=0.5)
    watched(one, [1.0, 0.9, 0.8])
    one.observe_eval({"success_rate": 0.5})
    two = RetireWeighting(window=2, teacher_success=0.5)
    two.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert watched(two, [1.2], 4) == 4
    three = RetireWeighting(window=2)
    three.load_state_dict(json.loads(json.dumps(two.state_dict())))
    assert three.retired_at == 4


@pytest.mark.parametrize(
    "kind, options, said",
    [
        (ATODWeighting, {"ramp_updates": 0}, "ramp_updates 0"),
        (ATODWeighting, {"least_kappa": 1.1}, "least_kappa 1.1"),
        (SAGEWeighting, {"weak": 0.0}, "weak 0.0"),
        (SAGEWeighting, {"weak": 2.0}, "weak 2.0 and strong 1.5"),
        (RetireWeighting, {"window": 0}, "window 0"),
        (RetireWeighting, {"success_ratio": 1.2}, "success_ratio 1.2"),
        (RetireWeighting, {"teacher_success": 0.0}, "teacher_success 0.0"),
        (GuidedWeighting, {"reduction": "mean"}, "reduction"),
    ],
)
def test_options_out_of_range_are_refused(kind, options, said):
    with pytest.raises(ConfigError, match=said):
        kind(**options)
