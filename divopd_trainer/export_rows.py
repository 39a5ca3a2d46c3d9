"""The rows of an export: one token sequence each, with all that was recorded about it.

Index convention as in `divopd_trainer.turns`: entry i of a per-token column is about ``input_ids[i]`` given all ids
before it. Log-probs are NaN where there is none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from .turns import Actor, Rollout, StopReason, Turn

__all__ = ["IGNORED", "expert_features", "expert_rows", "rollout_features", "rollout_rows", "sft_lines"]

IGNORED = -100
"""Label of a token that is not trained; the convention of transformers."""

_OUTCOME = ("success", "done", "score", "reward", "done_reason", "turns_played")
_TURN = (
    "index",
    "start",
    "end",
    "actor",
    "policy_version",
    "stop_reason",
    "valid",
    "why_not",
    "score",
    "prompt_truncated",
    "action",
    "action_valid",
    "observation",
)
_TOPK = ("teacher_topk_ids", "teacher_topk_logprobs")


def rollout_rows(rollout: Rollout, reader: Any = None) -> list[dict[str, Any]]:
    """A rollout's segments as rows; a whole episode is one in *accumulate* history, a turn is one in *window*.

    Args:
        rollout: As recorded.
        reader: A `DialogueReader`; None: messages are observations and actions.
    """
    rows = []
    for segment in rollout.segments:
        turns = sorted((t for t in rollout.turns if t.segment is segment), key=lambda turn: turn.start)
        length = len(segment)
        columns: dict[str, Any] = {
            "input_ids": segment.token_ids,
            "response_mask": np.zeros(length, bool),
            "loss_mask": np.zeros(length, bool),
            "student_logprobs": np.full(length, np.nan, np.float32),
            "teacher_logprobs": np.full(length, np.nan, np.float32),
        }
        for turn in turns:
            span = slice(turn.start, turn.end)
            columns["response_mask"][span] = True
            columns["loss_mask"][span] = turn.valid_mask()
            columns["student_logprobs"][span] = turn.student_logprobs
            if turn.teacher_logprobs is not None and len(turn.teacher_logprobs) == turn.n_tokens:
                columns["teacher_logprobs"][span] = turn.teacher_logprobs
        versions = rollout.policy_versions or (None, None)
        rows.append(
            {
                "rollout_id": rollout.rollout_id,
                "segment": segment.index,
                "task": _clean(rollout.task),
                "task_type": _clean(rollout.meta.get("task_type")),
                "goal": _clean(rollout.meta.get("goal")),
                "attempt": rollout.attempt,
                "seed": rollout.seed,
                "messages": reader.messages(segment, turns) if reader is not None else _plain(turns),
                **columns,
                "turns": [_turn(turn) for turn in turns],
                **{name: getattr(rollout, name) for name in _OUTCOME},
                "policy_version_first": versions[0],
                "policy_version_last": versions[1],
            }
        )
        rows[-1]["messages"] = [
            {"role": m["role"], "content": _clean(m["content"])} for m in rows[-1]["messages"]
        ]
    return rows


def expert_rows(
    codec: Any, prompt: Any, record: Mapping[str, Any], number: int, history: str
) -> list[dict[str, Any]]:
    """An expert's episode as rows.

    Args:
        codec: A `ChatCodec`; None: no ids.
        prompt: A `PromptStyle` made for `history`.
        record: As `divopd_trainer.expert` recorded it.
        number: Its place among the exported episodes.
        history: "accumulate": one row, whose replies are what was executed. "window:n": a row a turn, with the expert's
            answer as reply.
    """
    from .sft import SKIPPED, TRAINED, encode_episode, episode_messages

    dialogues = episode_messages(prompt, record, history)
    samples = [None] * len(dialogues) if codec is None else encode_episode(codec, prompt, record, history)
    turns = [
        {name: _clean(turn[name]) for name in ("observation", "action", "expert")}
        | {"noise": bool(turn["noise"])}
        for turn in record["turns"]
    ]
    rows = []
    for place, (messages, sample) in enumerate(zip(dialogues, samples)):
        ids = None if sample is None else sample.token_ids
        rows.append(
            {
                "episode": number,
                "segment": place,
                "task": _clean(record["task"]),
                "goal": _clean(record["goal"]),
                "success": bool(record["success"]),
                "messages": [{"role": m["role"], "content": _clean(m["content"])} for m in messages],
                "input_ids": ids,
                "labels": None
                if sample is None
                else np.where(sample.kind == TRAINED, sample.targets, IGNORED),
                "response_mask": None
                if sample is None
                else (sample.kind == TRAINED) | (sample.kind == SKIPPED),
                "loss_mask": None if sample is None else sample.kind == TRAINED,
                "turns": turns if len(dialogues) == 1 else [turns[place]],
            }
        )
    return rows


def sft_lines(rows: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Rows as lines for supervised training.

    Of a rollout those replies are labelled that the student or the teacher wrote, that ended by themselves and that
    the environment took; of an expert's episode the expert's answers, to the first token of a mistake.
    """
    for row in rows:
        labels = row.get("labels")
        if labels is None:
            labels = np.full(len(row["input_ids"]), IGNORED, np.int64)
            for turn in row["turns"]:
                if (
                    turn["actor"] != Actor.REPLAY.value
                    and turn["action_valid"]
                    and turn["stop_reason"] == StopReason.END_OF_TURN.value
                ):
                    span = slice(turn["start"], turn["end"])
                    labels[span] = row["input_ids"][span]
        yield {
            "input_ids": np.asarray(row["input_ids"]).tolist(),
            "labels": np.asarray(labels).tolist(),
            "response_mask": np.asarray(row["response_mask"]).astype(int).tolist(),
            "messages": row["messages"],
            "task": row["task"],
            "success": row["success"],
            "episode": row.get("rollout_id", row.get("episode")),
        }


