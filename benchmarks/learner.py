r"""Learner cost of one batch under three layouts, on the same rollouts and with the same gradient, as JSON.

    python benchmarks/learner.py [--run RUN_DIR] [--turns 10 20 40] [--layers 2 --hidden 128] [--repeats 3]
    python benchmarks/learner.py --device cuda --dtype bfloat16 --attention kernels-community/flash-attn3 \
        --layers 12 --hidden 1024 --peak_tflops 990

- merged: a rollout's selected turns are one sequence up to the last of them (this project's packing).
- row_per_turn: every turn is a sequence of its own, prompt and response (the same packing, merging off).
- trl: TRL's own planner and collator, which also lay out one sample a turn, in padding-free rows.

Two batches: "composed" (DivOPD's choice, k turns from each of several 20-turn rollouts of accumulated history) and
"all_turns" (every turn of a few rollouts), once for every number of turns a rollout: the context grows with it.

Tokens a second are counted on CPU seconds of the process on a CPU, and on seconds of the clock, read after the device
has finished, on a GPU; the best of the repeats, of which the first pays for a GPU's start, so ask for two or more. "mfu"
is 6 * parameters * forwarded tokens / seconds / --peak_tflops: attention and the head's positions that are left out
are not in it. The CUDA path was written without a GPU at hand and has not been run on one.
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

from divopd_trainer.attention import choose_layout
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
    layout = choose_layout("auto", model.config)
    micro_batches = pack(rows, uniform_weights(rows), merge=merge, max_tokens=budget, layout=layout)
    for micro in micro_batches:
        micro = micro.to(model.device)
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
        batch = {name: v.to(model.device) if torch.is_tensor(v) else v for name, v in batch.items()}
        # As TRL's loss does: backbone on the packed row, head on the completion positions only.
        hidden = model.base_model(
            input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False
        ).last_hidden_state[0, :-1]
        at = batch["completion_mask"][0, 1:].bool()
        logits = model.lm_head(hidden[at])
        logp = select_logprobs(logits, batch["input_ids"][0, 1:][at])
        teacher = batch["teacher_topk_logprobs"][0, 1:, 0][at]
        weights = torch.from_numpy(np.concatenate([s["weights"] for s in samples]).astype(np.float32))
        sampled_reverse_kl(logp, teacher, weights.to(model.device)).backward()
    tokens = sum(int(b["attention_mask"].sum()) for b, _ in batches)
    positions = sum(b["input_ids"].numel() for b, _ in batches)
    return {"forwarded_tokens": tokens, "computed_positions": positions, "micro_batches": len(batches)}


def clocks(device: torch.device) -> tuple[float, float]:
    """CPU seconds of the process and seconds of the clock, when the device has done all that was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.process_time(), time.perf_counter()


def measure(
    model: Qwen3ForCausalLM, rows: list[Turn], budget: int, repeats: int, peak_tflops: float | None
) -> dict:
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
            cpu, wall = clocks(model.device)
            result[name] = run()
            cpu_end, wall_end = clocks(model.device)
            seconds[name].append((cpu_end - cpu, wall_end - wall))
            gradients[name] = torch.cat([p.grad.flatten().float() for p in model.parameters()])
    trained = sum(int(turn.valid_mask().sum()) for turn in rows)
    which = "wall_s" if model.device.type == "cuda" else "cpu_s"
    for name, entry in result.items():
        entry["cpu_s"], entry["wall_s"] = (round(min(column), 4) for column in zip(*seconds[name]))
        spent = max(entry[which], 1e-4)
        entry["tokens_per_s"] = round(entry["forwarded_tokens"] / spent)
        entry["trained_tokens_per_s"] = round(trained / spent)
        entry["mfu"] = mfu(model, entry["forwarded_tokens"], spent, peak_tflops)
        entry["tokens_vs_merged"] = round(entry["forwarded_tokens"] / result["merged"]["forwarded_tokens"], 2)
        entry["seconds_vs_merged"] = round(entry[which] / max(result["merged"][which], 1e-4), 2)
        scale = gradients["merged"].abs().max()
        entry["gradient_difference"] = float(
            ((gradients[name] - gradients["merged"]).abs().max() / scale).item()
        )
    rollouts = len({t.rollout_id for t in rows})
    return {"rows": len(rows), "rollouts": rollouts, "trained_tokens": trained, "layouts": result}


