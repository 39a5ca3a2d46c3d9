"""The teacher on vLLM servers, against a fake one: whole segments, candidates, windows, what stays unscored."""

import asyncio

import numpy as np
import pytest
from fake_vllm import VOCAB, log_softmax, logits, reference_scores
from vllm_fakes import all_up, asked, play, teacher_of

from divopd_trainer.engines.base import EngineError
from divopd_trainer.engines.http import BadAnswer
from divopd_trainer.engines.vllm_teacher import windows

# --- the teacher -----------------------------------------------------------------------------------------------

SEGMENT = np.random.default_rng(0).integers(2, VOCAB, 60)


def test_one_request_scores_a_whole_segment_and_entry_i_scores_token_start_plus_i(serve):
    fake = serve()
    spans = [(0, 3), (10, 11), (12, 14), (30, 55), (55, 55)]
    found = play(teacher_of(fake), lambda t: t.score(SEGMENT, spans))
    expected = reference_scores(SEGMENT)
    assert len(fake.bodies()) == 1 and fake.bodies()[0]["prompt"] == SEGMENT[:55].tolist()
    for (start, end), scores in zip(spans, found):
        np.testing.assert_allclose(scores, expected[start:end], atol=1e-5)
        assert scores.dtype == np.float32


def test_a_segment_scored_once_costs_far_less_than_turn_by_turn_and_says_the_same(serve):
    spans = [(start + 2, start + 4) for start in range(0, 120, 4)]
    segment = np.random.default_rng(1).integers(2, VOCAB, 120)

    def scored(by_turn):
        async def work(teacher):
            if by_turn:
                found = [(await teacher.score(segment[:end], [(start, end)]))[0] for start, end in spans]
            else:
                found = await teacher.score(segment, spans)
            return np.concatenate(found), teacher.counters["scored_tokens"]

        return play(teacher_of(serve()), work)

    (once, few), (often, many) = scored(False), scored(True)
    np.testing.assert_allclose(once, often, atol=1e-5)
    assert many >= 8 * few


def test_candidates_of_the_teacher_are_its_most_likely_tokens_in_order(serve):
    found = play(teacher_of(serve()), lambda t: t.score(SEGMENT, [(4, 9)], 5))
    for i, place in enumerate(range(4, 9)):
        scores = log_softmax(logits(SEGMENT[place - 1]))
        best = np.argsort(-scores)[:5]
        assert found[0].topk_ids[i].tolist() == best.tolist()
        np.testing.assert_allclose(found[0].topk_logprobs[i], scores[best], atol=1e-5)
        np.testing.assert_allclose(found[0].logprobs[i], scores[SEGMENT[place]], atol=1e-5)


def test_what_the_teachers_context_cannot_hold_is_unscored_and_no_error(serve):
    fake = serve(max_model_len=40)

    async def work(teacher):
        return await teacher.score(SEGMENT, [(30, 60)], 2), teacher.counters

    (found,), counters = play(teacher_of(fake, max_model_len=40), work)
    assert np.isfinite(found.logprobs[:9]).all() and np.isnan(found.logprobs[9:]).all()
    assert (found.topk_ids[9:] == -1).all() and counters["unscored_tokens"] == 21


def test_windows_score_every_token_once_with_at_least_the_overlap_before_it():
    for length, limit, overlap in [(10, 20, 5), (60, 20, 5), (61, 20, 19), (40, 20, 1)]:
        cuts = windows(length, limit, overlap)
        scored = [i for _, end, first in cuts for i in range(first, end)]
        assert scored == list(range(length))
        assert all(
            end - start <= limit and (first == 0 or first - start == overlap) for start, end, first in cuts
        )
    assert windows(60, 20, 0) == [(0, 20, 0)]


def test_overlapping_windows_score_what_one_request_cannot(serve):
    fake = serve(max_model_len=21)
    found = play(teacher_of(fake, max_model_len=21, overlap=4), lambda t: t.score(SEGMENT, [(1, 60)]))
    # The fake's model looks at one token back, so windows change nothing here; those of a real one are approximate.
    np.testing.assert_allclose(found[0], reference_scores(SEGMENT)[1:], atol=1e-5)
    assert all(len(body["prompt"]) <= 20 for body in fake.bodies())


def test_ids_that_the_teacher_does_not_know_are_unscored_and_never_sent(serve):
    fake = serve()
    ids = SEGMENT.copy()
    ids[5] = VOCAB + 3
    found = play(teacher_of(fake, vocab_size=VOCAB), lambda t: t.score(ids, [(3, 9)]))
    assert np.isnan(found[0]).tolist() == [False, False, True, False, False, False]
    assert max(fake.bodies()[0]["prompt"]) < VOCAB


def test_scores_that_are_not_finite_are_unscored(serve):
    fake = serve()
    fake.faults.append("nan")
    assert np.isnan(play(teacher_of(fake), lambda t: t.score(SEGMENT, [(3, 9)]))[0]).all()


def no_scores(answer):
    answer["choices"][0]["prompt_logprobs"] = None


def scores_of_others(answer):
    answer["choices"][0]["prompt_logprobs"].reverse()


@pytest.mark.parametrize("edit", [no_scores, scores_of_others])
def test_scores_of_other_tokens_are_an_error(serve, edit):
    fake = serve()
    fake.faults.append(("edit", edit))
    with pytest.raises(BadAnswer, match="expected"):
        play(teacher_of(fake), lambda t: t.score(SEGMENT, [(3, 9)]))


def test_a_first_token_alone_costs_no_request(serve):
    fake = serve()
    found = play(teacher_of(fake), lambda t: t.score(SEGMENT, [(0, 1), (7, 7)]))
    assert [len(f) for f in found] == [1, 0] and np.isnan(found[0][0]) and fake.bodies() == []


def test_what_a_server_cannot_score_is_refused(serve):
    teacher = teacher_of(serve())
    with pytest.raises(EngineError, match="Candidates"):
        play(teacher, lambda t: t.score(SEGMENT, [(1, 2)], candidates=[np.zeros((1, 2))]))
    with pytest.raises(EngineError, match="span"):
        play(teacher_of(serve()), lambda t: t.score(SEGMENT, [(1, 99)]))


def test_scorings_are_spread_over_the_teachers_servers(serve):
    fakes = serve(), serve()

    async def work(teacher):
        await all_up(teacher)
        return await asyncio.gather(*(teacher.score(SEGMENT, [(1, 60)]) for _ in range(20)))

    found = play(teacher_of(*fakes, per_server=3), work)
    assert all(fake.most_running <= 3 and fake.bodies() for fake in fakes)
    assert len({scores[0].tobytes() for scores in found}) == 1


def test_the_teacher_can_write_a_turn(serve):
    done = play(teacher_of(serve()), lambda t: t.generate(asked(temperature=0.7)))
    before = [7, *done.token_ids[:-1]]
    expected = [log_softmax(logits(a) / 0.7)[b] for a, b in zip(before, done.token_ids)]
    np.testing.assert_allclose(done.logprobs, expected, atol=1e-5)
