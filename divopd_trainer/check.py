"""`divopd train --check`: what a run would be, found out without starting anything and without a network.

Settings that cannot work are refused as `divopd train` refuses them. What this machine does not have (models, data) is
"not checked", which only ``strict`` minds: `divopd_trainer.startup.check_run` looks at all of it when the run begins.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from divopd_gym.errors import ConfigError, DataNotFoundError

from .estimates import Assumptions, estimate_tokens, evaluations, learner_memory
from .explorer.fleet import split_config
from .launch import plan_run
from .model_shapes import ModelShape, find_shape
from .run_dir import RunDir
from .serve import LaunchSettings, ServerCommand, learner_gpus, server_commands, visible_gpus

__all__ = ["Report", "check"]

_GB = 1e9
# What vLLM takes beside weights and cache: CUDA graphs, activations, the context.
_SERVER_EXTRA = 3e9


@dataclass
class Report:
    """What a check found.

    Attributes:
        sections: (title, lines), in order.
        unchecked: What could not be looked at here, one sentence each.
        problems: What will not work on the machine that was asked about, one sentence each.
    """

    sections: list[tuple[str, list[str]]] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def add(self, title: str, *lines: str) -> None:
        """One section more."""
        self.sections.append((title, list(lines)))

    def text(self) -> str:
        """Everything, for a terminal."""
        parts = [f"{title}\n" + "\n".join(f"  {line}" for line in lines) for title, lines in self.sections]
        for title, lines in (("Not checked", self.unchecked), ("Problems", self.problems)):
            if lines:
                parts.append(f"{title}\n" + "\n".join(f"  - {line}" for line in lines))
        parts.append("Nothing was started.")
        return "\n\n".join(parts)


def check(config: Any, gpu_gb: float = 80.0, assume: Assumptions | None = None) -> Report:
    """Look at a run's settings.

    Args:
        config: A `DivOPDConfig`; that it exists means that its values work together.
        gpu_gb: Memory of each GPU, in 10^9 bytes.
        assume: What the token estimates take for granted.

    Raises:
        ConfigError: A model, a split or a launch that cannot work.
    """
    report, assume = Report(), assume or Assumptions()
    _settings(config, report)
    student = _models(config, report)
    _data(config, report)
    _tokens(config, assume, report)
    _memory(config, student, gpu_gb, report)
    return report


def _settings(config: Any, report: Report) -> None:
    from divopd_gym.prompts import get_prompt

    from .startup import explorer_config

    get_prompt(config.env_id, config.prompt_style, history=config.history)
    split_config(explorer_config(config), config.explorers)
    try:
        RunDir(config.run_dir).check(resume=bool(config.resume_from_checkpoint))
    except ConfigError as error:
        report.problems.append(str(error))
    rules = f"B {config.batch_rows}, c {config.pool_multiplier}, delta {config.max_staleness}, W {config.max_pending_age}"
    lines = [
        f"method {config.method}: composer {config.composer} ({rules}, k {config.cap}), horizon {config.horizon}, "
        f"weighting {config.weighting}, controller {config.controller}",
        f"{config.updates} updates, learning rate {config.learning_rate:g}, temperature {config.temperature:g}; episodes of "
        f"{config.max_turns} turns, replies of {config.max_tokens} tokens, context of {config.max_model_len}",
        f"{evaluations(config)} evaluations (every {config.eval_every} updates) of {config.eval_episodes or 'all'} tasks at "
        f"temperature {config.eval_temperature:g}",
    ]
    report.add("Settings fit together", *lines)


def _models(config: Any, report: Report) -> ModelShape | None:
    others = {f"teachers[{label!r}]": path for label, path in config.teachers.items()}
    named = {"student": config.model, "teacher": config.teacher, **others}
    shapes: dict[str, ModelShape | None] = {}
    lines = []
    for name, path in named.items():
        if path.startswith((".", "/", "~")) and not Path(path).expanduser().is_dir():
            report.unchecked.append(f"{name} {path} is not there yet; make it before the run.")
            continue
        shape, source = find_shape(path)
        shapes[name] = shape
        if shape is None:
            report.unchecked.append(f"The size of {name} {path}: {source}.")
            continue
        lines.append(f"{name} {path}: {_count(shape.parameters)} weights (from {source})")
        if name == "student" and 0 < shape.positions < config.max_model_len:
            raise ConfigError(
                f"max_model_len is {config.max_model_len} but the student {path} was made for {shape.positions} tokens; "
                f"expected at most that. Set max_model_len to {shape.positions} or less."
            )
    if all(Path(path).expanduser().is_dir() for path in named.values()):
        from .startup import Findings, check_models

        findings = Findings()
        check_models(config, findings)
        lines += [*findings.notes, "tokenizers compared"]
    else:
        report.unchecked.append("Whether the tokenizers fit: they are not in directories on this machine.")
    report.add("Models", *lines)
    return shapes.get("student")


def _data(config: Any, report: Report) -> None:
    lines = []
    for what, evaluation in (("training", False), ("evaluation", True)):
        if evaluation and not config.evaluates:
            continue
        kwargs = config.environment(evaluation=evaluation)
        try:
            count = count_tasks(config.env_id, kwargs)
        except DataNotFoundError as error:
            report.unchecked.append(f"The tasks of the {what} split: data not found. {error}")
            continue
        if count is None:
            report.unchecked.append(f"The tasks of {config.env_id} ({what}): only starting it tells.")
            continue
        lines.append(f"{what}: {count:,} tasks of split {kwargs.get('split')!r}")
        wanted = config.eval_episodes if evaluation else None
        if wanted is not None and wanted > count:
            report.problems.append(
                f"eval_episodes is {wanted}, but the evaluation split has {count} tasks only."
            )
    report.add("Tasks", *(lines or ["none counted"]))


def count_tasks(env_id: str, kwargs: dict[str, Any]) -> int | None:
    """Tasks of one of our environments, without starting it; None where only starting it tells.

    Args:
        env_id: Gymnasium id.
        kwargs: Arguments of the environment.

    Raises:
        ConfigError: There is no such split.
        DataNotFoundError: Its data are missing.
    """
    name = env_id.rpartition("/")[2].partition("-v")[0]
    split, types = kwargs.get("split"), kwargs.get("task_types")
    if name == "ScienceWorld":
        from divopd_gym.envs.scienceworld.tasks import split_tasks

        return len(split_tasks(split or "train", types))
    if name == "ALFWorld" and split not in (None, "generated"):
        from divopd_gym.envs.alfworld.games import find_split

        return len(find_split(split, kwargs.get("data_dir"), tuple(types) if types else None).tasks)
    if name == "ALFWorld":
        return kwargs.get("num_tasks", 1000)
    if name == "WebShop" and kwargs.get("data_dir") is not None:
        from divopd_gym.envs.webshop.goals import SPLITS
        from divopd_gym.envs.webshop.sources import find_sources

        if split not in (None, *SPLITS):
            raise ConfigError(f"split {split!r} of WebShop; choose from {', '.join(SPLITS)}")
        find_sources(kwargs["data_dir"], kwargs.get("size"))
        first, end = SPLITS[split or "all"]
        # How many goals there are is known once the catalogue is indexed.
        return None if end is None else end - first
    return None


def _tokens(config: Any, assume: Assumptions, report: Report) -> None:
    one = estimate_tokens(config, assume)
    runs, updates = evaluations(config), config.updates

    def line(what: str, tokens: float) -> str:
        return f"{what:<46} about {_count(tokens):>8} an update, {_count(tokens * updates):>8} the run"

    episodes = config.eval_episodes
    lines = [
        f"assumed: episodes of {one.turns:.0f} turns whose chat has {_count(one.context)} tokens at the end, replies of "
        f"{config.max_tokens * assume.reply:.0f}; load {'without limit, taken as c' if config.load is None else config.load}",
        f"{'episodes played':<46} about {one.rollouts:>8.0f} an update, {one.rollouts * updates:>8,.0f} the run",
        line("the student writes", one.explored),
        line("the teacher reads (each episode once)", one.teacher),
        line("the learner forwards, one row a turn", one.rows),
        line("the learner forwards, as packed here", one.learner),
        *([] if one.least == one.learner else [line("  or, if few rollouts fill a batch", one.least)]),
        f"{'the learner forwards':<46} at most {_count(one.most):>6} an update",
    ]
    if episodes and runs:
        written = episodes * config.max_turns * assume.depth * config.max_tokens * assume.reply
        lines.append(
            f"{'evaluations write':<46} about {_count(written):>8} each, {_count(runs * written):>10} the run"
        )
    report.add("Tokens", *lines)


def _memory(config: Any, student: ModelShape | None, gpu_gb: float, report: Report) -> None:
    settings = LaunchSettings.of(config)
    servers: list[ServerCommand] = []
    gpus: list[int | str] = []
    if config.engine == "vllm":
        servers = server_commands(config, settings)
        gpus = learner_gpus(settings, servers)
        plan_run(config, [])
    on_gpu = bool(gpus) or (settings.on_gpu and not config.use_cpu)
    lines, taken = [], {}
    for server in servers:
        lines += _server(config, settings, server, gpu_gb, taken, report)
    if student is None:
        report.unchecked.append("The learner's memory, because the student's size is not known.")
    else:
        ranks = max(1, len(gpus))
        memory = learner_memory(config, student, ranks, on_gpu)
        where = f"GPU {', '.join(map(str, gpus))}" if gpus else ("GPU" if on_gpu else "CPU")
        shards = ", sharded" if config.fsdp and ranks > 1 else ""
        lines.append(
            f"learner on {where}{shards}: about {memory.total / _GB:.1f} GB each, {_count(memory.trained)} weights trained"
        )
        lines += [f"  {what}: {size / _GB:.1f}" for what, size in memory.parts]
        for gpu in gpus:
            free = gpu_gb - taken.get(str(gpu), 0.0)
            if memory.total / _GB > free:
                report.problems.append(
                    f"The learner takes about {memory.total / _GB:.0f} GB on GPU {gpu}, where {free:.0f} of {gpu_gb:.0f} GB "
                    "are free. Set fsdp, gradient_checkpointing or lora_rank, or lower max_microbatch_tokens or "
                    "launch.gpu_memory."
                )
    if config.engine == "local":
        explorer = _explorer(config, on_gpu, lines)
        alone = len(settings.gpus or visible_gpus()) < 2
        together = explorer + (memory.total if student is not None and alone else 0.0)
        if on_gpu and together / _GB > gpu_gb:
            who = "Learner and explorer together take" if alone else "The explorer takes"
            report.problems.append(
                f"{who} about {together / _GB:.0f} GB of one GPU, which has {gpu_gb:.0f}. Lower max_concurrent or "
                "max_model_len, train adapters (lora_rank), give a second GPU, or set engine to vllm."
            )
    report.add(f"Memory (GPUs of {gpu_gb:g} GB)" if on_gpu else "Memory", *lines)


def _explorer(config: Any, on_gpu: bool, lines: list[str]) -> float:
    """Bytes of the explorer's own models, a line for each; evaluations have a student of their own."""
    total, width = 0.0, 2 if on_gpu else 4
    models = [("student", config.model), ("teacher", config.teacher)]
    models += [("student of evaluations", config.model)] if config.evaluates else []
    for name, path in models:
        shape, _ = find_shape(path)
        if shape is None:
            continue
        weights = shape.parameters * width
        cache = config.max_concurrent * config.max_model_len * shape.kv_bytes(width)
        # A teacher that only scores keeps none.
        total += weights + (0 if name == "teacher" else cache)
        lines.append(
            f"explorer, {name}: {weights / _GB:.2f} GB of weights, at most {cache / _GB:.2f} GB of keys and values "
            f"({config.max_concurrent} episodes)"
        )
    return total


