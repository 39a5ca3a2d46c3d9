import json
import math
import pickle
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_fakes import FakeExplorer, random_rollout

from divopd_gym.errors import ConfigError
from divopd_trainer.checkpoint import SideState, load_side_state, save_side_state
from divopd_trainer.collator import TurnCollator
from divopd_trainer.composer import BatchComposer
from divopd_trainer.composer_cost import CostReference, buy, merged_tokens
from divopd_trainer.packing import pack
from divopd_trainer.turns import Segment, make_turn


@dataclass(frozen=True)
class CostTurn:
    rollout_id: int
    index: int
    policy_version: int
    score: float
    valid: bool
    segment: int
    seq_len: int

    @property
    def key(self):
        return self.rollout_id, self.index


def rollout(rid, scores, version=0, lengths=None, apart=False):
    """Turns of one growing segment, 10 tokens each; or, `apart`, each a segment of its own."""
    ends = lengths or [10 * (i + 1) for i in range(len(scores))]
    return [
        CostTurn(rid, i, version, float(score), True, i if apart else 0, end)
        for i, (score, end) in enumerate(zip(scores, ends, strict=True))
    ]


def compose(turns, budget, **more):
    return BatchComposer("divopd-cost", token_budget=budget, **more).compose(1, turns)


def keys(turns):
    return [turn.key for turn in turns]


@st.composite
def streams(draw):
    """Updates' arrivals: rollouts of some turns, merged or not, some dead, versions at or below what is done."""
    scores = st.one_of(st.floats(-9, 9), st.sampled_from([math.inf, -math.inf, math.nan, 0.0]))
    stream, rid = [], 0
    for done in range(draw(st.integers(1, 5))):
        arrivals = []
        for _ in range(draw(st.integers(0, 4))):
            version, end = max(0, done - draw(st.integers(0, 3))), draw(st.integers(0, 40))
            apart = draw(st.booleans())
            for index in range(draw(st.integers(1, 6))):
                end += draw(st.integers(1, 30))
                valid = draw(st.integers(0, 4)) > 0
                turn = CostTurn(rid, index, version, draw(scores), valid, index if apart else 0, end)
                arrivals.append(turn)
            rid += 1
        stream.append(arrivals)
    return stream


configs = st.fixed_dictionaries(
    dict(
        batch_rows=st.integers(1, 10),
        pool_multiplier=st.integers(1, 4),
        cap=st.sampled_from([None, 1, 4, "auto"]),
        max_staleness=st.integers(1, 3),
        max_pending_age=st.integers(0, 3),
        token_budget=st.sampled_from([None, 1, 30, 100, 400]),
    )
)


@settings(max_examples=60, deadline=None)
@given(stream=streams(), config=configs)
def test_no_turn_trains_twice_dead_or_stale_and_only_the_first_exceeds_the_budget(stream, config):
    composer = BatchComposer("divopd-cost", **config)
    seen = set()
    for q, arrivals in enumerate([*stream, [], []], 1):
        composer.feed(arrivals)
        available = composer.available(q)
        batch = composer.compose(q)
        for turn in batch.selected:
            assert turn.valid and turn.key not in seen
            assert max(q - config["max_staleness"], 0) <= turn.policy_version <= q - 1
            seen.add(turn.key)
        spent = merged_tokens(batch.selected)
        assert batch.facts["budget_spent"] == spent
        assert spent <= batch.facts["token_budget"] or len(batch.selected) == 1
        # Progress: whatever the budget, a pool that has a turn gives one.
        assert bool(batch.selected) == (batch.pool > 0)
        assert batch.pool <= available
        if config["token_budget"] is not None:
            assert batch.facts["token_budget"] == config["token_budget"]
        # Nothing affordable is left lying: what stays costs more than the room.
        room = batch.facts["token_budget"] - spent
        for turn in batch.pending:
            assert merged_tokens([*batch.selected, turn]) - spent > room


