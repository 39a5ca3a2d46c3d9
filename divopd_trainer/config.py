"""`DivOPDConfig`: everything a run needs, in one dataclass on top of TRL's.

Defaults are those of the DivOPD paper (arXiv 2609.34838); ``method`` names a preset that replaces some of them, and
what is given wins over both. Values that cannot work together are refused when the object is made.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch  # noqa: E402
from trl.experimental.async_distillation import AsyncDistillationConfig  # noqa: E402

from divopd_gym.errors import ConfigError  # noqa: E402

from .config_checks import DIVERGENCES, check_together, check_values  # noqa: E402
from .methods import MERGED, method_settings  # noqa: E402
from .registry import import_plugins, plugins  # noqa: E402

__all__ = ["RECOVERY_OPTIONS", "DivOPDConfig"]


RECOVERY_OPTIONS = {
    "patience": "recovery_patience",
    "budget": "recovery_budget",
    "warmup_updates": "recovery_warmup",
    "return_on_progress": "recovery_return_on_progress",
}
"""Option of the controller "recovery" -> the setting it comes from."""


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

    _VALID_DICT_FIELDS = [
        *AsyncDistillationConfig._VALID_DICT_FIELDS,
        *("env_kwargs", "eval_env_kwargs", "teachers", "teacher_routing", "launch", *MERGED),
    ]

    # What is distilled.
    model: str = _option("Qwen/Qwen3-1.7B", "Student: a Hub name or a directory written by save_pretrained.")
    teacher: str = _option(
        "langfeng01/GiGPO-Qwen2.5-7B-Instruct-ALFWorld", "Frozen teacher: a Hub name or a directory."
    )
    teachers: dict[str, str] | str | None = _option(
        None, "More teachers by label (a mapping of Hub names or directories); see teacher_routing."
    )
    teacher_routing: dict[str, str] | str | None = _option(
        None,
        "Which teacher scores a rollout: a mapping of patterns over task ids ('boil/*') to labels of teachers; the "
        "first that fits decides, other tasks go to 'teacher'.",
    )
    engine: str = _option(
        "local",
        "Where student and teacher run while exploring: 'local' (transformers, inside the explorer process), 'vllm' "
        "(servers; see student_urls) or an importable factory 'module:function'.",
    )
    student_urls: list[str] | None = _option(
        None, "vllm: addresses of the student's servers, all of one model; null: http://127.0.0.1:8000."
    )
    teacher_urls: list[str] | None = _option(
        None,
        "vllm: addresses of the teacher's servers, and 'label=address' for those in teachers; null: "
        "http://127.0.0.1:8001.",
    )
    eval_urls: list[str] | None = _option(
        None,
        "vllm: addresses of student servers that only evaluations use; null: the student's own, which must then hold "
        "several versions at once (LoRA adapters).",
    )
    weight_sync: str | None = _option(
        None,
        "vllm: how weights get to the student's servers: 'file' (whole policies), 'nccl' (whole policies, without a shared "
        "folder), 'lora' (adapters) or an importable factory; null: lora where lora_rank is above 0, else file.",
    )
    sync_probes: int = _option(
        3,
        "vllm: syncs at the start after which served log-probs are compared with trained ones; -1: all, 0: none.",
    )
    sync_probe_limit: float | None = _option(
        None,
        "vllm: nats by which served and trained log-probs may differ on average; null: 0.02, and 0.05 in half precision and "
        "on a GPU, where rounding alone makes up to 0.02.",
    )
    launch: dict[str, Any] | str | None = _option(
        None, "divopd launch: which servers it starts, and how; see 'divopd launch --help'."
    )
    teacher_overlap: int = _option(
        0,
        "vllm: what the teacher's context cannot hold is scored in windows that read this many tokens again, so "
        "approximately; 0: it stays unscored.",
    )
    tokenizer_mismatch_limit: float = _option(
        0.05,
        "Largest share of the student's token ids (0 to 1) that may mean something else to the teacher; such ids are "
        "masked out of the loss, and a larger share is refused at start.",
    )

    # What is trained.
    lora_rank: int = _option(0, "Rank of the LoRA adapter that is trained; 0: all weights.")
    lora_alpha: float | None = _option(None, "Scale of the adapter; null: twice the rank.")
    lora_targets: list[str] | None = _option(
        None, "Linear layers with an adapter, such as q_proj; null: all but the head."
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
    method: str = _option(
        "divopd", "Preset that fills the settings below: a name ('divopd methods' lists them) or a YAML file."
    )
    plugins: list[str] | None = _option(
        None, "Modules or .py files to import first: those that register parts or methods of your own."
    )
    composer: str = _option("divopd", "Which turns form a batch: a composer preset, or 'module:name'.")
    controller: str = _option(
        "student", "Who acts at a turn: 'student', 'recovery', 'guided', 'tcod-b2f', or one of your own."
    )
    controller_kwargs: dict[str, Any] | str | None = _option(None, "Options of the controller (a mapping).")
    horizon: str = _option(
        "fixed",
        "How many turns a training rollout may take: 'fixed', 'tcod-f2b', 'turnopd', or one of your own.",
    )
    horizon_kwargs: dict[str, Any] | str | None = _option(None, "Options of the horizon (a mapping).")
    probe_rollouts: int = _option(
        16, "Full-depth rollouts of one probe, for horizons that ask for probes ('turnopd')."
    )
    weighting: str = _option(
        "uniform",
        "Weight of a row's tokens: 'uniform', 'turnopd', 'guided', 'atod', 'sage', 'retire', or your own.",
    )
    weighting_kwargs: dict[str, Any] | str | None = _option(None, "Options of the weighting (a mapping).")
    advantage: str = _option("reverse-kl", "Advantage of a token: 'reverse-kl', 'f-opd', or one of your own.")
    advantage_kwargs: dict[str, Any] | str | None = _option(None, "Options of the advantage (a mapping).")
    review: str | None = _option(
        None,
        "What happens to a finished rollout before it is sent: null, 'sage', 'future-bridge', or your own.",
    )
    review_kwargs: dict[str, Any] | str | None = _option(None, "Options of the review (a mapping).")
    batch_rows: int = _option(64, "Turns in a batch (B); one batch is one update.")
    pool_multiplier: int = _option(4, "Turns the composer looks at, in batches (c).")
    cap: int | str | None = _option(
        4, "Turns a rollout gives in the composer's first sweep (k); null: no cap, 'auto': by queue pressure."
    )
    token_budget: int | None = _option(
        None, "divopd-cost: tokens forwarded an update; null: what batch_rows rows of divopd would take."
    )
    max_staleness: int = _option(
        2,
        "Updates by which a turn's weights may be older than the learner's (delta); 1 is on-policy, and 0 means 1.",
    )
    max_pending_age: int = _option(8, "Updates a turn may wait in the pool (W).")
    divergence: str = _option(
        "sampled_reverse_kl",
        "Loss: 'sampled_reverse_kl' (the paper's), 'multi_sample_reverse_kl' (samples tokens a position), "
        "'forward_kl_topk' or 'jsd_topk' (teacher_top_k candidates; beta interpolates).",
        choices=list(DIVERGENCES),
    )
    advantage_scale: float = _option(
        1.0, "Factor on the advantage, the paper's beta (TRL's own beta is the JSD interpolation)."
    )
    samples: int = _option(
        4, "multi_sample_reverse_kl: tokens a position, the realised one and others drawn from the student."
    )
    extrapolate_every: int = _option(
        0, "Updates between attempts to extrapolate the weights along their last change (EffOPD); 0: never."
    )
    extrapolate_factors: list[float] | None = _option(
        None, "Steps along the last change that are tried besides 0, e.g. 0.5 1.0."
    )
    extrapolate_episodes: int = _option(16, "Evaluation tasks that decide between the extrapolations.")
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
    lazy_scoring: bool = _option(
        True, "Have the teacher score only rollouts that the composer can still use."
    )
    max_concurrent: int = _option(16, "Episodes in flight at once.")
    env_workers: int | None = _option(
        None,
        "Processes that run environments, one episode at a time each; null: max_concurrent.",
    )
    explorers: int = _option(
        1,
        "Explorer processes, each with its own engines; they share tasks, load, max_concurrent and env_workers.",
    )
    pool: str = _option(
        "processes",
        "Where environments run: 'processes' of this machine, 'ray' (actors on a Ray cluster; see ray_address) or an "
        "importable factory 'module:function'.",
    )
    ray_address: str | None = _option(
        None,
        "ray: address of the cluster, or 'local' for one of this machine; null: RAY_ADDRESS, else 'local'.",
    )
    merge_packing: bool = _option(
        True,
        "Forward the turns of a rollout that share a prefix as one sequence (same gradient, fewer tokens).",
    )
    packing_layout: str = _option(
        "auto",
        "'padded' rows, 'packed' rows (sequences end to end), or 'auto': packed with FlashAttention, padded without.",
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
    start_timeout_s: float = _option(
        1800.0,
        "Seconds the explorer may take to load its models, downloads included, and to start its environments.",
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
        for name in ("env_kwargs", "eval_env_kwargs", "teachers", "teacher_routing", "launch", *MERGED):
            value = getattr(self, name)
            if value is None:
                setattr(self, name, {})
            elif not isinstance(value, dict):
                raise ConfigError(f"{name} is {value!r}; expected a mapping, e.g. {{size: tiny}}.")
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
        if isinstance(self.cap, str) and self.cap.isdigit():
            self.cap = int(self.cap)
        if self.controller == "recovery":
            options = self.controller_kwargs
            own = {option: getattr(self, setting) for option, setting in RECOVERY_OPTIONS.items()}
            self.controller_kwargs = own | (options if isinstance(options, dict) else {})
        # The update that trains a turn is always one ahead of the weights that wrote it: 0 would drop every turn.
        if self.max_staleness == 0:
            self.max_staleness = 1
        self.max_completion_length = self.max_tokens
        self.save_strategy, self.save_steps = ("steps", self.save_every) if self.save_every else ("no", 500)
        if self.bf16 is None:
            self.bf16 = self.on_gpu and not self.fp16
        if not self.on_gpu:
            self.dataloader_pin_memory = False
        # The old name would warn; transformers lets the new one rule.
        if self.activation_checkpointing is None:
            self.activation_checkpointing = bool(self.gradient_checkpointing)
        self.gradient_checkpointing = self.activation_checkpointing
        if self.teacher_temperature is None:
            self.teacher_temperature = self.temperature if self.engine == "local" else 1.0
        if self.sync_probe_limit is None:
            self.sync_probe_limit = 0.05 if self.on_gpu or self.bf16 or self.fp16 else 0.02
        if self.engine == "vllm" and self.weight_sync is None:
            self.weight_sync = "lora" if self.lora_rank else "file"
        if self.env_workers is None:
            self.env_workers = self.max_concurrent
        if self.learner_threads is None and not self.on_gpu:
            self.learner_threads = 1
        if self.resume_from_checkpoint in ("true", "True", "last"):
            self.resume_from_checkpoint = True
        elif self.resume_from_checkpoint in ("false", "False", "", "none"):
            self.resume_from_checkpoint = None
        self.remove_unused_columns = False
        # While the main rank waits for the last evaluations, the others wait in a collective.
        self.ddp_timeout = max(self.ddp_timeout, int(self.eval_timeout_s) + 1800)

    def facts(self) -> dict[str, Any]:
        """What the parts of a method may ask of the run by the names of their parameters."""
        return {
            "updates": self.updates,
            "total_updates": self.updates,
            "max_turns": self.max_turns,
            "batch_rows": self.batch_rows,
            "max_staleness": self.max_staleness,
            "group": self.attempts_per_task,
            "seed": self.seed,
            "beta": self.advantage_scale,
        }

    @property
    def on_gpu(self) -> bool:
        """Whether the learner computes on a GPU."""
        return torch.cuda.is_available() and not self.use_cpu

    @property
    def n_gpu(self) -> int:
        """GPUs of this process: one, however many it sees; several take a process each (``accelerate launch``)."""
        return min(1, super().n_gpu)

    @property
    def evaluates(self) -> bool:
        """Whether there is any evaluation."""
        return bool(self.eval_every or self.eval_at_start or self.eval_at_end or self.extrapolate_every)

    def environment(self, split: str | None = None, *, evaluation: bool = False) -> dict[str, Any]:
        """Keyword arguments for ``gymnasium.make`` of the training (or evaluation) environment."""
        kwargs = dict(self.env_kwargs or {})
        if self.data_dir is not None:
            kwargs.setdefault("data_dir", self.data_dir)
        name = split or (self.eval_split if evaluation else self.split)
        if name is not None:
            kwargs["split"] = name
        return {**kwargs, **(self.eval_env_kwargs or {})} if evaluation else kwargs


def _fill_in_preset(given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a method under those that were given; options that are mappings are merged key by key."""
    given = {name: _listed(name, value) for name, value in given.items()}
    import_plugins(given.get("plugins") or [])
    preset = {
        name: _listed(name, value) for name, value in method_settings(given.get("method", "divopd")).items()
    }
    import_plugins(preset.get("plugins") or [])
    unknown = [key for key in preset if key not in DivOPDConfig.__dataclass_fields__]
    if unknown:
        raise ConfigError(
            f"The preset of method {given.get('method')!r} has unknown settings {', '.join(map(repr, unknown))}; "
            "'divopd train --help' lists every setting."
        )
    for name in MERGED:
        part, options = name.removesuffix("_kwargs"), given.get(name)
        if isinstance(options, str):
            try:
                options = given[name] = json.loads(options)
            except ValueError:
                continue  # refused by name once the object is made
        # The options of a preset are those of its own part.
        same = part not in given or given[part] == preset.get(part)
        if name not in preset or not isinstance(options, (dict, type(None))):
            continue
        given[name] = {**(preset[name] if same else {}), **(options or {})}
    merged = {**preset, **given}
    if sources := [*(preset.get("plugins") or []), *(given.get("plugins") or []), *plugins()]:
        merged["plugins"] = list(dict.fromkeys(sources))
    return merged


def _listed(name: str, value: Any) -> Any:
    """One value where a list is meant is a list of it."""
    field = DivOPDConfig.__dataclass_fields__.get(name)
    single = isinstance(value, (str, int, float))
    return [value] if single and field is not None and str(field.type).startswith("list[") else value


_generated_init = DivOPDConfig.__init__


@functools.wraps(_generated_init)
def _init(self: DivOPDConfig, **given: Any) -> None:
    _generated_init(self, **_fill_in_preset(given))


DivOPDConfig.__init__ = _init