def _server(
    config: Any,
    settings: LaunchSettings,
    server: ServerCommand,
    gpu_gb: float,
    taken: dict[str, float],
    report: Report,
) -> Iterator[str]:
    """What one server holds; notes in `taken` what it takes of its GPUs, in GB."""
    path = config.model if server.role != "teacher" else config.teachers.get(server.label, config.teacher)
    shape, _ = find_shape(path)
    listed = server.env.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        yield f"{server.name} on the CPU, {settings.cpu_kv_gb} GB of keys and values"
        return
    gpus = listed.split(",")
    share = float(server.argv[server.argv.index("--gpu-memory-utilization") + 1])
    for gpu in gpus:
        taken[gpu] = taken.get(gpu, 0.0) + share * gpu_gb
    where = f"{server.name} on GPU {listed}, {share * gpu_gb:.0f} GB each"
    if shape is None:
        yield where
        return
    weights = shape.parameters * 2
    room = share * gpu_gb * _GB * len(gpus) - weights - _SERVER_EXTRA * len(gpus)
    full = room / (config.max_model_len * shape.kv_bytes())
    yield f"{where}: weights {weights / _GB:.1f}, keys and values about {max(0.0, room) / _GB:.1f} ({full:.0f} full chats)"
    if full < 1:
        report.problems.append(
            f"{server.name} has about {room / _GB:.1f} GB for keys and values, not enough for one chat of "
            f"{config.max_model_len} tokens. Raise launch.gpu_memory or launch.tensor_parallel."
        )


def _count(number: float) -> str:
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.{2 if suffix == 'G' else 1}f}{suffix}"
    return f"{number:.0f}"