@settings(max_examples=40, deadline=None)
@given(stream=streams(), config=configs)
def test_every_rollout_that_fits_is_reached_before_any_is_deepened(stream, config):
    composer = BatchComposer("divopd-cost", **config)
    for q, arrivals in enumerate(stream, 1):
        batch = composer.compose(q, arrivals)
        reached = {turn.rollout_id for turn in batch.selected}
        room = batch.facts["token_budget"] - batch.facts["budget_spent"]
        for turn in batch.pending:
            if turn.rollout_id not in reached:
                assert turn.seq_len > room
        # Up to the last first appearance, every rollout's rows stand together: one piece each.
        order = [turn.rollout_id for turn in batch.selected]
        sweep = order[: max((order.index(r) for r in reached), default=0)]
        pieces = [r for i, r in enumerate(sweep) if i == 0 or sweep[i - 1] != r]
        assert len(pieces) == len(set(pieces))


@settings(max_examples=30, deadline=None)
@given(stream=streams(), config=configs, cut=st.integers(0, 5))
def test_resumed_state_has_the_same_future(stream, config, cut):
    cut = min(cut, len(stream))
    whole, first = BatchComposer("divopd-cost", **config), BatchComposer("divopd-cost", **config)
    expected = [whole.compose(q, a) for q, a in enumerate(stream, 1)][cut:]
    for q, arrivals in enumerate(stream[:cut], 1):
        first.compose(q, arrivals)
    state = pickle.loads(pickle.dumps(first.state_dict()))
    state["adaptive"] = json.loads(json.dumps(state["adaptive"]))
    second = BatchComposer("divopd-cost", **config)
    second.load_state_dict(state)
    got = [second.compose(q, a) for q, a in enumerate(stream[cut:], cut + 1)]
    assert [(keys(b.selected), b.facts) for b in got] == [(keys(b.selected), b.facts) for b in expected]


@settings(max_examples=30, deadline=None)
@given(stream=streams(), config=configs, order=st.randoms(use_true_random=False))
def test_the_order_of_turns_inside_a_read_does_not_matter(stream, config, order):
    turns = [replace(turn, policy_version=0) for turn in stream[0]]
    config = config | {"pool_multiplier": 100}
    shuffled = list(turns)
    order.shuffle(shuffled)
    one, other = (BatchComposer("divopd-cost", **config).compose(1, t) for t in (turns, shuffled))
    assert keys(one.selected) == keys(other.selected)


def test_a_piece_is_the_depth_with_the_most_disagreement_per_added_token():
    # Depths 10, 20, 30, 40: 1/10, 2/20, 8/30 and 9/40 nats a token.
    batch = compose(rollout(0, [1, 1, 6, 1]), 30)
    assert keys(batch.selected) == [(0, 0), (0, 1), (0, 2)]
    assert batch.facts["budget_spent"] == 30


def test_turns_above_the_depth_reached_are_free_and_taken_whatever_their_score():
    batch = compose(rollout(0, [-1, -2, 60, 1]), 30)
    assert keys(batch.selected) == [(0, 0), (0, 1), (0, 2)]


def test_what_does_not_share_a_prefix_costs_it_in_full():
    apart = rollout(0, [1, 5, 2], lengths=[10, 40, 20], apart=True)
    # Per token 0.1, 0.125 and 0.1; of equals the cheaper.
    assert keys(compose(apart, 55).selected) == [(0, 1), (0, 0)]
    assert keys(compose(apart, 70).selected) == [(0, 1), (0, 0), (0, 2)]


def test_coverage_comes_before_disagreement_and_the_oldest_before_the_rest():
    calm, wild, new = rollout(0, [0.1, 0.1]), rollout(1, [50, 50]), rollout(2, [9, 9])
    batch = compose([*calm, *wild, *new], 20)
    assert keys(batch.selected) == [(0, 0), (1, 0)]
    batch = compose([*calm, *wild, *new], 50)
    assert keys(batch.selected) == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1)]


def test_a_rollout_that_is_too_deep_lets_the_others_pass_and_goes_first_alone_when_nothing_was_bought():
    deep, flat = rollout(1, [5], lengths=[90]), rollout(2, [1])
    assert keys(compose([*rollout(0, [1]), *deep, *flat], 25).selected) == [(0, 0), (2, 0)]
    assert keys(compose([*deep, *flat], 25).selected) == [(1, 0)]


def test_rows_are_not_limited_by_batch_rows():
    assert len(compose(rollout(0, [1] * 12), 1000, batch_rows=4).selected) == 12


