"""Whether a server serves what was trained: the learner writes log-probs beside a policy, the server is asked for its own.

A reload can fail without a word, and the server then samples with old weights under a new version. The figure that is
compared is the mean over places in a fixed prompt of ``sum_k p_k |log q_k - log p_k| / sum_k p_k`` over the learner's
likeliest tokens, in nats. Rounding to bfloat16 gives about 0.01; the next update's weights may differ by less, so this
tells another model or an old head, not a version from its neighbour.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from divopd_trainer.engines.base import EngineError
from divopd_trainer.engines.http import BadAnswer, Server

__all__ = [
    "LIMIT",
    "Probe",
    "SyncMismatch",
    "check_served",
    "probe_file",
    "read_probe",
    "trained_probe",
    "write_probe",
]

LIMIT = 0.02
"""Nats by which served and trained log-probs may differ."""

_PLACES = 12
_TOP = 20
_TEXT = (
    "You are in the middle of a room. Looking quickly around you, you see a cabinet 1, a desk 1, a shelf 2 and a "
    "drawer 3. Your task is to: put a clean mug in cabinet. What do you do next?"
)


class SyncMismatch(EngineError):
    """A server serves other weights than were trained."""


@dataclass(frozen=True)
class Probe:
    """What the learner says of a fixed prompt.

    Attributes:
        token_ids: The prompt.
        places: Entry i of `top_ids` is about the token after ``token_ids[:places[i]]``.
        top_ids: The learner's likeliest tokens there.
        top_logprobs: Their log-probs at temperature 1, nats.
        limit: Difference that is let pass, nats.
    """

    token_ids: list[int]
    places: list[int]
    top_ids: list[list[int]]
    top_logprobs: list[list[float]]
    limit: float = LIMIT


def probe_file(policy: str | Path) -> Path:
    """Where the probe of a policy file or folder lies."""
    return Path(f"{policy}.probe.json")


def trained_probe(model: Any, codec: Any, longest: int, limit: float = LIMIT) -> Probe:
    """Ask the model that is being trained; in sharded training every rank must.

    Args:
        model: A causal LM.
        codec: The `ChatCodec` of its tokenizer.
        longest: Tokens that the server takes, one of which is sampled.
        limit: See `Probe`.
    """
    import torch

    ids = [int(i) for i in codec.start("You act in a text world.", _TEXT)][: longest - 1]
    places = sorted({max(1, round(len(ids) * (n + 1) / _PLACES)) for n in range(_PLACES)})
    device = next(model.parameters()).device
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids], device=device), use_cache=False).logits[0]
    finally:
        model.train(training)
    logprobs = torch.log_softmax(logits[[place - 1 for place in places]].float(), -1)
    top = logprobs.topk(min(_TOP, logprobs.shape[-1]), -1)
    return Probe(ids, places, top.indices.tolist(), top.values.tolist(), limit)


def write_probe(probe: Probe, policy: str | Path) -> Path:
    """Put it beside the policy; a reader sees all of it or nothing."""
    path = probe_file(policy)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(asdict(probe)), encoding="utf-8")
    os.replace(partial, path)
    return path


def read_probe(policy: Any) -> Probe | None:
    """The probe of a policy, if one was written."""
    if not isinstance(policy, (str, Path)):
        return None
    with contextlib.suppress(FileNotFoundError):
        return Probe(**json.loads(probe_file(policy).read_text(encoding="utf-8")))
    return None


async def check_served(server: Server, probe: Probe, model: str | None, timeout_s: float = 120.0) -> float:
    """Compare what a server serves with what was trained.

    Args:
        server: Which.
        probe: What the learner said.
        model: Name that requests give; None: the server's own.
        timeout_s: Seconds for each request; the first one of a server is slow.

    Returns:
        The difference in nats.

    Raises:
        SyncMismatch: It is above the limit.
        EngineError: The server does not answer, or not with log-probs.
    """
    gaps = []
    for place, ids, trained in zip(probe.places, probe.top_ids, probe.top_logprobs):
        served = await _served(server, probe.token_ids[:place], len(ids), model, timeout_s)
        gaps.append(difference(dict(zip(ids, trained)), served))
    gap = sum(gaps) / len(gaps)
    if not gap <= probe.limit:
        raise SyncMismatch(
            f"{server.url} serves log-probs that differ from the trained ones by {gap:.3f} nats on average (at most "
            f"{max(gaps):.3f}); expected at most {probe.limit}. Its weights are not those that were trained. Start it from "
            "the same checkpoint as the learner, without quantization; on a CPU with divopd in its environment "
            "(pip install divopd), or with weight_sync: lora. Raise sync_probe_limit only if its numbers are known to "
            "be coarser."
        )
    return gap


def difference(trained: dict[int, float], served: dict[int, float]) -> float:
    """Mean absolute difference in nats, weighted with the trained probabilities; a token not served counts as far off.

    Args:
        trained: Log-prob by token.
        served: Log-prob by token; at least the likeliest ones.
    """
    floor = min(served.values())
    total = weight = 0.0
    for token, value in trained.items():
        p = math.exp(value)
        # What is not among the likeliest served is at most as likely as the last of them.
        other = served.get(token, min(floor, value))
        total, weight = total + p * abs(other - value), weight + p
    return total / weight


async def _served(
    server: Server, prompt: Sequence[int], top: int, model: str | None, timeout_s: float
) -> dict[int, float]:
    body = {
        "prompt": list(prompt),
        "max_tokens": 1,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "logprobs": top,
        "return_tokens_as_token_ids": True,
        "add_special_tokens": False,
        # What is cached must not answer.
        "cache_salt": secrets.token_hex(8),
    }
    if model is not None:
        body["model"] = model
    answer = (await server.post("/v1/completions", body, timeout_s)).body
    try:
        found = answer["choices"][0]["logprobs"]["top_logprobs"][0]
        return {int(name.removeprefix("token_id:")): float(value) for name, value in found.items()}
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise BadAnswer(
            f"{server.url} answered without the log-probs of {top} tokens ({type(error).__name__}); use vLLM, started "
            f"with --max-logprobs {top} and --logprobs-mode processed_logprobs."
        ) from error