def _turn(turn: Turn) -> dict[str, Any]:
    row = {name: _clean(getattr(turn, name)) for name in _TURN}
    for name in _TOPK:
        value = getattr(turn, name)
        row[name] = None if value is None else value.tolist()
    return row


def _plain(turns: Iterable[Turn]) -> list[dict[str, str]]:
    return [
        message
        for turn in turns
        for message in (
            {"role": "user", "content": turn.observation},
            {"role": "assistant", "content": turn.action},
        )
    ]


def _clean(value: Any) -> Any:
    """Lone surrogates, which games may print, are no UTF-8 and so in no Arrow file."""
    return value.encode("utf-8", "replace").decode("utf-8") if isinstance(value, str) else value


def rollout_features() -> Any:
    """Columns and types of `rollout_rows`, as ``datasets.Features``."""
    from datasets import Features, Value

    v = {name: Value(name) for name in ("string", "bool", "int32", "int64", "float32", "float64")}
    turn = {
        **dict.fromkeys(("index", "start", "end", "policy_version"), v["int32"]),
        **dict.fromkeys(("actor", "stop_reason", "why_not", "action", "observation"), v["string"]),
        **dict.fromkeys(("valid", "prompt_truncated", "action_valid"), v["bool"]),
        "score": v["float64"],
        "teacher_topk_ids": [[v["int32"]]],
        "teacher_topk_logprobs": [[v["float32"]]],
    }
    return Features(
        {
            "rollout_id": v["int64"],
            "segment": v["int32"],
            **dict.fromkeys(("task", "task_type", "goal"), v["string"]),
            "attempt": v["int32"],
            "seed": v["int64"],
            "messages": [{"role": v["string"], "content": v["string"]}],
            "input_ids": [v["int32"]],
            **{name: [v["bool"]] for name in ("response_mask", "loss_mask")},
            **{name: [v["float32"]] for name in ("student_logprobs", "teacher_logprobs")},
            "turns": [turn],
            "success": v["bool"],
            "done": v["bool"],
            "score": v["float64"],
            "reward": v["float64"],
            "done_reason": v["string"],
            "turns_played": v["int32"],
            "policy_version_first": v["int32"],
            "policy_version_last": v["int32"],
        }
    )


def expert_features() -> Any:
    """Columns and types of `expert_rows`, as ``datasets.Features``."""
    from datasets import Features, Value

    text, flag, number = Value("string"), Value("bool"), Value("int32")
    return Features(
        {
            "episode": number,
            "segment": number,
            "task": text,
            "goal": text,
            "success": flag,
            "messages": [{"role": text, "content": text}],
            "input_ids": [number],
            "labels": [number],
            "response_mask": [flag],
            "loss_mask": [flag],
            "turns": [{"observation": text, "action": text, "expert": text, "noise": flag}],
        }
    )
