import json
from collections import Counter

import pytest
from test_composer import FakeTurn, keys

from divopd_gym.errors import ConfigError
from divopd_trainer.composer import BatchComposer
from divopd_trainer.composer_auto import QueuePressure, covering_cap


def rollout(rid, turns, version):
    return [FakeTurn(rid, i, version, float(i)) for i in range(turns)]


@pytest.mark.parametrize(
    ("rollouts", "last_chance", "pressure", "cap"),
    [
        (16, 0, 1.0, 4),  # all of the pool now
        (16, 0, 3.0, 4),  # no more than all
        (16, 0, 0.5, 8),  # the queue drains: half of it now
        (16, 16, 0.1, 4),  # on their last chance, none can wait
        (100, 0, 2.0, 1),
        (0, 0, 0.0, 64),
        (3, 0, 1.0, 21),
    ],
)
def test_the_cap_is_the_largest_that_reaches_all_that_cannot_wait(rollouts, last_chance, pressure, cap):
    assert covering_cap(64, rollouts, last_chance, pressure) == cap


def test_pressure_is_arrivals_over_drain_and_survives_its_state():
    pressure = QueuePressure(10)
    pressure.fed(20)
    pressure.fed(10)
    assert pressure.measure() == 3.0
    pressure.trained(10)
    pressure.fed(10)
    assert pressure.measure() == pytest.approx(2.5)
    again = QueuePressure(10)
    again.load(json.loads(json.dumps(pressure.state())))
    for p in (pressure, again):
        p.trained(6)
        p.fed(2)
    assert pressure.measure() == again.measure() == pytest.approx((25 + 0.25 * (2 - 25)) / 9)


def test_under_pressure_every_rollout_of_the_pool_is_reached():
    turns = [turn for rid in range(8) for turn in rollout(rid, 6, 0)]
    fixed = BatchComposer("divopd", 8, 8, cap=4).compose(1, turns)
    auto = BatchComposer("divopd", 8, 8, cap="auto").compose(1, turns)
    assert len({t.rollout_id for t in fixed.selected}) == 2
    assert Counter(t.rollout_id for t in auto.selected) == dict.fromkeys(range(8), 1)
    assert auto.cap == auto.facts["cap_used"] == 1 and fixed.cap == 4


def test_a_queue_that_drains_lets_the_young_wait_and_not_those_on_their_last_chance():
    def quiet(version):
        composer = BatchComposer("divopd", 8, 8, cap="auto", max_staleness=2)
        composer.load_state_dict(
            composer.state_dict()
            | {
                "adaptive": {
                    "pressure": {"arriving": 0.0, "draining": 64.0, "arrived": 0},
                    "reference": [0.0, 0.0],
                }
            }
        )
        return composer.compose(2, [turn for rid in range(4) for turn in rollout(rid, 8, version)])

    # At update 2 version 1 may still train at 3, version 0 may not.
    assert quiet(1).cap == 8 and len({t.rollout_id for t in quiet(1).selected}) == 1
    assert quiet(0).cap == 2 and len({t.rollout_id for t in quiet(0).selected}) == 4


def test_auto_resumes_and_reads_checkpoints_without_it():
    stream = [[turn for rid in range(5 * q, 5 * q + 4) for turn in rollout(rid, q + 2, q)] for q in range(5)]
    whole = BatchComposer("divopd", 6, cap="auto")
    expected = [whole.compose(q, arrivals) for q, arrivals in enumerate(stream, 1)]
    first = BatchComposer("divopd", 6, cap="auto")
    for q in (1, 2):
        first.compose(q, stream[q - 1])
    state = first.state_dict()
    second = BatchComposer("divopd", 6, cap="auto")
    second.load_state_dict(state)
    got = [second.compose(q, stream[q - 1]) for q in (3, 4, 5)]
    assert [(keys(b.selected), b.cap) for b in got] == [(keys(b.selected), b.cap) for b in expected[2:]]
    del state["adaptive"]
    second.load_state_dict(state)
    assert second.compose(3, stream[2]).selected


def test_a_preset_without_a_cap_stays_without_and_other_words_are_refused():
    assert BatchComposer("no-cap", cap="auto").compose(1, rollout(0, 3, 0)).cap is None
    with pytest.raises(ConfigError, match="cap is 'automatic'.*\"auto\", or null"):
        BatchComposer(cap="automatic")
