"""The local engine against plain forward passes: log-probs, prefixes, weights, limits, faults."""

import asyncio
import time

import numpy as np
import pytest
import torch
from engine_fakes import MODELS, episode, episodes, student
from tiny_models import EOS, VOCAB, gpt2, logprobs, prompt, qwen2, qwen3

from divopd_gym.errors import ConfigError
from divopd_trainer.engines import backends
from divopd_trainer.engines.base import EngineClosed, EngineError, EngineTimeout, GenerateRequest
from divopd_trainer.engines.dense import DenseBackend
from divopd_trainer.engines.local import LocalTeacher
from divopd_trainer.engines.slot_cache import KVBuffers, SlotTable
from divopd_trainer.engines.weights import WeightsError, write_policy


@pytest.mark.parametrize("name", MODELS)
def test_logprobs_equal_a_plain_forward_pass(name):
    build, backend = MODELS[name]
    model = build()
    with student(model, backend=backend) as engine:
        played = asyncio.run(episodes(engine, 6))
    for ids, spans, found in played:
        expected = logprobs(model, ids, 0.7)
        for (start, end), generation in zip(spans, found):
            assert end > start
            assert np.abs(generation.logprobs - expected[start - 1 : end - 1]).max() < 1e-4
            assert generation.logprobs.dtype == np.float32 and generation.token_ids.dtype == np.int32


def test_backends_of_auto_are_dense_where_known_and_transformers_elsewhere():
    for build, backend in ((qwen3, "DenseBackend"), (qwen2, "DenseBackend"), (gpt2, "TransformersBackend")):
        with student(build()) as engine:
            assert engine.backend == backend


def test_in_half_precision_the_dense_backend_is_judged_by_what_is_likely():
    model = qwen3(tied=False).to(torch.bfloat16)
    with torch.inference_mode():
        # Logits as large as real models have: single ones are rounded by more than a tenth.
        model.get_output_embeddings().weight.mul_(4)
        dense = DenseBackend(model, 2)
        assert dense.check() is None
        dense._sin = -dense._sin
        assert "differ by" in dense.check()


@pytest.mark.parametrize(
    ("gpus", "ranks", "device"),
    [(0, "1", "cpu"), (1, "1", "cuda:0"), (8, "1", "cuda:7"), (8, "4", "cuda:7"), (8, "8", "cuda:0")],
)
def test_models_go_to_a_gpu_that_the_learner_leaves_free(monkeypatch, gpus, ranks, device):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert backends._free_device() == device


def test_sample_does_not_depend_on_the_batch():
    with student() as engine:
        together = asyncio.run(episodes(engine, 4))
    with student() as engine:
        alone = [asyncio.run(episode(engine, n)) for n in range(4)]
    for (ids, _, _), (other, _, _) in zip(together, alone):
        assert np.array_equal(ids, other)


def test_growing_prompt_is_computed_only_where_it_grew():
    with student() as engine:
        ((_, spans, found),) = asyncio.run(episodes(engine, 1))
        counters = engine.counters
    assert found[0].cached_tokens == 0
    for (_, end), generation in zip(spans, found[1:]):
        # All that went through the model; the last token of a response was drawn but not fed.
        assert generation.cached_tokens == end - 1
    assert counters["cached_tokens"] == sum(g.cached_tokens for g in found)


def test_more_conversations_than_slots_are_still_right():
    model = qwen3()
    with student(model, max_slots=2, max_batch_tokens=16) as engine:
        for ids, spans, found in asyncio.run(episodes(engine, 5)):
            expected = logprobs(model, ids, 0.7)
            for (start, end), generation in zip(spans, found):
                assert np.abs(generation.logprobs - expected[start - 1 : end - 1]).max() < 1e-4


def test_prompt_longer_than_a_forward_pass_goes_in_pieces():
    model, ids = qwen3(), prompt(3, 150)
    with student(model) as engine:
        generation = asyncio.run(engine.generate(GenerateRequest(ids, 5, seed=1)))
    whole = np.concatenate([ids, generation.token_ids])
    assert np.abs(generation.logprobs - logprobs(model, whole)[149:]).max() < 1e-4


def test_a_prefix_is_copied_from_another_conversation():
    model, shared = qwen3(), prompt(5, 40)

    async def go(engine):
        await engine.generate(GenerateRequest(shared, 3, seed=1, cache_key="a"))
        ids = np.concatenate([shared[:30], prompt(6, 10)])
        return ids, await engine.generate(GenerateRequest(ids, 6, seed=2, cache_key="b"))

    with student(model) as engine:
        ids, generation = asyncio.run(go(engine))
    assert generation.cached_tokens == 30
    whole = np.concatenate([ids, generation.token_ids])
    assert np.abs(generation.logprobs - logprobs(model, whole)[39:]).max() < 1e-4


