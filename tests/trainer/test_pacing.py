"""Pacing: nothing deadlocks, little goes stale, long episodes are not the ones that do. A clockwork simulation."""

import heapq
import itertools
import random
from types import SimpleNamespace

import pytest

from divopd_gym.errors import ConfigError
from divopd_trainer.composer import BatchComposer
from divopd_trainer.explorer.pacing import Pacer


def simulate(
    *,
    rows=64,
    staleness=2,
    load=1.0,
    concurrent=16,
    turns_per_s=50.0,
    latency_s=0.0,
    learner_s=10.0,
    sync_s=0.05,
    updates=40,
    lengths=(2, 30),
    preset="vanilla",
    pool=4,
    seed=0,
):
    """Episodes of random length share a generator of so many turns a second; a learner takes so long an update.

    With `latency_s` every turn takes that long instead, however many run. New weights are loaded `sync_s` after the
    update.
    """
    rng = random.Random(seed)
    pacer = Pacer(batch_rows=rows, max_staleness=staleness, load=load, max_concurrent=concurrent)
    composer = BatchComposer(
        preset=preset, batch_rows=rows, pool_multiplier=pool, max_staleness=max(1, staleness), seed=seed
    )
    clock, order, keys = 0.0, itertools.count(), itertools.count()
    events: list = []
    flights: dict[int, SimpleNamespace] = {}
    waiting, update, version = True, 1, 0
    held: list[int] = []
    out = SimpleNamespace(
        produced=0,
        trained=0,
        stale=0,
        passed_over=0,
        held_s=0.0,
        waited=0.0,
        updates=0,
        played=[],
        trained_of={},
        batches=[],
    )

    def turn_s():
        return latency_s or len(flights) / turns_per_s

    def later(delay, what, *data):
        heapq.heappush(events, (clock + delay, next(order), what, data))

    def write(key):
        if pacer.too_late:
            held.append(key)
        else:
            later(turn_s(), "turn", key, version)

    def dispatch():
        while pacer.wants_more():
            key = next(keys)
            flights[key] = SimpleNamespace(length=rng.randint(*lengths), versions=[])
            pacer.begin(key)
            write(key)

    def compose():
        nonlocal waiting, waited_from
        available = composer.available(update)
        if available < rows:
            if not waiting:
                waited_from = clock
            waiting = True
            pacer.pool(composed=update - 1, available=available, wanted=rows, received=pacer._sent)
            return
        if waiting:
            out.waited += clock - waited_from
        waiting = False
        batch = composer.compose(update)
        out.trained += len(batch.selected)
        out.stale += batch.dropped_stale
        out.passed_over += batch.passed_over
        for turn in batch.selected:
            out.trained_of[turn.rollout_id] = out.trained_of.get(turn.rollout_id, 0) + 1
        out.batches.append(batch)
        pacer.pool(composed=update, available=composer.available(update + 1), wanted=0, received=pacer._sent)
        later(learner_s, "trained")

    waited_from = 0.0
    pacer.pool(composed=0, available=0, wanted=rows, received=0)
    dispatch()
    while events and out.updates < updates:
        clock, _, what, data = heapq.heappop(events)
        if what == "turn":
            key, by = data
            flight = flights[key]
            flight.versions.append(by)
            pacer.played(key)
            if len(flight.versions) < flight.length:
                write(key)
            else:
                del flights[key]
                turns = [
                    SimpleNamespace(rollout_id=key, index=i, policy_version=v, score=rng.random(), valid=True)
                    for i, v in enumerate(flight.versions)
                ]
                usable = sum(v >= pacer.oldest_usable for v in flight.versions)
                pacer.end(key, len(turns), usable)
                composer.feed(turns)
                out.produced += len(turns)
                out.played.append((key, len(turns)))
                if waiting:
                    compose()
        elif what == "trained":
            update += 1
            out.updates += 1
            pacer.announce(update - 1)
            later(sync_s, "loaded", update - 1)
            compose()
        else:
            version = data[0]
            pacer.policy(version)
            waiters, held = held, []
            for key in waiters:
                write(key)
        dispatch()
    out.seconds = clock
    return out


@pytest.mark.parametrize("staleness", [0, 1, 4])
@pytest.mark.parametrize("rows", [1, 2, 8])
@pytest.mark.parametrize("load", [0.5, 1.0, 2.0, None])
@pytest.mark.parametrize("lengths", [(1, 1), (30, 30)])
def test_every_staleness_and_batch_size_produces_batches(staleness, rows, load, lengths):
    out = simulate(rows=rows, staleness=staleness, load=load, lengths=lengths, updates=10, concurrent=2)
    assert out.updates == 10


def never_chosen(out):
    """Share of the turns made that went stale before any batch could have had them."""
    return (out.stale - out.passed_over) / out.produced


@pytest.mark.parametrize("latency_s", [0.0, 0.1])
@pytest.mark.parametrize("learner_s", [3.0, 10.0, 60.0])
@pytest.mark.parametrize("lengths", [(2, 30), (10, 20), (1, 50)])
def test_slow_learner_in_arrival_order_loses_less_than_two_percent_to_staleness(
    learner_s, latency_s, lengths
):
    out = simulate(learner_s=learner_s, latency_s=latency_s, updates=60, lengths=lengths)
    assert out.stale <= 0.02 * out.produced
    assert out.produced <= 1.05 * out.trained + 100


@pytest.mark.parametrize("preset", ["vanilla", "divopd"])
@pytest.mark.parametrize("sync_s", [0.05, 0.25, 0.5])
def test_learner_four_times_slower_than_generation_loses_under_two_percent_also_while_weights_are_loaded(
    preset, sync_s
):
    out = simulate(preset=preset, learner_s=4 * 64 / 50, sync_s=sync_s, updates=100)
    assert never_chosen(out) < 0.02
    assert out.waited < 0.2 * out.seconds


