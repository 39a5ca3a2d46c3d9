"""What the explorer plays with: student, teacher, codec, and a second student for evaluations.

`build_engines` follows `ExplorerConfig.engine`: the local transformers engines, vLLM servers, or any importable
factory.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from divopd_gym.errors import ConfigError

from .config import ExplorerConfig

__all__ = ["Engines", "build_engines", "import_factory", "shared_vocabulary"]


@dataclass
class Engines:
    """What a factory returns.

    Attributes:
        student: A `StudentEngine`.
        teacher: A `TeacherEngine`, or None.
        codec: A `ChatCodec` of the student's tokenizer.
        make_eval_student: Builds another `StudentEngine` that only evaluations use, called off the event loop at
            the first one; its weights are loaded before each. None: evaluations are refused.
        teacher_vocabulary: bool [V], the student's token ids that mean the same to the teacher; None = all.
        info: What to report at the start.
        others: More teachers by label, each with its vocabulary as above.
        routing: Pattern over task ids -> label; the first that fits decides, `teacher` has the other tasks.
    """

    student: Any
    codec: Any
    teacher: Any = None
    make_eval_student: Callable[[], Any] | None = None
    teacher_vocabulary: np.ndarray | None = None
    info: dict[str, Any] = field(default_factory=dict)
    others: dict[str, tuple[Any, np.ndarray | None]] = field(default_factory=dict)
    routing: dict[str, str] = field(default_factory=dict)

    def teacher_for(self, task: str) -> tuple[Any, np.ndarray | None]:
        """The teacher of a task (None where there is none) and its vocabulary (MOPD, arXiv 2606.30406)."""
        for pattern, label in self.routing.items():
            if fnmatchcase(task, pattern):
                return self.others[label]
        return self.teacher, self.teacher_vocabulary


def import_factory(name: str, field: str) -> Callable[..., Any]:
    """The function that "module:function" names.

    Args:
        name: The name.
        field: The setting it comes from, for the message.

    Raises:
        ConfigError: There is no such module or function.
    """
    module, _, function = name.partition(":")
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"{field} is {name!r}, which cannot be imported ({error}); expected 'module:function' on the Python path."
        ) from error


def build_engines(config: ExplorerConfig) -> Engines:
    """Load what the config names; blocks while models load."""
    if config.engine == "vllm":
        from ..engines.vllm import vllm_engines

        return vllm_engines(config)
    if config.engine != "local":
        return import_factory(config.engine, "engine")(config)
    return _local_engines(config)


def _local_engines(config: ExplorerConfig) -> Engines:
    from tqdm import tqdm
    from transformers import AutoTokenizer
    from transformers.utils import logging

    # Loading bars would break the trainer's view, and tqdm's own lock is a semaphore that a killed process leaks.
    tqdm.set_lock(threading.RLock())
    logging.disable_progress_bar()

    from ..chat import ChatCodec
    from ..engines.local import LocalStudent, LocalTeacher

    options = {
        "max_model_len": config.max_model_len,
        "num_threads": config.threads,
        "max_slots": max(2, min(config.max_concurrent, config.workers)),
        "request_timeout_s": config.episode_timeout_s,
        **config.engine_kwargs,
    }
    tokenizer = AutoTokenizer.from_pretrained(config.tokenizer or config.student)
    codec = ChatCodec(tokenizer)
    options.setdefault("stop_ids", codec.end_of_turn_ids)
    student = LocalStudent(config.student, policy_version=config.policy_version, **options)

    def load_teacher(path: str) -> tuple[Any, np.ndarray | None]:
        model = LocalTeacher(path, temperature=config.temperature, **_teacher_options(options, path))
        return model, shared_vocabulary(config, path, tokenizer)

    teacher, vocabulary = load_teacher(config.teacher) if config.teacher else (None, None)
    others = {label: load_teacher(path) for label, path in config.teachers.items()}

    def make_eval_student() -> Any:
        return LocalStudent(config.student, policy_version=config.policy_version, **options)

    info = {
        "student_parameters": sum(p.numel() for p in student.model.parameters()),
        "teacher_parameters": sum(p.numel() for p in teacher.model.parameters()) if teacher else 0,
        "max_model_len": student.max_model_len,
        "masked_token_ids": 0 if vocabulary is None else int((~vocabulary).sum()),
    }
    return Engines(
        student, codec, teacher, make_eval_student, vocabulary, info, others, dict(config.teacher_routing)
    )


def _teacher_options(options: dict[str, Any], path: str) -> dict[str, Any]:
    """A shorter teacher context than the student's is no error: what lies beyond it stays unscored."""
    from transformers import AutoConfig

    allowed = getattr(AutoConfig.from_pretrained(path), "max_position_embeddings", None)
    wanted = options["max_model_len"]
    return {**options, "max_model_len": min(wanted, allowed) if wanted and allowed else wanted}


def shared_vocabulary(config: ExplorerConfig, path: str, tokenizer: Any) -> np.ndarray | None:
    """Which ids of the student mean the same to the teacher in `path`; bool [V].

    Raises:
        ConfigError: The teacher has no readable tokenizer, or too many ids differ.
    """
    from transformers import AutoTokenizer

    from ..compat import compare_tokenizers

    try:
        teachers = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"The teacher {path!r} has no readable tokenizer ({error}); expected one beside the model, to "
            "compare it with the student's. Save the tokenizer into the teacher's directory."
        ) from error
    report = compare_tokenizers(tokenizer, teachers)
    # The start-up check of the trainer decides on the end of turn; here only what would be nonsense is refused.
    report.check(config.tokenizer_mismatch_limit, allow_other_end=True)
    return report.shared