def test_slots_follow_their_key_and_forgotten_ones_go_first():
    table, ids = SlotTable(2), np.arange(8, dtype=np.int32)
    first = table.acquire("a", ids)
    second = table.acquire("b", ids + 50)
    assert {first.slot, second.slot} == {0, 1} and table.acquire("c", ids) is None
    table.release(first.slot, ids)
    table.release(second.slot, ids + 50)
    again = table.acquire("a", np.append(ids, 99))
    assert (again.slot, again.reused) == (first.slot, 8)
    table.release(again.slot, ids)
    table.forget("a")
    # b was used longer ago, but a is forgotten.
    assert table.acquire("c", ids + 90).slot == first.slot
    table.invalidate()
    assert table.acquire("b", ids + 50).reused == 0


def test_slot_of_a_key_in_use_is_not_given_twice():
    table, ids = SlotTable(2), np.arange(8, dtype=np.int32)
    first, second = table.acquire("a", ids), table.acquire("a", ids)
    assert first.slot != second.slot


def test_greedy_is_the_most_likely_continuation():
    model, ids = qwen3(), prompt(1, 10)
    with student(model) as engine:
        generation = asyncio.run(
            engine.generate(GenerateRequest(ids, 6, 0.5, greedy=True, stop_ids=(VOCAB,)))
        )
    for token in generation.token_ids:
        with torch.no_grad():
            best = model(input_ids=torch.tensor(ids.astype(np.int64))[None]).logits[0, -1].argmax()
        assert token == int(best)
        ids = np.append(ids, token)
    assert np.abs(generation.logprobs - logprobs(model, ids, 0.5)[9:]).max() < 1e-4


def test_response_ends_with_a_stop_id_or_at_the_limit():
    with student() as engine:

        async def ask(**more):
            return await engine.generate(GenerateRequest(prompt(1, 10), 8, seed=5, **more))

        free = asyncio.run(ask(stop_ids=(VOCAB + 1,)))
        assert free.stop_reason == "length" and len(free.token_ids) == 8
        stop = int(free.token_ids[2])
        ended = asyncio.run(ask(stop_ids=(stop,)))
    first = free.token_ids.tolist().index(stop)
    assert (
        ended.stop_reason == "end_of_turn"
        and ended.token_ids.tolist() == free.token_ids[: first + 1].tolist()
    )


def test_context_limit_cuts_the_response_and_overflow_is_no_error():
    with student(max_model_len=20) as engine:

        async def ask(length):
            return await engine.generate(GenerateRequest(prompt(1, length), 8, seed=1, stop_ids=(VOCAB,)))

        cut, one, none, beyond = (asyncio.run(ask(n)) for n in (15, 19, 20, 40))
    assert (len(cut.token_ids), cut.stop_reason) == (5, "length")
    assert len(one.token_ids) == 1
    for overflow in (none, beyond):
        assert (len(overflow.token_ids), len(overflow.logprobs)) == (0, 0)
        assert overflow.stop_reason == "context_overflow"


def test_weights_change_between_responses_never_inside_one():
    models = [qwen3(seed) for seed in range(4)]

    async def go(engine):
        async def load():
            for version in (1, 2, 3):
                await asyncio.sleep(0.01)
                await engine.load_weights(dict(models[version].named_parameters()), version)

        played, _ = await asyncio.gather(episodes(engine, 5, turns=12), load())
        return played

    with student(models[0]) as engine:
        played = asyncio.run(go(engine))
        assert engine.policy_version == 3
    versions = set()
    for ids, spans, found in played:
        for (start, end), generation in zip(spans, found):
            versions.add(generation.policy_version)
            expected = logprobs(models[generation.policy_version], ids[:end], 0.7)
            assert np.abs(generation.logprobs - expected[start - 1 :]).max() < 1e-4
    assert len(versions) > 1


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("backend", ["dense", "transformers"])
def test_after_a_load_every_weight_counts(tied, backend, tmp_path):
    # https://github.com/vllm-project/vllm/issues/56689: the version rises and the weights stay.
    learner, ids = qwen3(tied=tied), prompt(2, 24)

    async def probe(engine):
        (scores,) = await engine.score(ids, [(1, len(ids))])
        request = GenerateRequest(ids, 4, greedy=True, cache_key="probe", stop_ids=(VOCAB,))
        return scores, await engine.generate(request)

    with student(learner, backend=backend) as engine:
        before, _ = asyncio.run(probe(engine))
        for version, (_, parameter) in enumerate(learner.named_parameters(), 1):
            with torch.no_grad():
                parameter.view(-1)[::3] += 0.05
            asyncio.run(
                engine.load_weights(write_policy(learner.named_parameters(), tmp_path, version), version)
            )
            after, generation = asyncio.run(probe(engine))
            assert np.abs(after - before).max() > 1e-5
            assert np.abs(after - logprobs(learner, ids)).max() < 1e-4
            whole = np.concatenate([ids, generation.token_ids])
            assert np.abs(generation.logprobs - logprobs(learner, whole)[len(ids) - 1 :]).max() < 1e-4
            assert engine.policy_version == generation.policy_version == version
            before = after


