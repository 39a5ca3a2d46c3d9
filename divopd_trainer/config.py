"""`DivOPDConfig`: everything a run needs, in one dataclass on top of TRL's.

Defaults are those of the DivOPD paper (arXiv 2609.34838). Values that cannot work together are refused when the
object is made; `load_config` also refuses unknown keys, naming the closest known ones.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch  # noqa: E402
import yaml  # noqa: E402
from trl import TrlParser  # noqa: E402
from trl.experimental.async_distillation import AsyncDistillationConfig  # noqa: E402

from divopd_gym.errors import ConfigError  # noqa: E402

from .config_checks import DIVERGENCES, METHODS, check_together, check_values  # noqa: E402

__all__ = [
    "DIVERGENCES",
    "METHODS",
    "DivOPDConfig",
    "config_from_mapping",
    "load_config",
    "parse_config",
    "save_config",
]


def _option(default: Any, help: str, **more: Any) -> Any:
    if isinstance(default, (dict, list)):
        return field(default_factory=lambda: type(default)(default), metadata={"help": help, **more})
    return field(default=default, metadata={"help": help, **more})


@dataclass
class DivOPDConfig(AsyncDistillationConfig):
    """Settings of one distillation run.

    Every field carries its meaning, unit and default in its help text (``divopd train --help``). Fields inherited
    from TRL and transformers keep their meaning, with other defaults where the paper has them: ``learning_rate``
    1e-6 constant, ``weight_decay`` 0.01, ``max_staleness`` 2.

    Raises:
        ConfigError: Values that cannot work, alone or together.
    """

    _VALID_DICT_FIELDS = [*AsyncDistillationConfig._VALID_DICT_FIELDS, "env_kwargs", "eval_env_kwargs"]

    # What is distilled.
    model: str = _option("Qwen/Qwen3-1.7B", "Student: a Hub name or a directory written by save_pretrained.")
    teacher: str = _option(
        "langfeng01/GiGPO-Qwen2.5-7B-Instruct-ALFWorld", "Frozen teacher: a Hub name or a directory."
    )
    engine: str = _option(
        "local",
        "Where student and teacher run while exploring: 'local' (transformers, inside the explorer process) or an "
        "importable factory 'module:function'.",
    )
    tokenizer_mismatch_limit: float = _option(
        0.05,
        "Largest share of the student's token ids (0 to 1) that may mean something else to the teacher; such ids are "
        "masked out of the loss, and a larger share is refused at start.",
    )

    # The environment.
    env_id: str = _option("divopd_gym/ALFWorld-v0", "Gymnasium id of the training environment.")
    env_kwargs: dict[str, Any] | str | None = _option(
        None, "Keyword arguments for gymnasium.make (a mapping)."
    )
    split: str | None = _option(
        "train", "Split of tasks to train on, passed to the environment; null if it has none."
    )
    eval_split: str | None = _option("valid_seen", "Split of tasks to evaluate on.")
    eval_env_kwargs: dict[str, Any] | str | None = _option(
        None, "Keyword arguments that replace those of env_kwargs in evaluations (a mapping)."
    )
    prompt_style: str = _option("think", "Prompt and reply form: 'think', 'action' or 'tiny'.")
    history: str = _option(
        "accumulate",
        "How past turns are shown: 'accumulate' (one growing chat) or 'window:N' (the last N turns).",
    )
    max_turns: int = _option(30, "Turns an episode may take.")
    max_tokens: int = _option(512, "Tokens a response may take.")
    max_model_len: int = _option(10752, "Tokens of prompt and response together.")
    attempts_per_task: int = _option(1, "Episodes per task and epoch.")
    epochs: int | None = _option(
        None, "Passes over the training tasks after which no episode is begun; null: without end."
    )

    # The method.
    method: str = _option("divopd", f"Preset: one of {', '.join(METHODS)}.", choices=list(METHODS))
    batch_rows: int = _option(64, "Turns in a batch (B); one batch is one update.")
    pool_multiplier: int = _option(4, "Turns the composer looks at, in batches (c).")
    cap: int | None = _option(4, "Turns a rollout gives in the composer's first sweep (k); null: no cap.")
    max_staleness: int = _option(
        2,
        "Updates by which a turn's weights may be older than the learner's (delta); 1 is on-policy, and 0 means 1.",
    )
    max_pending_age: int = _option(8, "Updates a turn may wait in the pool (W).")
    divergence: str = _option(
        "sampled_reverse_kl",
        "Loss: 'sampled_reverse_kl' (the paper's), 'forward_kl_topk' or 'jsd_topk' (teacher_top_k candidates; beta "
        "interpolates).",
        choices=list(DIVERGENCES),
    )
    advantage_scale: float = _option(
        1.0, "Factor on the advantage, the paper's beta (TRL's own beta is the JSD interpolation)."
    )
    recovery_patience: int = _option(4, "divopd-r: turns without progress before the teacher takes over (p).")
    recovery_budget: int = _option(6, "divopd-r: teacher turns a rollout may hold (m).")
    recovery_warmup: int = _option(0, "divopd-r: updates before which the teacher never takes over.")
    recovery_return_on_progress: bool = _option(
        False, "divopd-r: hand back at the first progress instead of after the whole budget."
    )

    # How fast.
    updates: int = _option(250, "Updates of the whole run.")
    load: float | None = _option(
        1.0, "Turns explored per turn trained: 1 keeps pace with the learner, null explores without a limit."
    )
    max_concurrent: int = _option(16, "Episodes in flight at once.")
    env_workers: int | None = _option(
        None,
        "Processes that run environments, one episode at a time each; null: max_concurrent.",
    )
    merge_packing: bool = _option(
        True,
        "Forward the turns of a rollout that share a prefix as one sequence (same gradient, fewer tokens).",
    )
    packing_layout: str = _option(
        "auto",
        "'padded' rows, 'packed' rows (sequences end to end), or 'auto': padded on a CPU, packed on a GPU.",
    )
    max_microbatch_tokens: int = _option(16384, "Tokens of one forward pass, padding included.")
    explorer_threads: int = _option(1, "CPU threads of each engine in the explorer.")
    learner_threads: int | None = _option(
        None, "CPU threads of the learner; null: as torch decides, 1 on a CPU."
    )

    # Evaluation.
    eval_every: int = _option(10, "Updates between evaluations; 0: none in between.")
    eval_at_start: bool = _option(True, "Evaluate the student before the first update.")
    eval_at_end: bool = _option(True, "Evaluate the student after the last update.")
    eval_episodes: int | None = _option(None, "Tasks of the evaluation split, from its beginning; null: all.")
    eval_temperature: float = _option(0.4, "Sampling temperature in evaluations; 0: greedy.")
    eval_timeout_s: float = _option(3600.0, "Seconds an evaluation may take.")

    # The run.
    run_dir: str | None = _option(
        None, "Directory of the run (also output_dir). It must not hold a run unless this one resumes it."
    )
    save_every: int = _option(25, "Updates between checkpoints; 0: only at the end and on Ctrl-C.")
    keep_checkpoints: int = _option(2, "Newest checkpoints to keep; 0: all.")
    record_rollouts: bool = _option(
        True, "Write every rollout to run_dir/rollouts (report and replay read them)."
    )
    progress: str = _option(
        "auto",
        "Terminal view: 'live', 'plain' (one line per update), 'none', or 'auto'.",
        choices=["auto", "live", "plain", "none"],
    )
    data_dir: str | None = _option(
        None, "Where benchmark data lies; null: DIVOPD_DATA or the environment's own."
    )

    # What may fail.
    max_nonfinite_updates: int = _option(
        5, "Updates in a row with a non-finite gradient before the run stops."
    )
    max_explorer_restarts: int = _option(2, "Times a dead explorer is started again.")
    max_failed_episodes: int = _option(20, "Failed episodes in a row before the run stops.")
    heartbeat_stale_after_s: float = _option(
        120.0, "Seconds of silence after which the explorer counts as hung."
    )
    stop_grace_s: float = _option(10.0, "Seconds the explorer gets to end by itself.")
    env_step_timeout_s: float = _option(30.0, "Seconds an environment may take for one action.")
    env_reset_timeout_s: float = _option(120.0, "Seconds an environment may take to start an episode.")
    episode_timeout_s: float = _option(1800.0, "Seconds an episode may take.")

    # Inherited fields with the paper's defaults.
    lr_scheduler_type: str = _option("constant", "Learning-rate schedule over the updates.")
    weight_decay: float = _option(0.01, "AdamW weight decay.")
    max_grad_norm: float = _option(1.0, "Gradient norm to clip to; 0: no clipping.")
    gradient_checkpointing: bool = _option(
        False, "Recompute activations in the backward pass: less memory, about a fifth slower."
    )
    teacher_temperature: float | None = _option(
        None, "Temperature of the teacher's log-probs; null: that of sampling (local engine), 1 elsewhere."
    )
    disable_tqdm: bool | None = _option(True, "Transformers' own progress bar off; divopd shows its own.")

    def __post_init__(self) -> None:
        self._resolve()
        super().__post_init__()
        for name in ("env_kwargs", "eval_env_kwargs"):
            value = getattr(self, name)
            if value is None:
                setattr(self, name, {})
            elif not isinstance(value, dict):
                raise ConfigError(
                    f"{name} is {value!r}; expected a mapping of keyword arguments, e.g. {{size: tiny}}."
                )
        check_values(self)
        check_together(self)

    def _resolve(self) -> None:
        """Make the names that mean one thing agree, before transformers looks at them."""
        if self.run_dir is None:
            self.run_dir = self.output_dir or "runs/divopd"
        elif self.output_dir not in (None, self.run_dir):
            raise ConfigError(
                f"run_dir is {self.run_dir!r} but output_dir is {self.output_dir!r}; they are one directory. "
                "Give only run_dir."
            )
        self.run_dir = self.output_dir = os.path.expanduser(self.run_dir)
        if self.max_steps is not None and self.max_steps > 0 and self.max_steps != self.updates:
            default = next(f.default for f in dataclasses.fields(type(self)) if f.name == "updates")
            if self.updates != default:
                raise ConfigError(
                    f"updates is {self.updates} but max_steps is {self.max_steps}; they are one number. "
                    "Give only updates."
                )
            self.updates = self.max_steps
        self.max_steps = self.updates
        # The update that trains a turn is always one ahead of the weights that wrote it: 0 would drop every turn.
        if self.max_staleness == 0:
            self.max_staleness = 1
        self.max_completion_length = self.max_tokens
        self.save_strategy, self.save_steps = ("steps", self.save_every) if self.save_every else ("no", 500)
        on_gpu = torch.cuda.is_available() and not self.use_cpu
        if self.bf16 is None:
            self.bf16 = on_gpu and not self.fp16
        if not on_gpu:
            self.dataloader_pin_memory = False
        # The old name would warn; transformers lets the new one rule.
        if self.activation_checkpointing is None:
            self.activation_checkpointing = bool(self.gradient_checkpointing)
        self.gradient_checkpointing = self.activation_checkpointing
        if self.teacher_temperature is None:
            self.teacher_temperature = self.temperature if self.engine == "local" else 1.0
        if self.env_workers is None:
            self.env_workers = self.max_concurrent
        if self.learner_threads is None and not on_gpu:
            self.learner_threads = 1
        if self.resume_from_checkpoint in ("true", "True", "last"):
            self.resume_from_checkpoint = True
        elif self.resume_from_checkpoint in ("false", "False", "", "none"):
            self.resume_from_checkpoint = None
        self.remove_unused_columns = False

    @property
    def preset(self) -> str:
        """Composer preset of the method."""
        return self.method

    @property
    def recovery(self) -> bool:
        """Whether the teacher may take over while exploring."""
        return self.method == "divopd-r" and self.recovery_budget > 0

    @property
    def evaluates(self) -> bool:
        """Whether there is any evaluation."""
        return bool(self.eval_every or self.eval_at_start or self.eval_at_end)

    def environment(self, split: str | None = None, *, evaluation: bool = False) -> dict[str, Any]:
        """Keyword arguments for ``gymnasium.make`` of the training (or evaluation) environment."""
        kwargs = dict(self.env_kwargs or {})
        if self.data_dir is not None:
            kwargs.setdefault("data_dir", self.data_dir)
        name = split or (self.eval_split if evaluation else self.split)
        if name is not None:
            kwargs["split"] = name
        return {**kwargs, **(self.eval_env_kwargs or {})} if evaluation else kwargs


def _check_keys(keys: Sequence[str], where: str) -> None:
    known = [f.name for f in dataclasses.fields(DivOPDConfig) if f.init]
    unknown = [key for key in keys if key not in known]
    if not unknown:
        return
    parts = []
    for key in unknown:
        close = difflib.get_close_matches(key, known, 3, 0.6)
        parts.append(f"{key!r}" + (f" (did you mean {' or '.join(map(repr, close))}?)" if close else ""))
    raise ConfigError(
        f"Unknown setting{'s' if len(unknown) > 1 else ''} in {where}: {', '.join(parts)}. "
        "'divopd train --help' lists every setting."
    )


def config_from_mapping(values: Mapping[str, Any], *, where: str = "the configuration") -> DivOPDConfig:
    """Build a configuration from names and values.

    Args:
        values: Settings by name.
        where: What the error should call their source.

    Raises:
        ConfigError: An unknown name (the closest known ones are named) or a value that cannot work.
    """
    _check_keys(list(values), where)
    return _guard(lambda: DivOPDConfig(**_numbers(values)), where)


def load_config(path: str | os.PathLike, overrides: Mapping[str, Any] | None = None) -> DivOPDConfig:
    """Read a YAML file, replace some of its values, and check it.

    Raises:
        ConfigError: The file is missing or no mapping, or see `config_from_mapping`.
    """
    return config_from_mapping({**_read_yaml(path), **(overrides or {})}, where=str(path))


def parse_config(argv: Sequence[str]) -> DivOPDConfig:
    """Command line in TRL's convention: ``--config file.yaml --name value ...``; the command line wins.

    Raises:
        ConfigError: Unknown names or values that cannot work.
    """
    argv = list(argv)
    names = [a[2:].partition("=")[0] for a in argv if a.startswith("--") and len(a) > 2]
    fields = {f.name for f in dataclasses.fields(DivOPDConfig)}
    names = [n for n in names if not (n.startswith("no_") and n[3:] in fields)]
    _check_keys([n for n in names if n not in ("config", "help")], "the command line")
    if "--config" in argv:
        at = argv.index("--config")
        if at + 1 >= len(argv):
            raise ConfigError("--config has no value; expected the path of a YAML file after it.")
        path = argv[at + 1]
        settings = _read_yaml(path)
        _check_keys(list(settings), path)

    def parse() -> DivOPDConfig:
        return TrlParser(DivOPDConfig).parse_args_and_config(argv)[0]

    return _guard(parse, "the command line")


def _guard(build: Any, where: str) -> DivOPDConfig:
    try:
        return build()
    except ConfigError:
        raise
    except (ValueError, TypeError) as error:
        raise ConfigError(f"Bad value in {where}: {error}") from error


def _read_yaml(path: str | os.PathLike) -> dict[str, Any]:
    path = Path(path)
    if not path.is_file():
        raise ConfigError(
            f"There is no configuration file {path}; expected a YAML mapping of settings. Check the path."
        )
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}. Mend the line that is named.") from error
    if not isinstance(values, dict):
        raise ConfigError(
            f"{path} holds {type(values).__name__}; expected a YAML mapping of settings (name: value)."
        )
    return values


def _numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """YAML reads 1e-6 as text; turn such text into the number its field wants."""
    kinds = {f.name: str(f.type) for f in dataclasses.fields(DivOPDConfig)}
    result = dict(values)
    for name, value in values.items():
        if isinstance(value, str) and "float" in kinds[name] and "str" not in kinds[name]:
            try:
                result[name] = float(value)
            except ValueError:
                raise ConfigError(f"{name} is {value!r}; expected a number.") from None
    return result


def save_config(config: DivOPDConfig, path: str | os.PathLike) -> None:
    """Write every resolved value as YAML, so that the file alone repeats the run."""
    values = {}
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if hasattr(value, "value") and not isinstance(value, (dict, list)):
            value = value.value
        if f.init and not f.name.endswith("_token") and _plain(value):
            values[f.name] = value
    for name in ("output_dir", "max_steps", "max_completion_length", "resume_from_checkpoint"):
        values.pop(name, None)
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=110)
    path = Path(path)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def _plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _plain(item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return all(_plain(item) for item in value)
    return value is None or isinstance(value, (str, int, float, bool))
