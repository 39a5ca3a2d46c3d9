"""What is sent to vLLM's ``/v1/completions``, and what comes back: ids both ways, checked, never text.

Field names are those of vLLM 0.31. Every sampling setting is sent, because a server fills what is missing from the
model's ``generation_config.json``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from divopd_trainer.engines.base import EngineError, GenerateRequest, Generation
from divopd_trainer.engines.http import BadAnswer, ServerUnavailable

__all__ = [
    "Completion",
    "generate_body",
    "no_room",
    "prompt_scores",
    "read_completion",
    "refuse_unfinished",
    "room_for",
    "score_body",
]

_PLAIN = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
_PLAIN |= {"presence_penalty": 0.0, "frequency_penalty": 0.0}
# vLLM writes this where a log-prob is minus infinity, which JSON cannot hold.
_MINUS_INFINITY = -9999.0


@dataclass
class Completion:
    """A sampled response as the server reported it.

    Attributes:
        token_ids: int32 [n].
        logprobs: float32 [n].
        stop_reason: ``end_of_turn`` or ``length``.
        prompt_tokens: Tokens of the prompt.
        cached_tokens: Those whose keys and values were reused; 0 where the server does not tell.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    stop_reason: str
    prompt_tokens: int
    cached_tokens: int


def room_for(request: GenerateRequest, max_model_len: int) -> int:
    """Tokens that a response may take; 0 where the prompt leaves no room.

    Raises:
        EngineError: More draws a position are asked for.
    """
    if request.extra_samples:
        raise EngineError(
            f"extra_samples is {request.extra_samples}, but a vLLM server draws one token a position; expected 0. Use "
            "divergence: sampled_reverse_kl, or engine: local."
        )
    return max(0, min(request.max_tokens, max_model_len - len(request.prompt_ids)))


def no_room(version: int) -> Generation:
    """What is given instead of a request whose prompt leaves no room."""
    return Generation(np.zeros(0, np.int32), np.zeros(0, np.float32), "context_overflow", version)


def generate_body(
    request: GenerateRequest,
    max_tokens: int,
    stop_ids: Sequence[int],
    *,
    model: str | None,
    cache_salt: str | None = None,
) -> dict[str, Any]:
    """The request for one response.

    Args:
        request: What to sample.
        max_tokens: Already cut to the room there is.
        stop_ids: Ids that end it.
        model: Name of the model or adapter; None: the server's own.
        cache_salt: Keeps keys and values of other weights out.
    """
    body = {
        "prompt": request.prompt_ids.tolist(),
        "max_tokens": max_tokens,
        # Greedy decoding is temperature 0 there.
        "temperature": 0.0 if request.greedy else float(request.temperature),
        "seed": int(request.seed),
        "n": 1,
        "logprobs": 0,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "skip_special_tokens": False,
        "add_special_tokens": False,
        "stop_token_ids": [int(i) for i in stop_ids],
        **_PLAIN,
    }
    if model is not None:
        body["model"] = model
    if cache_salt is not None:
        body["cache_salt"] = cache_salt
    return body


def score_body(token_ids: Sequence[int], topk: int, *, model: str | None) -> dict[str, Any]:
    """The request for the log-probs of given tokens; one token is sampled with it, which is thrown away."""
    body = {
        "prompt": [int(i) for i in token_ids],
        "max_tokens": 1,
        "temperature": 1.0,
        "prompt_logprobs": topk,
        "return_token_ids": True,
        "add_special_tokens": False,
        **_PLAIN,
    }
    if model is not None:
        body["model"] = model
    return body


def refuse_unfinished(body: Any) -> None:
    """Refuse the answer of a server that is being paused or shut down in the middle of it.

    Raises:
        ServerUnavailable: So that it is tried again.
    """
    choices = body.get("choices") if isinstance(body, dict) else None
    reasons = [c.get("finish_reason") for c in choices or () if isinstance(c, dict)]
    if "abort" in reasons:
        raise ServerUnavailable("The server called a request off (finish_reason 'abort').")


