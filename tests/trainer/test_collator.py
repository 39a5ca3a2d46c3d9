"""From rollouts to a packed batch: what is read, recorded, chosen, counted."""

import dataclasses

import numpy as np
import pytest
from learner_fakes import FakeExplorer, random_rollout

from divopd_gym.errors import DivOPDError
from divopd_trainer.collator import PackOptions, TurnCollator
from divopd_trainer.composer import BatchComposer
from divopd_trainer.explorer.messages import ExplorerDied
from divopd_trainer.records import RunWriter, read_batches, read_rollouts
from divopd_trainer.streams import BatchStream
from divopd_trainer.turns import Rollout, make_turn


def collator(explorer, *, preset="divopd", rows=4, cap=2, options=None, writer=None, **more):
    composer = BatchComposer(preset, batch_rows=rows, cap=cap)
    return TurnCollator(
        explorer, composer, options, writer=writer, on_status=lambda *s: explorer.send_status(*s), **more
    )


class Explorer(FakeExplorer):
    def send_status(self, update, available, wanted, unread):
        self.sent.append((update, available, wanted, unread))
        if wanted:
            for _ in range(self.ahead):
                self.make()


def unscored(turn):
    """The same turn without the teacher's scores: a dead row."""
    fields = {f.name: getattr(turn, f.name) for f in dataclasses.fields(turn)}
    for name in ("valid", "why_not", "score"):
        fields.pop(name)
    return make_turn(**{**fields, "teacher_logprobs": None})


def fill(explorer, n):
    for _ in range(n):
        explorer.make()


def test_a_batch_waits_until_enough_valid_turns_can_be_formed():
    explorer = Explorer(random_rollout, ahead=2)
    c = collator(explorer)
    batch = c.poll(1)
    assert len(batch.rows) == 4
    assert explorer.sent[0] == (0, 0, 4, 0)
    assert explorer.sent[-1] == (1, 2, 0, 0)


def test_time_out_and_stop_end_the_wait_without_a_batch():
    explorer = Explorer(random_rollout, ahead=0)
    assert collator(explorer).poll(1, timeout_s=0.0) is None
    assert collator(explorer, stopping=lambda: True).poll(1) is None


def test_a_dead_explorer_ends_the_wait():
    explorer = Explorer(random_rollout, ahead=0)
    explorer.error = ExplorerDied("gone")
    with pytest.raises(ExplorerDied):
        collator(explorer).poll(1)


def test_when_nothing_more_comes_the_last_batch_is_short_and_divided_by_its_own_rows():
    explorer = Explorer(random_rollout, limit=1, ahead=1)
    c = collator(explorer)
    batch = c.poll(1)
    assert len(batch.rows) == 3 and batch.facts["short"]
    total = sum(float(m.weights.sum()) for m in batch.shares[0])
    assert total == pytest.approx(1.0)
    assert c.poll(2) is None


def test_reading_goes_on_without_waiting_once_a_batch_can_be_formed():
    explorer = Explorer(random_rollout)
    fill(explorer, 10)
    c = collator(explorer)
    batch = c.poll(1)
    assert explorer.rollout_buffer.empty()
    assert batch.facts["pool"] == 16 and batch.facts["unread"] == 14


def test_trained_ids_are_exactly_the_valid_response_ids_of_the_chosen_turns():
    """Field report 15: masks with holes, several turns of one rollout, prompts never trained."""

    def holes(explorer, rid):
        rollout = random_rollout(explorer, rid, turns=4)
        rng = np.random.default_rng(rid)
        turns = []
        for turn in rollout.turns:
            mask = rng.random(turn.n_tokens) < 0.6
            mask[rng.integers(turn.n_tokens)] = True
            fields = {f.name: getattr(turn, f.name) for f in dataclasses.fields(turn)}
            for name in ("valid", "why_not", "score", "teacher_mask"):
                fields.pop(name)
            turns.append(make_turn(**fields, teacher_mask=mask))
        return dataclasses.replace(rollout, turns=turns)

    for merge in (True, False):
        explorer = Explorer(holes, ahead=4)
        batch = collator(explorer, rows=8, cap=3, options=PackOptions(merge=merge, max_tokens=64)).poll(1)
        trained = {}
        for micro in batch.shares[0]:
            flat = micro.input_ids.flatten()
            for index, token, row in zip(micro.target_index, micro.target_ids, micro.row, strict=True):
                assert flat[index + 1] == token
                trained.setdefault(int(row), []).append(int(token))
        assert len(trained) == 8
        for row, turn in enumerate(batch.rows):
            assert trained[row] == turn.response_ids[turn.valid_mask()].tolist()


