"""Local engine against plain transformers, on conversations that grow turn by turn, as JSON.

Usage: python benchmarks/engine.py [--models 2M 5M] [--concurrency 1 8 16] [--turns 12] [--backends dense transformers]

Generation: each turn samples 7 tokens and then 28 observation tokens are appended. "plain" is
`model.generate` on the left-padded batch of all conversations, which computes every prompt again each turn.
Scoring: finished conversations; "plain" is one forward pass with all logits a conversation, "per_turn" one a turn.
Every rate of scoring is of the tokens that one pass a conversation reads, so that their ratio is that of the times;
"scored_tokens" says what is read once and turn by turn. Contexts grow with --turns: 60 + 35 tokens a turn.
Seconds are CPU seconds of the process (one thread), so that other programs on the machine disturb less.
"""

import argparse
import asyncio
import itertools
import json
import time

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from divopd_trainer.engines.base import GenerateRequest
from divopd_trainer.engines.local import LocalStudent, LocalTeacher

SIZES = {
    "2M": {"hidden_size": 192, "num_hidden_layers": 4, "intermediate_size": 640},
    "5M": {"hidden_size": 256, "num_hidden_layers": 4, "intermediate_size": 1152},
}
VOCAB, SAMPLED, OBSERVED, FIRST = 530, 7, 28, 60
NEVER = (VOCAB + 1,)
BACKENDS = ("dense", "transformers")


def build(size: str) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB, num_attention_heads=4, num_key_value_heads=2, head_dim=SIZES[size]["hidden_size"] // 4,
        max_position_embeddings=2048, tie_word_embeddings=True, eos_token_id=None, pad_token_id=0,
        initializer_range=0.05, **SIZES[size],
    )  # fmt: skip
    return Qwen3ForCausalLM(config).eval()


def observation(rng: np.random.Generator, length: int = OBSERVED) -> np.ndarray:
    return rng.integers(2, VOCAB, length).astype(np.int32)


async def play(engine, number: int, turns: int) -> tuple[np.ndarray, list[tuple[int, int]]]:
    rng = np.random.default_rng(number)
    ids, spans = observation(rng, FIRST), []
    for turn in range(turns):
        seed = 1000 * number + turn
        answer = await engine.generate(
            GenerateRequest(ids, SAMPLED, seed=seed, cache_key=number, stop_ids=NEVER)
        )
        spans.append((len(ids), len(ids) + SAMPLED))
        ids = np.concatenate([ids, answer.token_ids, observation(rng)])
    engine.forget(number)
    return ids, spans


def generate_with_engine(model, backend: str, concurrency: int, turns: int) -> tuple[float, float, list]:
    async def everyone(engine, first, length):
        return await asyncio.gather(*(play(engine, first + i, length) for i in range(concurrency)))

    with LocalStudent(model, backend=backend, max_slots=max(2, concurrency)) as engine:
        asyncio.run(everyone(engine, 10_000, 1))
        cpu, wall = time.process_time(), time.perf_counter()
        played = asyncio.run(everyone(engine, 0, turns))
        return time.process_time() - cpu, time.perf_counter() - wall, played


@torch.inference_mode()
def generate_plainly(model, concurrency: int, turns: int) -> tuple[float, float]:
    rngs = [np.random.default_rng(i) for i in range(concurrency)]
    ids = torch.tensor(np.stack([observation(rng, FIRST) for rng in rngs]).astype(np.int64))

    def turn(ids):
        return model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=SAMPLED, do_sample=True, temperature=1.0,
            top_k=0, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip

    turn(ids)
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in range(turns):
        ids = turn(ids)
        more = np.stack([observation(rng) for rng in rngs]).astype(np.int64)
        ids = torch.cat([ids, torch.tensor(more)], -1)
    return time.process_time() - cpu, time.perf_counter() - wall


def score_with_engine(model, played: list) -> float:
    async def everyone(teacher):
        await asyncio.gather(*(teacher.score(ids, spans) for ids, spans in played))

    with LocalTeacher(model) as teacher:
        asyncio.run(everyone(teacher))
        cpu = time.process_time()
        asyncio.run(everyone(teacher))
        return time.process_time() - cpu


@torch.inference_mode()
def score_plainly(model, played: list, per_turn: bool) -> float:
    cpu = time.process_time()
    for ids, spans in played:
        for end in [end for _, end in spans] if per_turn else [spans[-1][1]]:
            logits = model(input_ids=torch.tensor(ids[None, :end].astype(np.int64)), use_cache=False).logits
            logits.log_softmax(-1)
    return time.process_time() - cpu


def rates(cpu: float, concurrency: int, turns: int) -> dict[str, float]:
    return {
        "sampled_tokens_per_s": round(concurrency * turns * SAMPLED / cpu, 1),
        "turns_per_s": round(concurrency * turns / cpu, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 8, 16])
    parser.add_argument("--turns", nargs="+", type=int, default=[12])
    parser.add_argument("--backends", nargs="+", default=list(BACKENDS), choices=BACKENDS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for size in args.models:
        model = build(size)
        for concurrency, turns in itertools.product(args.concurrency, args.turns):
            row = {"model": size, "parameters": sum(p.numel() for p in model.parameters())}
            row |= {"concurrency": concurrency, "turns": turns}
            for backend in args.backends:
                cpu, _, played = generate_with_engine(model, backend, concurrency, turns)
                row[f"engine_{backend}"] = rates(cpu, concurrency, turns)
            cpu, _ = generate_plainly(model, concurrency, turns)
            row["plain_generate"] = rates(cpu, concurrency, turns)
            tokens = sum(spans[-1][1] for _, spans in played)
            row["scored_tokens"] = {
                "once": tokens,
                "per_turn": sum(end for _, spans in played for _, end in spans),
            }
            row["scored_tokens_per_s"] = {
                "engine": round(tokens / score_with_engine(model, played)),
                "plain": round(tokens / score_plainly(model, played, False)),
                "per_turn": round(tokens / score_plainly(model, played, True)),
            }
            rows.append(row)
    print(json.dumps({"benchmark": "engine", "threads": 1, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
