"""`ExplorerConfig`: everything the explorer's process needs, picklable and checked before a process is started."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from divopd_gym.errors import ConfigError
from divopd_gym.prompts import history_pairs

from ..registry import build, import_plugins
from .episode import EpisodeLimits

__all__ = ["ExplorerConfig"]


@dataclass
class ExplorerConfig:
    """What the explorer plays, with what, and how fast.

    Attributes:
        env_id: Gymnasium id of the environment.
        env_kwargs: Its keyword arguments.
        workers: Environment processes.
        tasks: Task ids; None = all of the environment's.
        share: (i, n): only every n-th of the tasks, from the i-th on; see `divopd_trainer.explorer.fleet`.
        epochs: Passes over the tasks; None = without end.
        group: Attempts a task and epoch.
        eval_env_kwargs: Keyword arguments for evaluations; None = the same environment, whose workers are shared.
        eval_workers: Environment processes for evaluations, started at the first one; None = `workers`.
        engine: "local" (transformers models in this process), "vllm" (servers), or a factory "module:function" that
            takes this config and returns `Engines`.
        pool: "processes" (`divopd_gym.pool.EnvPool`), "ray" (`divopd_gym.ray_pool.RayEnvPool`), or a factory "module:function" called as
            ``factory(env_id, env_kwargs, workers, config)``.
        ray_address: pool "ray": the cluster; see `divopd_gym.ray_pool`.
        student: Path or name of the student.
        teacher: Path or name of the teacher; None = no scores, no recovery.
        student_urls: vLLM servers of the student; none = the one on this machine at port 8000.
        teacher_urls: vLLM servers of the teacher, and "label=address" of those in `teachers`; none = port 8001.
        eval_urls: vLLM servers that only evaluations use.
        weight_sync: How weights get to the student's servers; see `divopd_trainer.engines.sync`.
        tokenizer: Path or name; None = the student's.
        engine_kwargs: More arguments for the engine factory.
        prompt_style: "think", "action" or "tiny".
        history: "accumulate" or "window:n".
        max_turns: Turns an episode.
        max_tokens: Tokens a response.
        max_model_len: Tokens of prompt and response.
        temperature: Sampling temperature in training.
        teacher_topk: Candidates a token that the teacher reports; 0 = the sampled token only.
        tokenizer_mismatch_limit: Largest share of token ids that may mean something else to the teacher.
        teachers: More teachers by label: paths or names.
        teacher_routing: Pattern over task ids -> label; the first that fits decides, other tasks go to `teacher`.
        extra_samples: Tokens that the student draws beside each realised one, for the teacher to score.
        plugins: Modules and .py files to import first.
        run_facts: What parts may ask of the run; see `divopd_trainer.registry.build`.
        controller: A name in `divopd_trainer.registry`, or a picklable `Controller`.
        controller_kwargs: Its options.
        horizon: A name in `divopd_trainer.registry`, or a picklable `Horizon`.
        horizon_kwargs: Its options.
        probe_rollouts: Full-depth rollouts of one probe.
        review: What happens to a finished rollout before it is sent: a name in the registry; None = nothing.
        review_kwargs: Its options.
        lazy_scoring: Score only rollouts that the composer can still use.
        pool_turns: Turns that the composer's pool holds; lazy scoring goes by it. None = four batches.
        batch_rows: Turns that one update trains (B); pacing goes by it.
        max_staleness: Updates that a turn's version may lag (delta); pacing goes by it.
        load: Turns produced a turn trained; None = as fast as possible.
        max_concurrent: Episodes in flight.
        seed: Seed of the run.
        policy_version: Version of the weights in `student`.
        max_failures: Failed episodes in a row that end the run.
        episode_timeout_s: Seconds an episode may take, scoring included.
        step_timeout_s: Seconds an environment may take for one action.
        reset_timeout_s: Seconds an environment may take for a reset.
        start_timeout_s: Seconds for loading models and starting environments.
        load_timeout_s: Seconds for loading new weights.
        eval_timeout_s: Seconds for one evaluation.
        recycle_after: Episodes after which an environment process is replaced.
        max_worker_restarts: Restarts of environment processes before the pool gives up; None = the pool's default.
        threads: Threads of one forward pass on a CPU.
        heartbeat_s: Seconds between heartbeats.

    Raises:
        ConfigError: A value that cannot work; the message names the field.
    """

    env_id: str
    env_kwargs: dict[str, Any] = field(default_factory=dict)
    workers: int = 2
    tasks: Sequence[str] | None = None
    share: tuple[int, int] = (0, 1)
    epochs: int | None = None
    group: int = 1
    eval_env_kwargs: dict[str, Any] | None = None
    eval_workers: int | None = None
    engine: str = "local"
    pool: str = "processes"
    ray_address: str | None = None
    student: str | None = None
    teacher: str | None = None
    student_urls: Sequence[str] = ()
    teacher_urls: Sequence[str] = ()
    eval_urls: Sequence[str] = ()
    weight_sync: str | None = None
    tokenizer: str | None = None
    engine_kwargs: dict[str, Any] = field(default_factory=dict)
    prompt_style: str = "think"
    history: str = "accumulate"
    max_turns: int = 30
    max_tokens: int = 512
    max_model_len: int | None = None
    temperature: float = 1.0
    teacher_topk: int = 0
    tokenizer_mismatch_limit: float = 0.05
    teachers: dict[str, str] = field(default_factory=dict)
    teacher_routing: dict[str, str] = field(default_factory=dict)
    extra_samples: int = 0
    plugins: Sequence[str] = ()
    run_facts: dict[str, Any] = field(default_factory=dict)
    controller: Any = "student"
    controller_kwargs: dict[str, Any] = field(default_factory=dict)
    horizon: Any = "fixed"
    horizon_kwargs: dict[str, Any] = field(default_factory=dict)
    probe_rollouts: int = 16
    review: Any = None
    review_kwargs: dict[str, Any] = field(default_factory=dict)
    lazy_scoring: bool = False
    pool_turns: int | None = None
    batch_rows: int = 64
    max_staleness: int = 2
    load: float | None = 1.0
    max_concurrent: int = 16
    seed: int = 0
    policy_version: int = 0
    max_failures: int = 10
    episode_timeout_s: float = 900.0
    step_timeout_s: float = 30.0
    reset_timeout_s: float = 120.0
    start_timeout_s: float = 600.0
    load_timeout_s: float = 300.0
    eval_timeout_s: float = 3600.0
    recycle_after: int = 500
    max_worker_restarts: int | None = None
    threads: int = 1
    heartbeat_s: float = 1.0

    def __post_init__(self) -> None:
        history_pairs(self.history)
        self.limits()
        self.make_controller()
        self.make_horizon()
        self.make_review()
        at_least = {"workers": 1, "group": 1, "batch_rows": 1, "max_staleness": 0, "max_concurrent": 1}
        at_least |= {"max_failures": 1, "seed": 0, "threads": 1, "recycle_after": 1, "teacher_topk": 0}
        at_least |= {"extra_samples": 0, "probe_rollouts": 1}
        for name, least in at_least.items():
            if getattr(self, name) < least:
                raise ConfigError(f"{name} is {getattr(self, name)}; expected at least {least}.")
        positive = [f.name for f in dataclasses.fields(self) if f.name.endswith("_timeout_s")]
        for name in (*positive, "temperature", "heartbeat_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; expected a number above 0.")
        if self.load is not None and not self.load > 0:
            raise ConfigError(f"load is {self.load}; expected a number above 0, or None for no pacing.")
        for name in ("engine", "pool"):
            value = getattr(self, name)
            if value not in (None, "local", "vllm", "processes", "ray") and value.count(":") != 1:
                raise ConfigError(f"{name} is {value!r}; expected an importable factory 'module:function'.")
        built_in = self.engine in ("local", "vllm")
        if built_in and not self.student:
            raise ConfigError(
                f"student is missing; expected the path or name of a model for engine={self.engine!r}."
            )
        if built_in and not self.teacher and self.make_controller().needs_teacher:
            raise ConfigError(
                f"The controller {self.controller!r} hands turns to the teacher, but teacher is missing; name a "
                "teacher, or use controller='student'."
            )

    def limits(self) -> EpisodeLimits:
        """The limits of a training episode."""
        return EpisodeLimits(self.max_turns, self.max_tokens, self.max_model_len, self.episode_timeout_s)

    def facts(self) -> dict[str, Any]:
        """What parts may ask of the run by the names of their parameters."""
        return {"max_turns": self.max_turns, "seed": self.seed, "group": self.group, **self.run_facts}

    def make_controller(self) -> Any:
        """The controller of training episodes."""
        return self._part("controller")

    def make_horizon(self) -> Any:
        """The horizon of training episodes."""
        return self._part("horizon")

    def make_review(self) -> Any:
        """What happens to finished rollouts; None = nothing."""
        return self._part("review")

    def _part(self, seam: str) -> Any:
        part = getattr(self, seam)
        if not isinstance(part, str):
            return part
        import_plugins(self.plugins)
        return build(seam, part, getattr(self, f"{seam}_kwargs"), self.facts())

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> ExplorerConfig:
        """A config from plain values.

        Raises:
            ConfigError: A field is unknown or missing; the message names it.
        """
        names = [f.name for f in dataclasses.fields(cls)]
        for key in values:
            if key not in names:
                close = difflib.get_close_matches(key, names, 1)
                hint = f" Did you mean {close[0]!r}?" if close else ""
                raise ConfigError(f"ExplorerConfig has no field {key!r}.{hint} Remove or rename it.")
        if "env_id" not in values:
            raise ConfigError("ExplorerConfig needs the field 'env_id'; give the environment's Gymnasium id.")
        return cls(**values)
