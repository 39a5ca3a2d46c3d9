"""What the vLLM servers of a run must be, found out by asking them before anything is loaded.

Each refusal names the server, what it answered, what was expected, and the flag that mends it. A few tokens are
sampled and scored for it; nothing on the servers is changed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import numpy as np

from divopd_gym.errors import ConfigError
from divopd_trainer.chat import ChatCodec
from divopd_trainer.engines.base import EngineError, GenerateRequest
from divopd_trainer.engines.completions import generate_body, prompt_scores, read_completion, score_body
from divopd_trainer.engines.http import Server, ServerRefusal
from divopd_trainer.engines.vllm import student_servers, teacher_servers

__all__ = ["check_servers", "check_student_server", "check_teacher_server", "start_command"]

_TEXTS = (
    "You are in a room. Your task: put 2 clean mugs on shelf 1.",
    "<think>1 + 1 = 2</think>\n<action>go to desk 1</action>",
    "Grüße, 世界! ¿Qué? ☃ 😀\t{}[]\\ 0123456789",
)
_TOP = 10
_HOT = 2.0


def start_command(model: str, url: str, max_model_len: int, *flags: str) -> str:
    """How such a server is started; it binds to this machine only."""
    port = url.rpartition(":")[2]
    parts = ["python -m vllm.entrypoints.openai.api_server", f"--model {model}", "--host 127.0.0.1"]
    parts += [f"--port {port}" if port.isdigit() else "", f"--max-model-len {max_model_len}"]
    return " ".join(part for part in (*parts, "--generation-config vllm", *flags) if part)


def check_servers(config: Any, tokenizers: Mapping[str | None, Any], sync: Any) -> list[str]:
    """Ask every server of a run.

    Args:
        config: A `DivOPDConfig` with ``engine: vllm``.
        tokenizers: The student's under None, those of teachers by label, "" being the main one.
        sync: The `WeightSync` of the run, or None.

    Returns:
        What was let pass, one sentence each.

    Raises:
        ConfigError: The first thing that is wrong.
    """
    if sync is None:
        raise ConfigError(
            "weight_sync is null, so the vLLM servers would sample with the first weights for ever. Set weight_sync."
        )
    if config.evaluates and not config.eval_urls and not sync.adapters:
        raise ConfigError(
            f"weight_sync {config.weight_sync!r} lets a server hold one version only, so evaluations need servers of "
            "their own. Set eval_urls, train adapters, or set eval_every 0, eval_at_start and eval_at_end false."
        )
    if not sync.adapters and (both := sorted(set(config.student_urls or ()) & set(config.eval_urls or ()))):
        raise ConfigError(
            f"{both[0]} is in student_urls and in eval_urls, but weight_sync {config.weight_sync!r} lets a server hold one "
            "version only. Start another server for evaluations, or train adapters."
        )
    return asyncio.run(_check_all(config, tokenizers, sync))


async def _check_all(config: Any, tokenizers: Mapping[str | None, Any], sync: Any) -> list[str]:
    notes: list[str] = []
    students = student_servers(config.student_urls)
    if config.eval_urls:
        students += student_servers(config.eval_urls, "eval_urls")
    slots = config.max_staleness + 2 + (1 if config.evaluates and not config.eval_urls else 0)
    teachers = teacher_servers(config.teacher_urls, default=bool(config.teacher))
    topk = config.teacher_top_k if config.divergence in ("forward_kl_topk", "jsd_topk") else 0
    try:
        for server in students:
            notes += await check_student_server(
                server,
                tokenizers[None],
                model=config.model,
                max_model_len=config.max_model_len,
                adapter_slots=slots if sync.adapters else 0,
            )
        for label, servers in teachers.items():
            for server in servers:
                notes += await check_teacher_server(
                    server,
                    tokenizers[label],
                    model=config.teachers.get(label, config.teacher),
                    max_model_len=config.max_model_len,
                    topk=topk,
                )
    finally:
        for server in [*students, *(s for servers in teachers.values() for s in servers)]:
            await server.aclose()
    return notes


async def check_student_server(
    server: Server, tokenizer: Any, *, model: str, max_model_len: int, adapter_slots: int = 0
) -> list[str]:
    """Refuse a server that cannot be the student's; see `check_servers`.

    Args:
        server: Which.
        tokenizer: The student's.
        model: Its name, for messages.
        max_model_len: Tokens of prompt and response together that the run needs.
        adapter_slots: LoRA adapters that it must hold at once; 0: none.

    Returns:
        What was let pass.

    Raises:
        ConfigError: It cannot.
    """
    flags = ["--logprobs-mode processed_logprobs"]
    flags += [f"--enable-lora --max-loras {adapter_slots}"] if adapter_slots else []
    length = await _reach(server, "student", model, max_model_len, flags)
    if length < max_model_len:
        raise ConfigError(
            f"The student server {server.url} takes {length} tokens, but max_model_len is {max_model_len}. Start it "
            f"with --max-model-len {max_model_len}, or lower max_model_len."
        )
    await _check_vocabulary(server, tokenizer, "student", model)
    notes = await _check_logprobs(server, ChatCodec(tokenizer), length)
    if adapter_slots:
        notes += await _check_adapters(server, adapter_slots)
    if (await server.identity())[0] is None:
        notes.append(
            f"The student server {server.url} does not tell when it was started (/metrics), so a restart shows only "
            "where a connection breaks."
        )
    return notes


async def check_teacher_server(
    server: Server, tokenizer: Any, *, model: str, max_model_len: int, topk: int = 0
) -> list[str]:
    """Refuse a server that cannot be the teacher's; see `check_servers`.

    Args:
        server: Which.
        tokenizer: The teacher's.
        model: Its name, for messages.
        max_model_len: Tokens of a segment.
        topk: Candidates a token that the run asks for.

    Returns:
        What was let pass.

    Raises:
        ConfigError: It cannot.
    """
    flags = [f"--max-logprobs {topk}"] if topk > 20 else []
    length = await _reach(server, "teacher", model, max_model_len + 1, flags)
    notes = []
    if length < max_model_len + 1:
        notes.append(
            f"The teacher server {server.url} takes {length} tokens; segments have up to {max_model_len}, and what lies "
            f"beyond token {length - 1} stays unscored. Start it with --max-model-len {max_model_len + 1} if it can."
        )
    await _check_vocabulary(server, tokenizer, "teacher", model)
    await _check_scores(server, ChatCodec(tokenizer), length, topk)
    return notes


async def _reach(server: Server, role: str, model: str, max_model_len: int, flags: list[str]) -> int:
    try:
        await server.get("/health")
        return await server.model_length()
    except EngineError as error:
        raise ConfigError(
            f"The {role} server {server.url} cannot be used: {error} Expected vLLM serving {model}. Start it with: "
            f"{start_command(model, server.url, max_model_len, *flags)}"
        ) from error


async def _check_vocabulary(server: Server, tokenizer: Any, role: str, model: str) -> None:
    """The same texts must become the same ids, the end of a turn one of them."""
    codec = ChatCodec(tokenizer)
    ends = [str(tokenizer.convert_ids_to_tokens(i)) for i in codec.end_of_turn_ids]
    for text in (*_TEXTS, *ends):
        body = {"prompt": text, "add_special_tokens": False}
        try:
            reply = await server.post("/tokenize", body)
        except EngineError as error:
            raise ConfigError(
                f"The {role} server {server.url} does not say how it reads text: {error} Expected POST /tokenize; start "
                "vLLM without --skip-tokenizer-init."
            ) from error
        theirs = reply.body.get("tokens") if isinstance(reply.body, dict) else None
        ours = [int(i) for i in tokenizer(text, add_special_tokens=False)["input_ids"]]
        if theirs != ours:
            what = f"the end of a turn {text!r}" if text in ends else repr(text)
            raise ConfigError(
                f"The {role} server {server.url} reads {what} as the ids {_few(theirs)}, but the tokenizer of {model} as "
                f"{_few(ours)}: ids would mean other strings. Serve {model} itself, with --tokenizer {model} if its "
                "weights lie elsewhere."
            )


async def _check_logprobs(server: Server, codec: ChatCodec, length: int) -> list[str]:
    """Ids come back, and log-probs are those after temperature.

    Between the same two tokens the difference of log-probs at temperature T is 1/T of that at 1. So no prompt has to
    be scored, which kills vLLM's CPU engine where adapters are served.
    """
    prompt = _prompt(codec, length)
    tops = []
    for heat in (1.0, _HOT):
        request = GenerateRequest(prompt, 1, temperature=heat, seed=1)
        body = generate_body(request, 1, codec.end_of_turn_ids, model=None) | {"logprobs": _TOP}
        answer = await _ask(server, body, "sample one token")
        try:
            read_completion(answer, prompt, 1, server.url)
            top = answer["choices"][0]["logprobs"]["top_logprobs"][0]
        except EngineError as error:
            raise ConfigError(f"The student server cannot be used: {error}") from error
        values = np.array(list(top.values()), np.float64)
        if values.max() > 0.01 or np.exp(values).sum() > 1.05:
            raise ConfigError(
                f"The student server {server.url} reports {values.max():.2f} as a log-prob; expected at most 0. It seems "
                "to report logits. Start it with --logprobs-mode processed_logprobs."
            )
        tops.append(top)
    common = sorted(set(tops[0]) & set(tops[1]))
    cold, hot = (np.array([top[token] for token in common]) for top in tops)
    if len(common) < 2 or np.ptp(cold) < 0.02:
        return [
            f"Whether {server.url} reports log-probs after temperature could not be told, for its model finds all "
            "tokens alike; it must run with --logprobs-mode processed_logprobs."
        ]
    ratio = float(np.ptp(hot) / np.ptp(cold))
    if ratio > (1 + 1 / _HOT) / 2:
        raise ConfigError(
            f"The student server {server.url} reports log-probs before temperature (at temperature {_HOT:g} tokens differ "
            f"{ratio:.2f} times as much as at 1; expected {1 / _HOT:g}). The first update's ratio would not be 1. Start it "
            "with --logprobs-mode processed_logprobs."
        )
    return []


async def _check_adapters(server: Server, slots: int) -> list[str]:
    try:
        # Without a name it is refused before anything is loaded.
        await server.post("/v1/load_lora_adapter", {"lora_name": "", "lora_path": ""})
    except ServerRefusal as error:
        if error.status in (404, 405):
            raise ConfigError(
                f"The student server {server.url} takes no adapters while it runs ({error.status}). Start it with "
                f"VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment and --enable-lora --max-loras {slots}."
            ) from error
    except EngineError:
        pass
    try:
        reply = await server.get("/server_info?config_format=json", 30.0)
        lora = reply.body["vllm_config"].get("lora_config")
    except (EngineError, KeyError, TypeError, AttributeError):
        return [
            f"How many adapters {server.url} holds could not be told (VLLM_SERVER_DEV_MODE=1 would); it needs "
            f"--max-loras {slots}."
        ]
    found = int((lora or {}).get("max_loras") or 0)
    if found < slots:
        raise ConfigError(
            f"The student server {server.url} holds {found} adapters at once, but {slots} versions may be in use "
            f"(max_staleness + 2, and one for evaluations). Start it with --enable-lora --max-loras {slots}."
        )
    return []


async def _check_scores(server: Server, codec: ChatCodec, length: int, topk: int) -> None:
    """Entry i scores token i: the likeliest next token has one log-prob, sampled or given."""
    prompt = _prompt(codec, length)
    request = GenerateRequest(prompt, 1, greedy=True)
    body = generate_body(request, 1, codec.end_of_turn_ids, model=None)
    answer = await _ask(server, body, "sample one token")
    try:
        said = read_completion(answer, prompt, 1, server.url)
        whole = np.concatenate([prompt, said.token_ids])
        scored = await _ask(server, score_body(whole, topk, model=None), "score a prompt", topk)
        logprobs, top_ids, _ = prompt_scores(scored, whole, topk, server.url)
    except EngineError as error:
        raise ConfigError(f"The teacher server cannot be used: {error}") from error
    gap = abs(float(logprobs[-1]) - float(said.logprobs[-1]))
    if not gap < 0.5 or not np.isfinite(logprobs[1:]).all():
        raise ConfigError(
            f"The teacher server {server.url} gives its own next token the log-prob {said.logprobs[-1]:.3f} when it samples "
            f"it and {logprobs[-1]:.3f} when it scores it; expected the same. Start it without --enable-lora, without "
            "speculative decoding, and with --dtype bfloat16."
        )
    if topk and (top_ids[-1] < 0).any():
        raise ConfigError(
            f"The teacher server {server.url} gave {int((top_ids[-1] >= 0).sum())} of {topk} candidates; start it with "
            f"--max-logprobs {topk}."
        )


async def _ask(server: Server, body: dict[str, Any], what: str, topk: int = 0) -> Any:
    try:
        return (await server.post("/v1/completions", body, 120.0)).body
    except EngineError as error:
        flag = f" Start it with --max-logprobs {topk}." if topk and isinstance(error, ServerRefusal) else ""
        raise ConfigError(f"The server {server.url} was asked to {what}: {error}{flag}") from error


def _prompt(codec: ChatCodec, length: int) -> np.ndarray:
    ids = codec.start("You act in a text world.", _TEXTS[0])
    return ids[: max(1, min(len(ids), length - 3, 64))]


def _few(ids: Any) -> str:
    if not isinstance(ids, list):
        return repr(ids)
    return f"{ids[:8]}{'...' if len(ids) > 8 else ''}"
