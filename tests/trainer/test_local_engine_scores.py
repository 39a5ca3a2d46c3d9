"""Scores of the local engine against plain forward passes: alignment, candidates, draws beside the response."""

import asyncio

import numpy as np
import pytest
import torch
from engine_fakes import MODELS, episodes, student
from tiny_models import EOS, VOCAB, logprobs, prompt, qwen3

from divopd_trainer.engines.base import EngineError, GenerateRequest
from divopd_trainer.engines.local import LocalTeacher


@pytest.mark.parametrize("name", MODELS)
def test_scores_are_aligned_for_responses_of_length_1_2_and_n(name):
    build, backend = MODELS[name]
    model = build()
    sequences = [prompt(n, 20 + 13 * n) for n in range(5)]
    spans = [[(1, 2), (5, 7), (9, 20)], [(32, 33)], [(3, 46)], [(10, 10), (11, 12)], [(1, 72)]]

    async def go(engine):
        return await asyncio.gather(*(engine.score(s, p) for s, p in zip(sequences, spans)))

    with LocalTeacher(model, backend=backend, temperature=0.7, max_batch_tokens=90) as teacher:
        found = asyncio.run(go(teacher))
    for ids, places, scores in zip(sequences, spans, found):
        expected = logprobs(model, ids, 0.7)
        assert len(scores) == len(places)
        for (start, end), got in zip(places, scores):
            assert got.shape == (end - start,) and got.dtype == np.float32
            assert np.allclose(got, expected[start - 1 : end - 1], atol=1e-4)


def test_scoring_temperature_is_the_engines_own():
    # https://github.com/huggingface/trl/issues/4159
    model, ids = qwen3(), prompt(4, 30)
    for temperature in (0.7, 1.0):
        with LocalTeacher(model, temperature=temperature) as teacher:
            (scores,) = asyncio.run(teacher.score(ids, [(10, 30)]))
        assert np.abs(scores - logprobs(model, ids, temperature)[9:]).max() < 1e-4


def test_topk_holds_the_most_likely_alternatives():
    model, ids = qwen3(), prompt(4, 30)
    with LocalTeacher(model, temperature=0.7) as teacher:
        first, second = asyncio.run(teacher.score(ids, [(0, 3), (20, 30)], topk=5))
    with torch.no_grad():
        every = (model(input_ids=torch.tensor(ids.astype(np.int64))[None]).logits[0] / 0.7).log_softmax(-1)
    best = every[19:29].topk(5)
    assert np.array_equal(second.topk_ids, best.indices.numpy())
    assert np.abs(second.topk_logprobs - best.values.numpy()).max() < 1e-4
    assert np.abs(second.logprobs - logprobs(model, ids, 0.7)[19:]).max() < 1e-4
    assert first.topk_ids[0].tolist() == [-1] * 5 and np.isnan(first.topk_logprobs[0]).all()
    assert first.topk_ids.shape == first.topk_logprobs.shape == (3, 5)


def test_what_cannot_be_scored_is_nan_and_no_error():
    model, ids = qwen3(), prompt(4, 40)
    with LocalTeacher(model, max_model_len=24) as teacher:
        first, across, beyond = asyncio.run(teacher.score(ids, [(0, 2), (20, 30), (30, 40)]))
        (only,) = asyncio.run(teacher.score(ids, [(30, 40)]))
        assert asyncio.run(teacher.score(ids, [])) == []
    assert np.isnan(first).tolist() == [True, False]
    assert np.isnan(across).tolist() == [False] * 5 + [True] * 5
    assert np.isnan(beyond).all() and np.isnan(only).all()
    assert np.allclose(across[:5], logprobs(model, ids)[19:24], atol=1e-4)


def test_ids_that_the_teacher_does_not_have_are_nan_alone():
    model, ids = qwen3(), prompt(4, 20)
    ids[10] = VOCAB + 7
    with LocalTeacher(model) as teacher:
        (scores,) = asyncio.run(teacher.score(ids, [(8, 14)]))
    assert np.isnan(scores).tolist() == [False, False, True, False, False, False]


