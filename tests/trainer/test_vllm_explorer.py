"""The explorer on vLLM servers (fake ones): whatever fails meanwhile, every turn is of the weights that it names."""

import asyncio

import numpy as np
import pytest
from fake_vllm import FakeSync, FakeVLLM, log_softmax, logits, reference_scores
from fakes import END, ByteCodec
from loop_fakes import config, run

from divopd_trainer.engines import replicas
from divopd_trainer.engines.http import Server
from divopd_trainer.engines.vllm_student import VLLMStudent
from divopd_trainer.engines.vllm_teacher import VLLMTeacher
from divopd_trainer.explorer.engines import Engines
from divopd_trainer.explorer.messages import (
    EpisodeFailed,
    EvalDone,
    Evaluate,
    PolicyLoaded,
    Ready,
    RolloutDone,
    SetPolicy,
)

VOCAB, HEAT, TEACHER = 300, 0.7, 5


def build(config):
    """An engine factory; `engine_kwargs` holds addresses, whether adapters are used, and the shortest context."""
    options = config.engine_kwargs

    def student(purpose):
        return VLLMStudent(
            [Server(url) for url in options["student"]],
            max_model_len=options.get("length", 4000),
            stop_ids=(END,),
            sync=FakeSync(options.get("adapters", True), purpose),
            request_timeout_s=20.0,
        )

    teacher = VLLMTeacher(
        [Server(url) for url in options["teacher"]], max_model_len=4000, request_timeout_s=20.0
    )
    return Engines(student("train"), ByteCodec(), teacher, make_eval_student=lambda: student("eval"))


@pytest.fixture
def fleet(monkeypatch):
    monkeypatch.setattr(replicas, "_BACKOFF_S", (0.001, 0.01))
    monkeypatch.setattr(replicas, "_LOOK_AGAIN_S", (0.01, 0.05))
    started = []

    def start(students=2, teachers=2, adapters=True, length=4000):
        for _ in range(students):
            started.append(FakeVLLM(vocab=VOCAB, max_model_len=length, adapters=adapters, stop_id=END))
        for _ in range(teachers):
            started.append(FakeVLLM(vocab=VOCAB, max_model_len=4000, stop_id=END))
            started[-1].weights = TEACHER
        options = {
            "adapters": adapters,
            "length": length,
            "student": [fake.url for fake in started[:students]],
        }
        return started, options | {"teacher": [fake.url for fake in started[students:]]}

    yield start
    for fake in started:
        if fake.alive:
            fake.stop()


def assert_of_its_weights(rollout):
    """Ids, masks and both models' log-probs of every turn are the servers' own."""
    for turn in rollout.turns:
        ids = turn.segment.token_ids
        places = np.arange(turn.start, turn.end)
        rows = [logits(ids[i - 1], 10 * turn.policy_version, VOCAB) / HEAT for i in places]
        own = [log_softmax(row)[ids[i]] for row, i in zip(rows, places)]
        np.testing.assert_allclose(turn.student_logprobs, own, atol=1e-4)
        expected = reference_scores(ids, TEACHER, VOCAB)[turn.start : turn.end]
        np.testing.assert_allclose(turn.teacher_logprobs, expected, atol=1e-4)
        assert turn.valid


@pytest.mark.parametrize("adapters", [True, False])
def test_faults_restarts_and_new_weights_leave_every_turn_of_the_weights_that_it_names(fleet, adapters):
    fakes, options = fleet(adapters=adapters)
    fakes[0].faults.extend([None, 500, "drop", None, "truncate", 503, None, "abort", 429])
    fakes[2].faults.extend([None, "truncate", 502, "drop"])

    async def talk(channel, explorer):
        await channel.until(lambda: channel.of(Ready))
        for version in range(1, 5):
            seen = len(channel.of(RolloutDone))
            channel.say(SetPolicy(version, str(10 * version), version))
            await channel.until(lambda v=version: any(m.version == v for m in channel.of(PolicyLoaded)))
            await channel.until(lambda n=seen: len(channel.of(RolloutDone)) >= n + 4)
            await asyncio.to_thread(fakes[version % 2].restart)
        seen = len(channel.of(RolloutDone))
        await channel.until(lambda: len(channel.of(RolloutDone)) >= seen + 8)

    values = {"engine": "test_vllm_explorer:build", "engine_kwargs": options, "temperature": HEAT}
    channel, explorer = run(config(**values, max_turns=3, workers=4, max_concurrent=4), talk)
    rollouts = [m.rollout for m in channel.of(RolloutDone)]
    assert channel.of(EpisodeFailed) == []
    assert len({turn.policy_version for rollout in rollouts for turn in rollout.turns}) >= 3
    for rollout in rollouts:
        assert_of_its_weights(rollout)
    seeds = [body["seed"] for fake in fakes[:2] for body in fake.bodies()]
    assert len(set(seeds)) > 30


def test_one_refused_generation_of_many_costs_one_episode(fleet):
    fakes, options = fleet(students=1, teachers=1)
    fakes[0].faults.extend([None, None, 400])

    async def talk(channel, explorer):
        await channel.until(lambda: len(channel.of((RolloutDone, EpisodeFailed))) == 20)

    values = {"engine": "test_vllm_explorer:build", "engine_kwargs": options, "temperature": HEAT}
    channel, _ = run(config(**values, max_turns=2, epochs=1), talk)
    (failed,) = channel.of(EpisodeFailed)
    assert "400: fault 400" in failed.why and len(channel.of(RolloutDone)) == 19


def test_an_episode_that_outgrows_the_servers_context_is_cut_and_no_request_is_refused(fleet):
    fakes, options = fleet(students=1, teachers=1, length=700)

    async def talk(channel, explorer):
        await channel.until(lambda: len(channel.of((RolloutDone, EpisodeFailed))) == 10)

    values = {"engine": "test_vllm_explorer:build", "engine_kwargs": options, "temperature": HEAT}
    env_kwargs = {"tasks": 10, "lengths": (70,), "grow": 4}
    channel, _ = run(config(**values, env_kwargs=env_kwargs, max_turns=30, epochs=1), talk)
    rollouts = [m.rollout for m in channel.of(RolloutDone)]
    assert len(rollouts) == 10 and {r.done_reason for r in rollouts} == {"context_overflow"}
    for rollout in rollouts:
        assert len(rollout.turns) > 1
        assert_of_its_weights(rollout)
    assert all(len(body["prompt"]) + body["max_tokens"] <= 700 for body in fakes[0].bodies())


def test_an_evaluation_on_shared_servers_carries_one_version_while_training_goes_on_with_others(fleet):
    fakes, options = fleet(students=2, teachers=1)

    async def talk(channel, explorer):
        await channel.until(lambda: channel.of(Ready))
        channel.say(SetPolicy(1, "10", 1))
        channel.say(Evaluate(9, 1, "10", episodes=12, temperature=0.4, max_turns=4))
        for version in range(2, 8):
            await asyncio.sleep(0.05)
            channel.say(SetPolicy(version, str(10 * version), version))
        await channel.until(lambda: channel.of(EvalDone))
        await channel.until(lambda: any(m.version == 7 for m in channel.of(PolicyLoaded)))

    values = {"engine": "test_vllm_explorer:build", "engine_kwargs": options, "temperature": HEAT}
    channel, _ = run(config(**values, max_turns=3), talk)
    (done,) = channel.of(EvalDone)
    assert done.error is None and done.result["policy_version"] == 1 and done.result["episodes"] == 12
    names = {body.get("model") for fake in fakes[:2] for body in fake.bodies()}
    assert {name for name in names if str(name).startswith("eval")} == {"eval-1-1"}
