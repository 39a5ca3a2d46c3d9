"""Conversations with the local engine, for tests."""

import asyncio

import numpy as np
from tiny_models import EOS, gpt2, prompt, qwen2, qwen3

from divopd_trainer.engines.base import GenerateRequest
from divopd_trainer.engines.local import LocalStudent

MODELS = {
    "qwen3-dense": (qwen3, "dense"),
    "qwen3-transformers": (qwen3, "transformers"),
    "qwen2-dense": (qwen2, "dense"),
    "gpt2-transformers": (gpt2, "transformers"),
}


def student(model=None, **more):
    return LocalStudent(
        model or qwen3(), **{"max_slots": 4, "max_batch_tokens": 64, "stop_ids": (EOS,), **more}
    )


async def episode(engine, number, turns=5, temperature=0.7, answers=9):
    """A conversation whose prompt grows; gives its ids, the responses' spans and the generations."""
    ids, spans, found = prompt(number, 12), [], []
    for turn in range(turns):
        request = GenerateRequest(ids, answers, temperature, seed=100 * number + turn, cache_key=number)
        generation = await engine.generate(request)
        spans.append((len(ids), len(ids) + len(generation.token_ids)))
        found.append(generation)
        ids = np.concatenate([ids, generation.token_ids, prompt(1000 * number + turn, 7 + number % 3)])
    return ids, spans, found


async def episodes(engine, count, **more):
    return await asyncio.gather(*(episode(engine, n, **more) for n in range(count)))
