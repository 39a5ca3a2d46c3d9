"""Supervised training on recorded episodes, in exactly the ids that the explorer would produce.

TRL's `SFTTrainer` does the training. The target of every reply is the expert's; where something else was executed, the
target is the expert's up to and including the first token that differs, and the rest of that reply is context only.
Observations may be trained with a small weight, which tiny models learn faster with.
"""

from __future__ import annotations

import json
import math
import os
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from divopd_gym.errors import ConfigError
from divopd_gym.prompts import get_prompt, history_pairs
from divopd_trainer.chat import ChatCodec
from divopd_trainer.expert import read_episodes
from divopd_trainer.tiny import PHRASES, TinySpec, build_model, count_parameters, save_model, train_tokenizer

__all__ = ["Sample", "encode_episode", "episode_messages", "plan_batches", "train_sft", "transcript_texts"]

OBSERVED, TRAINED, SKIPPED = 0, 1, 2


@dataclass(frozen=True, eq=False)
class Sample:
    """One token sequence.

    Attributes:
        token_ids: int32 [T].
        targets: int32 [T]; what position t - 1 should have predicted: ``token_ids[t]``, but the expert's token where a
            mistake begins.
        kind: int8 [T]; 1 a target that is trained as a reply, 2 one that is not trained, 0 anything else.
    """

    token_ids: np.ndarray
    targets: np.ndarray
    kind: np.ndarray

    def weights(self, observation_weight: float) -> np.ndarray:
        """float32 [T]: weight of each token as a target."""
        return np.array([observation_weight, 1.0, 0.0], np.float32)[self.kind]


def encode_episode(
    codec: ChatCodec, prompt: Any, episode: Mapping[str, Any], history: str, follow: str = "expert"
) -> list[Sample]:
    """An episode as the explorer would have written it.

    Args:
        codec: Of the model's tokenizer.
        prompt: A `PromptStyle` made for `history`.
        episode: A record of `divopd_trainer.expert`.
        history: "accumulate": one sequence of what was executed. "window:n": one sequence a turn, with the expert's
            answer as reply.
        follow: "expert": every reply is taught the expert's answer. "executed": what was executed is taught, mistakes
            included, so that a model can be made that knows the task and plays it badly.

    Raises:
        ConfigError: `follow` is neither.
    """
    if follow not in ("expert", "executed"):
        raise ConfigError(f"follow={follow!r}: expected 'expert' or 'executed'.")
    taught = "action" if follow == "executed" else "expert"
    window = history_pairs(history)
    past: list[tuple[str, str]] = []
    pieces: list[Sample] = []
    samples: list[Sample] = []
    for number, turn in enumerate(episode["turns"]):
        info = _info(episode, turn)
        shown = past if window is None else past[-window:] if window else []
        user = prompt.user(number, turn["observation"], info, shown)
        if window is not None:
            opened, answer = codec.start(prompt.system(info), user), codec.reply(prompt.reply(turn[taught]))
            samples.append(_join([_observed(opened), _reply(answer, answer)]))
        else:
            opened = codec.start(prompt.system(info), user) if number == 0 else codec.extend(user)
            said, answer = (codec.reply(prompt.reply(turn[key])) for key in ("action", taught))
            pieces += [_observed(opened), _reply(said, answer)]
        past.append((turn["observation"], turn["action"]))
    return samples if window is not None else [_join(pieces)]


def episode_messages(prompt: Any, episode: Mapping[str, Any], history: str) -> list[list[dict[str, str]]]:
    """The messages behind the sequences of `encode_episode`, for reading; the same prompts and replies."""
    window = history_pairs(history)
    past: list[tuple[str, str]] = []
    dialogues: list[list[dict[str, str]]] = []
    for number, turn in enumerate(episode["turns"]):
        info = _info(episode, turn)
        shown = past if window is None else past[-window:] if window else []
        if window is not None or number == 0:
            system = prompt.system(info)
            dialogues.append([] if system is None else [{"role": "system", "content": system}])
        said = turn["action"] if window is None else turn["expert"]
        dialogues[-1] += [
            {"role": "user", "content": prompt.user(number, turn["observation"], info, shown)},
            {"role": "assistant", "content": prompt.reply(said)},
        ]
        past.append((turn["observation"], turn["action"]))
    return dialogues


