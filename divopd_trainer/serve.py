"""The vLLM servers of a run as commands: which, where, on what, with the flags that training needs.

Servers listen on this machine only unless ``launch: {host: ...}`` says otherwise. Keys come from the environment
(VLLM_API_KEY), never from flags, so no command, log or file holds one.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from divopd_gym.errors import ConfigError

from .vllm_plugin import BACKEND

__all__ = ["LaunchSettings", "ServerCommand", "server_commands", "visible_gpus"]

_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
_LOCAL = ("127.0.0.1", "localhost", "::1")
_CPU_ENV = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Threads of several processes on shared cores stand in each other's way.
    "OMP_NUM_THREADS": "1",
}


@dataclass
class LaunchSettings:
    """The mapping ``launch`` of a run's settings.

    Attributes:
        python: Interpreter of the environment that has vLLM (and, for ``weight_sync: file``, divopd); null: this one.
        student_servers: Servers of the student.
        teacher_servers: Servers of each teacher.
        eval_servers: Student servers for evaluations alone; null: one where ``weight_sync`` file or nccl needs it.
        host: Address to listen on.
        port: Of the first server; the others follow.
        device: "gpu", "cpu", or "auto".
        gpus: Ids of the GPUs to use; null: all there are.
        learner_gpus: How many of them, from the end, the learner has; null: as many as the servers leave, at least one.
        tensor_parallel: GPUs of one teacher server.
        gpu_memory: Share of a GPU's memory that a server takes; null: 0.9, or less where several share a GPU.
        cpu_kv_gb: Memory for keys and values of one server on a CPU, in GB.
        max_num_seqs: Requests in a server's batch; null: 16 on a CPU, vLLM's own on a GPU.
        student_flags: More flags for student servers.
        teacher_flags: More flags for teacher servers.
        start_timeout_s: Seconds the servers may take to start.
        stop_timeout_s: Seconds the trainer gets to write its checkpoint on Ctrl-C.
    """

    python: str | None = None
    student_servers: int = 1
    teacher_servers: int = 1
    eval_servers: int | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    device: str = "auto"
    gpus: list[int | str] | None = None
    learner_gpus: int | None = None
    tensor_parallel: int = 1
    gpu_memory: float | None = None
    cpu_kv_gb: int = 1
    max_num_seqs: int | None = None
    student_flags: list[str] = field(default_factory=list)
    teacher_flags: list[str] = field(default_factory=list)
    start_timeout_s: float = 900.0
    stop_timeout_s: float = 120.0

    def __post_init__(self) -> None:
        for name in ("student_servers", "teacher_servers", "tensor_parallel", "port", "cpu_kv_gb"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ConfigError(
                    f"launch.{name} is {getattr(self, name)!r}; expected a whole number of at least 1."
                )
        for name in ("start_timeout_s", "stop_timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"launch.{name} is {getattr(self, name)!r}; expected seconds above 0.")
        if self.device not in ("auto", "cpu", "gpu"):
            raise ConfigError(f"launch.device is {self.device!r}; expected auto, cpu or gpu.")
        for name in ("student_flags", "teacher_flags"):
            flags = getattr(self, name)
            flags = shlex.split(flags) if isinstance(flags, str) else [str(flag) for flag in flags]
            setattr(self, name, flags)
            if any(flag.partition("=")[0] == "--api-key" for flag in flags):
                raise ConfigError(
                    f"launch.{name} has --api-key, which every user of this machine could read. Set the environment "
                    "variable VLLM_API_KEY instead."
                )
        if self.host not in _LOCAL and not os.environ.get("VLLM_API_KEY"):
            raise ConfigError(
                f"launch.host is {self.host!r}, which others can reach, and VLLM_API_KEY is not set. Set it to a key of your "
                "choice (it guards /v1 only: keep the port inside a trusted network), or leave host at 127.0.0.1."
            )

    @classmethod
    def of(cls, config: Any) -> LaunchSettings:
        """From a run's settings.

        Raises:
            ConfigError: An unknown key, or a value that cannot work.
        """
        given = dict(config.launch or {})
        known = [item.name for item in dataclasses.fields(cls)]
        for key in given:
            if key not in known:
                close = difflib.get_close_matches(str(key), known, 1)
                hint = f" Did you mean {close[0]!r}?" if close else ""
                raise ConfigError(f"launch has no setting {key!r}.{hint} It takes {', '.join(known)}.")
        try:
            return cls(**given)
        except TypeError as error:
            raise ConfigError(f"launch holds a value that cannot be used: {error}.") from error

    def evaluators(self, config: Any) -> int:
        """Student servers for evaluations alone."""
        if self.eval_servers is not None:
            return self.eval_servers
        return int(config.evaluates and config.weight_sync != "lora")

    @property
    def on_gpu(self) -> bool:
        """Whether servers run on GPUs."""
        return self.device == "gpu" or (self.device == "auto" and bool(visible_gpus()))


@dataclass(frozen=True)
class ServerCommand:
    """One server.

    Attributes:
        name: Such as "student-0" or "teacher-0"; also of its log file.
        role: "student", "eval" or "teacher".
        label: Of the teacher; "" is the main one.
        url: Where it will answer.
        argv: The command.
        env: What is set for it beside the environment of the launcher.
    """

    name: str
    role: str
    label: str
    url: str
    argv: list[str]
    env: dict[str, str]

    @property
    def address(self) -> str:
        """As student_urls and teacher_urls take it."""
        return f"{self.label}={self.url}" if self.label else self.url

    def shell(self) -> str:
        """The command as a shell would read it."""
        return " ".join(
            [*(f"{key}={shlex.quote(value)}" for key, value in self.env.items()), shlex.join(self.argv)]
        )


def visible_gpus() -> list[int | str]:
    """Ids of the NVIDIA GPUs that may be used here: numbers, or the names that CUDA_VISIBLE_DEVICES has for them."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        ids = [part.strip() for part in chosen.split(",")]
        return [int(part) if part.isdigit() else part for part in ids if part and part != "-1"]
    if not shutil.which("nvidia-smi"):
        return []
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return list(range(sum(line.startswith("GPU ") for line in listed.stdout.splitlines())))


