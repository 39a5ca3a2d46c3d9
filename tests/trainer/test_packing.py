import dataclasses
import datetime
import multiprocessing

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ports import free_port

from divopd_gym.errors import ConfigError
from divopd_trainer.losses import (
    advantage_loss,
    forward_logprobs,
    multi_sample_reverse_kl,
    sample_candidates,
    sampled_reverse_kl,
)
from divopd_trainer.packing import dummy_micro_batch, pack, split_ranks
from divopd_trainer.turns import Segment, make_turn, score_turn
from divopd_trainer.weighting import REDUCTIONS, TurnOPDWeighting, uniform_weights

torch.set_num_threads(1)
VOCAB = 64


def tiny_model(seed=0):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=512, tie_word_embeddings=True,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).double().train()


def fake_teacher(ids, positions):
    """A log-prob that only the token's own id and place determine: anything shifted shows."""
    return -0.01 * np.asarray(ids) - 0.5 * np.asarray(positions) % 3.0 - 0.1


def rollout(rollout_id, lengths, rng, holes=0.0, gap=4):
    """Accumulated turns: a prompt, then a response of each length with an observation before it."""
    segment = Segment(rollout_id)
    spans = []
    for n in lengths:
        segment.append(rng.integers(0, VOCAB, rng.integers(1, gap + 1)))
        spans.append(segment.append(rng.integers(0, VOCAB, n)))
    turns = []
    for index, (start, end) in enumerate(spans):
        mask = rng.random(end - start) >= holes
        mask[rng.integers(end - start)] = True
        turns.append(
            make_turn(
                rollout_id=rollout_id, index=index, segment=segment, start=start, end=end,
                student_logprobs=-rng.random(end - start),
                teacher_logprobs=fake_teacher(segment.token_ids[start:end], np.arange(start, end)),
                teacher_mask=mask if holes else None,
            )
        )  # fmt: skip
    return turns


def composed_rows():
    """8 rows of 3 rollouts: lengths 1, 2 and n, masks with holes, a dead row, not in order."""
    rng = np.random.default_rng(0)
    a, b, c = (
        rollout(0, [1, 5, 2, 7], rng, 0.3),
        rollout(1, [3, 1, 4], rng, 0.3),
        rollout(2, [2, 6], rng),
    )
    dead = score_turn(c[0], None)
    return [a[3], b[0], dead, a[0], c[1], b[2], a[1], b[1]]


def gradient_of(model, micro_batches, scale=1.0):
    model.zero_grad()
    for micro in micro_batches:
        logp = forward_logprobs(model, micro)
        (scale * sampled_reverse_kl(logp, micro.teacher_logprobs, micro.weights)).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def gradient_by_hand(model, rows, weights):
    """Section 2 read literally: a forward a row over its own prompt and response, one token at a time."""
    model.zero_grad()
    for turn, row_weights in zip(rows, weights):
        ids = torch.from_numpy(turn.segment.token_ids[: turn.end].astype(np.int64))
        logp = torch.log_softmax(model(input_ids=ids[None]).logits[0], -1)
        for i, keep in enumerate(turn.valid_mask()):
            if keep:
                token = turn.start + i
                now = logp[token - 1, ids[token]]
                advantage = float(turn.teacher_logprobs[i]) - now.detach()
                (-advantage * now * float(np.float32(row_weights[i]))).backward(retain_graph=True)
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_same_gradient(got, expected):
    scale = max(g.abs().max() for g in expected.values())
    assert scale > 1e-4
    for name in expected:
        assert (got[name] - expected[name]).abs().max() <= 1e-5 * scale, name


def all_weightings(rows):
    return {
        **{r: uniform_weights(rows, r) for r in REDUCTIONS},
        "turnopd": TurnOPDWeighting(10).weights(rows, 5),
    }


WEIGHTINGS = [*REDUCTIONS, "turnopd"]


@pytest.mark.parametrize("name", WEIGHTINGS)
def test_packing_and_micro_batches_cannot_change_the_gradient(name):
    rows, model = composed_rows(), tiny_model()
    weights = all_weightings(rows)[name]
    expected = gradient_by_hand(model, rows, weights)
    for layout in ("padded", "packed"):
        for merge in (True, False):
            for max_tokens in (1, 40, 10_000):
                micro = pack(rows, weights, merge=merge, max_tokens=max_tokens, layout=layout)
                assert_same_gradient(gradient_of(model, micro), expected)


def test_eight_rows_as_1x8_2x4_8x1_have_one_gradient():
    """The weights are the batch's, so where it is cut does not matter."""
    rows, model = composed_rows(), tiny_model()
    for weights in all_weightings(rows).values():
        gradients = []
        for size in (8, 4, 1):
            micro = []
            for at in range(0, 8, size):
                micro += pack(rows[at : at + size], weights[at : at + size], merge=False)
            gradients.append(gradient_of(model, micro))
        assert_same_gradient(gradients[1], gradients[0])
        assert_same_gradient(gradients[2], gradients[0])