def test_composer_that_chooses_passes_over_no_more_than_what_the_last_episodes_bring_beyond_the_batch():
    # Episodes end where they end: half of one is left beside each batch of 64, and what a batch leaves goes stale.
    shares = [
        out.passed_over / out.produced
        for rows in (64, 256)
        for out in [simulate(preset="divopd", rows=rows, learner_s=4 * rows / 50, updates=60)]
    ]
    assert shares[0] <= 0.12 and shares[1] <= 0.04


def test_unpaced_explorer_throws_much_away_where_the_paced_one_does_not():
    paced = simulate(learner_s=10.0)
    unpaced = simulate(learner_s=10.0, load=None)
    assert unpaced.produced > 3 * paced.produced


def test_slow_learner_trains_long_and_short_episodes_alike():
    out = simulate(learner_s=10.0, updates=80)
    done = out.played[: int(len(out.played) * 0.9)]
    share = {True: [0, 0], False: [0, 0]}
    for key, length in done:
        share[length > 15][0] += out.trained_of.get(key, 0)
        share[length > 15][1] += length
    long, short = (share[kind][0] / share[kind][1] for kind in (True, False))
    assert abs(long - short) < 0.02


@pytest.mark.parametrize("preset", ["vanilla", "divopd"])
@pytest.mark.parametrize("sync_s", [0.05, 0.5])
def test_rollouts_that_train_are_as_long_as_those_that_are_made(preset, sync_s):
    out = simulate(preset=preset, learner_s=4 * 64 / 50, sync_s=sync_s, updates=100)
    done = out.played[: int(len(out.played) * 0.95)]
    made = sum(length for _, length in done) / len(done)
    trained = [length for key, length in done if key in out.trained_of]
    assert abs(sum(trained) / len(trained) - made) < 0.02 * made
    assert len(trained) > 0.98 * len(done)


def test_learner_does_not_wait_when_the_explorer_can_keep_up():
    out = simulate(learner_s=10.0, updates=60)
    assert out.waited < 0.1 * out.seconds


def test_surplus_load_gives_the_composer_about_that_many_turns_to_choose_from():
    out = simulate(load=2.0, learner_s=10.0, updates=60, preset="divopd")
    assert 1.6 < out.produced / out.trained < 2.4


def test_failed_episodes_do_not_use_up_the_budget():
    pacer = Pacer(batch_rows=4, max_concurrent=2, expected_turns=4)
    for key in range(100):
        assert pacer.wants_more()
        pacer.begin(key)
        pacer.end(key, None)
    assert pacer.outstanding == 0 and pacer.expected_turns == 4


def test_waiting_learner_is_fed_although_the_counts_say_that_enough_is_on_its_way():
    pacer = Pacer(batch_rows=4, load=1.0, expected_turns=4)
    pacer.begin(1)
    pacer.end(1, 10)
    pacer.policy(0)
    pacer.pool(composed=5, available=0, wanted=4, received=0)
    assert pacer.allowed == 0 and pacer.delivered >= 4 and pacer.wants_more()
    pacer.begin(2)
    assert not pacer.wants_more()


def test_while_weights_are_loaded_only_what_the_batch_takes_whole_is_begun():
    pacer = Pacer(batch_rows=8, load=1.0, expected_turns=5)
    pacer.policy(3)
    pacer.pool(composed=4, available=2, wanted=8, received=0)
    pacer.announce(4)
    assert pacer.wants_more()
    pacer.begin(1)
    assert not pacer.wants_more()
    pacer.policy(4)
    assert pacer.wants_more()


def test_turns_of_old_weights_are_too_late_only_if_newer_ones_are_on_their_way_and_no_batch_can_have_them():
    pacer = Pacer(batch_rows=8, max_staleness=2)
    pacer.announce(1)
    assert not pacer.too_late
    pacer.pool(composed=2, available=0, wanted=0, received=0)
    assert pacer.too_late
    pacer.policy(1)
    pacer.pool(composed=3, available=0, wanted=0, received=0)
    # Nothing to wait for: the learner has not finished the update yet.
    assert not pacer.too_late


def test_turns_on_their_way_count_until_the_learner_has_received_them():
    pacer = Pacer(batch_rows=10, max_staleness=1, load=1.0, expected_turns=5, margin=0)
    for key in (1, 2):
        assert pacer.wants_more()
        pacer.begin(key)
        pacer.end(key, 5)
    assert pacer.delivered == 10 and not pacer.wants_more()
    pacer.pool(composed=0, available=3, wanted=0, received=5)
    assert pacer.delivered == 8
    pacer.pool(composed=0, available=3, wanted=0, received=10)
    assert pacer.delivered == 3 and pacer.wants_more()


def test_never_more_episodes_than_allowed_at_once():
    pacer = Pacer(batch_rows=1000, load=None, max_concurrent=3)
    for key in range(3):
        pacer.begin(key)
    assert not pacer.wants_more()
    pacer.pool(composed=0, available=0, wanted=1000, received=0)
    assert not pacer.wants_more()


def test_episode_that_outlasts_expectation_keeps_counting():
    pacer = Pacer(batch_rows=64, expected_turns=5)
    pacer.begin(1)
    for _ in range(9):
        pacer.played(1)
    assert pacer.in_flight_turns == 10


@pytest.mark.parametrize(
    "bad", [{"batch_rows": 0}, {"load": 0}, {"max_staleness": -1}, {"max_concurrent": 0}]
)
def test_impossible_setting_is_refused_by_name(bad):
    with pytest.raises(ConfigError, match=next(iter(bad))):
        Pacer(**{"batch_rows": 4, **bad})
