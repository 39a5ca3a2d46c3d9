import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from divopd_gym.errors import ConfigError
from divopd_trainer.horizon import TCODF2B, FixedHorizon, TurnOPDHorizon


def test_golden_depths(shared_data):
    cases = json.loads(shared_data("turnopd_cases.json").read_text())["horizon"]
    assert cases
    for case in cases:
        horizon = TurnOPDHorizon(**case["config"])
        for probes, expected in zip(case["rounds"], case["turns_after_each_round"], strict=True):
            for kl, success in probes:
                horizon.observe_probe(kl, success)
            horizon.close_probe()
            assert horizon.turns(10) == expected


def test_full_depth_in_warm_up_and_before_the_first_probe():
    horizon = TurnOPDHorizon(max_turns=30, warmup_updates=3)
    assert horizon.turns(1) == horizon.turns(100) == 30
    horizon.close_probe()
    assert horizon.turns(100) == 30
    horizon.observe_probe([1.0, 1.0, 1.0], False)
    horizon.close_probe()
    assert [horizon.turns(q) for q in (3, 4)] == [30, 2]


def test_probes_come_every_eighth_update():
    horizon = TurnOPDHorizon(probe_every=8)
    assert [q for q in range(26) if horizon.is_probe(q)] == [8, 16, 24]


def test_coverage_needs_eight_successes_and_is_then_kept():
    horizon = TurnOPDHorizon(max_turns=50, ema=1.0, warmup_updates=0)

    def play(successes):
        for _ in range(successes):
            horizon.observe_probe([1.0] + [0.0] * 9, True)
        horizon.observe_probe([1.0], False)
        horizon.close_probe()
        return horizon.turns(1)

    assert play(7) == 2
    assert play(8) == 10
    assert play(1) == 10


def test_eight_of_ten_cover_eighty_percent():
    horizon = TurnOPDHorizon(ema=1.0, warmup_updates=0)
    for depth in range(10):
        horizon.observe_probe([1.0] + [0.0] * depth, True)
    horizon.close_probe()
    assert horizon.turns(1) == 7 + 1


def test_a_turn_without_scores_counts_as_reached_only():
    seen, unseen = TurnOPDHorizon(warmup_updates=0), TurnOPDHorizon(warmup_updates=0)
    seen.observe_probe([0.1, 0.2, 0.1, float("nan"), 0.1, 0.4], False)
    unseen.observe_probe([0.1, 0.2, 0.1, 0.0, 0.1, 0.4], False)
    for horizon in (seen, unseen):
        horizon.close_probe()
    assert seen.turns(1) == unseen.turns(1) > 2


rounds = st.lists(
    st.lists(st.tuples(st.lists(st.floats(-1, 1), max_size=12), st.booleans()), max_size=12), max_size=4
)


@given(before=rounds, after=rounds, low=st.integers(1, 4), span=st.integers(0, 9))
def test_depth_stays_in_range_and_state_resumes(before, after, low, span):
    def play(horizon, some):
        for probes in some:
            for kl, success in probes:
                horizon.observe_probe(kl, success)
            horizon.close_probe()

    config = dict(min_turns=low, max_turns=low + span, warmup_updates=0)
    one, other = TurnOPDHorizon(**config), TurnOPDHorizon(**config)
    play(one, before)
    one.observe_probe([0.5, 0.1], True)
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    for horizon in (one, other):
        play(horizon, [[], *after])
    assert one.turns(1) == other.turns(1)
    assert low <= one.turns(1) <= low + span


def test_fixed_and_front_to_back():
    fixed = FixedHorizon(30)
    assert fixed.turns(1) == fixed.turns(999) == 30 and not fixed.is_probe(8)
    f2b = TCODF2B(max_turns=4, start_turns=1, every=2)
    assert [f2b.turns(q) for q in range(1, 10)] == [1, 1, 2, 2, 3, 3, 4, 4, 4]
    assert not f2b.is_probe(8)


@pytest.mark.parametrize(
    "wrong", [dict(min_turns=0), dict(max_turns=1), dict(probe_every=0), dict(coverage=0), dict(ema=1.5)]
)
def test_settings_out_of_range_are_refused_by_name(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        TurnOPDHorizon(**wrong)
    with pytest.raises(ConfigError, match="every"):
        TCODF2B(30, every=0)