def mfu(model: Qwen3ForCausalLM, tokens: int, seconds: float, peak_tflops: float | None) -> float | None:
    """Share of the device's peak that 6 operations a parameter and token make up; None without a peak."""
    if peak_tflops is None:
        return None
    return round(6 * sum(p.numel() for p in model.parameters()) * tokens / seconds / (peak_tflops * 1e12), 4)


def build(args: argparse.Namespace, vocab: int) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    heads = max(4, args.hidden // 64)
    config = Qwen3Config(
        vocab_size=vocab, hidden_size=args.hidden, intermediate_size=3 * args.hidden, num_hidden_layers=args.layers,
        num_attention_heads=heads, num_key_value_heads=heads // 2, head_dim=args.hidden // heads,
        max_position_embeddings=32768, tie_word_embeddings=True,
    )  # fmt: skip
    model = Qwen3ForCausalLM._from_config(config, attn_implementation=args.attention)
    return model.train().to(args.device, getattr(torch, args.dtype))


def at_depth(args: argparse.Namespace, turns_of_rollout: int) -> dict:
    """Both batches of rollouts with so many turns."""
    if args.run:
        rollouts = recorded_rollouts(args.run, args.rollouts, turns_of_rollout)
    else:
        rollouts = synthetic_rollouts(
            args.rollouts, turns_of_rollout, args.prompt, args.observation, args.response
        )
    vocab = max(VOCAB, 1 + max(int(r.turns[-1].segment.token_ids.max()) for r in rollouts))
    model = build(args, vocab)
    turns = [t for r in rollouts for t in r.turns]
    batch_rows = args.rollouts * args.cap
    composer = BatchComposer(
        "divopd", batch_rows, -(-len(turns) // batch_rows), args.cap, max_staleness=10**6
    )
    composed = composer.compose(1 + max(t.policy_version for t in turns), turns).selected
    whole = [t for r in rollouts[: args.whole_rollouts] for t in r.turns]
    # TRL's default budget is the longest sequence the server takes.
    budget = max(t.end for t in turns)
    row = {
        "turns": turns_of_rollout,
        "token_budget": budget,
        "parameters": sum(p.numel() for p in model.parameters()),
    }
    for name, rows in (("composed", composed), ("all_turns", whole)):
        row[name] = measure(model, rows, budget, args.repeats, args.peak_tflops)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", help="run directory with recorded rollouts; synthetic ones without it")
    parser.add_argument("--rollouts", type=int, default=16, help="rollouts of the composed batch")
    parser.add_argument(
        "--whole-rollouts", type=int, default=4, help="rollouts of which all turns are trained"
    )
    parser.add_argument("--turns", type=int, nargs="+", default=[20], help="turns of a rollout")
    parser.add_argument(
        "--cap", type=int, default=4, help="turns that a rollout gives to the composed batch (k)"
    )
    parser.add_argument("--prompt", type=int, default=120, help="tokens of the first prompt")
    parser.add_argument("--observation", type=int, default=24, help="mean tokens between two responses")
    parser.add_argument("--response", type=int, default=12, help="mean tokens of a response")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument(
        "--attention",
        default="sdpa",
        help="transformers' attn_implementation; on a GPU in bfloat16 kernels-community/flash-attn3",
    )
    parser.add_argument("--peak_tflops", type=float, help="the device's peak in this dtype, for the MFU")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda, but torch finds no GPU here; expected one. Use --device cpu.")
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    report = {"benchmark": "learner"} | {
        name: getattr(args, name) for name in ("device", "dtype", "attention")
    }
    if args.device == "cuda":
        report["gpu"] = torch.cuda.get_device_name()
    report |= {"peak_tflops": args.peak_tflops, "depths": [at_depth(args, turns) for turns in args.turns]}
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
