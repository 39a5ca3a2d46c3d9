"""A student's and a teacher's real vLLM server: scores, limits, adapters, a run, a kill."""

import asyncio
import json
import subprocess
import sys
import urllib.error
import urllib.request

import numpy as np
import pytest
import torch
import yaml
from servers import check_run, model_of, reference
from transformers import AutoTokenizer

from divopd_trainer.chat import ChatCodec
from divopd_trainer.config_files import config_from_mapping
from divopd_trainer.engines.adapter_files import adapter_tensors, make_lora, write_adapter
from divopd_trainer.engines.base import GenerateRequest
from divopd_trainer.engines.http import Server as Address
from divopd_trainer.engines.sync_probe import LIMIT, SyncMismatch, probe_file, trained_probe, write_probe
from divopd_trainer.engines.vllm_student import VLLMStudent
from divopd_trainer.engines.vllm_sync import AdapterSync
from divopd_trainer.engines.vllm_teacher import VLLMTeacher
from divopd_trainer.metrics_log import read_metrics

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

WORDS = [
    "go",
    "to",
    "desk",
    "1",
    "shelf",
    "2",
    "take",
    "mug",
    "from",
    "cabinet",
    "3",
    "open",
    "drawer",
    "put",
    "look",
    "examine",
]


@pytest.fixture(scope="module")
def codec(adapter_run):
    return ChatCodec(AutoTokenizer.from_pretrained(adapter_run[0]["model"]))


def rollout(codec, rng, turns, words=3):
    """A chat as one segment: (ids, spans of the replies)."""

    def say(number):
        return " ".join(rng.choice(WORDS, number))

    parts, spans = [codec.start("You play.", say(words))], []
    for turn in range(turns):
        at = sum(map(len, parts))
        parts.append(codec.reply(say(words)))
        spans.append((at, at + len(parts[-1])))
        if turn < turns - 1:
            parts.append(codec.extend(say(words)))
    return np.concatenate(parts).astype(np.int32), spans


def teacher_of(adapter_run, **options):
    values = {"max_model_len": 1001, "vocab_size": 612, "request_timeout_s": 300.0, **options}
    return VLLMTeacher([Address(adapter_run[2].url, field="teacher_urls")], **values)


def student_of(adapter_run, codec, **options):
    values = {"max_model_len": 1000, "stop_ids": codec.end_of_turn_ids, "request_timeout_s": 600.0, **options}
    return VLLMStudent([Address(adapter_run[1].url)], **values)


def with_engine(engine, use):
    async def run():
        try:
            return await use(engine)
        finally:
            await engine.aclose()

    return asyncio.run(run())


def test_servers_that_were_launched_pass_the_start_up_checks(adapter_run):
    from divopd_trainer.startup import check_vllm

    assert check_vllm(config_from_mapping(adapter_run[0])) == []


def test_a_prompt_over_the_limit_is_an_outcome_and_the_server_lives(adapter_run, codec):
    too_long = np.full(1000, 7, np.int32)

    async def use(student):
        none = await student.generate(GenerateRequest(too_long, 5))
        some = await student.generate(GenerateRequest(too_long[:997], 5, seed=1))
        return none, some

    none, some = with_engine(student_of(adapter_run, codec), use)
    assert (none.stop_reason, len(none.token_ids)) == ("context_overflow", 0)
    assert 1 <= len(some.token_ids) <= 3
    # What a client that does not look would be told.
    body = json.dumps({"prompt": too_long.tolist(), "max_tokens": 5}).encode()
    request = urllib.request.Request(
        f"{adapter_run[1].url}/v1/completions", body, {"content-type": "application/json"}
    )
    with pytest.raises(urllib.error.HTTPError, match="400"):
        urllib.request.urlopen(request, timeout=60)


def test_tokens_beyond_the_teachers_context_stay_unscored(adapter_run):
    ids = np.random.default_rng(0).integers(5, 600, 1020).astype(np.int32)
    (scores,) = with_engine(teacher_of(adapter_run), lambda t: t.score(ids, [(0, 1020)]))
    assert np.isfinite(scores[1:1000]).all()
    assert np.isnan(scores[1000:]).all()


def test_seeded_long_prompts_repeat_and_carry_the_models_own_log_probs(adapter_run, codec):
    # Prompts that are read in parts while a seed is set end the CPU engine.
    prompts = [np.random.default_rng(n).integers(5, 600, 940).astype(np.int32) for n in range(6)]

    async def use(student):
        return [
            await asyncio.gather(
                *(student.generate(GenerateRequest(p, 8, seed=n)) for n, p in enumerate(prompts))
            )
            for _ in range(2)
        ]

    first, second = with_engine(student_of(adapter_run, codec), use)
    model = model_of(adapter_run[0]["model"])
    for prompt, one, other in zip(prompts, first, second):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        whole = np.concatenate([prompt, one.token_ids])
        np.testing.assert_allclose(one.logprobs, reference(model, whole)[940:], atol=LIMIT)
    assert len({tuple(one.token_ids) for one in first}) > 1