def test_stale_and_dead_turns_are_counted_and_never_trained():
    def old(explorer, rid):
        rollout = random_rollout(explorer, rid)
        if rid == 0:
            rollout.turns = [dataclasses.replace(t, policy_version=0) for t in rollout.turns]
        elif rid == 1:
            rollout.turns[0] = unscored(rollout.turns[0])
        return rollout

    explorer = Explorer(old)
    explorer.loaded_version = 9
    fill(explorer, 4)
    c = collator(explorer, rows=8)
    batch = c.poll(10)
    assert batch.facts["dropped_stale"] == 3 and batch.facts["gated"] == 1
    assert batch.facts["dead_rows"] == 0
    assert all(t.valid and t.policy_version == 9 for t in batch.rows)
    assert batch.facts["staleness"] == {"0": 8}


def test_vanilla_keeps_dead_rows_in_the_denominator():
    def dead(explorer, rid):
        rollout = random_rollout(explorer, rid, turns=2)
        rollout.turns[0] = unscored(rollout.turns[0])
        return rollout

    explorer = Explorer(dead)
    fill(explorer, 2)
    batch = collator(explorer, preset="vanilla").poll(1)
    assert batch.facts["rows"] == 4 and batch.facts["dead_rows"] == 2
    assert sum(float(m.weights.sum()) for m in batch.shares[0]) == pytest.approx(0.5)
    # Dead rows take rows and no forward pass, so they are no cost either.
    assert batch.facts["forwarded_tokens"] == sum(m.forwarded_tokens for m in batch.shares[0])
    assert batch.facts["forwarded_tokens_rows"] == sum(t.seq_len for t in batch.rows if t.valid)


@pytest.mark.parametrize("rows", [1, 4])
def test_dead_turns_in_front_never_leave_a_batch_empty_or_short(rows):
    def late(explorer, rid):
        rollout = random_rollout(explorer, rid, turns=1)
        if rid < 8 * rows:
            rollout.turns = [unscored(turn) for turn in rollout.turns]
        return rollout

    explorer = Explorer(late, ahead=9 * rows)
    c = collator(explorer, rows=rows)
    batch = c.poll(1)
    assert batch is not None and len(batch.rows) == rows and not batch.facts["short"]
    assert c.counters["gated"] == 8 * rows


def test_teacher_turns_are_no_candidates():
    def helped(explorer, rid):
        rollout = random_rollout(explorer, rid)
        rollout.turns[1] = dataclasses.replace(
            rollout.turns[1], actor="teacher", valid=False, why_not="not_student"
        )
        return rollout

    explorer = Explorer(helped)
    fill(explorer, 2)
    c = collator(explorer)
    batch = c.poll(1)
    assert {t.actor for t in batch.rows} == {"student"} and batch.facts["gated"] == 0
    assert c.counters["turns"] == 4 and c.counters["env_turns"] == 6


def test_both_cost_models_are_reported_whatever_the_packing():
    for merge in (True, False):
        explorer = Explorer(random_rollout)
        fill(explorer, 4)
        batch = collator(explorer, rows=8, cap=3, options=PackOptions(merge=merge)).poll(1)
        ends = {}
        for turn in batch.rows:
            ends[turn.rollout_id] = max(ends.get(turn.rollout_id, 0), turn.end)
        assert batch.facts["forwarded_tokens"] == sum(ends.values())
        assert batch.facts["forwarded_tokens_rows"] == sum(turn.end for turn in batch.rows)
        real = sum(m.forwarded_tokens for m in batch.shares[0])
        assert real == batch.facts["forwarded_tokens" if merge else "forwarded_tokens_rows"]


def test_every_rank_gets_the_same_number_of_micro_batches():
    explorer = Explorer(random_rollout)
    fill(explorer, 3)
    batch = collator(explorer, rows=6, options=PackOptions(world=2, max_tokens=20)).poll(1)
    assert len(batch.shares) == 2 and len(batch.shares[0]) == len(batch.shares[1])
    assert sum(float(m.weights.sum()) for share in batch.shares for m in share) == pytest.approx(1.0)


