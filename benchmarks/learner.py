"""Learner cost of one batch under three layouts, on the same rollouts and with the same gradient, as JSON.

- merged: a rollout's selected turns are one sequence up to the last of them (this project's packing).
- row_per_turn: every turn is a sequence of its own, prompt and response (the same packing, merging off).
- trl: TRL's own planner and collator, which also lay out one sample a turn, in padding-free rows.

Two batches: "composed" (DivOPD's choice, k turns from each of several 20-turn rollouts of accumulated history) and
"all_turns" (every turn of a few rollouts).

Usage: python benchmarks/learner.py [--run RUN_DIR] [--layers 2 --hidden 128] [--repeats 3]
"""

import argparse
import itertools
import json
import logging
import time
from collections import defaultdict

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from trl.experimental.async_distillation.async_distillation_trainer import (
    DataCollatorForRollout,
    TokenBudgetBatcher,
)

from divopd_trainer.composer import BatchComposer
from divopd_trainer.losses import forward_logprobs, sampled_reverse_kl, select_logprobs
from divopd_trainer.packing import pack
from divopd_trainer.turns import Rollout, Segment, Turn, make_turn
from divopd_trainer.weighting import uniform_weights

VOCAB = 1024


def synthetic_rollouts(count: int, turns: int, prompt: int, observation: int, response: int) -> list[Rollout]:
    """Rollouts of accumulated history; lengths vary by a half around the given means."""
    rng = np.random.default_rng(0)

    def some(mean: int) -> np.ndarray:
        return rng.integers(0, VOCAB, max(1, rng.integers(mean // 2, mean + mean // 2 + 1)))

    rollouts = []
    for rollout_id in range(count):
        segment, made = Segment(rollout_id, 0, rng.integers(0, VOCAB, prompt)), []
        for index in range(turns):
            segment.append(some(observation))
            start, end = segment.append(some(response))
            n = end - start
            made.append(
                make_turn(
                    rollout_id=rollout_id, index=index, segment=segment, start=start, end=end,
                    student_logprobs=-rng.random(n) * 5, teacher_logprobs=-rng.random(n) * 5,
                )
            )  # fmt: skip
        rollouts.append(Rollout(rollout_id, turns=made))
    return rollouts


def recorded_rollouts(run_dir: str, count: int, turns: int) -> list[Rollout]:
    """The first rollouts of a run whose valid turns reach the wanted number; later turns are left out."""
    from divopd_trainer.records import read_rollouts

    long_enough = (r for r in read_rollouts(run_dir) if len(r.valid_turns) >= turns)
    found = [Rollout(r.rollout_id, turns=r.valid_turns[:turns]) for r in itertools.islice(long_enough, count)]
    if len(found) < count:
        raise SystemExit(
            f"{run_dir} has {len(found)} rollouts of {turns} valid turns, {count} wanted; lower --turns."
        )
    return found


def ours(model: Qwen3ForCausalLM, rows: list[Turn], merge: bool, budget: int) -> dict:
    micro_batches = pack(rows, uniform_weights(rows), merge=merge, max_tokens=budget, layout="padded")
    for micro in micro_batches:
        logp = forward_logprobs(model, micro)
        sampled_reverse_kl(logp, micro.teacher_logprobs, micro.weights).backward()
    return {
        "forwarded_tokens": sum(m.forwarded_tokens for m in micro_batches),
        "computed_positions": sum(m.padded_tokens for m in micro_batches),
        "micro_batches": len(micro_batches),
    }


def trl_micro_batches(rows: list[Turn], budget: int) -> list[tuple[dict, list[dict]]]:
    """The rows through TRL's planner and collator; with each batch, its samples in order."""
    samples = []
    for number, (turn, weights) in enumerate(zip(rows, uniform_weights(rows))):
        ids = turn.segment.token_ids[: turn.end].astype(np.int64)
        mask, topk_ids = np.zeros(turn.end, np.int64), np.full((turn.end, 1), -1, np.int64)
        topk = np.full((turn.end, 1), -np.inf, np.float32)
        at = turn.start + np.flatnonzero(turn.valid_mask())
        mask[at], topk_ids[at, 0], topk[at, 0] = 1, ids[at], turn.teacher_logprobs[turn.valid_mask()]
        samples.append(
            {"input_ids": ids, "completion_mask": mask, "teacher_topk_ids": topk_ids, "teacher_topk_logprobs": topk,
             "teacher_id": "t", "prompt_id": number, "metrics": {}, "weights": weights[turn.valid_mask()]}
        )  # fmt: skip
    # The planner hands out full rows only, as from an endless queue; a last oversized one flushes the rest.
    flush = dict(samples[0], input_ids=np.zeros(budget, np.int64))
    planner = TokenBudgetBatcher([*samples, flush], 1, budget, defaultdict(list))
    collate = DataCollatorForRollout(pad_token_id=0)
    return [(collate.torch_call([groups]), groups[0]) for groups in planner]


def trl(model: Qwen3ForCausalLM, rows: list[Turn], budget: int) -> dict:
    batches = trl_micro_batches(rows, budget)
    for batch, samples in batches:
        # As TRL's loss does: backbone on the packed row, head on the completion positions only.
        hidden = model.base_model(
            input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False
        ).last_hidden_state[0, :-1]
        at = batch["completion_mask"][0, 1:].bool()
        logits = model.lm_head(hidden[at])
        logp = select_logprobs(logits, batch["input_ids"][0, 1:][at])
        teacher = batch["teacher_topk_logprobs"][0, 1:, 0][at]
        weights = torch.from_numpy(np.concatenate([s["weights"] for s in samples]).astype(np.float32))
        sampled_reverse_kl(logp, teacher, weights).backward()
    tokens = sum(int(b["attention_mask"].sum()) for b, _ in batches)
    positions = sum(b["input_ids"].numel() for b, _ in batches)
    return {"forwarded_tokens": tokens, "computed_positions": positions, "micro_batches": len(batches)}


def measure(model: Qwen3ForCausalLM, rows: list[Turn], budget: int, repeats: int) -> dict:
    layouts = {
        "merged": lambda: ours(model, rows, True, budget),
        "row_per_turn": lambda: ours(model, rows, False, budget),
        "trl": lambda: trl(model, rows, budget),
    }
    result, seconds, gradients = {}, defaultdict(list), {}
    for _ in range(repeats):
        # Layouts take turns, so that a busy machine does not favour one.
        for name, run in layouts.items():
            model.zero_grad()
            start, start_cpu = time.perf_counter(), time.process_time()
            result[name] = run()
            seconds[name].append((time.process_time() - start_cpu, time.perf_counter() - start))
            gradients[name] = torch.cat([p.grad.flatten() for p in model.parameters()])
    for name, entry in result.items():
        entry["cpu_s"] = round(min(s[0] for s in seconds[name]), 3)
        entry["wall_s"] = round(min(s[1] for s in seconds[name]), 3)
        entry["tokens_vs_merged"] = round(entry["forwarded_tokens"] / result["merged"]["forwarded_tokens"], 2)
        entry["cpu_s_vs_merged"] = round(entry["cpu_s"] / result["merged"]["cpu_s"], 2)
        scale = gradients["merged"].abs().max()
        entry["gradient_difference"] = float(
            ((gradients[name] - gradients["merged"]).abs().max() / scale).item()
        )
    return {"rows": len(rows), "rollouts": len({t.rollout_id for t in rows}), "layouts": result}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", help="run directory with recorded rollouts; synthetic ones without it")
    parser.add_argument("--rollouts", type=int, default=16, help="rollouts of the composed batch")
    parser.add_argument(
        "--whole-rollouts", type=int, default=4, help="rollouts of which all turns are trained"
    )
    parser.add_argument("--turns", type=int, default=20, help="turns of a rollout")
    parser.add_argument(
        "--cap", type=int, default=4, help="turns that a rollout gives to the composed batch (k)"
    )
    parser.add_argument("--prompt", type=int, default=120, help="tokens of the first prompt")
    parser.add_argument("--observation", type=int, default=24, help="mean tokens between two responses")
    parser.add_argument("--response", type=int, default=12, help="mean tokens of a response")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    torch.manual_seed(0)
    if args.run:
        rollouts = recorded_rollouts(args.run, args.rollouts, args.turns)
    else:
        rollouts = synthetic_rollouts(args.rollouts, args.turns, args.prompt, args.observation, args.response)
    vocab = max(VOCAB, 1 + max(int(r.turns[-1].segment.token_ids.max()) for r in rollouts))
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=vocab, hidden_size=args.hidden, intermediate_size=3 * args.hidden, num_hidden_layers=args.layers,
            num_attention_heads=4, num_key_value_heads=2, head_dim=args.hidden // 4, max_position_embeddings=32768,
            tie_word_embeddings=True,
        )
    ).train()  # fmt: skip
    turns = [t for r in rollouts for t in r.turns]
    batch_rows = args.rollouts * args.cap
    composer = BatchComposer(
        "divopd", batch_rows, -(-len(turns) // batch_rows), args.cap, max_staleness=10**6
    )
    composed = composer.compose(1 + max(t.policy_version for t in turns), turns).selected
    whole = [t for r in rollouts[: args.whole_rollouts] for t in r.turns]
    # TRL's default budget is the longest sequence the server takes.
    budget = max(t.end for t in turns)
    report = {
        "benchmark": "learner",
        "token_budget": budget,
        "parameters": sum(p.numel() for p in model.parameters()),
        "composed": measure(model, composed, budget, args.repeats),
        "all_turns": measure(model, whole, budget, args.repeats),
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