def test_100_scorings_at_once_are_those_of_the_model(adapter_run, codec):
    rng = np.random.default_rng(1)
    rollouts = [rollout(codec, rng, turns=int(rng.integers(1, 5))) for _ in range(100)]

    async def use(teacher):
        return await asyncio.gather(*(teacher.score(ids, spans) for ids, spans in rollouts))

    found = with_engine(teacher_of(adapter_run, per_server=100), use)
    model = model_of(adapter_run[0]["teacher"])
    for (ids, spans), scores in zip(rollouts, found):
        whole = reference(model, ids)
        for (start, end), span in zip(spans, scores):
            np.testing.assert_allclose(span, whole[start:end], atol=LIMIT)


def test_scoring_a_segment_once_equals_scoring_each_turn_for_an_eighth_of_the_tokens(adapter_run, codec):
    rng = np.random.default_rng(2)
    rollouts = [rollout(codec, rng, turns=30, words=1) for _ in range(30)]
    assert max(len(ids) for ids, _ in rollouts) <= 1000

    async def at_once(teacher):
        scores = await asyncio.gather(*(teacher.score(ids, spans) for ids, spans in rollouts))
        return [np.concatenate(spans) for spans in scores], teacher.counters["scored_tokens"]

    async def one_by_one(teacher):
        async def turns(ids, spans):
            found = await asyncio.gather(*(teacher.score(ids[:end], [(start, end)]) for start, end in spans))
            return np.concatenate([scores for (scores,) in found])

        return await asyncio.gather(*(turns(*one) for one in rollouts)), teacher.counters["scored_tokens"]

    whole, few = with_engine(teacher_of(adapter_run), at_once)
    single, many = with_engine(teacher_of(adapter_run), one_by_one)
    for one, other in zip(whole, single):
        assert np.isfinite(one).all()
        np.testing.assert_allclose(one, other, atol=0.01)
    assert many >= 8 * few


def test_eight_updates_with_adapters_serve_what_was_trained(adapter_run, tmp_path):
    values, *_ = adapter_run
    run_dir = tmp_path / "run"
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({**values, "run_dir": str(run_dir)}))
    command = [sys.executable, "-m", "divopd_trainer.cli", "train", "--config", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    check_run(run_dir)
    (evaluation,) = read_metrics(run_dir, ["eval"])
    assert (evaluation["policy_version"], evaluation["episodes"]) == (8, 4)
    # Slots of past versions are free again.
    models = json.load(urllib.request.urlopen(f"{values['student_urls'][0]}/v1/models", timeout=60))
    assert len(models["data"]) <= 3


def trained_adapter(values, codec, folder, version, scale=0.3):
    """A policy folder of a random adapter with its probe, and the model that it makes."""
    from peft import get_peft_model

    model = get_peft_model(model_of(values["model"]), make_lora(8, None, None)).eval()
    generator = torch.Generator().manual_seed(version)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale / 8)
    path = write_adapter(adapter_tensors(model), folder, version, model)
    write_probe(trained_probe(model, codec, 1000), path)
    return path, model


def test_a_server_that_serves_something_else_is_found_out(adapter_run, codec, tmp_path):
    one, _ = trained_adapter(adapter_run[0], codec, tmp_path, 1)
    other, _ = trained_adapter(adapter_run[0], codec, tmp_path, 2)
    probe_file(one).write_text(probe_file(other).read_text())
    student = student_of(adapter_run, codec, sync=AdapterSync())
    with pytest.raises(SyncMismatch, match="trained"):
        with_engine(student, lambda s: s.load_weights(one, 1))


def test_a_server_that_was_killed_gets_the_current_weights_before_it_serves(adapter_run, codec, tmp_path):
    values, server, _ = adapter_run
    path, model = trained_adapter(values, codec, tmp_path, 3)
    prompt = codec.start("You play.", "go to desk 1")

    async def use(student):
        await student.load_weights(path, 3)
        before = await student.generate(GenerateRequest(prompt, 12, seed=5))
        server.kill()
        server.start()
        # Asked while it is away.
        after = await student.generate(GenerateRequest(prompt, 12, seed=5))
        return before, after, dict(student.counters)

    student = student_of(adapter_run, codec, sync=AdapterSync())
    before, after, counters = with_engine(student, use)
    assert counters["restarts"] == 1
    assert before.policy_version == after.policy_version == 3
    assert before.token_ids.tolist() == after.token_ids.tolist()
    whole = np.concatenate([prompt, after.token_ids])
    np.testing.assert_allclose(after.logprobs, reference(model, whole)[len(prompt) :], atol=LIMIT)
    assert max(student.sync.gaps) <= LIMIT