def test_the_default_budget_is_what_divopd_would_forward():
    turns = [turn for rid in range(6) for turn in rollout(rid, [1, 3, 2, 1, 5, 1])]
    composer = BatchComposer("divopd-cost", 8, cap=2)
    reference = BatchComposer("divopd", 8, cap=2)
    batch, rows = composer.compose(1, turns), reference.compose(1, turns)
    assert batch.facts["token_budget"] == merged_tokens(rows.selected)


def test_the_reference_is_a_decaying_mean_and_scales_to_a_whole_batch():
    reference = CostReference()
    assert reference.budget(64) == 1
    reference.add(300, 10)
    assert reference.budget(20) == 600
    reference.add(0, 0)
    reference.add(100, 10)
    assert reference.budget(10) == round(10 * (0.9 * 300 + 100) / 19)


def test_costs_are_the_tokens_that_merged_packing_forwards():
    segments = [Segment(rid, 0, range(60)) for rid in range(3)]
    turns = []
    for rid, segment in enumerate(segments):
        for index, (start, end) in enumerate([(5, 9), (20, 31), (50, 55)]):
            logprobs = [-1.0] * (end - start)
            turns.append(
                make_turn(
                    rollout_id=rid,
                    index=index,
                    segment=segment,
                    start=start,
                    end=end,
                    student_logprobs=logprobs,
                    teacher_logprobs=[-1.0 - (index == rid)] * (end - start),
                    policy_version=0,
                )
            )
    batch = compose(turns, 95)
    forwarded = sum(micro.forwarded_tokens for micro in pack(batch.selected, merge=True))
    assert forwarded == batch.facts["budget_spent"] == merged_tokens(batch.selected) <= 95
    assert len({turn.rollout_id for turn in batch.selected}) == 3


def loaded_collator(rollouts):
    explorer = FakeExplorer(lambda e, rid: random_rollout(e, rid, turns=6), limit=rollouts)
    for _ in range(rollouts):
        explorer.make()
    return TurnCollator(explorer, BatchComposer("divopd-cost", 6, token_budget=120))


def test_the_collator_packs_what_the_budget_bought():
    collator = loaded_collator(5)
    batch = collator.poll(1)
    assert batch.facts["forwarded_tokens"] == merged_tokens(batch.rows) <= 120
    assert batch.facts["rows"] == len(batch.rows) > 6
    assert batch.facts["rollouts"] == 4  # of 6 turns each: the pool of 24 holds no more
    assert sum(micro.n_targets for micro in batch.shares[0]) == batch.facts["trained_tokens"]
    weights = sum(float(micro.weights.sum()) for micro in batch.shares[0])
    assert weights == pytest.approx(1.0)


def test_a_checkpoint_keeps_what_shares_a_prefix_and_the_running_mean(tmp_path):
    composer = loaded_collator(4).composer
    composer.token_budget = None
    turns = [turn for rid in range(4) for turn in random_rollout(None, rid, turns=6).turns]
    composer.compose(1, turns)
    save_side_state(tmp_path, SideState(1, 1, 0, 0.0, {}, composer.state_dict(), {}))
    again = BatchComposer("divopd-cost", 6)
    again.load_state_dict(load_side_state(tmp_path).composer)
    one, other = composer.compose(2), again.compose(2)
    key = [(turn.rollout_id, turn.index) for turn in one.selected]
    assert key and key == [(turn.rollout_id, turn.index) for turn in other.selected]
    assert one.facts == other.facts


def test_odd_scores_are_ranked_and_break_nothing():
    turns = [*rollout(0, [math.nan, 1]), *rollout(1, [math.inf, -math.inf]), *rollout(2, [-1, -1])]
    batch = compose(turns, 35)
    assert (1, 0) in keys(batch.selected) and {0, 1} <= {t.rollout_id for t in batch.selected}
    assert buy([], 10) == ([], 0) and buy([[]], 10) == ([], 0)


def test_turns_without_a_cost_and_budgets_of_nothing_are_refused():
    class Bare:
        rollout_id, index, policy_version, score, valid = 0, 0, 0, 0.0, True

    with pytest.raises(ConfigError, match="no segment and no seq_len"):
        BatchComposer("divopd-cost").feed([Bare()])
    with pytest.raises(ConfigError, match="token_budget is 0"):
        BatchComposer("divopd-cost", token_budget=0)