def rank_gradients(rank, world, port):
    """What one learner rank ends up with: its micro-batches' gradients, averaged over ranks as DDP does."""
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=120),
    )
    try:
        rows, model = composed_rows(), tiny_model()
        answer = {}
        for name, weights in all_weightings(rows).items():
            for merge in (True, False):
                mine = split_ranks(pack(rows, weights, merge=merge, max_tokens=30, world=world), world)[rank]
                answer[name, merge] = gradient_of(model, mine, scale=world)
                for value in answer[name, merge].values():
                    torch.distributed.all_reduce(value)
                    value /= world
        return answer
    finally:
        torch.distributed.destroy_process_group()


def test_two_ranks_have_the_gradient_of_one():
    port = free_port()
    other = multiprocessing.get_context("spawn").Process(
        target=rank_gradients, args=(1, 2, port), daemon=True
    )
    other.start()
    try:
        answer = rank_gradients(0, 2, port)
    finally:
        other.join(timeout=20)
        other.kill()
    rows, model = composed_rows(), tiny_model()
    assert len(answer) == 8
    for (name, _), gradient in answer.items():
        assert_same_gradient(gradient, gradient_of(model, pack(rows, all_weightings(rows)[name])))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    merge=st.booleans(),
    layout=st.sampled_from(["padded", "packed"]),
    max_tokens=st.integers(1, 200),
    world=st.integers(1, 3),
    holes=st.sampled_from([0.0, 0.5]),
)
def test_nothing_is_shifted_and_only_selected_response_tokens_train(
    seed, merge, layout, max_tokens, world, holes
):
    """Responses of length 1, 2 and n, several in one pack, masks with holes: each target is the token after its
    index, with that token's own teacher log-prob, and the trained tokens are the valid ones of the selected turns."""
    rng = np.random.default_rng(seed)
    rollouts = [
        rollout(r, rng.choice([1, 2, 5], rng.integers(1, 5)), rng, holes) for r in range(rng.integers(1, 5))
    ]
    turns = [t for turns in rollouts for t in turns]
    rows = [turns[i] for i in rng.permutation(len(turns))[: rng.integers(1, len(turns) + 1)]]
    micro_batches = pack(
        rows, merge=merge, layout=layout, max_tokens=max_tokens, world=world, pad_id=VOCAB - 1
    )
    trained = []
    for micro in micro_batches:
        ids, positions = micro.input_ids.flatten(), micro.position_ids.flatten()
        at = micro.target_index
        assert torch.equal(ids[at + 1], micro.target_ids)
        assert torch.equal(positions[at + 1], positions[at] + 1)
        teacher = fake_teacher(micro.target_ids, positions[at + 1]).astype(np.float32)
        assert np.array_equal(micro.teacher_logprobs.numpy(), teacher)
        sequences = int((micro.position_ids == 0).sum())
        assert micro.padded_tokens <= max_tokens or sequences == 1
        trained += zip(micro.row.tolist(), positions[at + 1].tolist(), micro.target_ids.tolist())
        for row, position, begin in zip(
            micro.row.tolist(), positions[at + 1].tolist(), (at + 1 - positions[at + 1]).tolist()
        ):
            # All that the token may attend to is its own segment's past, from position 0.
            assert np.array_equal(ids[begin : begin + position], rows[row].segment.token_ids[:position])
    assert sorted(trained) == sorted(
        (number, turn.start + i, int(turn.response_ids[i]))
        for number, turn in enumerate(rows)
        for i in np.flatnonzero(turn.valid_mask())
    )
    ends = {}
    for turn in rows:
        ends[id(turn.segment)] = max(ends.get(id(turn.segment), 0), turn.end)
    assert sum(m.forwarded_tokens for m in micro_batches) == (
        sum(ends.values()) if merge else sum(t.end for t in rows)
    )
    assert sum(float(m.weights.double().sum()) for m in micro_batches) == pytest.approx(1, abs=1e-5)


def test_observation_tokens_never_train():
    rows = rollout(0, [3, 2, 4], np.random.default_rng(1), gap=6)
    (micro,) = pack([rows[0], rows[2]])
    inside = {p for t in (rows[0], rows[2]) for p in range(t.start, t.end)}
    assert set((micro.target_index + 1).tolist()) == inside