def transcript_texts(prompt: Any, episodes: Sequence[Mapping[str, Any]]) -> list[str]:
    """All messages of episodes, in order: what a tokenizer is trained on."""
    texts = []
    for episode in episodes:
        for number, turn in enumerate(episode["turns"]):
            info = _info(episode, turn)
            texts += [prompt.user(number, turn["observation"], info, []), prompt.reply(turn["action"])]
    return texts


def _info(episode: Mapping[str, Any], turn: Mapping[str, Any]) -> dict[str, Any]:
    """What the prompt saw of the environment's info."""
    known = {"goal": episode["goal"], "admissible_actions": turn["admissible"], "task": episode["task"]}
    return known | turn.get("info", {})


def plan_batches(lengths: Sequence[int], batch_tokens: int, batches: int, seed: int) -> list[list[int]]:
    """Which samples are trained together: sequences of like length, so that little is padding.

    Args:
        lengths: Tokens of each sample.
        batch_tokens: Most tokens of a batch, padding included; a longer sample is a batch of its own.
        batches: How many; the samples are gone through as often as it takes, each time in another order.
        seed: Of the order.

    Returns:
        Indices of samples, batch by batch.
    """
    rng = random.Random(seed)
    plan: list[list[int]] = []
    while len(plan) < batches:
        order = list(range(len(lengths)))
        rng.shuffle(order)
        for start in range(0, len(order), 1024):
            near = sorted(order[start : start + 1024], key=lengths.__getitem__)
            made, current = [], []
            for index in near:
                if current and (len(current) + 1) * lengths[index] > batch_tokens:
                    made.append(current)
                    current = []
                current.append(index)
            made.append(current)
            rng.shuffle(made)
            plan += made
    return plan[:batches]


def train_sft(
    model: Any,
    episodes: str | Path | Sequence[str | Path] | Sequence[Mapping[str, Any]],
    out: str | Path,
    *,
    tokenizer: Any = None,
    env_id: str = "divopd_gym/ALFWorld-v0",
    prompt_style: str = "tiny",
    history: str = "accumulate",
    follow: str = "expert",
    lr: float = 2e-3,
    matrix_lr: float = 0.0,
    batch_tokens: int = 2048,
    updates: int = 1000,
    warmup: int = 30,
    decay: float = 0.4,
    weight_decay: float = 0.01,
    observation_weight: float = 0.2,
    max_episodes: int | None = None,
    max_tokens: int = 1024,
    seed: int = 0,
    vocab_size: int = 1024,
    dtype: str = "bfloat16",
    log_every: int = 50,
    quiet: bool = False,
) -> dict[str, Any]:
    """Train a model on episodes and write it with its tokenizer.

    Args:
        model: A folder or hub name, a model object, or the shape of a new one ("tiny:layers=4,width=256").
        episodes: Recordings of `record_expert`, or records; or files ``*.jsonl`` of `divopd export`, which hold ids: then
            prompts, `history` and `follow` are as exported.
        out: Folder for the model.
        tokenizer: An object, or a folder or hub name; None: the model's own (of a new model: one trained on the
            episodes).
        env_id: Whose prompts are used.
        prompt_style: Style of the prompts.
        history: "accumulate" or "window:n".
        follow: "expert" teaches the expert's answer in every state; "executed" what was executed, mistakes included.
        lr: Highest learning rate of AdamW.
        matrix_lr: Above 0: the hidden matrices are trained by Muon at this rate, AdamW takes the rest.
        batch_tokens: Most tokens of an update.
        updates: How many.
        warmup: Updates during which the rates rise.
        decay: Share of the updates, at the end, during which they fall to 0.
        weight_decay: Decoupled weight decay of the matrices.
        observation_weight: Weight of a token that is not a reply; a reply's is 1.
        max_episodes: Only the first so many.
        max_tokens: Sequences longer than this are left out.
        seed: Of new weights and of the order.
        vocab_size: Most entries of a tokenizer that is trained.
        dtype: Type of the stored weights; training is in float32.
        log_every: Updates between two lines of output.
        quiet: No output.

    Returns:
        Figures: samples, tokens, updates, loss, reply_loss, parameters, cpu_s.

    Raises:
        ConfigError: Nothing to train on, a tokenizer without chat template, or a figure out of range.
    """
    if updates < 1 or batch_tokens < 1 or not 0 <= observation_weight <= 1 or not 0 <= decay <= 1:
        raise ConfigError(
            f"updates={updates}, batch_tokens={batch_tokens}, observation_weight={observation_weight}, decay={decay}: "
            "expected at least one update and token, and shares between 0 and 1."
        )
    begun = time.process_time()
    exported = _exported(episodes)
    records = [] if exported else _records(episodes, max_episodes)
    prompt = get_prompt(env_id, prompt_style, history)
    if tokenizer is None and _is_new(model):
        if exported:
            raise ConfigError(
                f"{exported[0]} holds token ids, and {model!r} is a new model without a tokenizer; give --tokenizer, the "
                "one that the episodes were exported with."
            )
        tokenizer = train_tokenizer(transcript_texts(prompt, records), vocab_size, PHRASES.get(env_id, ()))
    tokenizer, model = _load(model, tokenizer, seed)
    codec = ChatCodec(tokenizer)
    if exported:
        from divopd_trainer.export import read_sft_samples

        samples = read_sft_samples(exported, max_episodes, len(tokenizer))
    else:
        samples = [s for record in records for s in encode_episode(codec, prompt, record, history, follow)]
    fitting = [s for s in samples if len(s.token_ids) <= max_tokens and (s.kind == TRAINED).any()]
    if not fitting:
        raise ConfigError(
            f"None of the {len(samples)} sequences has a reply to train on within max_tokens={max_tokens} "
            f"(the shortest has {min((len(s.token_ids) for s in samples), default=0)}); raise max_tokens, or record "
            "episodes of an expert that acts."
        )
    trainer = _trainer(
        model, tokenizer, fitting, out,
        lr=lr, matrix_lr=matrix_lr, batch_tokens=batch_tokens, updates=updates, warmup=warmup, decay=decay,
        weight_decay=weight_decay, observation_weight=observation_weight, seed=seed, log_every=log_every, quiet=quiet,
    )  # fmt: skip
    trainer.train()
    save_model(trainer.model, tokenizer, out, dtype)
    figures = {
        "samples": len(fitting),
        "left_out": len(samples) - len(fitting),
        "updates": updates,
        "tokens": trainer.seen_tokens,
        "reply_loss": round(trainer.recent_reply_loss(), 5),
        "parameters": count_parameters(trainer.model),
        "cpu_s": round(time.process_time() - begun, 1),
        "seed": seed,
    }
    Path(out, "sft.json").write_text(json.dumps(figures, indent=1) + "\n")
    return figures