@pytest.mark.parametrize("name", MODELS)
def test_extra_draws_change_no_response_and_follow_the_students_distribution(name):
    build, backend = MODELS[name]
    model, ids = build(), prompt(1, 10)

    async def ask(engine):
        plain = engine.generate(GenerateRequest(ids, 5, 0.7, seed=5, stop_ids=(VOCAB,)))
        more = engine.generate(GenerateRequest(ids, 5, 0.7, seed=5, stop_ids=(VOCAB,), extra_samples=400))
        fewer = engine.generate(GenerateRequest(ids, 3, 0.7, seed=6, stop_ids=(VOCAB,), extra_samples=2))
        return await asyncio.gather(plain, more, fewer)

    with student(model, backend=backend) as engine:
        plain, more, fewer = asyncio.run(ask(engine))
    assert np.array_equal(plain.token_ids, more.token_ids)
    assert np.allclose(plain.logprobs, more.logprobs, atol=1e-5)
    assert plain.extra_ids is None
    assert more.extra_ids.shape == (5, 400) and more.extra_ids.dtype == np.int32
    assert fewer.extra_ids.shape == (3, 2)
    whole = np.concatenate([ids, more.token_ids]).astype(np.int64)
    with torch.no_grad():
        p = (model(input_ids=torch.from_numpy(whole)[None]).logits[0, 9:14] / 0.7).softmax(-1).numpy()
    for drawn, expected in zip(more.extra_ids, p):
        assert np.abs(np.bincount(drawn, minlength=VOCAB) / 400 - expected).max() < 0.1


def test_a_response_that_does_not_fit_has_no_extra_draws():
    with student(max_model_len=20) as engine:
        none = asyncio.run(engine.generate(GenerateRequest(prompt(1, 20), 8, extra_samples=3)))
    assert none.extra_ids.shape == (0, 3)
    with pytest.raises(EngineError, match="extra_samples is -1"):
        GenerateRequest(prompt(1, 5), 8, extra_samples=-1)


@pytest.mark.parametrize("name", MODELS)
def test_candidates_are_scored_in_the_place_of_their_token(name):
    build, backend = MODELS[name]
    model, spans = build(), [(0, 3), (20, 24), (7, 7)]
    sequences = [prompt(n, 26) for n in range(3)]
    rng = np.random.default_rng(0)
    asked = [rng.integers(0, VOCAB, (end - start, 3)).astype(np.int32) for start, end in spans]
    asked[1][0, 1], asked[1][2, 0] = -1, VOCAB + 2

    async def go(teacher):
        with_candidates = (teacher.score(s, spans, candidates=asked) for s in sequences[:2])
        narrower = teacher.score(sequences[2], spans, topk=2, candidates=[a[:, :1] for a in asked])
        return await asyncio.gather(*with_candidates, narrower, teacher.score(sequences[0], spans))

    with LocalTeacher(model, backend=backend, temperature=0.7, max_batch_tokens=200) as teacher:
        *found, plain = asyncio.run(go(teacher))
    for ids, scores in zip(sequences, found):
        for (start, end), given, score in zip(spans, asked, scores):
            width = score.candidate_logprobs.shape[1]
            assert score.candidate_logprobs.shape == (end - start, width) and width in (1, 3)
            for i, place in enumerate(range(start, end)):
                for c in range(width):
                    got = score.candidate_logprobs[i, c]
                    if place == 0 or not 0 <= given[i, c] < VOCAB:
                        assert np.isnan(got)
                        continue
                    swapped = np.concatenate([ids[:place], [given[i, c]]])
                    assert abs(got - logprobs(model, swapped, 0.7)[-1]) < 1e-4
    for one, other in zip(plain, found[0]):
        assert np.allclose(one, other.logprobs, atol=1e-5, equal_nan=True)
    assert found[2][1].topk_ids.shape == (4, 2) and found[0][1].topk_ids.shape == (4, 0)


def test_candidates_that_do_not_fit_the_spans_are_refused():
    with LocalTeacher(qwen3()) as teacher:
        for candidates in ([np.zeros((3, 2))], [np.zeros((2, 2)), np.zeros((2, 2))], [np.zeros(2)], []):
            with pytest.raises(EngineError, match="same C"):
                asyncio.run(teacher.score(prompt(1, 10), [(4, 6)], candidates=candidates))
        assert asyncio.run(teacher.score(prompt(1, 10), [], candidates=[])) == []


def test_teacher_can_act_while_it_scores():
    model = qwen3()

    async def go(teacher):
        ids = prompt(4, 40)
        return ids, await asyncio.gather(
            episodes(teacher, 3), *(teacher.score(ids, [(5, 40)]) for _ in range(6))
        )

    with LocalTeacher(model, max_slots=4, max_batch_tokens=64, stop_ids=(EOS,)) as teacher:
        ids, (played, *scores) = asyncio.run(go(teacher))
    assert all(np.abs(s[0] - logprobs(model, ids)[4:]).max() < 1e-4 for s in scores)
    for whole, spans, found in played:
        expected = logprobs(model, whole, 0.7)
        for (start, end), generation in zip(spans, found):
            assert np.abs(generation.logprobs - expected[start - 1 : end - 1]).max() < 1e-4