def test_dead_rows_cost_nothing_and_stay_in_the_denominator():
    rows = composed_rows()
    micro_batches = pack(rows, merge=False)
    assert sum(float(m.weights.sum()) for m in micro_batches) == pytest.approx(7 / 8)
    assert sum(m.forwarded_tokens for m in micro_batches) == sum(t.end for t in rows if t.valid)
    assert pack([rows[2]]) == []


def test_end_of_turn_trains_when_pad_is_eos():
    """The mask comes from spans, never from comparing ids with the pad id."""
    eos = 5
    segment = Segment(0, 0, [1, 2, 3, eos, 4, 6, 7, eos])
    turns = [
        make_turn(rollout_id=0, index=i, segment=segment, start=s, end=e, student_logprobs=[-1] * (e - s), teacher_logprobs=[-2] * (e - s))
        for i, (s, e) in enumerate([(2, 4), (6, 8)])
    ]  # fmt: skip
    long = rollout(1, [9, 9], np.random.default_rng(0))
    for layout in ("padded", "packed"):
        (micro,) = pack([*turns, long[1]], pad_id=eos, layout=layout)
        of_first = micro.target_ids[micro.row == 0].tolist() + micro.target_ids[micro.row == 1].tolist()
        assert of_first == [3, eos, 7, eos]


def test_merging_costs_the_tokens_up_to_the_last_selected_response():
    turns = rollout(0, [5] * 6, np.random.default_rng(3))
    chosen = [turns[4], turns[1]]
    assert sum(m.forwarded_tokens for m in pack(chosen)) == turns[4].end
    assert sum(m.forwarded_tokens for m in pack(chosen, merge=False)) == turns[4].end + turns[1].end


def test_topk_candidates_travel_with_their_tokens():
    turns = rollout(0, [2, 3], np.random.default_rng(4))
    with_topk = [
        score_turn(t, t.teacher_logprobs, None, np.stack([t.response_ids, t.response_ids + 1], 1), np.zeros((t.n_tokens, 2)))
        for t in turns
    ]  # fmt: skip
    (micro,) = pack(with_topk)
    assert torch.equal(micro.teacher_topk_ids[:, 0], micro.target_ids)
    assert pack(turns)[0].teacher_topk_ids is None


def drawn_beside(turn, width, rng):
    """The turn with draws whose teacher log-probs tell the token that they belong to."""
    ids = rng.integers(0, VOCAB, (turn.n_tokens, width))
    scores = -ids - 100.0 * turn.response_ids[:, None]
    return score_turn(
        dataclasses.replace(turn, extra_ids=ids.astype(np.int32)),
        *(turn.teacher_logprobs, turn.teacher_mask),
        extra_teacher_logprobs=scores,
    )


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_extra_draws_travel_with_their_tokens_and_narrower_turns_are_filled_up(layout):
    rng = np.random.default_rng(4)
    turns = rollout(0, [2, 3, 4], rng, holes=0.5) + rollout(1, [3], rng)
    rows = [drawn_beside(turns[0], 3, rng), drawn_beside(turns[2], 1, rng), turns[3], turns[1]]
    micro_batches = pack(rows, layout=layout, max_tokens=8)
    assert len(micro_batches) > 1
    for micro in micro_batches:
        assert micro.extra_ids.shape == micro.extra_teacher_logprobs.shape == (micro.n_targets, 3)
        width = torch.tensor([3, 1, 0, 0])[micro.row]
        there = torch.arange(3) < width[:, None]
        assert torch.equal(micro.extra_ids >= 0, there)
        assert torch.equal(micro.extra_teacher_logprobs.isfinite(), there)
        expected = (-micro.extra_ids - 100 * micro.target_ids[:, None]).float()
        assert torch.equal(micro.extra_teacher_logprobs[there], expected[there])
    assert all(micro.extra_ids is None for micro in pack(turns))


