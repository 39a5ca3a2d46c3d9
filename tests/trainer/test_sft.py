"""Supervised training: the explorer's own ids, no loss on mistakes, batches by tokens."""

import asyncio

import numpy as np
import pytest
import torch
from counter_expert import CounterWithExpert
from fakes import LocalHandle

from divopd_gym.errors import ConfigError
from divopd_gym.prompts import get_prompt
from divopd_trainer.chat import ChatCodec
from divopd_trainer.engines.base import Generation
from divopd_trainer.explorer.episode import EpisodeLimits, run_episode
from divopd_trainer.sft import TRAINED, encode_episode, plan_batches, train_sft, transcript_texts
from divopd_trainer.tiny import TinySpec, build_model, train_tokenizer

ENV = "divopd_test/CounterWithExpert-v0"
SPEC = "tiny:layers=1,width=32,heads=2,mlp=64"


def episode(task="4/1", mistakes=()):
    """A recorded episode in which the turns named say something wrong."""
    env = CounterWithExpert()
    expert = env.expert()
    observation, info = env.reset(options={"task": task})
    expert.reset(observation, info)
    goal, turns, done = info["goal"], [], False
    while not done:
        label = expert.act()
        action = "wait" if len(turns) in mistakes else label
        turns.append(
            {
                "observation": observation,
                "admissible": info["admissible_actions"],
                "action": action,
                "expert": label,
                "noise": action != label,
            }
        )
        observation, _, done, _, info = env.step(action)
        expert.observe(action, observation, info)
    return {"schema": 1, "task": task, "goal": goal, "turns": turns, "success": True}


def tokenizer():
    prompt = get_prompt(ENV, "tiny", "accumulate")
    return train_tokenizer(transcript_texts(prompt, [episode(f"{n}/0") for n in (2, 3, 4)] * 3), 400)


class Script:
    """A student that says what it was told to."""

    policy_version = 0

    def __init__(self, codec, actions):
        self.codec, self.actions = codec, iter(actions)

    async def generate(self, request):
        ids = self.codec.reply(next(self.actions))
        return Generation(ids, np.zeros(len(ids), np.float32), "end_of_turn", 0)


@pytest.mark.parametrize("mistakes", [(), (0,), (1, 2)])
def test_accumulate_ids_are_exactly_the_explorers(mistakes):
    codec, prompt = ChatCodec(tokenizer()), get_prompt(ENV, "tiny", "accumulate")
    recorded = episode(mistakes=mistakes)
    rollout = asyncio.run(
        run_episode(
            rollout_id=0,
            task=recorded["task"],
            env=LocalHandle(CounterWithExpert()),
            student=Script(codec, [t["action"] for t in recorded["turns"]]),
            codec=codec,
            prompt=prompt,
            limits=EpisodeLimits(max_turns=10, max_tokens=20),
        )
    )
    (sample,) = encode_episode(codec, prompt, recorded, "accumulate")
    assert sample.token_ids.tolist() == rollout.turns[0].segment.token_ids.tolist()
    for turn, record in zip(rollout.turns, recorded["turns"]):
        answer = codec.reply(record["expert"])
        targets = sample.targets[turn.start : turn.end][sample.kind[turn.start : turn.end] == TRAINED]
        assert targets.tolist() == answer[: len(targets)].tolist()
        assert len(targets) == (len(answer) if record["action"] == record["expert"] else 1)
    replies = sum(turn.end - turn.start for turn in rollout.turns)
    assert (sample.kind != 0).sum() == replies


def test_window_ids_are_exactly_the_explorers_and_answer_as_the_expert():
    history = "window:1"
    codec, prompt = ChatCodec(tokenizer()), get_prompt(ENV, "tiny", history)
    recorded = episode(mistakes=(1,))
    samples = encode_episode(codec, prompt, recorded, history)
    rollout = asyncio.run(
        run_episode(
            rollout_id=0,
            task=recorded["task"],
            env=LocalHandle(CounterWithExpert()),
            student=Script(codec, [t["action"] for t in recorded["turns"]]),
            codec=codec,
            prompt=prompt,
            history=history,
            limits=EpisodeLimits(max_turns=10, max_tokens=20),
        )
    )
    assert len(samples) == len(rollout.turns) == len(recorded["turns"])
    for sample, turn, record in zip(samples, rollout.turns, recorded["turns"]):
        reply = codec.reply(record["expert"])
        assert sample.token_ids.tolist() == [*turn.prompt_ids, *reply]
        assert (sample.kind == TRAINED).sum() == len(reply)


def test_a_mistake_is_trained_up_to_its_first_wrong_token_towards_the_experts():
    codec, prompt = ChatCodec(tokenizer()), get_prompt(ENV, "tiny", "accumulate")
    recorded = episode(mistakes=(1,))
    recorded["turns"][1]["action"] = "go 7 or so"
    (sample,) = encode_episode(codec, prompt, recorded, "accumulate")
    weights = sample.weights(0.25)
    assert set(weights.tolist()) == {0.0, 0.25, 1.0}
    said, answer = codec.reply("go 7 or so"), codec.reply(recorded["turns"][1]["expert"])
    start = next(
        i
        for i in range(len(sample.token_ids))
        if sample.token_ids[i : i + len(said)].tolist() == said.tolist()
    )
    same = next(i for i, (a, b) in enumerate(zip(said, answer)) if a != b)
    span = slice(start, start + len(said))
    assert weights[span].tolist() == [1.0] * (same + 1) + [0.0] * (len(said) - same - 1)
    assert sample.targets[span][: same + 1].tolist() == answer[: same + 1].tolist()
    outside = np.ones(len(weights), bool)
    outside[span] = False
    assert (sample.targets[outside] == sample.token_ids[outside]).all()