def read_completion(body: Any, prompt_ids: np.ndarray, max_tokens: int, url: str) -> Completion:
    """Check an answer to `generate_body` and take it apart.

    Raises:
        BadAnswer: Ids are missing or are not those that were sampled, or log-probs are missing or not finite.
    """
    choice = _choice(body, url)
    ids = _ids(choice, "token_ids", url)
    _check_prompt(choice, prompt_ids, url)
    logprobs = choice.get("logprobs")
    if not isinstance(logprobs, dict) or len(logprobs.get("token_logprobs") or ()) != len(ids):
        raise BadAnswer(
            f"{url} answered with {len(ids)} ids and "
            f"{len((logprobs or {}).get('token_logprobs') or ())} log-probs; expected one each. Use vLLM, "
            "started with --logprobs-mode processed_logprobs."
        )
    named = logprobs.get("tokens") or []
    if len(named) == len(ids) and named and str(named[0]).startswith("token_id:"):
        said = [int(str(name).removeprefix("token_id:")) for name in named]
        if said != ids.tolist():
            at = next(i for i, (a, b) in enumerate(zip(said, ids)) if a != b)
            raise BadAnswer(
                f"{url} reported token {at} as id {ids[at]} but its log-prob as that of id {said[at]}; the two must "
                "be one. Look for a proxy or plug-in that changes answers."
            )
    values = np.array([math.nan if v is None else v for v in logprobs["token_logprobs"]], np.float32)
    if not len(ids) or len(ids) > max_tokens:
        raise BadAnswer(f"{url} answered with {len(ids)} ids; expected 1 to {max_tokens}.")
    if not np.isfinite(values).all() or (values <= _MINUS_INFINITY).any():
        raise BadAnswer(
            f"{url} sampled tokens with log-probs that are not finite ({values[:8].tolist()}...); the weights it "
            "serves are broken, or it computes in too coarse a type. Start it with --dtype bfloat16."
        )
    reason = choice.get("finish_reason")
    if reason not in ("stop", "length"):
        raise BadAnswer(f"{url} ended a response with finish_reason {reason!r}; expected 'stop' or 'length'.")
    usage = body.get("usage") or {}
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    stop = "end_of_turn" if reason == "stop" else "length"
    return Completion(ids, values, stop, len(prompt_ids), int(cached))


def prompt_scores(
    body: Any, token_ids: np.ndarray, topk: int, url: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Check an answer to `score_body` and take it apart.

    Returns:
        logprobs float32 [T], topk_ids int32 [T, K] (most likely first, -1 where there is none), topk_logprobs
        float32 [T, K]. Entry i scores ``token_ids[i]`` given all before it; NaN where the server gave no finite one.

    Raises:
        BadAnswer: There are no scores, or they are of other tokens.
    """
    choice = _choice(body, url)
    _check_prompt(choice, token_ids, url)
    rows = choice.get("prompt_logprobs")
    if not isinstance(rows, list) or len(rows) != len(token_ids):
        raise BadAnswer(
            f"{url} gave {'no' if rows is None else len(rows)} prompt_logprobs for {len(token_ids)} tokens; expected "
            "one a token. Use vLLM, without a proxy that drops fields."
        )
    logprobs = np.full(len(token_ids), np.nan, np.float32)
    top_ids = np.full((len(token_ids), topk), -1, np.int32)
    top_logprobs = np.full((len(token_ids), topk), np.nan, np.float32)
    for place, row in enumerate(rows):
        if row is None:
            continue
        own = row.get(str(int(token_ids[place])))
        if own is None:
            raise BadAnswer(
                f"{url} scored position {place} without the token there ({int(token_ids[place])}); expected the "
                "scores of the very tokens that were sent."
            )
        logprobs[place] = _finite(own)
        if topk:
            found = [(entry["rank"], int(i), _finite(entry)) for i, entry in row.items() if entry.get("rank")]
            for column, (_, token, value) in enumerate(sorted(f for f in found if f[0] <= topk)[:topk]):
                if not math.isnan(value):
                    top_ids[place, column], top_logprobs[place, column] = token, value
    return logprobs, top_ids, top_logprobs


def _finite(entry: dict[str, Any]) -> float:
    value = entry.get("logprob")
    usable = value is not None and math.isfinite(value) and value > _MINUS_INFINITY
    return float(value) if usable else math.nan


def _choice(body: Any, url: str) -> dict[str, Any]:
    choices = body.get("choices") if isinstance(body, dict) else None
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise BadAnswer(f"{url} answered without exactly one choice; expected vLLM's /v1/completions.")
    return choices[0]


def _ids(choice: dict[str, Any], name: str, url: str) -> np.ndarray:
    ids = choice.get(name)
    if not isinstance(ids, list):
        raise BadAnswer(
            f"{url} gave no {name}, and text must not be encoded again. Use vLLM 0.10.2 or newer, which knows "
            "return_token_ids, without a proxy that drops fields."
        )
    return np.asarray(ids, np.int32)


def _check_prompt(choice: dict[str, Any], prompt_ids: np.ndarray, url: str) -> None:
    seen = choice.get("prompt_token_ids")
    if seen is not None and not np.array_equal(np.asarray(seen), prompt_ids):
        raise BadAnswer(
            f"{url} read {len(seen)} prompt ids that are not the {len(prompt_ids)} that were sent; something between "
            "encodes or cuts prompts. Ask the server directly."
        )