def test_a_packed_batch_of_all_tokens_drawn_once_has_the_exact_reverse_kl_gradient():
    """Drawing every token, each as often as the student would, leaves nothing to chance: through model and packing."""
    model, rng = tiny_model(), np.random.default_rng(5)
    (turn,) = rollout(0, [3], rng)
    with torch.no_grad():
        ids = torch.from_numpy(turn.segment.token_ids.astype(np.int64))
        student = model(input_ids=ids[None]).logits[0].log_softmax(-1)[turn.start - 1 : turn.end - 1]
    teacher = torch.from_numpy(-rng.random((3, VOCAB)) * 5).log_softmax(-1)
    # Shares in 4000ths of the student's probabilities, the realised token's one draw included.
    counts = (student.exp() * 4000).round().long()
    width = int(counts.sum(1).max()) - 1
    drawn = np.full((3, width), -1)
    for place, (row, token) in enumerate(zip(counts, turn.response_ids)):
        row[int(token)] -= 1
        drawn[place, : int(row.sum())] = np.repeat(np.arange(VOCAB), row.numpy())
    places = np.arange(3)[:, None]
    turn = dataclasses.replace(turn, extra_ids=drawn.astype(np.int32))
    turn = score_turn(
        turn,
        teacher.numpy()[places[:, 0], turn.response_ids],
        None,
        None,
        None,
        teacher.numpy()[places, drawn],
    )
    (micro,) = pack([turn])
    model.zero_grad()
    ids, scores = sample_candidates(micro)
    multi_sample_reverse_kl(forward_logprobs(model, micro, ids=ids), scores, micro.weights).backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    whole = torch.arange(VOCAB).expand(3, -1)
    logp = forward_logprobs(model, micro, ids=whole)
    (micro.weights * (logp.exp() * (logp - teacher)).sum(-1)).sum().backward()
    for name, p in model.named_parameters():
        # As near as whole numbers of draws come to the student's probabilities.
        assert torch.nn.functional.cosine_similarity(found[name].flatten(), p.grad.flatten(), 0) > 0.999, name


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), world=st.integers(1, 5), layout=st.sampled_from(["padded", "packed"]))
def test_ranks_get_equal_counts_and_every_micro_batch_once(seed, world, layout):
    rng = np.random.default_rng(seed)
    rows = [t for r in range(rng.integers(1, 7)) for t in rollout(r, rng.integers(1, 9, 3), rng)]
    micro_batches = pack(rows, max_tokens=60, world=world, layout=layout)
    ranks = split_ranks(micro_batches, world)
    assert len({len(r) for r in ranks}) == 1 and len(ranks) == world
    real = [m for r in ranks for m in r if m.forwarded_tokens]
    assert sorted(map(id, real)) == sorted(map(id, micro_batches))
    dummies = [m for r in ranks for m in r if not m.forwarded_tokens]
    assert all(float(m.weights.sum()) == 0 for m in dummies)
    assert all((m.attention_mask is None) == (layout == "packed") for m in dummies)
    again = split_ranks(micro_batches, world)
    assert [[id(m) for m in r if m.forwarded_tokens] for r in again] == [
        [id(m) for m in r if m.forwarded_tokens] for r in ranks
    ]
    if len({id(t.segment) for t in rows}) >= world:
        assert not dummies


def test_a_dummy_touches_every_parameter_and_changes_none():
    gradient = gradient_of(tiny_model(), [dummy_micro_batch()])
    assert all(g is not None and not g.any() for g in gradient.values())


def test_logits_in_chunks_have_the_same_gradient():
    rows, model = composed_rows(), tiny_model()
    expected = gradient_of(model, pack(rows))
    model.zero_grad()
    (micro,) = pack(rows)
    logp = forward_logprobs(model, micro, chunk=3)
    sampled_reverse_kl(logp, micro.teacher_logprobs, micro.weights).backward()
    assert_same_gradient({n: p.grad for n, p in model.named_parameters()}, expected)


def test_weights_that_do_not_fit_are_refused():
    rows = rollout(0, [2, 3], np.random.default_rng(0))
    with pytest.raises(ConfigError, match="one array a row"):
        pack(rows, [np.ones(2)])
    with pytest.raises(ConfigError, match="Row 1 has 3"):
        pack(rows, [np.ones(2), np.ones(2)])
    with pytest.raises(ConfigError, match="layout"):
        pack(rows, layout="flat")


def test_imitated_replies_weigh_as_cross_entropy_and_others_as_distillation():
    student = rollout(1, [3], np.random.default_rng(0))[0]
    segment = Segment(2, 0, [5, 6])
    start, end = segment.append([7, 8, 9])
    reply = make_turn(
        rollout_id=2, index=0, segment=segment, start=start, end=end, student_logprobs=[np.nan] * 3,
        teacher_logprobs=[-0.5, -1.0, -2.0], actor="teacher", info={"imitate": True},
    )  # fmt: skip
    assert reply.valid
    model = tiny_model()
    (micro,) = pack([student, reply])
    assert micro.weights[micro.row == 1].tolist() == [0, 0, 0] == micro.rewards[micro.row == 0].tolist()
    logp = forward_logprobs(model, micro, 1.0, micro.target_ids)
    loss = advantage_loss(logp, micro.teacher_logprobs - logp.detach(), micro.weights, micro.rewards)
    loss.backward()
    got = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    logp = forward_logprobs(model, micro, 1.0, micro.target_ids)
    mine = micro.row == 0
    distilled = sampled_reverse_kl(logp[mine], micro.teacher_logprobs[mine], micro.weights[mine])
    (distilled - logp[~mine].sum() / 6).backward()
    assert_same_gradient(got, {name: p.grad for name, p in model.named_parameters()})
