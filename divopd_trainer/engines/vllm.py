"""Student and teachers of a run on vLLM servers, from the explorer's settings."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from divopd_gym.errors import ConfigError
from divopd_trainer.engines.addresses import STUDENT_URL, TEACHER_URL, by_label
from divopd_trainer.engines.base import EngineError
from divopd_trainer.engines.http import Server
from divopd_trainer.engines.sync import make_weight_sync
from divopd_trainer.engines.vllm_student import VLLMStudent
from divopd_trainer.engines.vllm_teacher import VLLMTeacher

__all__ = ["STUDENT_KEYS", "TEACHER_KEYS", "student_servers", "teacher_servers", "vllm_engines"]

STUDENT_KEYS = ("DIVOPD_STUDENT_API_KEY", "VLLM_API_KEY")
TEACHER_KEYS = ("DIVOPD_TEACHER_API_KEY", "VLLM_API_KEY")
"""Environment variables that may hold the servers' keys."""


def student_servers(urls: Any, field: str = "student_urls") -> list[Server]:
    """Servers of the student; none given: the one on this machine at port 8000."""
    return [Server(url, key_variables=STUDENT_KEYS, field=field) for url in urls or (STUDENT_URL,)]


def teacher_servers(urls: Any, *, default: bool = True) -> dict[str, list[Server]]:
    """Servers by the teacher's label; "" is the main one, which is on this machine at port 8001 if none is given."""
    labels = by_label(urls or ())
    if default:
        labels.setdefault("", [TEACHER_URL])
    return {
        label: [Server(url, key_variables=TEACHER_KEYS, field="teacher_urls") for url in addresses]
        for label, addresses in labels.items()
    }


def vllm_engines(config: Any) -> Any:
    """Build what the explorer plays with; to be called where no event loop runs.

    Args:
        config: An `ExplorerConfig`. Of ``engine_kwargs`` it takes ``request_timeout_s``, ``student_requests``,
            ``teacher_requests`` (at once, a server) and ``teacher_overlap``.

    Returns:
        `Engines`.

    Raises:
        ConfigError: The servers do not fit the settings, or an option is unknown.
        EngineError: They do not answer within ``start_timeout_s``.
    """
    from transformers import AutoTokenizer

    from divopd_trainer.chat import ChatCodec
    from divopd_trainer.explorer.engines import Engines, shared_vocabulary

    options = {
        "request_timeout_s": config.episode_timeout_s,
        "student_requests": 64,
        "teacher_requests": 16,
        "teacher_overlap": 0,
    }
    if unknown := sorted(set(config.engine_kwargs) - set(options)):
        raise ConfigError(
            f"engine_kwargs has {', '.join(map(repr, unknown))}; engine 'vllm' takes {', '.join(options)}."
        )
    options |= config.engine_kwargs
    if config.extra_samples:
        raise ConfigError(
            f"extra_samples is {config.extra_samples}, but a vLLM server draws one token a position; expected 0."
        )
    tokenizer = AutoTokenizer.from_pretrained(config.tokenizer or config.student)
    codec = ChatCodec(tokenizer)
    students = student_servers(config.student_urls)
    teachers = teacher_servers(config.teacher_urls, default=bool(config.teacher))
    evaluators = student_servers(config.eval_urls, "eval_urls") if config.eval_urls else None
    groups = {
        "student": students,
        "evaluation": evaluators or [],
        **{f"teacher {k}": v for k, v in teachers.items()},
    }
    lengths = asyncio.run(_lengths(groups, config.start_timeout_s))
    wanted = config.max_model_len or lengths["student"]
    for role in ("student", "evaluation"):
        if lengths.get(role, wanted) < wanted:
            raise ConfigError(
                f"max_model_len is {wanted}, but the {role} servers take {lengths[role]} tokens. Start them with "
                f"--max-model-len {wanted}, or lower max_model_len."
            )

    def student(servers: list[Server], purpose: str) -> VLLMStudent:
        return VLLMStudent(
            servers,
            max_model_len=wanted,
            stop_ids=codec.end_of_turn_ids,
            sync=make_weight_sync(config.weight_sync, config, purpose),
            policy_version=config.policy_version,
            per_server=options["student_requests"],
            request_timeout_s=options["request_timeout_s"],
            # One server that hangs must not use up the time of all.
            load_timeout_s=config.load_timeout_s / 2,
        )

    def teacher(label: str, path: str) -> tuple[VLLMTeacher, Any]:
        engine = VLLMTeacher(
            teachers[label],
            max_model_len=lengths[f"teacher {label}"],
            stop_ids=codec.end_of_turn_ids,
            overlap=options["teacher_overlap"],
            vocab_size=_vocabulary_size(path),
            per_server=options["teacher_requests"],
            request_timeout_s=options["request_timeout_s"],
        )
        return engine, shared_vocabulary(config, path, tokenizer)

    main = teacher("", config.teacher) if config.teacher else (None, None)
    own = student(students, "train")

    def make_eval_student() -> VLLMStudent:
        return student(evaluators or student_servers(config.student_urls), "eval")

    # Servers that hold one version cannot be pinned to it while training goes on.
    can_evaluate = evaluators or (own.sync is not None and own.sync.adapters)
    info = {"max_model_len": wanted, "student_servers": len(students)}
    info |= {"teacher_servers": sum(map(len, teachers.values()))}
    info |= {"masked_token_ids": 0 if main[1] is None else int((~main[1]).sum())}
    others = {label: teacher(label, path) for label, path in config.teachers.items()}
    return Engines(
        own,
        codec,
        main[0],
        make_eval_student if can_evaluate else None,
        main[1],
        info,
        others,
        dict(config.teacher_routing),
    )


def _vocabulary_size(path: str) -> int | None:
    from transformers import AutoConfig

    try:
        return getattr(AutoConfig.from_pretrained(path).get_text_config(), "vocab_size", None)
    except (OSError, ValueError):
        return None


async def _lengths(groups: dict[str, list[Server]], timeout_s: float) -> dict[str, int]:
    """The shortest context of each group's servers, once one of each answers; loading may take them minutes."""
    deadline = time.monotonic() + timeout_s

    async def shortest(name: str, servers: list[Server]) -> int:
        while True:
            found = await asyncio.gather(*(s.model_length() for s in servers), return_exceptions=True)
            if lengths := [length for length in found if isinstance(length, int)]:
                return min(lengths)
            if time.monotonic() > deadline - 2:
                raise EngineError(
                    f"No server of the {name} answered within {timeout_s:.0f} s: {found[0]} Start it, or correct its "
                    "address."
                )
            await asyncio.sleep(1.0)

    wanted = {name: servers for name, servers in groups.items() if servers}
    try:
        found = await asyncio.gather(*(shortest(*item) for item in wanted.items()))
        return dict(zip(wanted, found))
    finally:
        for servers in wanted.values():
            for server in servers:
                await server.aclose()
