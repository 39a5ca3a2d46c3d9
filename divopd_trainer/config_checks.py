"""The rules that a `DivOPDConfig` must keep. No torch and no TRL here."""

from __future__ import annotations

import difflib
from typing import Any

from divopd_gym.errors import ConfigError
from divopd_gym.prompts import history_pairs

from .composer import PRESETS

__all__ = ["DIVERGENCES", "METHODS", "check_together", "check_values"]

METHODS = tuple(PRESETS)
DIVERGENCES = ("sampled_reverse_kl", "forward_kl_topk", "jsd_topk")
# Anything but these would sample from another distribution than the one whose log-probs are trained on.
_PLAIN_SAMPLING = {"top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0}


def check_values(config: Any) -> None:
    """Refuse single values out of range.

    Raises:
        ConfigError: The first one; the message names its field.
    """
    for name, allowed in (
        ("method", METHODS),
        ("divergence", DIVERGENCES),
        ("packing_layout", ("auto", "padded", "packed")),
        ("progress", ("auto", "live", "plain", "none")),
    ):
        value = getattr(config, name)
        if value not in allowed:
            close = difflib.get_close_matches(str(value), allowed, 1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise ConfigError(f"{name} is {value!r}; expected one of {', '.join(allowed)}.{hint}")
    at_least = dict.fromkeys(
        ("max_turns", "max_tokens", "batch_rows", "pool_multiplier", "updates", "max_concurrent"), 1
    )
    at_least |= dict.fromkeys(
        ("env_workers", "attempts_per_task", "max_microbatch_tokens", "explorer_threads"), 1
    )
    at_least |= dict.fromkeys(("max_nonfinite_updates", "max_failed_episodes", "recovery_patience"), 1)
    at_least |= dict.fromkeys(("max_staleness", "max_pending_age", "eval_every", "save_every"), 0)
    at_least |= dict.fromkeys(("keep_checkpoints", "recovery_budget", "recovery_warmup"), 0)
    at_least |= {"max_explorer_restarts": 0, "max_model_len": 2, "weight_sync_steps": 1}
    for name, least in at_least.items():
        value = getattr(config, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigError(f"{name} is {value!r}; expected a whole number of at least {least}.")
    for name in ("cap", "epochs", "eval_episodes", "learner_threads"):
        value = getattr(config, name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ConfigError(f"{name} is {value!r}; expected null or a whole number of at least 1.")
    for name in ("heartbeat_stale_after_s", "stop_grace_s", "env_step_timeout_s", "env_reset_timeout_s"):
        _check_positive(config, name)
    for name in ("episode_timeout_s", "eval_timeout_s", "temperature", "teacher_temperature"):
        _check_positive(config, name)
    if config.load is not None:
        _check_positive(config, "load")
    if not 0 <= config.tokenizer_mismatch_limit <= 1:
        raise ConfigError(
            f"tokenizer_mismatch_limit is {config.tokenizer_mismatch_limit}; expected a share from 0 to 1."
        )
    if config.eval_temperature < 0:
        raise ConfigError(f"eval_temperature is {config.eval_temperature}; expected 0 (greedy) or more.")
    history_pairs(config.history)


def _check_positive(config: Any, name: str) -> None:
    value = getattr(config, name)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < float("inf"):
        raise ConfigError(f"{name} is {value!r}; expected a number above 0.")


def check_together(config: Any) -> None:
    """Refuse values that do not work together.

    Raises:
        ConfigError: The first pair; the message says what to change.
    """
    if config.gradient_accumulation_steps != 1:
        raise ConfigError(
            f"gradient_accumulation_steps is {config.gradient_accumulation_steps}; expected 1, because one composed "
            "batch is exactly one update. Limit memory with max_microbatch_tokens instead."
        )
    if config.beta == 1.0 and not config.add_tail_bucket:
        raise ConfigError(
            "beta is 1 with add_tail_bucket false: the divergence over one renormalised token is exactly 0, so "
            "nothing would be learned. Set add_tail_bucket to true, or use divergence: sampled_reverse_kl."
        )
    changed = [
        f"{name}={getattr(config, name)}"
        for name, value in _PLAIN_SAMPLING.items()
        if getattr(config, name) != value
    ]
    if changed:
        raise ConfigError(
            f"{', '.join(changed)}: sampling must follow softmax(logits / temperature), whose log-probs are "
            "trained on. Leave top_p 1, top_k 0, min_p null and repetition_penalty 1."
        )
    if config.max_tokens >= config.max_model_len:
        raise ConfigError(
            f"max_tokens is {config.max_tokens} and max_model_len is {config.max_model_len}: no token is left for a "
            "prompt. Raise max_model_len or lower max_tokens."
        )
    if config.engine != "local" and ":" not in config.engine:
        raise ConfigError(
            f"engine is {config.engine!r}; expected 'local' or an importable factory 'package.module:function'."
        )
    if config.engine == "local" and config.teacher_temperature != config.temperature:
        raise ConfigError(
            f"teacher_temperature is {config.teacher_temperature} and temperature is {config.temperature}: the local engine "
            "scores at the sampling temperature. Leave teacher_temperature null."
        )
    every = config.weight_sync_steps
    if every != 1 and config.max_staleness < every:
        raise ConfigError(
            f"weight_sync_steps is {every} with max_staleness {config.max_staleness}: every turn would be stale before "
            "it could be trained. Set weight_sync_steps to 1 or raise max_staleness."
        )
    unsynced = [name for name in ("updates", "eval_every") if getattr(config, name) % every]
    if unsynced:
        raise ConfigError(
            f"weight_sync_steps is {every}, which does not divide {unsynced[0]}={getattr(config, unsynced[0])}: an "
            "evaluation would be due when its weights are not written. Set weight_sync_steps to 1, or choose multiples."
        )