def server_commands(config: Any, settings: LaunchSettings | None = None) -> list[ServerCommand]:
    """Every server of a run, students first.

    Args:
        config: A `DivOPDConfig` with ``engine: vllm``.
        settings: Instead of those in ``config.launch``.

    Raises:
        ConfigError: The run asks no servers, or there are too few GPUs.
    """
    if config.engine != "vllm":
        raise ConfigError(
            f"engine is {config.engine!r}, which needs no servers. Set engine to vllm, or use 'divopd train'."
        )
    settings = settings or LaunchSettings.of(config)
    evaluators = settings.evaluators(config)
    roles = [("student", "", config.model)] * settings.student_servers
    roles += [("eval", "", config.model)] * evaluators
    teachers = [("", config.teacher), *config.teachers.items()] if config.teacher else []
    roles += [("teacher", label, path) for label, path in teachers for _ in range(settings.teacher_servers)]
    places = _places(roles, settings) if settings.on_gpu else [None] * len(roles)
    commands, counts = [], {}
    for number, ((role, label, model), place) in enumerate(zip(roles, places)):
        kind = f"{role}-{label}" if label else role
        index = counts[kind] = counts.get(kind, -1) + 1
        port = settings.port + number
        host = "127.0.0.1" if settings.host in ("0.0.0.0", "::") else settings.host
        argv = [
            settings.python or sys.executable,
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--model",
            model,
        ]
        argv += [
            "--host",
            settings.host,
            "--port",
            str(port),
            *_flags(config, settings, role, model, evaluators),
        ]
        env = {"VLLM_NO_USAGE_STATS": "1"}
        if role != "teacher":
            env |= {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
        if place is None:
            env |= _CPU_ENV | {"VLLM_CPU_KVCACHE_SPACE": str(settings.cpu_kv_gb)}
        else:
            gpus, share = place
            env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
            argv += ["--gpu-memory-utilization", f"{share:g}"]
            argv += ["--tensor-parallel-size", str(len(gpus))] if len(gpus) > 1 else []
        argv += settings.teacher_flags if role == "teacher" else settings.student_flags
        commands.append(ServerCommand(f"{kind}-{index}", role, label, f"http://{host}:{port}", argv, env))
    return commands


def learner_gpus(settings: LaunchSettings, servers: Sequence[ServerCommand]) -> list[int | str]:
    """GPUs of the trainer: those that no server has, or the last one where all are taken."""
    if not settings.on_gpu:
        return []
    gpus = list(settings.gpus if settings.gpus is not None else visible_gpus())
    taken = {part for server in servers for part in server.env["CUDA_VISIBLE_DEVICES"].split(",")}
    free = [gpu for gpu in gpus if str(gpu) not in taken] or gpus[-1:]
    return free[-settings.learner_gpus :] if settings.learner_gpus else free


def _flags(config: Any, settings: LaunchSettings, role: str, model: str, evaluators: int) -> list[str]:
    # A teacher samples one token beside those that it scores.
    length = config.max_model_len + (role == "teacher")
    longest = _positions(model)
    length = min(length, longest) if longest else length
    flags = ["--max-model-len", str(length), "--generation-config", "vllm", "--disable-uvicorn-access-log"]
    if role == "teacher":
        flags += ["--max-logprobs", str(max(20, config.teacher_top_k))]
    else:
        flags += ["--logprobs-mode", "processed_logprobs", "--enable-prompt-tokens-details"]
        if config.weight_sync == "lora":
            rank = next((rank for rank in _LORA_RANKS if rank >= config.lora_rank), config.lora_rank)
            # Versions that turns may still be of, the one that is being loaded, and one that is evaluated.
            slots = config.max_staleness + 2 + (1 if config.evaluates and not evaluators else 0)
            flags += ["--enable-lora", "--max-loras", str(slots), "--max-lora-rank", str(rank)]
        elif config.weight_sync in (BACKEND, "nccl"):
            flags += ["--weight-transfer-config", json.dumps({"backend": config.weight_sync})]
    sequences = settings.max_num_seqs or (None if settings.on_gpu else 16)
    flags += ["--max-num-seqs", str(sequences)] if sequences else []
    if not settings.on_gpu:
        # A seeded request whose prompt is read in parts ends vLLM's CPU engine.
        flags += ["--enforce-eager", "--max-num-batched-tokens", str(length * sequences)]
        # As the learner computes there, so that served and trained log-probs agree to the last digit.
        flags += ["--dtype", "float32"]
    elif role == "teacher":
        # Log-probs of prompts take [tokens, vocabulary] of memory that vLLM does not plan for.
        flags += ["--max-num-batched-tokens", "4096"]
    elif config.bf16 or config.fp16:
        # As the learner computes; the checkpoint's own type may be another.
        flags += ["--dtype", "bfloat16" if config.bf16 else "float16"]
    return flags


def _positions(model: str) -> int | None:
    """Tokens that a model was made for."""
    try:
        config: Mapping[str, Any] = json.loads((Path(model).expanduser() / "config.json").read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return config.get("max_position_embeddings")


def _places(roles: Sequence[tuple], settings: LaunchSettings) -> list[tuple[list[int | str], float]]:
    """(GPUs, share of memory) of each server: one GPU a server while there are enough, the learner's kept free."""
    gpus = list(settings.gpus if settings.gpus is not None else visible_gpus())
    if not gpus:
        raise ConfigError(
            "launch.device is gpu, but no GPU is to be seen. Set device to cpu, or gpus to their ids."
        )
    sizes = [settings.tensor_parallel if role == "teacher" else 1 for role, _, _ in roles]
    keep = settings.learner_gpus if settings.learner_gpus is not None else 1
    room = gpus[: len(gpus) - keep] if len(gpus) > keep else []
    if sum(sizes) <= len(room):
        places, at = [], 0
        for size in sizes:
            places.append((room[at : at + size], settings.gpu_memory or 0.9))
            at += size
        return places
    if max(sizes) > 1:
        raise ConfigError(
            f"The servers want {sum(sizes)} GPUs and the learner {keep}, but there are {len(gpus)}. Lower "
            "launch.tensor_parallel or the number of servers."
        )
    # They share: the learner's GPU keeps room for it.
    shared = room or gpus
    on_each = -(-len(roles) // len(shared))
    share = settings.gpu_memory or round((0.9 if room else 0.6) / on_each, 2)
    return [([shared[number % len(shared)]], share) for number in range(len(roles))]