def test_weights_of_another_model_are_refused_and_the_old_ones_stay():
    model, ids = qwen3(), prompt(2, 20)
    with student(model) as engine:
        with pytest.raises(WeightsError, match="of another shape"):
            asyncio.run(engine.load_weights(dict(qwen3(hidden_size=40).named_parameters()), 5))
        assert engine.policy_version == 0
        (scores,) = asyncio.run(engine.score(ids, [(1, 20)]))
    assert np.abs(scores - logprobs(model, ids)).max() < 1e-4


def test_a_request_that_cannot_be_served_fails_alone():
    bad = np.array([3, VOCAB], np.int32)

    async def go(engine):
        good = engine.generate(GenerateRequest(prompt(1, 10), 5, seed=1))
        wrong = engine.generate(GenerateRequest(bad, 5, seed=1))
        span = engine.score(prompt(1, 10), [(5, 11)])
        return await asyncio.gather(good, wrong, span, return_exceptions=True)

    with student() as engine:
        good, wrong, span = asyncio.run(go(engine))
    assert len(good.token_ids) > 0
    assert isinstance(wrong, EngineError) and "vocabulary has 48" in str(wrong)
    assert isinstance(span, EngineError) and "(5, 11)" in str(span)


def test_failed_forward_pass_fails_its_requests_and_the_engine_goes_on():
    with student() as engine:
        backend, real = engine._forward.backend, engine._forward.backend.extend

        def broken(feeds):
            backend.extend = real
            raise MemoryError("no room")

        backend.extend = broken
        with pytest.raises(EngineError, match="MemoryError: no room"):
            asyncio.run(engine.generate(GenerateRequest(prompt(1, 10), 5, seed=1, cache_key="a")))
        again = asyncio.run(engine.generate(GenerateRequest(prompt(1, 10), 5, seed=1, cache_key="a")))
    assert again.cached_tokens == 0 and len(again.token_ids) > 0


def test_one_request_that_a_forward_pass_fails_on_costs_no_other():
    """Field report 6: several responses share a forward pass, and one of them is what it fails on."""

    async def go(engine):
        asked = [engine.generate(GenerateRequest(prompt(i, 10 + i), 5, seed=i)) for i in range(4)]
        scored = [engine.score(prompt(i, 12), [(2, 8 + i)]) for i in range(4)]
        return await asyncio.gather(*asked, *scored, return_exceptions=True)

    def refusing(real, lengths):
        def call(given, *more):
            if any(len(getattr(item, "ids", item)) in lengths for item in given):
                raise MemoryError("no room")
            return real(given, *more)

        return call

    with student() as engine:
        expected = asyncio.run(go(engine))
        backend = engine._forward.backend
        engine._forward._table.invalidate()
        backend.extend = refusing(backend.extend, {12})
        backend.hidden = refusing(backend.hidden, {9})
        found = asyncio.run(go(engine))
    failed = [number for number, result in enumerate(found) if isinstance(result, EngineError)]
    assert failed == [2, 6] and all("MemoryError: no room" in str(found[number]) for number in failed)
    for number in (0, 1, 3):
        assert np.array_equal(found[number].token_ids, expected[number].token_ids)
        assert np.allclose(found[4 + number][0], expected[4 + number][0], atol=1e-5)


def test_growth_that_fails_half_way_leaves_every_layer_as_it_was():
    buffers = KVBuffers(2)
    state = torch.randn(1, 1, 1, 4)
    for layer in range(3):
        buffers.ensure_layer(layer, state, state)
    buffers.keys[0][:] = 1.0

    class Full(list):
        def __setitem__(self, index, value):
            if index == 1 and value.shape[2] > 128:
                raise MemoryError("no room")
            super().__setitem__(index, value)

    buffers.keys = Full(buffers.keys)
    with pytest.raises(MemoryError):
        buffers.reserve(500)
    assert buffers.capacity == 128
    assert {b.shape[2] for b in [*buffers.keys, *buffers.values]} == {128}
    assert bool((buffers.keys[0] == 1.0).all())


