"""Recorded expert episodes of the real benchmarks become exactly the ids that the explorer would have produced."""

import asyncio

import gymnasium
import numpy as np
import pytest
from fakes import LocalHandle

import divopd_gym  # noqa: F401
from divopd_gym.prompts import get_prompt
from divopd_trainer.chat import ChatCodec
from divopd_trainer.engines.base import Generation
from divopd_trainer.expert import read_episodes, record_expert
from divopd_trainer.explorer.episode import EpisodeLimits, run_episode
from divopd_trainer.sft import encode_episode, transcript_texts
from divopd_trainer.tiny import train_tokenizer

SETTINGS = [
    pytest.param("divopd_gym/WebShop-v0", {"num_products": 12}),
    pytest.param(
        "divopd_gym/ScienceWorld-v0", {"task_types": ["lifespan-longest-lived"]}, marks=pytest.mark.env
    ),
    pytest.param("divopd_gym/TextWorld-v0", {"num_tasks": 1}, marks=pytest.mark.env),
]


class Script:
    """A student that says what it was told to."""

    policy_version = 0

    def __init__(self, codec, replies):
        self.codec, self.replies = codec, iter(replies)

    async def generate(self, request):
        ids = self.codec.reply(next(self.replies))
        return Generation(ids, np.zeros(len(ids), np.float32), "end_of_turn", 0)


@pytest.mark.parametrize("style", ["tiny", "action", "think"])
@pytest.mark.parametrize(("env_id", "env_kwargs"), SETTINGS)
def test_ids_of_a_recording_are_the_explorers(env_id, env_kwargs, style, tmp_path):
    pytest.importorskip({"Scie": "scienceworld", "Text": "textworld"}.get(env_id[11:15], "numpy"))
    out = tmp_path / "expert.jsonl.zst"
    record_expert(env_id, env_kwargs, 1, 0.4, 1, out, 0, 10, clean=0.0, concurrency=1)
    (episode,) = read_episodes(out)
    prompt = get_prompt(env_id, style, "accumulate")
    codec = ChatCodec(train_tokenizer(transcript_texts(prompt, [episode]), 600))
    env = gymnasium.make(env_id, **env_kwargs)
    try:
        rollout = asyncio.run(
            run_episode(
                rollout_id=0,
                task=episode["task"],
                env=LocalHandle(env),
                student=Script(codec, [prompt.reply(t["action"]) for t in episode["turns"]]),
                codec=codec,
                prompt=prompt,
                limits=EpisodeLimits(max_turns=len(episode["turns"]), max_tokens=200),
            )
        )
    finally:
        env.close()
    (sample,) = encode_episode(codec, prompt, episode, "accumulate")
    ids = rollout.turns[0].segment.token_ids
    assert codec.decode(sample.token_ids) == codec.decode(ids)
    assert sample.token_ids.tolist() == ids.tolist()