def _records(episodes: Any, limit: int | None) -> list[Mapping[str, Any]]:
    if isinstance(episodes, (str, Path)) or (episodes and isinstance(episodes[0], (str, Path))):
        return read_episodes(episodes, limit)
    return list(episodes)[:limit]


def _exported(episodes: Any) -> list[Path]:
    """The files, if they are lines of `divopd export`."""
    given = [episodes] if isinstance(episodes, (str, Path)) else list(episodes)
    paths = [Path(item) for item in given if isinstance(item, (str, Path))]
    lines = [path for path in paths if path.suffix == ".jsonl"]
    if lines and len(lines) < len(given):
        raise ConfigError(
            f"{lines[0]} holds token ids, and other episodes were given beside it; give files of one kind."
        )
    return lines


def _is_new(model: Any) -> bool:
    return (
        isinstance(model, str) and (model == "tiny" or model.startswith("tiny:")) and not os.path.isdir(model)
    )


def _load(model: Any, tokenizer: Any, seed: int) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if tokenizer is None:
        if not isinstance(model, (str, Path)):
            raise ConfigError("A model object was given without its tokenizer; pass tokenizer=.")
        tokenizer = model
    if isinstance(tokenizer, (str, Path)):
        tokenizer = AutoTokenizer.from_pretrained(str(tokenizer))
    if _is_new(model):
        return tokenizer, build_model(TinySpec.parse(model), tokenizer, seed)
    if isinstance(model, (str, Path)):
        model = AutoModelForCausalLM.from_pretrained(str(model), dtype="float32", attn_implementation="sdpa")
    return tokenizer, model


def _observed(ids: np.ndarray) -> Sample:
    return Sample(ids, ids, np.full(len(ids), OBSERVED, np.int8))


