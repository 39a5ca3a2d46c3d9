"""The rules that a `DivOPDConfig` must keep. No torch and no TRL here."""

from __future__ import annotations

import difflib
from typing import Any

from divopd_gym.errors import ConfigError
from divopd_gym.prompts import history_pairs

from .composer import PRESETS
from .engines.addresses import check_addresses
from .registry import build, known

__all__ = ["DIVERGENCES", "check_together", "check_values"]

DIVERGENCES = ("sampled_reverse_kl", "multi_sample_reverse_kl", "forward_kl_topk", "jsd_topk")
# Anything but these would sample from another distribution than the one whose log-probs are trained on.
_PLAIN_SAMPLING = {"top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0}


def check_values(config: Any) -> None:
    """Refuse single values out of range.

    Raises:
        ConfigError: The first one; the message names its field.
    """
    for name, allowed in (
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
    at_least |= {"samples": 2, "extrapolate_every": 0, "extrapolate_episodes": 1, "probe_rollouts": 1}
    at_least |= {"explorers": 1, "max_explorer_restarts": 0, "max_model_len": 2, "weight_sync_steps": 1}
    at_least |= {"lora_rank": 0, "sync_probes": -1}
    for name, least in at_least.items():
        value = getattr(config, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigError(f"{name} is {value!r}; expected a whole number of at least {least}.")
    for name in ("cap", "epochs", "eval_episodes", "learner_threads", "token_budget"):
        value = getattr(config, name)
        if name == "cap" and value == "auto":
            continue
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ConfigError(f"{name} is {value!r}; expected null or a whole number of at least 1.")
    for name in ("heartbeat_stale_after_s", "stop_grace_s", "env_step_timeout_s", "env_reset_timeout_s"):
        _check_positive(config, name)
    names = ("episode_timeout_s", "eval_timeout_s", "temperature", "teacher_temperature", "sync_probe_limit")
    for name in names:
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
    if config.engine not in ("local", "vllm") and ":" not in config.engine:
        raise ConfigError(
            f"engine is {config.engine!r}; expected 'local', 'vllm' or an importable factory 'package.module:function'."
        )
    if config.engine == "local" and config.teacher_temperature != config.temperature:
        raise ConfigError(
            f"teacher_temperature is {config.teacher_temperature} and temperature is {config.temperature}: the local engine "
            "scores at the sampling temperature. Leave teacher_temperature null."
        )
    check_addresses(config)
    _check_adapter(config)
    _check_method(config)
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


def _check_adapter(config: Any) -> None:
    if not config.lora_rank and (config.lora_alpha is not None or config.lora_targets):
        raise ConfigError(
            "lora_alpha or lora_targets is set, but lora_rank is 0: no adapter is trained. Set lora_rank."
        )
    if config.weight_sync == "lora" and config.extrapolate_every:
        raise ConfigError(
            f"extrapolate_every is {config.extrapolate_every}, whose trials are whole policies, but weight_sync lora hands "
            "over adapters. Set weight_sync to file with eval_urls, or extrapolate_every to 0."
        )


def _check_method(config: Any) -> None:
    """Every part must exist, take its options, and find what it needs; see `registry.SEAMS`."""
    composers = [*PRESETS, *known("composer")]
    if config.composer not in composers and config.composer.count(":") != 1:
        close = difflib.get_close_matches(config.composer, composers, 1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ConfigError(
            f"composer is {config.composer!r}; expected one of {', '.join(composers)}, or 'module:name' of your "
            f"own.{hint}"
        )
    facts = config.facts()
    parts = {
        seam: build(seam, name, getattr(config, f"{seam}_kwargs"), facts)
        for seam in ("controller", "horizon", "weighting", "advantage", "review")
        if (name := getattr(config, seam)) is not None
    }
    for seam, part in parts.items():
        name = getattr(config, seam)
        if getattr(part, "needs_groups", False) and config.attempts_per_task < 2:
            raise ConfigError(
                f"{seam} {name!r} compares the episodes of one task, but attempts_per_task is "
                f"{config.attempts_per_task}; expected 2 or more. Set attempts_per_task to 8, as its paper has it."
            )
        if getattr(part, "needs_teacher", False) and not config.teacher:
            raise ConfigError(f"{seam} {name!r} needs a teacher, but teacher is empty; name one.")
        wanted = getattr(part, "needs_review", None)
        if wanted is not None and config.review != wanted:
            raise ConfigError(
                f"{seam} {name!r} reads what the review {wanted!r} writes, but review is {config.review!r}. Set review "
                f"to {wanted}, or use method: {wanted}."
            )
        wanted = getattr(part, "needs_controller", None)
        if wanted is not None and config.controller != wanted:
            raise ConfigError(
                f"{seam} {name!r} weights turns of the controller {wanted!r}, but controller is "
                f"{config.controller!r}. Set controller to {wanted}."
            )
    if getattr(parts["controller"], "imitates", False) and not getattr(
        parts["weighting"], "weighs_imitation", False
    ):
        raise ConfigError(
            f"The controller {config.controller!r} lets turns of the teacher be imitated, but weighting "
            f"{config.weighting!r} has no weight for them. Set weighting to guided."
        )
    imitating = [seam for seam, part in parts.items() if getattr(part, "imitates", False)]
    if imitating and config.divergence != "sampled_reverse_kl":
        raise ConfigError(
            f"{imitating[0]} {getattr(config, imitating[0])!r} lets replies of the teacher be imitated, but divergence is "
            f"{config.divergence!r}, which cannot. Set divergence to sampled_reverse_kl."
        )
    weighting = parts["weighting"]
    own_rewards = getattr(weighting, "gives_rewards", False) and not getattr(
        weighting, "weighs_imitation", False
    )
    if imitating and own_rewards:
        raise ConfigError(
            f"weighting {config.weighting!r} adds rewards of its own, which replies of the teacher "
            f"({imitating[0]} {getattr(config, imitating[0])!r}) have none of. Set weighting to uniform."
        )
    if getattr(weighting, "needs_topk", False) and config.teacher_top_k < 1:
        raise ConfigError(
            f"weighting {config.weighting!r} reads the teacher's most likely tokens, but teacher_top_k is "
            f"{config.teacher_top_k}; expected 1 or more."
        )
    if config.controller == "tcod-b2f" and config.horizon != "fixed":
        raise ConfigError(
            f"controller 'tcod-b2f' replays the beginning of an episode and horizon {config.horizon!r} cuts its end: "
            "nothing might be left to train. Set horizon to fixed."
        )
    if getattr(parts["weighting"], "gives_rewards", False) and config.divergence != "sampled_reverse_kl":
        raise ConfigError(
            f"weighting {config.weighting!r} adds rewards to the advantage of sampled tokens, but divergence is "
            f"{config.divergence!r}, which has no advantage. Set divergence to sampled_reverse_kl, or weighting to uniform."
        )
    if (config.advantage != "reverse-kl") and config.divergence != "sampled_reverse_kl":
        raise ConfigError(
            f"advantage {config.advantage!r} scores sampled tokens, but divergence is {config.divergence!r}. Set "
            "divergence to sampled_reverse_kl, or advantage to reverse-kl."
        )
    if config.extrapolate_every and not config.extrapolate_factors:
        raise ConfigError("extrapolate_every is set without extrapolate_factors; give some, e.g. [0.5, 1.0].")
    _check_teachers(config)


def _check_teachers(config: Any) -> None:
    if config.teachers and not config.teacher_routing:
        raise ConfigError(
            f"There are {len(config.teachers)} more teachers ({', '.join(config.teachers)}) but no teacher_routing; "
            "expected a mapping of task patterns to labels, e.g. {'boil/*': "
            + next(iter(config.teachers))
            + "}."
        )
    unknown = sorted(set(config.teacher_routing.values()) - set(config.teachers))
    if unknown:
        raise ConfigError(
            f"teacher_routing names {', '.join(map(repr, unknown))}, but teachers has "
            f"{', '.join(map(repr, config.teachers)) or 'none'}. Add the label to teachers."
        )
    if config.method == "mopd" and not config.teachers:
        raise ConfigError(
            "method 'mopd' distils from several teachers, but teachers is empty. Give teachers (label: model) and "
            "teacher_routing (task pattern: label)."
        )
