import json
import math
import pickle
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from divopd_gym.errors import ConfigError
from divopd_trainer.composer import PRESETS, BatchComposer, Preset

PAPER_PRESETS = ["vanilla", "gate-only", "divopd-base", "divopd", "no-cap", "top-b"]


@dataclass(frozen=True)
class FakeTurn:
    rollout_id: int
    index: int
    policy_version: int
    score: float
    valid: bool = True

    @property
    def key(self):
        return self.rollout_id, self.index


def keys(turns):
    return [t.key for t in turns]


class LiteralOracle:
    """Algorithm 1 read line by line, slow on purpose. Uniform orders are left to the composer."""

    def __init__(self, preset, B, c, k, delta, W):
        self.preset, self.B, self.c, self.k, self.delta, self.W = preset, B, c, k, delta, W
        self.queue, self.P = [], []  # P: [turn, first_seen]

    def compose(self, q, arrivals):
        self.queue += arrivals
        v_min = max(q - self.delta, 0)
        stale = [p for p in self.P if p[0].policy_version < v_min]
        self.P = [p for p in self.P if p[0].policy_version >= v_min]
        dropped, F = len(stale), []
        limit = self.B if self.preset == "vanilla" else self.c * self.B
        while self.queue and len(self.P) + len(F) < limit:
            turn = self.queue.pop(0)
            if turn.policy_version < v_min:
                dropped += 1
            else:
                F.append(turn)
        if self.preset == "vanilla":
            return F, [], dropped, 0
        gated = [t for t in F if not t.valid]
        C = self.P + [[t, q] for t in F if t.valid]
        if self.preset == "gate-only":
            S = [t for t, _ in C][: self.B]
        elif self.preset == "top-b":
            S = sorted([t for t, _ in C], key=lambda t: (-t.score, t.rollout_id, t.index))[: self.B]
        else:
            S = self.sweep(C)
        self.P = [p for p in C if not any(p[0] is s for s in S) and q - p[1] <= self.W]
        return S, [p[0] for p in self.P], dropped, len(gated)

    def sweep(self, C):
        order = sorted(
            {t.rollout_id for t, _ in C}, key=lambda r: (min(s for t, s in C if t.rollout_id == r), r)
        )
        S, h = [], math.inf if self.k is None else self.k
        while len(S) < self.B and len(S) < len(C):
            for r in order:
                group = sorted(
                    [t for t, _ in C if t.rollout_id == r], key=lambda t: (-t.score, t.rollout_id, t.index)
                )
                for t in group:
                    given = sum(s.rollout_id == r for s in S)
                    if given < h and len(S) < self.B and not any(s is t for s in S):
                        S.append(t)
            h += 1
        return S


@st.composite
def streams(draw):
    """Some updates' arrivals: rollouts of several turns, versions at or below what the learner has done."""
    scores = st.one_of(
        st.integers(-3, 3).map(float), st.floats(-9, 9), st.sampled_from([math.inf, -math.inf])
    )
    stream, rollout_id = [], 0
    for done in range(draw(st.integers(1, 6))):
        arrivals = []
        for _ in range(draw(st.integers(0, 5))):
            version = max(0, done - draw(st.integers(0, 4)))
            for index in range(draw(st.integers(1, 7))):
                valid = draw(st.integers(0, 4)) > 0
                # Weights may be loaded in the middle of an episode.
                moved = min(done, version + (index > 3 and draw(st.booleans())))
                arrivals.append(FakeTurn(rollout_id, index, moved, draw(scores), valid))
            rollout_id += 1
        stream.append(arrivals)
    return stream


configs = st.fixed_dictionaries(
    dict(
        batch_rows=st.integers(1, 12),
        pool_multiplier=st.integers(1, 4),
        cap=st.one_of(st.none(), st.integers(1, 5)),
        max_staleness=st.integers(0, 4),
        max_pending_age=st.integers(0, 4),
    )
)


def play(composer, stream, first=1):
    return [composer.compose(q, arrivals) for q, arrivals in enumerate(stream, first)]