def _reply(said: np.ndarray, answer: np.ndarray) -> Sample:
    """What was said, with the expert's answer as target as far as one follows from the other."""
    targets, kind = said.copy(), np.full(len(said), SKIPPED, np.int8)
    for place, (token, target) in enumerate(zip(said, answer)):
        targets[place], kind[place] = target, TRAINED
        if token != target:
            break
    return Sample(said, targets, kind)


def _join(pieces: Sequence[Sample]) -> Sample:
    columns = zip(*((p.token_ids, p.targets, p.kind) for p in pieces))
    ids, targets, kind = (np.concatenate(column) for column in columns)
    return Sample(ids.astype(np.int32), targets.astype(np.int32), kind)


def _trainer(
    model: Any, tokenizer: Any, samples: Sequence[Sample], out: str | Path, *, lr: float, matrix_lr: float,
    batch_tokens: int, updates: int, warmup: int, decay: float, weight_decay: float, observation_weight: float,
    seed: int, log_every: int, quiet: bool,
) -> Any:  # fmt: skip
    import torch
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    from divopd_trainer.optim import make_optimizer

    plan = plan_batches([len(s.token_ids) for s in samples], batch_tokens, updates, seed)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id

    def rows() -> Any:
        # One row of the data set is one whole batch, so that batches are formed by tokens, not by samples.
        for chosen in plan:
            members = [samples[i] for i in chosen]
            ids = np.concatenate([s.token_ids for s in members])
            yield {
                "input_ids": ids,
                "labels": np.concatenate([s.targets for s in members]),
                "weights": np.concatenate([s.weights(observation_weight) for s in members]),
                "lengths": [len(s.token_ids) for s in members],
            }

    def collate(batch: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        (row,) = batch
        lengths = row["lengths"]
        ids = np.full((len(lengths), max(lengths)), pad, np.int64)
        targets, weights = ids.copy(), np.zeros(ids.shape, np.float32)
        start = 0
        for number, length in enumerate(lengths):
            ids[number, :length] = row["input_ids"][start : start + length]
            targets[number, :length] = row["labels"][start : start + length]
            weights[number, :length] = row["weights"][start : start + length]
            start += length
        return {
            "input_ids": torch.from_numpy(ids),
            "labels": torch.from_numpy(targets),
            "weights": torch.from_numpy(weights),
        }

    class WeightedSFTTrainer(SFTTrainer):
        seen_tokens = 0

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.reply_losses: list[float] = []

        def recent_reply_loss(self) -> float:
            recent = self.reply_losses[-20:]
            return sum(recent) / max(1, len(recent))

        def compute_loss(
            self, model: Any, inputs: dict, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            ids, targets, weights = inputs["input_ids"], inputs["labels"][:, 1:], inputs["weights"][:, 1:]
            # Padding is on the right and attention is causal: no token sees it, so no mask is needed.
            logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
            chosen = weights > 0
            losses = torch.nn.functional.cross_entropy(
                logits[chosen].float(), targets[chosen], reduction="none"
            )
            weights = weights[chosen]
            loss = (losses * weights).sum() / weights.sum()
            self.seen_tokens += ids.numel()
            replies = weights == 1.0
            if replies.any():
                self.reply_losses.append(float(losses.detach()[replies].mean()))
            return (loss, {"logits": logits}) if return_outputs else loss

        def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
            if self.reply_losses:
                logs["reply_loss"] = round(self.recent_reply_loss(), 5)
            super().log(logs, start_time)

    def factor(update: int) -> float:
        rise = (update + 1) / max(1, warmup)
        left = (updates - update) / max(1.0, decay * updates)
        return min(1.0, rise, left) if math.isfinite(left) else 1.0

    optimizer = make_optimizer(model, lr, matrix_lr, weight_decay)
    arguments = SFTConfig(
        output_dir=str(Path(out)),
        max_steps=updates,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=1,
        max_grad_norm=1.0,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=not torch.cuda.is_available(),
        save_strategy="no",
        logging_steps=log_every,
        # A bar that redraws itself fills files and pipes.
        disable_tqdm=quiet or not sys.stderr.isatty(),
        report_to=[],
        seed=seed,
        max_length=None,
        remove_unused_columns=False,
        dataset_kwargs={"skip_prepare_dataset": True},
        dataloader_num_workers=0,
    )
    return WeightedSFTTrainer(
        model=model,
        args=arguments,
        data_collator=collate,
        train_dataset=Dataset.from_list(list(rows())),
        processing_class=tokenizer,
        optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)),
    )
