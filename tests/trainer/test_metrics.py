import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from divopd_gym.errors import ConfigError
from divopd_trainer.metrics import (
    bootstrap_interval,
    cost_to_target,
    effective_rollouts,
    final_mean,
    gini,
    never_used_share,
    normalized_auc,
    peak,
    top1_share,
    turns_per_rollout,
    wilson_interval,
)


def test_golden_metrics(shared_data):
    cases = json.loads(shared_data("metric_cases.json").read_text())
    assert cases
    for case in cases:
        points = [tuple(p) for p in case["points"]]
        tokens = {int(r): n for r, n in case["tokens_by_rollout"].items()}
        assert effective_rollouts(tokens) == pytest.approx(case["effective_rollouts"], rel=1e-12)
        assert gini(case["counts"]) == pytest.approx(case["gini"], rel=1e-9, abs=1e-12)
        assert normalized_auc(points, case["budget"]) == pytest.approx(case["normalized_auc"], rel=1e-9)
        assert cost_to_target(points, case["target"]) == case["cost_to_target"]


@given(st.dictionaries(st.integers(), st.integers(1, 1000), min_size=1, max_size=30))
def test_effective_rollouts_lie_between_one_and_their_number(tokens):
    assert 1 - 1e-9 <= effective_rollouts(tokens) <= len(tokens) + 1e-9
    assert 1 / len(tokens) - 1e-9 <= top1_share(tokens) <= 1
    assert effective_rollouts(dict.fromkeys(tokens, 7)) == pytest.approx(len(tokens))


@given(st.lists(st.integers(0, 50), min_size=1, max_size=30))
def test_gini_is_half_the_relative_mean_difference(counts):
    total = sum(counts)
    expected = sum(abs(a - b) for a in counts for b in counts) / (2 * len(counts) * total) if total else 0
    assert gini(counts) == pytest.approx(expected)


def test_nothing_selected_is_zero_not_an_error():
    assert (
        effective_rollouts({}) == top1_share({0: 0}) == gini([]) == gini([0, 0]) == turns_per_rollout([]) == 0
    )
    assert never_used_share({}) == 0 and peak([]) is None and final_mean([]) is None


def test_shares_and_summaries():
    assert never_used_share({0: 0, 1: 3, 2: 0, 3: 1}) == 0.5
    assert turns_per_rollout([1, 1, 2, 1]) == 2.0
    points = [(i, float(v)) for i, v in enumerate([9, 1, 2, 3, 4, 5])]
    assert peak(points) == 9 and final_mean(points) == (3.0, pytest.approx(math.sqrt(2)))


def test_area_is_constant_outside_the_points():
    assert normalized_auc([(4, 50.0)], 10) == 50
    assert normalized_auc([(2, 0.0), (4, 10.0)], 8) == pytest.approx((0 * 2 + 5 * 2 + 10 * 4) / 8)
    assert normalized_auc([(0, 0.0), (10, 10.0)], 5) == pytest.approx(2.5)
    assert normalized_auc([(4, 10.0), (2, 0.0)], 8) == normalized_auc([(2, 0.0), (4, 10.0)], 8)
    for points, budget in ([], 1), ([(0, 1)], 0):
        with pytest.raises(ConfigError, match="budget"):
            normalized_auc(points, budget)


def test_cost_to_target_is_the_first_evaluation_at_or_above_it():
    points = [(10, 40.0), (20, 60.0), (30, 55.0), (40, 80.0)]
    assert cost_to_target(points, 60) == 20 and cost_to_target(points, 61) == 40
    assert cost_to_target(points, 81) is None


def test_wilson_interval_of_known_counts():
    assert wilson_interval(50, 100) == pytest.approx((0.4038, 0.5962), abs=1e-4)
    assert (
        wilson_interval(0, 0) == (0, 1) and wilson_interval(0, 20)[0] == 0 and wilson_interval(20, 20)[1] == 1
    )
    with pytest.raises(ConfigError, match="no more successes"):
        wilson_interval(3, 2)


@given(st.integers(1, 500), st.data())
def test_wilson_interval_holds_the_rate(n, data):
    k = data.draw(st.integers(0, n))
    low, high = wilson_interval(k, n)
    assert 0 <= low <= k / n <= high <= 1


def test_bootstrap_interval_is_repeatable_and_near_the_normal_one():
    values = [float(i % 10) for i in range(200)]
    low, high = bootstrap_interval(values)
    assert (low, high) == bootstrap_interval(values)
    half = 1.96 * math.sqrt(8.25 / 200)
    assert low == pytest.approx(4.5 - half, abs=0.08) and high == pytest.approx(4.5 + half, abs=0.08)
    assert bootstrap_interval([3.0]) == (3.0, 3.0)
    with pytest.raises(ConfigError, match="one value"):
        bootstrap_interval([])