def test_batches_stay_within_their_tokens_and_go_through_all_samples():
    lengths = [5, 90, 40, 41, 7, 300, 12, 12, 60, 33]
    plan = plan_batches(lengths, 120, 8, seed=3)
    for chosen in plan:
        assert len(chosen) * max(lengths[i] for i in chosen) <= 120 or len(chosen) == 1
    one_pass = []
    for chosen in plan:
        one_pass += chosen
        if len(one_pass) >= len(lengths):
            break
    assert sorted(one_pass) == list(range(len(lengths)))
    assert plan == plan_batches(lengths, 120, 8, seed=3) != plan_batches(lengths, 120, 8, seed=4)
    assert len(plan) == 8


def test_training_learns_the_replies_and_writes_a_model_that_loads(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    recorded = [episode(f"{n}/0", mistakes=m) for n in (2, 3, 4) for m in ((), (1,))]
    first = train_sft(
        SPEC, recorded, tmp_path / "a", env_id=ENV, updates=2, batch_tokens=512, quiet=True, log_every=1
    )
    more = train_sft(
        str(tmp_path / "a"), recorded, tmp_path / "b", env_id=ENV, updates=60, warmup=5, batch_tokens=512, matrix_lr=0.02,
        quiet=True, log_every=50,
    )  # fmt: skip
    assert more["reply_loss"] < first["reply_loss"] / 2
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "b", dtype="float32")
    read = AutoTokenizer.from_pretrained(tmp_path / "b")
    codec = ChatCodec(read)
    assert codec.end_of_turn_id == read.eos_token_id == model.generation_config.eos_token_id
    ids = codec.start(None, "You are at 0. Next is 1.")
    assert model(torch.tensor(ids[None].astype(np.int64))).logits.shape[-1] == len(read)


def test_same_seed_trains_the_same_weights(tmp_path):
    recorded, tok = [episode("3/0"), episode("4/0", (1,))], tokenizer()
    for name in ("a", "b"):
        train_sft(SPEC, recorded, tmp_path / name, tokenizer=tok, env_id=ENV, updates=3, quiet=True)
    first, second = ((tmp_path / n / "model.safetensors").read_bytes() for n in ("a", "b"))
    assert first == second


def test_the_loss_does_not_depend_on_who_shares_the_batch(tmp_path):
    # One update at rate 0 reports the loss of fresh weights; padded neighbours must not change it.
    tok = tokenizer()
    short, long = episode("2/0"), episode("4/0")
    figures = {}
    for name, recorded in {"short": [short], "long": [long], "both": [short, long]}.items():
        figures[name] = train_sft(
            build_model(TinySpec(1, 32, 2, 64), tok, seed=5), recorded, tmp_path / name, tokenizer=tok, env_id=ENV,
            lr=0.0, updates=1, batch_tokens=4096, observation_weight=0.0, quiet=True, log_every=1,
        )["reply_loss"]  # fmt: skip
    codec, prompt = ChatCodec(tok), get_prompt(ENV, "tiny", "accumulate")
    n = {
        name: sum(int((s.kind == TRAINED).sum()) for s in encode_episode(codec, prompt, e, "accumulate"))
        for name, e in {"short": short, "long": long}.items()
    }
    mean = (figures["short"] * n["short"] + figures["long"] * n["long"]) / (n["short"] + n["long"])
    assert figures["both"] == pytest.approx(mean, abs=2e-5)


def test_nothing_to_train_on_is_refused_with_a_remedy(tmp_path):
    with pytest.raises(ConfigError, match="max_tokens"):
        train_sft(SPEC, [episode()], tmp_path / "a", env_id=ENV, max_tokens=4, updates=1, quiet=True)
    with pytest.raises(ConfigError, match="updates"):
        train_sft(SPEC, [episode()], tmp_path / "a", env_id=ENV, updates=0)


def test_following_what_was_executed_teaches_the_mistakes_too():
    codec, prompt = ChatCodec(tokenizer()), get_prompt(ENV, "tiny", "accumulate")
    recorded = episode(mistakes=(1,))
    (sample,) = encode_episode(codec, prompt, recorded, "accumulate", "executed")
    trained = sample.kind == TRAINED
    assert sample.targets[trained].tolist() == sample.token_ids[trained].tolist()
    said = codec.reply(recorded["turns"][1]["action"])
    assert recorded["turns"][1]["action"] != recorded["turns"][1]["expert"]
    assert trained.sum() == sum(len(codec.reply(t["action"])) for t in recorded["turns"]) > len(said)
    with pytest.raises(ConfigError, match="executed"):
        encode_episode(codec, prompt, recorded, "accumulate", "both")
