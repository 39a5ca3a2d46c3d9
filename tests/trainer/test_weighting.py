import json
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from divopd_gym.errors import ConfigError
from divopd_trainer.weighting import TurnOPDWeighting, UniformWeighting, turnopd_shares, uniform_weights


def row(rollout_id, mask):
    mask = np.array(mask, np.bool_)
    return SimpleNamespace(rollout_id=rollout_id, n_tokens=len(mask), valid_mask=lambda: mask)


ROWS = [row(0, [1, 0, 1]), row(0, [1]), row(1, [0, 0]), row(1, [1, 1, 1, 1])]


def test_dead_rows_stay_in_the_denominator():
    weights = uniform_weights(ROWS)
    assert [w.tolist() for w in weights] == [[1 / 8, 0, 1 / 8], [1 / 4], [0, 0], [1 / 16] * 4]
    assert sum(w.sum() for w in weights) == pytest.approx(3 / 4)


def test_token_mean_and_token_sum():
    assert uniform_weights(ROWS, "token-mean")[0].tolist() == [1 / 7, 0, 1 / 7]
    assert uniform_weights(ROWS, "seq-mean-token-sum")[3].tolist() == [1 / 4] * 4


def test_all_dead_and_empty_batches_weigh_nothing():
    dead = [row(0, [0, 0])]
    for weighting in (UniformWeighting(), UniformWeighting("token-mean"), TurnOPDWeighting(10)):
        assert [w.tolist() for w in weighting.weights(dead, 1)] == [[0, 0]]
        assert weighting.weights([], 1) == []


def test_unknown_reduction_is_refused():
    with pytest.raises(ConfigError, match="seq-mean-token-mean"):
        UniformWeighting("mean")


def test_golden_shares(shared_data):
    cases = json.loads(shared_data("turnopd_cases.json").read_text())["shares"]
    assert cases
    for case in cases:
        got = turnopd_shares(case["tokens_per_turn"], case["alpha"])
        assert got == pytest.approx(case["shares"], abs=1e-12)


@given(st.lists(st.integers(0, 300), min_size=1), st.floats(0, 1))
def test_shares_add_up_to_one(tokens, alpha):
    assert sum(turnopd_shares(tokens, alpha)) == pytest.approx(1)


def test_shares_out_of_range_are_refused():
    for bad in (([1], 1.5), ([-1], 0.5)):
        with pytest.raises(ConfigError, match="alpha"):
            turnopd_shares(*bad)


def test_turnopd_goes_from_token_mean_to_turn_mean():
    weighting = TurnOPDWeighting(100, cap=None)
    assert [weighting.alpha(q) for q in (0, 50, 100, 200)] == [0, 0.5, 1, 1]
    assert TurnOPDWeighting(100, 0.5, 0.75).alpha(50) == 0
    early = weighting.weights(ROWS, 0)
    assert np.concatenate(early) == pytest.approx(0.75 * np.concatenate(uniform_weights(ROWS, "token-mean")))
    late = [w.sum() for w in weighting.weights(ROWS, 100)]
    # Rollout 0 has 3 of 7 tokens, halved between its two rows; rollout 1 has one live row.
    assert late == pytest.approx([0.75 * 3 / 14, 0.75 * 3 / 14, 0, 0.75 * 4 / 7])


def test_turnopd_cap_bounds_what_a_thin_turn_gains():
    rows = [row(0, [1]), row(0, [1] * 99)]
    thin = [TurnOPDWeighting(1, cap=cap).weights(rows, 1)[0].sum() for cap in (None, 4.0)]
    assert thin[0] == pytest.approx(0.5)
    assert thin[1] == pytest.approx(0.04)


def test_what_a_cap_cuts_off_goes_to_the_other_turns_up_to_their_caps():
    # Halfway shares of 1/6 + n/200 against a cap of 2 n/100: 0.1717, 0.2167 and 0.6117 against 0.02, 0.2 and 1.78.
    rows = [row(0, [1] * n) for n in (1, 10, 89)]
    found = [w.sum() for w in TurnOPDWeighting(2, cap=2.0).weights(rows, 1)]
    assert found == pytest.approx([0.02, 0.2, 0.78])
    uncapped = [w.sum() for w in TurnOPDWeighting(2, cap=None).weights(rows, 1)]
    assert uncapped == pytest.approx([0.5 / 3 + n / 200 for n in (1, 10, 89)])


@given(
    st.lists(st.integers(1, 200), min_size=1, max_size=12),
    st.floats(1.0, 6.0),
    st.integers(0, 10),
)
def test_no_turn_weighs_more_than_its_cap(tokens, cap, update):
    found = TurnOPDWeighting(10, cap=cap).weights([row(0, [1] * n) for n in tokens], update)
    shares = np.array([w.sum() for w in found])
    assert shares.sum() == pytest.approx(1)
    assert (shares <= cap * np.array(tokens) / sum(tokens) * (1 + 1e-9)).all()


@given(
    st.lists(st.tuples(st.integers(0, 3), st.lists(st.booleans(), min_size=1, max_size=6)), min_size=1),
    st.integers(0, 10),
)
def test_turnopd_weights_add_up_to_the_live_share(spec, update):
    rows = [row(r, m) for r, m in spec]
    weights = TurnOPDWeighting(10).weights(rows, update)
    live = sum(any(m) for _, m in spec) / len(spec)
    assert sum(w.sum() for w in weights) == pytest.approx(live)
    assert all((w[~r.valid_mask()] == 0).all() for w, r in zip(weights, rows))
