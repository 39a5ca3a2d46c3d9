"""Everything that can be wrong with a run, found before anything heavy is loaded.

`check_run` reads configuration files and tokenizers, starts one environment for a moment in a process of its own,
and refuses what cannot work: each message says what was found, what was expected, and how to mend it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from divopd_gym.errors import ConfigError, DivOPDError

from .chat import ChatCodec
from .compat import compare_tokenizers
from .composer import PRESETS
from .config import DivOPDConfig
from .explorer.config import ExplorerConfig
from .explorer.fleet import split_config
from .registry import build
from .run_dir import RunDir

__all__ = [
    "EnvironmentProbe",
    "Findings",
    "check_environment",
    "check_models",
    "check_run",
    "check_vllm",
    "explorer_config",
]


@dataclass
class EnvironmentProbe:
    """What one environment said of itself.

    Attributes:
        tasks: Its task ids.
        observation: The first observation of its first task.
        info: The info that came with it.
        versions: Versions of what it is made of.
    """

    tasks: list[str]
    observation: str
    info: dict[str, Any]
    versions: dict[str, str] = field(default_factory=dict)


@dataclass
class Findings:
    """What the checks saw.

    Attributes:
        notes: Differences that were let pass, one sentence each.
        train_tasks: Tasks of the training split.
        eval_tasks: Tasks of the evaluation split; 0 when nothing is evaluated.
        first_prompt_tokens: Tokens of the first prompt of the first task.
    """

    notes: list[str] = field(default_factory=list)
    train_tasks: int = 0
    eval_tasks: int = 0
    first_prompt_tokens: int = 0


def check_run(config: DivOPDConfig) -> Findings:
    """Refuse a run that cannot work.

    Raises:
        ConfigError: The first thing that is wrong.
        DataNotFoundError: The environment's data are missing.
    """
    findings = Findings()
    run_dir = RunDir(config.run_dir)
    run_dir.check(resume=bool(config.resume_from_checkpoint))
    split_config(explorer_config(config), config.explorers)
    if config.pool == "ray":
        from divopd_gym.ray_pool import import_ray

        import_ray()
    codec = check_models(config, findings)
    if config.engine == "vllm":
        findings.notes += check_vllm(config)
    training = check_environment(config, config.environment(), f"split {config.split!r}", training=True)
    findings.train_tasks = len(training.tasks)
    _check_context(config, codec, training, findings)
    if config.evaluates:
        evaluation = config.environment(evaluation=True)
        if evaluation == config.environment():
            findings.eval_tasks = findings.train_tasks
        else:
            where = f"evaluation split {config.eval_split!r}"
            findings.eval_tasks = len(check_environment(config, evaluation, where).tasks)
    return findings


def check_models(config: DivOPDConfig, findings: Findings | None = None) -> ChatCodec | None:
    """Compare what is written beside student and teacher; loads no weights.

    Returns:
        The student's codec.

    Raises:
        ConfigError: A model is missing, has no chat template, or does not fit the other.
    """
    from transformers import AutoConfig, AutoTokenizer

    findings = findings or Findings()
    student = _read("model", config.model, AutoConfig)
    tokenizer = _read("model", config.model, AutoTokenizer)
    codec = ChatCodec(tokenizer)
    _check_head(config.model, student)
    positions = getattr(student.get_text_config(), "max_position_embeddings", None)
    if positions is not None and config.max_model_len > positions:
        raise ConfigError(
            f"max_model_len is {config.max_model_len} but the student {config.model} was made for {positions} tokens; "
            f"expected at most that. Set max_model_len to {positions} or less."
        )
    if config.engine in ("local", "vllm"):
        others = {f"teachers[{label!r}]": path for label, path in config.teachers.items()}
        for name, path in {"teacher": config.teacher, **others}.items():
            _read(name, path, AutoConfig)
            report = compare_tokenizers(tokenizer, _read(name, path, AutoTokenizer))
            notes = report.check(config.tokenizer_mismatch_limit)
            findings.notes += notes if name == "teacher" else [f"{name}: {note}" for note in notes]
    return codec


def check_vllm(config: DivOPDConfig) -> list[str]:
    """Ask the run's vLLM servers what they are; see `divopd_trainer.engines.server_checks`.

    Raises:
        ConfigError: One of them cannot serve this run.
    """
    from transformers import AutoTokenizer

    from .engines.server_checks import check_servers
    from .engines.sync import make_weight_sync

    paths = {None: config.model, "": config.teacher, **config.teachers}
    tokenizers = {label: _read(str(label), path, AutoTokenizer) for label, path in paths.items() if path}
    sync = make_weight_sync(config.weight_sync, explorer_config(config))
    return check_servers(config, tokenizers, sync)


def _read(name: str, path: str, kind: Any) -> Any:
    if not path:
        raise ConfigError(f"{name} is empty; expected a Hub name or the directory of a saved model.")
    looks_local = path.startswith((".", "/", "~")) or Path(path).exists()
    if looks_local and not Path(path).expanduser().is_dir():
        raise ConfigError(
            f"{name} is {path!r}, which is no directory; expected one that save_pretrained wrote. Check the path."
        )
    try:
        # Said, not left to the default, which would ask at a terminal.
        return kind.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        what = "tokenizer" if "Tokenizer" in kind.__name__ else "configuration"
        raise ConfigError(
            f"The {what} of {name} {path!r} cannot be read ({type(error).__name__}: {str(error).splitlines()[0]}); "
            "expected a Hub name that can be reached or a directory with config.json and tokenizer files. Check the "
            "name, or save the tokenizer into the model's directory."
        ) from error


def _check_head(path: str, model: Any) -> None:
    """The learner applies the output head by itself, to few positions."""
    text = model.get_text_config()
    for name in (
        "final_logit_softcapping",
        "logit_scale",
        "logits_scaling",
        "lm_head_multiplier",
        "output_multiplier",
    ):
        value = getattr(text, name, None)
        if value not in (None, 1, 1.0):
            raise ConfigError(
                f"The student {path} changes its logits after the head ({name}={value}); expected plain logits. Choose "
                "another student."
            )


def check_environment(
    config: DivOPDConfig, env_kwargs: dict[str, Any], where: str, *, training: bool = False
) -> EnvironmentProbe:
    """Start one environment in a process of its own, list its tasks, and begin the first.

    Args:
        config: The run's settings.
        env_kwargs: Arguments of the environment.
        where: How messages call the split.
        training: Whether training episodes are played in it, which may need reference trajectories.

    Raises:
        ConfigError: The environment cannot be made, has no task, or lacks what the controller needs.
        DataNotFoundError: Its data are missing.
    """
    from divopd_gym.pool import EnvPool

    pool = EnvPool.sync(
        config.env_id,
        env_kwargs,
        1,
        step_timeout_s=config.env_step_timeout_s,
        reset_timeout_s=config.env_reset_timeout_s,
        start_method="spawn",
    )
    try:
        with pool, pool.lend(config.env_reset_timeout_s) as env:
            tasks = list(env.call("tasks"))
            if not tasks:
                raise ConfigError(
                    f"{config.env_id} has no task in {where}; expected at least one. Check the split's name and the "
                    "data with 'divopd data check'."
                )
            observation, info = env.reset(task=tasks[0])
            versions = env.call("versions")
            if training:
                _check_reference(config, env, tasks[0], where)
    except DivOPDError as error:
        cause = error
        while cause is not None:
            # The pool wraps what the environment raised; its own message is the better one.
            if isinstance(cause, DivOPDError) and not _is_pool_error(cause):
                raise cause from None
            cause = cause.__cause__
        raise ConfigError(
            f"{config.env_id} with {env_kwargs} could not be started ({where}): {error} Check env_id, env_kwargs and "
            "the data with 'divopd data check'."
        ) from error
    return EnvironmentProbe(tasks, observation, info, dict(versions or {}))


def _check_reference(config: DivOPDConfig, env: Any, task: str, where: str) -> None:
    """Refuse a controller that replays reference trajectories where there are none, or none that leave a turn."""
    controller = build("controller", config.controller, config.controller_kwargs, config.facts())
    if not getattr(controller, "needs_reference", False):
        return
    try:
        path = env.call("gold_path")
    except DivOPDError:
        path = None
    if path is None:
        raise ConfigError(
            f"The controller {config.controller!r} replays reference trajectories, but {config.env_id} has none for "
            f"task {task!r} of {where} (gold_path() is None). Use a split or environment with gold paths, or method: "
            "tcod-f2b."
        )
    if len(path) > config.max_turns:
        raise ConfigError(
            f"The controller {config.controller!r} replays reference trajectories, and that of task {task!r} of {where} "
            f"has {len(path)} turns, but max_turns is {config.max_turns}: the student would never act. Raise max_turns "
            f"to {len(path)} or more."
        )


def _is_pool_error(error: BaseException) -> bool:
    from divopd_gym.errors import PoolError

    return isinstance(error, PoolError)


def _check_context(
    config: DivOPDConfig, codec: ChatCodec | None, probe: EnvironmentProbe, findings: Findings
) -> None:
    from divopd_gym.prompts import get_prompt

    prompt = get_prompt(config.env_id, config.prompt_style, history=config.history)
    ids = codec.start(prompt.system(probe.info), prompt.user(0, probe.observation, probe.info, []))
    findings.first_prompt_tokens = len(ids)
    if len(ids) + config.max_tokens > config.max_model_len:
        raise ConfigError(
            f"The first prompt has {len(ids)} tokens and a response may take {config.max_tokens}, but max_model_len is "
            f"{config.max_model_len}: not even one turn fits. Raise max_model_len to {len(ids) + config.max_tokens} at the "
            "very least, lower max_tokens, or use a shorter prompt_style."
        )


def explorer_config(
    config: DivOPDConfig, checkpoint: Path | None = None, update: int = 0, **more: Any
) -> ExplorerConfig:
    """The explorer's settings that follow from the run's.

    Args:
        config: The run's settings.
        checkpoint: Folder of the checkpoint that is resumed; the explorer begins with its weights.
        update: Completed updates of that checkpoint.
        **more: Fields that replace what follows.

    Raises:
        ConfigError: Values that the explorer cannot work with.
    """
    # The checkpoint of an adapter is no whole model; its first policy file is, and is loaded before play begins.
    whole = checkpoint is not None and (checkpoint / "config.json").exists()
    values = {
        "env_id": config.env_id,
        "env_kwargs": config.environment(),
        "workers": config.env_workers,
        "pool": config.pool,
        "ray_address": config.ray_address,
        "epochs": config.epochs,
        "group": config.attempts_per_task,
        "eval_env_kwargs": config.environment(evaluation=True),
        "engine": config.engine,
        "student": str(checkpoint) if whole else config.model,
        "teacher": config.teacher,
        "tokenizer": config.model,
        **_servers(config),
        "prompt_style": config.prompt_style,
        "history": config.history,
        "max_turns": config.max_turns,
        "max_tokens": config.max_tokens,
        "max_model_len": config.max_model_len,
        "temperature": config.temperature,
        "teachers": config.teachers,
        "teacher_routing": config.teacher_routing,
        "teacher_topk": config.teacher_top_k if _needs_candidates(config) else 0,
        "extra_samples": config.samples - 1 if config.divergence == "multi_sample_reverse_kl" else 0,
        "tokenizer_mismatch_limit": config.tokenizer_mismatch_limit,
        "plugins": config.plugins or [],
        "run_facts": config.facts(),
        "controller": config.controller,
        "controller_kwargs": config.controller_kwargs,
        "horizon": config.horizon,
        "horizon_kwargs": config.horizon_kwargs,
        "probe_rollouts": config.probe_rollouts,
        "review": config.review,
        "review_kwargs": config.review_kwargs,
        "lazy_scoring": config.lazy_scoring and not _asks(config, "needs_whole_rollouts"),
        "pool_turns": _pool_turns(config),
        "batch_rows": config.batch_rows,
        "max_staleness": config.max_staleness,
        "load": config.load,
        "max_concurrent": config.max_concurrent,
        "seed": config.seed,
        "policy_version": update,
        "max_failures": config.max_failed_episodes,
        "start_timeout_s": config.start_timeout_s,
        "episode_timeout_s": config.episode_timeout_s,
        "step_timeout_s": config.env_step_timeout_s,
        "reset_timeout_s": config.env_reset_timeout_s,
        "eval_timeout_s": config.eval_timeout_s,
        "threads": config.explorer_threads,
    }
    return ExplorerConfig(**{**values, **more})


def _servers(config: DivOPDConfig) -> dict[str, Any]:
    if config.engine != "vllm":
        return {"engine_kwargs": {"device": "cpu"}} if config.use_cpu and config.engine == "local" else {}
    options = {"request_timeout_s": float(config.request_timeout), "teacher_overlap": config.teacher_overlap}
    names = ("student_urls", "teacher_urls", "eval_urls")
    urls = {name: tuple(getattr(config, name) or ()) for name in names}
    timeout = {"load_timeout_s": float(config.weight_sync_timeout)}
    return {**urls, **timeout, "weight_sync": config.weight_sync, "engine_kwargs": options}


def _needs_candidates(config: DivOPDConfig) -> bool:
    return config.divergence in ("forward_kl_topk", "jsd_topk") or _asks(config, "needs_topk")


def _asks(config: DivOPDConfig, attribute: str) -> bool:
    """Whether the run's weighting has this attribute set."""
    weighting = build("weighting", config.weighting, config.weighting_kwargs, config.facts())
    return bool(getattr(weighting, attribute, False))


def _pool_turns(config: DivOPDConfig) -> int:
    """Turns worth scoring ahead: the composer's pool, or the next batch and one more where it keeps none."""
    preset = PRESETS.get(config.composer)
    pooled = preset is None or preset.pooled
    return config.batch_rows * (max(2, config.pool_multiplier) if pooled else 2)