def test_golden_cases(shared_data):
    cases = json.loads(shared_data("composer_cases.json").read_text())
    assert len(cases) >= 150
    for number, case in enumerate(cases):
        c = case["config"]
        composer = BatchComposer(c["preset"], c["B"], c["c"], c["k"], c["delta"], c["W"])
        for update, expected in zip(case["updates"], case["expected"], strict=True):
            batch = composer.compose(update["update"], [FakeTurn(*a) for a in update["arrivals"]])
            got = {
                "update": update["update"],
                "selected": [list(k) for k in keys(batch.selected)],
                "pending": sorted(list(k) for k in keys(batch.pending)),
                "dropped_stale": batch.dropped_stale,
                "gated": batch.gated,
            }
            assert got == expected, (number, c)


@settings(max_examples=80, deadline=None)
@given(stream=streams(), config=configs, preset=st.sampled_from(["vanilla", "gate-only", "divopd", "top-b"]))
def test_equals_a_literal_reading_of_algorithm_1(stream, config, preset):
    c = config
    composer = BatchComposer(preset, **config)
    oracle = LiteralOracle(
        preset, c["batch_rows"], c["pool_multiplier"], c["cap"], c["max_staleness"], c["max_pending_age"]
    )
    for q, arrivals in enumerate(stream, 1):
        batch = composer.compose(q, arrivals)
        selected, pending, dropped, gated = oracle.compose(q, arrivals)
        assert keys(batch.selected) == keys(selected)
        assert keys(batch.pending) == keys(pending)
        assert (batch.dropped_stale, batch.gated) == (dropped, gated)
        assert composer.unread == len(oracle.queue)


@settings(max_examples=40, deadline=None)
@given(stream=streams(), config=configs, preset=st.sampled_from(PAPER_PRESETS))
def test_no_turn_trains_twice_or_outside_its_version_window(stream, config, preset):
    composer = BatchComposer(preset, **config)
    seen = Counter()
    for q, batch in enumerate(play(composer, stream + [[]] * 4), 1):
        seen.update(keys(batch.selected))
        assert len(batch.selected) <= config["batch_rows"]
        for turn in batch.selected:
            assert max(q - config["max_staleness"], 0) <= turn.policy_version <= q - 1
    assert all(count == 1 for count in seen.values())


@settings(max_examples=40, deadline=None)
@given(stream=streams(), config=configs, preset=st.sampled_from([p for p in PAPER_PRESETS if p != "vanilla"]))
def test_no_dead_row_passes_the_gate(stream, config, preset):
    for batch in play(BatchComposer(preset, **config), stream):
        assert all(t.valid for t in batch.selected + batch.pending)


@settings(max_examples=40, deadline=None)
@given(stream=streams(), config=configs, preset=st.sampled_from(PAPER_PRESETS))
def test_every_turn_is_accounted_for(stream, config, preset):
    composer = BatchComposer(preset, **config)
    dropped = Counter()
    composer.on_drop = lambda turn, why: dropped.update([why])
    batches = play(composer, stream)
    total = sum(map(len, stream))
    assert (
        total
        == sum(len(b.selected) for b in batches)
        + dropped.total()
        + len(batches[-1].pending)
        + composer.unread
    )
    assert dropped["stale"] == sum(b.dropped_stale for b in batches) == composer.counters["stale"]
    assert dropped["gated"] == sum(b.gated for b in batches) == composer.counters["gated"]
    assert dropped["expired"] == sum(b.expired for b in batches) == composer.counters["expired"]
    assert composer.counters["selected"] == sum(len(b.selected) for b in batches)


def pool_before(composer, q, arrivals):
    """What compose(q, arrivals) can choose from, found by asking a wide copy of it to take everything."""
    state = composer.state_dict()
    size = composer.batch_rows * composer.pool_multiplier
    twin = BatchComposer("gate-only", size, 1, None, composer.max_staleness, 10**6)
    twin.load_state_dict(state)
    return twin.compose(q, arrivals).selected


@settings(max_examples=60, deadline=None)
@given(stream=streams(), config=configs, preset=st.sampled_from(PAPER_PRESETS))
def test_with_fill_a_batch_is_full_whenever_enough_turns_are_usable(stream, config, preset):
    composer = BatchComposer(preset, **config)
    composer.fill = True
    for q, arrivals in enumerate(stream, 1):
        composer.feed(arrivals)
        usable = composer.available(q)
        assert len(composer.compose(q).selected) == min(usable, composer.batch_rows)


