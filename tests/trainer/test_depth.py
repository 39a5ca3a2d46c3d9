"""Rounds of probes: full depth, marked, made up for, and the only rollouts that a horizon hears of."""

import json
import math

import pytest

from divopd_trainer.explorer.depth import DepthControl, reverse_kl_per_turn
from divopd_trainer.horizon import FixedHorizon, TurnOPDHorizon
from divopd_trainer.turns import Rollout, Segment, make_turn


class Recorder(TurnOPDHorizon):
    """Notes what it is told; allows 3 turns once a round is closed."""

    def __init__(self, **more):
        super().__init__(max_turns=10, **more)
        self.heard, self.rounds = [], []

    def observe_probe(self, reverse_kl_per_turn, success):
        super().observe_probe(reverse_kl_per_turn, success)
        self.heard.append((list(reverse_kl_per_turn), success))

    def close_probe(self):
        super().close_probe()
        self.rounds.append(len(self.heard))

    def turns(self, update):
        return 3 if self.rounds else self.max_turns


def rollout(gaps, success=False, extra=0):
    """One turn a gap, of two tokens; `extra` turns of a review behind them."""
    segment, turns = Segment(0), []
    segment.append([1, 2, 3])
    for index, gap in enumerate([*gaps, *[9.0] * extra]):
        start, end = segment.append([5, 6])
        scores = None if gap is None else [-1.0 - gap] * 2
        turns.append(
            make_turn(
                rollout_id=0,
                index=index,
                segment=segment,
                start=start,
                end=end,
                student_logprobs=[-1.0, -1.0],
                teacher_logprobs=scores,
            )
        )
    return Rollout(0, turns=turns, turns_played=len(gaps), success=success)


def control(horizon=None, probes=2):
    return DepthControl(horizon or Recorder(warmup_updates=1, probe_every=4), 10, probes)


def test_the_first_rollouts_of_the_warm_up_are_the_first_round_and_the_rest_run_at_full_depth_unheard():
    depth = control()
    assert [depth.begin(0) for _ in range(3)] == [(10, True), (10, True), (10, False)]
    depth.end(rollout([0.5, 1.5]), False)
    depth.end(rollout([1.0, 2.0]), True)
    assert depth.horizon.rounds == []
    depth.end(rollout([3.0], success=True), True)
    assert depth.horizon.rounds == [2]
    assert depth.horizon.heard == [([1.0, 2.0], False), ([3.0], True)]


def test_a_round_begins_at_its_update_and_only_once():
    depth = control(Recorder(warmup_updates=0, probe_every=4))
    assert depth.begin(1) == (10, False)  # nothing is closed yet: full depth, but no probe
    begun = [depth.begin(3) for _ in range(2)]
    assert begun == [(10, True)] * 2
    for _ in begun:
        depth.end(rollout([1.0]), True)
    assert depth.begin(3) == (3, False)
    assert depth.begin(4) == (3, False)
    assert depth.begin(7) == (10, True)


def test_a_cut_rollout_never_feeds_the_horizon():
    depth = control(Recorder(warmup_updates=0, probe_every=4))
    for _ in range(5):
        _, probe = depth.begin(1)
        assert not probe
        depth.end(rollout([5.0] * 3), probe)
    assert depth.horizon.heard == []


def test_a_round_whose_update_passed_without_a_begin_is_made_up_for():
    depth = control(Recorder(warmup_updates=0, probe_every=4))
    assert depth.begin(1) == (10, False)
    # Update 4 went by while nothing was begun.
    assert depth.begin(4) == (10, True)


def test_a_round_due_while_the_last_is_still_played_follows_it():
    depth = control(Recorder(warmup_updates=0, probe_every=4))
    depth.begin(3), depth.begin(3)
    assert depth.begin(7) == (10, False)
    depth.end(rollout([1.0]), True), depth.end(rollout([1.0]), True)
    assert depth.begin(9) == (10, True)


def test_a_failed_probe_closes_the_round_without_it():
    depth = control()
    depth.begin(0), depth.begin(0)
    depth.end(rollout([1.0]), True)
    depth.end(None, True)
    assert depth.horizon.rounds == [1]


def test_probes_in_flight_begin_again_after_a_resume():
    depth = control(probes=3)
    for _ in range(2):
        assert depth.begin(0)[1]
    depth.end(rollout([1.0, 4.0]), True)
    saved = json.loads(json.dumps(depth.state_dict()))
    assert (saved["round"], saved["to_begin"]) == (0, 2)
    again = control(probes=3)
    again.load_state_dict(saved)
    assert [again.begin(0)[1] for _ in range(3)] == [True, True, False]
    again.end(rollout([2.0]), True), again.end(rollout([2.0]), True)
    assert again.horizon.rounds == [2]  # and the third was heard before the resume
    reference = TurnOPDHorizon(max_turns=10)
    for kl in ([1.0, 4.0], [2.0], [2.0]):
        reference.observe_probe(kl, False)
    reference.close_probe()
    assert again.state_dict()["horizon"] == reference.state_dict()


def test_a_horizon_without_probes_is_asked_for_its_depth_alone():
    depth = DepthControl(FixedHorizon(4), 10)
    assert depth.begin(0) == (4, False)
    depth.end(rollout([1.0]), False)
    state = depth.state_dict()
    depth.load_state_dict(state)
    assert depth.state_dict() == state


@pytest.mark.parametrize("asked, depth", [(0, 1), (7, 7), (99, 10)])
def test_depth_lies_between_one_turn_and_full(asked, depth):
    class Odd:
        def turns(self, update):
            return asked

    assert DepthControl(Odd(), 10).begin(0) == (depth, False)


def test_reverse_kl_is_a_mean_a_turn_and_nan_where_nothing_is_scored():
    values = reverse_kl_per_turn(rollout([0.25, None, -0.5]))
    assert values[0] == pytest.approx(0.25) and math.isnan(values[1]) and values[2] == pytest.approx(-0.5)


def test_turns_that_a_review_added_were_not_reached_by_the_rollout():
    assert len(reverse_kl_per_turn(rollout([0.25, 0.5], extra=1))) == 2