def test_never_used_counts_rollouts_with_trainable_turns_that_all_left_unselected():
    explorer = Explorer(random_rollout)
    fill(explorer, 6)
    c = collator(explorer, rows=2, cap=1)
    c.composer.max_pending_age = 0
    c.composer.pool_multiplier = 9
    assert c.poll(1).facts["never_used"] == 0
    facts = c.poll(2).facts
    assert facts["valid_rollouts"] == 6 and facts["never_used"] == 4


def test_rollouts_and_selections_are_on_disk_before_training(tmp_path):
    explorer = Explorer(random_rollout)
    fill(explorer, 3)
    with RunWriter(tmp_path) as writer:
        c = collator(explorer, writer=writer)
        batch = c.poll(1)
        assert [r.rollout_id for r in read_rollouts(tmp_path)] == [0, 1, 2]
        (record,), _ = read_batches(tmp_path)
    assert record.selected == [(t.rollout_id, t.index) for t in batch.rows]
    assert record.arrivals == [(r, t) for r in range(3) for t in range(3)]
    assert record.versions == (0, 0) and len(record.pending) == 5


def test_what_is_no_rollout_is_refused_by_the_name_of_its_field():
    """Field report 24."""
    explorer = Explorer(random_rollout)
    explorer.rollout_buffer.put({"turns": []})
    with pytest.raises(DivOPDError, match="dict; expected a Rollout"):
        collator(explorer).poll(1)

    broken = random_rollout(explorer, 0)
    object.__setattr__(broken.turns[1], "policy_version", None)
    explorer.rollout_buffer.put(broken)
    with pytest.raises(DivOPDError, match="no policy_version"):
        collator(explorer).poll(1)

    foreign = random_rollout(explorer, 3)
    explorer.rollout_buffer.put(Rollout(4, turns=foreign.turns))
    with pytest.raises(DivOPDError, match="rollout_id 3"):
        collator(explorer).poll(1)


def test_a_resumed_collator_goes_on_with_what_had_arrived_before_the_cut():
    explorer = Explorer(random_rollout)
    fill(explorer, 3)
    c = collator(explorer)
    c.poll(1)
    fill(explorer, 3)
    assert c.drain(before=5) == 2
    state, composed = c.state_dict(), c.composer.state_dict()

    again = collator(Explorer(random_rollout, state={"next_rollout_id": 5}))
    again.composer.load_state_dict(composed)
    again.load_state_dict(state)
    batch = again.poll(2)
    assert len(batch.rows) == 4 and again.counters["rollouts"] == 5 and batch.facts["arrived"] == 6
    # The collator that goes on living loses nothing either.
    assert c.drain() == 1 and c.counters["rollouts"] == 6


def test_a_rollout_after_the_cut_stays_first_in_line():
    explorer = Explorer(random_rollout)
    fill(explorer, 4)
    c = collator(explorer)
    assert c.drain(before=2) == 2 and c.drain(before=2) == 0 and c.drain() == 2
    assert [t.rollout_id for t in c.composer.state_dict()["unread"]][::3] == [0, 1, 2, 3]


def test_the_last_batch_is_not_given_up_because_its_last_rollout_came_after_the_wait():
    """Several ranks wait in short turns: what arrives just after one of them must train in the next."""

    class Late(Explorer):
        late = False

        @property
        def exhausted(self):
            return self.late

    explorer = Late(random_rollout, ahead=0)

    def wake():
        if not explorer.late:
            fill(explorer, 1)
        explorer.late = True

    c = collator(explorer, rows=40, on_wake=wake)
    stream = BatchStream(
        c,
        next_update=lambda: 1,
        last_update=9,
        rank=0,
        world=2,
        stopping=lambda: False,
        on_end=lambda: None,
        scatter=lambda items: items[0],
    )
    stream.tick_s = 0.0
    assert [stream._turn()[0] for _ in range(3)] == ["wait", "batch", "end"]


def test_rows_of_an_update_that_failed_are_counted_as_lost():
    explorer = Explorer(random_rollout, ahead=2)
    c = collator(explorer)
    c.poll(1)
    c.trained()
    assert c.give_up() == 0
    c.poll(2)
    assert c.give_up() == 4
    assert c.counters["lost_rows"] == 4