@settings(max_examples=40, deadline=None)
@given(stream=streams(), config=configs, preset=st.sampled_from(["divopd", "divopd-base"]))
def test_rollout_first_coverage_and_relaxation(stream, config, preset):
    """At least ceil(B/k) rollouts when there are that many, and no empty row while valid turns remain."""
    composer = BatchComposer(preset, **config)
    for q, arrivals in enumerate(stream, 1):
        pool = pool_before(composer, q, arrivals)
        batch = composer.compose(q, arrivals)
        assert batch.pool == len(pool)
        assert len(batch.selected) == min(config["batch_rows"], len(pool))
        groups = len({t.rollout_id for t in pool})
        got = Counter(t.rollout_id for t in batch.selected)
        if config["cap"] is not None:
            assert len(got) >= min(groups, -(-len(batch.selected) // config["cap"]))
            sizes = Counter(t.rollout_id for t in pool)
            # The cap gives way only where no other rollout could fill the row.
            most = max(got.values(), default=0)
            if most > config["cap"]:
                assert all(got[r] == sizes[r] or got[r] >= most - 1 for r in sizes)


@settings(max_examples=40, deadline=None)
@given(stream=streams(), config=configs, seed=st.integers(0, 3))
def test_divopd_and_its_base_allocate_identically(stream, config, seed):
    """From one pool, the same number of rows a rollout: the score moves no slot between rollouts."""
    composer = BatchComposer("divopd", **config)
    for q, arrivals in enumerate(stream, 1):
        base = BatchComposer("divopd-base", **config, seed=seed)
        base.load_state_dict(composer.state_dict())
        ours, theirs = composer.compose(q, arrivals), base.compose(q, arrivals)
        # A Counter in order of first appearance: the rollouts also come in the same order.
        rows, base_rows = ([t.rollout_id for t in b.selected] for b in (ours, theirs))
        assert rows == base_rows


@pytest.mark.parametrize("preset", PAPER_PRESETS)
@settings(max_examples=15, deadline=None)
@given(stream=streams(), config=configs, cut=st.integers(0, 6))
def test_resumed_state_has_the_same_future(preset, stream, config, cut):
    cut = min(cut, len(stream))
    whole, first = BatchComposer(preset, **config, seed=3), BatchComposer(preset, **config, seed=3)
    expected = play(whole, stream)
    play(first, stream[:cut])
    state = pickle.loads(pickle.dumps(first.state_dict()))
    second = BatchComposer(preset, **config, seed=3)
    second.load_state_dict(state)
    assert second.available(cut + 1) == first.available(cut + 1)
    got = play(second, stream[cut:], cut + 1)
    assert [(keys(b.selected), keys(b.pending)) for b in got] == [
        (keys(b.selected), keys(b.pending)) for b in expected[cut:]
    ]
    assert second.counters == whole.counters


def test_state_is_a_snapshot():
    composer = BatchComposer("divopd", 1, max_pending_age=3)
    turns = [FakeTurn(0, i, 0, float(i)) for i in range(6)]
    composer.compose(1, turns[:4])
    state = composer.state_dict()
    composer.compose(2, turns[4:])
    assert len(state["pending"]) == 3 and state["counters"]["selected"] == 1


@settings(max_examples=40, deadline=None)
@given(stream=streams(), config=configs, preset=st.sampled_from(PAPER_PRESETS))
def test_available_counts_what_could_be_rows(stream, config, preset):
    composer = BatchComposer(preset, **config)
    for q, arrivals in enumerate(stream, 1):
        composer.feed(arrivals)
        state = composer.state_dict()
        turns = [t for _, t in state["pending"]] + state["unread"]
        for update in (q, q + 1):
            oldest = max(update - config["max_staleness"], 0)
            usable = [t for t in turns if t.policy_version >= oldest and (t.valid or preset == "vanilla")]
            assert composer.available(update) == len(usable)
        composer.compose(q)


def test_hands_back_the_very_objects():
    turns = [FakeTurn(0, i, 0, 0.0) for i in range(6)]
    batch = BatchComposer("divopd", 4).compose(1, iter(turns))
    assert {id(t) for t in batch.selected + batch.pending} == {id(t) for t in turns}


def test_what_is_not_read_stays_queued_in_order():
    composer = BatchComposer("gate-only", 2, pool_multiplier=2)
    turns = [FakeTurn(i, 0, 0, 0.0) for i in range(7)]
    assert keys(composer.compose(1, turns).selected) == keys(turns[:2])
    assert composer.unread == 3
    assert keys(composer.compose(2, []).selected) == keys(turns[2:4])


def test_stale_turns_met_while_reading_use_no_room_and_gated_ones_do():
    old, dead = [FakeTurn(0, i, 0, 0.0) for i in range(3)], FakeTurn(1, 0, 4, 0.0, valid=False)
    fresh = [FakeTurn(2, i, 4, 0.0) for i in range(2)]
    composer = BatchComposer("divopd", 2, pool_multiplier=1, max_staleness=2)
    batch = composer.compose(5, [*old, dead, *fresh])
    assert (batch.dropped_stale, batch.gated, keys(batch.selected), composer.unread) == (3, 1, [(2, 0)], 1)


def test_vanilla_reads_exactly_one_batch_and_gives_rows_to_dead_turns():
    turns = [FakeTurn(i, 0, 0, 0.0, valid=i % 2 == 0) for i in range(5)]
    composer = BatchComposer("vanilla", 4)
    batch = composer.compose(1, turns)
    assert keys(batch.selected) == keys(turns[:4]) and not batch.pending
    assert composer.unread == 1 and composer.counters["dead_selected"] == 2


@pytest.mark.parametrize("preset", ["divopd", "top-b"])
def test_odd_scores_order_the_same_whatever_came_first(preset):
    scores = [math.nan, math.inf, -math.inf, 0.0, -0.0, math.nan, 1.0]
    turns = [FakeTurn(0, i, 0, s) for i, s in enumerate(scores)]
    for order in (turns, turns[::-1], turns[3:] + turns[:3]):
        batch = BatchComposer(preset, 7, cap=None).compose(1, order)
        assert [t.index for t in batch.selected] == [1, 6, 3, 4, 2, 0, 5]


def test_uniform_draw_depends_on_seed_update_and_rollout_and_is_uniform():
    def draw(seed, update, rollout_id):
        turns = [FakeTurn(rollout_id, i, update - 1, float(i)) for i in range(6)]
        return keys(BatchComposer("divopd-base", 1, 6, seed=seed).compose(update, turns).selected)[0][1]

    assert draw(0, 1, 0) == draw(0, 1, 0)
    for varied in (
        [draw(s, 1, 0) for s in range(600)],
        [draw(0, q, 0) for q in range(1, 601)],
        [draw(0, 1, r) for r in range(600)],
    ):
        counts = Counter(varied)
        chi2 = sum((counts[i] - 100) ** 2 / 100 for i in range(6))
        assert chi2 < 25.7  # 99.99 % of a chi-square with 5 degrees of freedom


def test_no_cap_takes_the_oldest_group_whole():
    composer = BatchComposer("no-cap", 5, cap=1)
    turns = [FakeTurn(1, i, 0, 0.0) for i in range(4)] + [FakeTurn(0, i, 0, 0.0) for i in range(4)]
    batch = composer.compose(1, turns)
    assert [t.rollout_id for t in batch.selected] == [0, 0, 0, 0, 1]
    # What was left of rollout 1 is older than rollout 2 by first sight.
    batch = composer.compose(2, [FakeTurn(2, 0, 1, 0.0)])
    assert [t.rollout_id for t in batch.selected] == [1, 1, 1, 2]


def test_a_preset_may_be_given_as_an_object():
    turns = [FakeTurn(0, i, 0, float(i)) for i in range(4)]
    own = Preset(coverage="ranked", order="uniform")
    assert len(BatchComposer(own, 3).compose(1, turns).selected) == 3
    assert PRESETS["divopd-r"] == PRESETS["divopd"]


@pytest.mark.parametrize(
    "wrong", [dict(preset="divpod"), dict(batch_rows=0), dict(cap=0), dict(max_staleness=-1), dict(cap=1.5)]
)
def test_settings_out_of_range_are_refused_by_name(wrong):
    with pytest.raises(ConfigError, match="preset" if "preset" in wrong else next(iter(wrong))):
        BatchComposer(**wrong)


def test_a_foreign_state_is_refused():
    with pytest.raises(ConfigError, match="schema"):
        BatchComposer().load_state_dict({"pending": []})