def test_failed_copy_of_a_prefix_gives_the_slot_back():
    async def go(engine, seeds):
        asked = [engine.generate(GenerateRequest(prompt(5, 40), 4, seed=s, cache_key=s)) for s in seeds]
        return await asyncio.gather(*asked, return_exceptions=True)

    with student(max_slots=2) as engine:
        asyncio.run(go(engine, [1]))
        buffers = engine._forward.backend.buffers
        real = buffers.copy_prefix

        def broken(*_):
            buffers.copy_prefix = real
            raise MemoryError("no room")

        buffers.copy_prefix = broken
        (failed,) = asyncio.run(go(engine, [2]))
        assert isinstance(failed, EngineError)
        after = asyncio.run(go(engine, [3, 4, 5]))
    assert all(len(g.token_ids) > 0 for g in after)


def test_weights_that_are_not_finite_are_named():
    model = qwen3()
    with student(model) as engine:
        with torch.no_grad():
            model.model.norm.weight.fill_(torch.nan)
        asyncio.run(engine.load_weights(dict(model.named_parameters()), 3))
        with pytest.raises(EngineError, match="not finite"):
            asyncio.run(engine.generate(GenerateRequest(prompt(1, 10), 5)))


def test_every_request_has_a_deadline_and_its_slot_comes_back():
    with student(max_slots=1, request_timeout_s=0.05) as engine:
        backend, real = engine._forward.backend, engine._forward.backend.extend

        def slow(feeds):
            backend.extend = real
            time.sleep(0.3)
            return real(feeds)

        backend.extend = slow
        with pytest.raises(EngineTimeout, match="within 0.05 s"):
            asyncio.run(engine.generate(GenerateRequest(prompt(1, 10), 5, stop_ids=(VOCAB,))))
        engine.request_timeout_s = 60
        assert len(asyncio.run(engine.generate(GenerateRequest(prompt(1, 10), 5, seed=1))).token_ids) > 0


def test_closing_fails_what_waits_and_refuses_what_comes():
    engine = student()

    async def go():
        request = GenerateRequest(prompt(1, 10), 200, seed=1, stop_ids=(VOCAB,))
        waiting = [asyncio.ensure_future(engine.generate(request)) for _ in range(8)]
        await asyncio.sleep(0)
        assert await asyncio.to_thread(engine.close)
        return await asyncio.gather(*waiting, return_exceptions=True)

    assert all(isinstance(r, EngineClosed) for r in asyncio.run(go()))
    with pytest.raises(EngineClosed):
        asyncio.run(engine.generate(GenerateRequest(prompt(1, 10), 5)))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"max_model_len": 300}, "expected 2 to 256"),
        ({"max_slots": 64}, "more batch tokens than slots"),
        ({"temperature": 0.0}, "above 0"),
        ({"backend": "fast"}, "expected 'auto', 'dense' or 'transformers'"),
    ],
)
def test_bad_settings_are_refused(more, message):
    with pytest.raises(ConfigError, match=message):
        student(**more)


def test_models_that_cannot_be_held_are_refused(tmp_path):
    sliding = qwen3(
        layer_types=["full_attention", "sliding_attention"], sliding_window=16, use_sliding_window=True
    )
    with pytest.raises(ConfigError, match="sliding_attention"):
        student(sliding)
    with pytest.raises(ConfigError, match="No causal language model"):
        student(tmp_path)
    with pytest.raises(ConfigError, match="dense backend cannot run 'gpt2'"):
        student(gpt2(), backend="dense")


def test_requests_that_make_no_sense_are_refused():
    for bad in ({"temperature": 0.0}, {"max_tokens": 0}, {"prompt_ids": []}):
        with pytest.raises(EngineError):
            GenerateRequest(**{"prompt_ids": prompt(1, 5), "max_tokens": 4, **bad})


def test_model_is_read_from_its_directory(tmp_path):
    model, ids = qwen3(), prompt(2, 20)
    model.save_pretrained(tmp_path)
    with LocalTeacher(tmp_path) as teacher:
        assert teacher.stop_ids == (EOS,) and teacher.max_model_len == 256
        (scores,) = asyncio.run(teacher.score(ids, [(1, 20)]))
    assert np.abs(scores - logprobs(model, ids)).max() < 1e-4
