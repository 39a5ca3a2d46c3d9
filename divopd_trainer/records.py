"""What a run leaves on disk, and how it is read back: rollouts, batch selections, metrics.

``run_dir/rollouts/NNNNN.jsonl.zst`` holds one rollout a record with nothing lost (`rollout_to_dict` is the
schema), ``run_dir/batches.jsonl.zst`` one record an update (`BatchRecord`), ``run_dir/metrics.jsonl`` the metrics.
Each record is a zstd frame of its own, so a killed writer loses at most the record it was writing.
A resumed run marks the point it goes on from; readers leave out what the interrupted run wrote beyond it.
"""

from __future__ import annotations

import base64
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from .framelog import FrameLogWriter, RecordError, read_frames
from .metrics_log import MetricsWriter, read_metrics
from .turns import Rollout, Segment, Turn

__all__ = [
    "BATCHES_FILE",
    "SCHEMA",
    "BatchRecord",
    "MetricsWriter",
    "RecordError",
    "Run",
    "RunWriter",
    "read_batches",
    "read_metrics",
    "read_rollouts",
    "read_run",
    "rollout_from_dict",
    "rollout_to_dict",
]

SCHEMA = 1
BATCHES_FILE = "batches.jsonl.zst"
ROLLOUTS_DIR = "rollouts"
CONFIG_FILE = "config.yaml"
PART_BYTES = 256 << 20
"""A part of rollouts/ that has grown beyond this is followed by the next."""


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=3)


def _pack(values: Any, dtype: str) -> Any:
    """An array as JSON, bit for bit.

    None stays None; one dimension of bool is a text of 0 and 1, of ints a list, of floats base64 of the
    little-endian bytes; any other shape an object of base64 and shape.
    """
    if values is None:
        return None
    array = np.ascontiguousarray(values, np.dtype(dtype))
    if array.ndim != 1:
        raw = base64.b64encode(array.tobytes()).decode("ascii")
        return {"shape": list(np.shape(values)), "base64": raw}
    if dtype == "?":
        return "".join("1" if value else "0" for value in array)
    if dtype == "<i4":
        return array.tolist()
    return base64.b64encode(array.tobytes()).decode("ascii")


def _unpack(value: Any, dtype: str) -> np.ndarray | None:
    native = np.dtype(dtype).newbyteorder("=")
    if value is None:
        return None
    if isinstance(value, dict):
        raw = np.frombuffer(base64.b64decode(value["base64"]), dtype)
        return raw.reshape(value["shape"]).astype(native)
    if isinstance(value, list):
        return np.array(value, native)
    if dtype == "?":
        return np.array([sign == "1" for sign in value], np.bool_)
    return np.frombuffer(base64.b64decode(value), dtype).astype(native)


_TURN_ARRAYS = {
    "student_logprobs": "<f4",
    "teacher_logprobs": "<f4",
    "teacher_mask": "?",
    "teacher_topk_ids": "<i4",
    "teacher_topk_logprobs": "<f4",
}
# Written only where they exist, and absent in records of versions that did not know them.
_OPTIONAL_TURN_ARRAYS = {"extra_ids": "<i4", "extra_teacher_logprobs": "<f4"}
_TURN_PLAIN = (
    "index",
    "start",
    "end",
    "policy_version",
    "stop_reason",
    "actor",
    "valid",
    "why_not",
    "score",
    "prompt_truncated",
    "action",
    "action_valid",
    "observation",
    "info",
)
_ROLLOUT_PLAIN = (
    "rollout_id",
    "task",
    "attempt",
    "success",
    "done",
    "score",
    "reward",
    "turns_played",
    "done_reason",
    "seed",
    "timings",
    "meta",
)


def rollout_to_dict(rollout: Rollout) -> dict[str, Any]:
    """The record of a rollout, schema 1.

    Fields of `Rollout` and `Turn` under their own names; the extra draws only where there are any. ``segments`` is
    a list of ``{index, token_ids}``; a turn's ``segment`` is a place in that list. ``token_ids`` are lists of ints,
    log-probs base64 of little-endian float32, masks a text of 0 and 1.
    """
    places = {id(segment): place for place, segment in enumerate(rollout.segments)}
    record: dict[str, Any] = {"schema": SCHEMA, "kind": "rollout"}
    record |= {name: getattr(rollout, name) for name in _ROLLOUT_PLAIN}
    record["policy_versions"] = None if rollout.policy_versions is None else list(rollout.policy_versions)
    record["segments"] = [
        {"rollout_id": s.rollout_id, "index": s.index, "token_ids": _pack(s.token_ids, "<i4")}
        for s in rollout.segments
    ]
    record["turns"] = [
        {"rollout_id": turn.rollout_id, "segment": places[id(turn.segment)]}
        | {name: getattr(turn, name) for name in _TURN_PLAIN}
        | {name: _pack(getattr(turn, name), dtype) for name, dtype in _TURN_ARRAYS.items()}
        | {
            name: _pack(getattr(turn, name), dtype)
            for name, dtype in _OPTIONAL_TURN_ARRAYS.items()
            if getattr(turn, name) is not None
        }
        for turn in rollout.turns
    ]
    return record


def rollout_from_dict(record: dict[str, Any]) -> Rollout:
    """The inverse of `rollout_to_dict`; turns of one segment share it again.

    Raises:
        RecordError: The schema is another one, or a field is missing or unknown (named in the message).
    """
    if record.get("schema") != SCHEMA:
        raise RecordError(
            f"A rollout record has schema {record.get('schema')!r}; this version of divopd reads schema {SCHEMA}; "
            "read it with the version that wrote it."
        )
    where = f"Rollout record {record.get('rollout_id')!r}"
    _check_fields(record, {"schema", "kind", "policy_versions", "segments", "turns", *_ROLLOUT_PLAIN}, where)
    segments = []
    for item in record["segments"]:
        _check_fields(item, {"rollout_id", "index", "token_ids"}, f"{where}, a segment")
        segments.append(Segment(item["rollout_id"], item["index"], _unpack(item["token_ids"], "<i4")))
    turns = []
    for item in record["turns"]:
        known = {"rollout_id", "segment", *_TURN_PLAIN, *_TURN_ARRAYS}
        optional = {name: dtype for name, dtype in _OPTIONAL_TURN_ARRAYS.items() if name in item}
        _check_fields(item, known | set(optional), f"{where}, a turn")
        turns.append(
            Turn(
                rollout_id=item["rollout_id"],
                segment=segments[item["segment"]],
                **{name: item[name] for name in _TURN_PLAIN},
                **{name: _unpack(item[name], dtype) for name, dtype in (_TURN_ARRAYS | optional).items()},
            )
        )
    versions = record["policy_versions"]
    return Rollout(
        turns=turns,
        policy_versions=None if versions is None else tuple(versions),
        **{name: record[name] for name in _ROLLOUT_PLAIN},
    )


def _check_fields(record: dict[str, Any], expected: set[str], where: str) -> None:
    missing, unknown = sorted(expected - set(record)), sorted(set(record) - expected)
    if missing or unknown:
        found = [f"no field {name!r}" for name in missing] + [
            f"an unknown field {name!r}" for name in unknown
        ]
        raise RecordError(
            f"{where} has {', '.join(found)}; schema {SCHEMA} has exactly {', '.join(sorted(expected))}; the file "
            "was changed, or written by another version of divopd."
        )


@dataclass
class BatchRecord:
    """One composed batch: all that is needed to compose it again.

    Attributes:
        update: The update it was composed for (completed updates + 1).
        selected: (rollout id, turn index) of the chosen turns, in the order of the batch.
        arrivals: The turns handed to the composer at this update, in arrival order.
        pending: Turns kept for later updates, or how many when only that is known.
        dropped_stale: Turns dropped as too old at this update.
        gated: Turns discarded by the validity gate at this update.
        versions: Oldest policy version that may train at this update, and the newest.
        unread: Turns that had arrived but were not read yet.
        extra: Anything else; JSON values only.
    """

    update: int
    selected: list[tuple[int, int]]
    arrivals: list[tuple[int, int]] = field(default_factory=list)
    pending: list[tuple[int, int]] | int = 0
    dropped_stale: int = 0
    gated: int = 0
    versions: tuple[int, int] | None = None
    unread: int = 0
    extra: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, update: int, batch: Any, arrivals: Any = (), **more: Any) -> BatchRecord:
        """From what ``BatchComposer.compose`` returned and the turns it was given."""
        return cls(
            update=update,
            selected=[(turn.rollout_id, turn.index) for turn in batch.selected],
            arrivals=[(turn.rollout_id, turn.index) for turn in arrivals],
            pending=[(turn.rollout_id, turn.index) for turn in batch.pending],
            dropped_stale=int(batch.dropped_stale),
            gated=int(batch.gated),
            **more,
        )

    @property
    def n_pending(self) -> int:
        """Turns kept for later updates."""
        return self.pending if isinstance(self.pending, int) else len(self.pending)


class RunWriter:
    """Everything a run records, in one place; safe to use from several threads of one process.

    Args:
        run_dir: Made if missing.
        start_time: See `MetricsWriter`.
        settings: The composer's settings (``preset``, ``batch_rows``, ...), noted once for the replay.

    Attributes:
        metrics: The run's `MetricsWriter`.
    """

    def __init__(
        self, run_dir: str | Path, start_time: float | None = None, settings: dict[str, Any] | None = None
    ):
        self.run_dir = Path(run_dir)
        self.metrics = MetricsWriter(self.run_dir, start_time)
        self._batches: FrameLogWriter | None = FrameLogWriter(self.run_dir / BATCHES_FILE)
        self._part: FrameLogWriter | None = None
        self._part_bytes = 0
        self._closed = False
        if settings is not None:
            self._batches.write({"schema": SCHEMA, "kind": "settings", "settings": settings})

    def resume(
        self, *, update: int, policy_version: int, env_turns: int, next_rollout_id: int | None = None
    ) -> None:
        """Mark that the run goes on from a checkpoint; call it before anything else is written.

        Args:
            update: Completed updates of the checkpoint. Later batches and metrics of the interrupted run no
                longer count.
            policy_version: As in every line of the metrics.
            env_turns: As in every line of the metrics.
            next_rollout_id: First id that will be given out again; rollouts already recorded from it on no
                longer count. None when ids go on rising.
        """
        marker = {"schema": SCHEMA, "kind": "resume", "update": update, "next_rollout_id": next_rollout_id}
        self._batches.write(marker)
        self._write_to_part(marker)
        self.metrics.write(kind="resume", update=update, policy_version=policy_version, env_turns=env_turns)

    def write_rollout(self, rollout: Rollout) -> None:
        """Append one rollout.

        Raises:
            RecordError: It holds something that JSON cannot say, or the writer is closed.
        """
        self._write_to_part(rollout_to_dict(rollout))

    def write_batch(self, batch: BatchRecord) -> None:
        """Append one batch selection."""
        self._batches.write({"schema": SCHEMA, "kind": "batch"} | vars(batch))

    def write_metrics(self, line: dict[str, Any] | None = None, /, **fields: Any) -> dict[str, Any]:
        """See `MetricsWriter.write`."""
        return self.metrics.write(line, **fields)

    def _write_to_part(self, record: dict[str, Any]) -> None:
        if self._closed:
            raise RecordError(f"The writer of {self.run_dir} is closed; make a new RunWriter to append more.")
        if self._part is None or self._part_bytes > PART_BYTES:
            if self._part is not None:
                self._part.close()
            folder = self.run_dir / ROLLOUTS_DIR
            folder.mkdir(parents=True, exist_ok=True)
            number = 1 + max((int(path.name.split(".")[0]) for path in _parts(self.run_dir)), default=-1)
            # A part is never reopened, so a record torn by a kill stays at the end of its own part.
            self._part, self._part_bytes = FrameLogWriter(folder / f"{number:05d}.jsonl.zst"), 0
        self._part_bytes += self._part.write(record)

    def close(self) -> None:
        """Idempotent."""
        self._closed = True
        self.metrics.close()
        self._batches.close()
        if self._part is not None:
            self._part.close()

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _parts(run_dir: Path) -> list[Path]:
    found = (run_dir / ROLLOUTS_DIR).glob("*.jsonl.zst")
    return sorted(
        (path for path in found if path.name.split(".")[0].isdigit()),
        key=lambda path: int(path.name.split(".")[0]),
    )


def read_rollouts(run_dir: str | Path, on_notice: Callable[[str], None] | None = None) -> Iterator[Rollout]:
    """Every recorded rollout in the order of arrival, read as needed.

    Args:
        run_dir: The run.
        on_notice: Called with a sentence about anything that cannot be read; by default a Python warning.

    Raises:
        RecordError: The run has no rollouts folder, or a record has another schema.
    """
    run_dir = Path(run_dir)
    parts = _parts(run_dir)
    if not parts:
        raise RecordError(
            f"{run_dir} holds no rollouts; expected {ROLLOUTS_DIR}/NNNNN.jsonl.zst in it; pass the directory of a run "
            "(the --run_dir of `divopd train`)."
        )
    cuts: list[float] = []
    for path in parts:
        first = next(read_frames(path), {})
        cut = first.get("next_rollout_id") if first.get("kind") == "resume" else None
        cuts.append(float("inf") if cut is None else cut)
    for place, path in enumerate(parts):
        limit = min(cuts[place + 1 :], default=float("inf"))
        for record in read_frames(path, on_notice or _warn):
            if record.get("kind") == "resume" or record.get("rollout_id", -1) >= limit:
                continue
            yield rollout_from_dict(record)


def read_batches(
    run_dir: str | Path, on_notice: Callable[[str], None] | None = None
) -> tuple[list[BatchRecord], dict[str, Any]]:
    """The batch selections of a run, oldest first, and the composer's settings (empty when not noted)."""
    path = Path(run_dir) / BATCHES_FILE
    batches: list[BatchRecord] = []
    settings: dict[str, Any] = {}
    if not path.exists():
        return batches, settings
    for record in read_frames(path, on_notice or _warn):
        kind = record.pop("kind", None)
        if record.pop("schema", None) != SCHEMA:
            raise RecordError(
                f"{path} has another schema than {SCHEMA}; read it with the version that wrote it."
            )
        if kind == "settings":
            settings = record["settings"]
        elif kind == "resume":
            batches = [batch for batch in batches if batch.update <= record["update"]]
        else:
            for name in ("selected", "arrivals", "pending"):
                if isinstance(record[name], list):
                    record[name] = [tuple(key) for key in record[name]]
            record["versions"] = None if record["versions"] is None else tuple(record["versions"])
            batches.append(BatchRecord(**record))
    return batches, settings


@dataclass
class Run:
    """A run as read back.

    Attributes:
        path: Its directory.
        config: Contents of config.yaml; empty when there is none.
        metrics: Lines of metrics.jsonl, oldest first.
        batches: Batch selections, oldest first.
        settings: The composer's settings, empty when not noted.
        notices: What could not be read, one sentence each; grows while `rollouts` are read.
    """

    path: Path
    config: dict[str, Any]
    metrics: list[dict[str, Any]]
    batches: list[BatchRecord]
    settings: dict[str, Any]
    notices: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The directory's own name."""
        return self.path.resolve().name

    def lines(self, kind: str) -> list[dict[str, Any]]:
        """Metrics of one kind."""
        return [line for line in self.metrics if line["kind"] == kind]

    def rollouts(self) -> Iterator[Rollout]:
        """Every recorded rollout, read from disk as needed; none when nothing was recorded yet."""
        if not _parts(self.path):
            return
        yield from read_rollouts(self.path, self._notice)

    def _notice(self, sentence: str) -> None:
        if sentence not in self.notices:
            self.notices.append(sentence)


def read_run(run_dir: str | Path) -> Run:
    """Read a run's config, metrics and batches now, and its rollouts as they are asked for.

    Raises:
        RecordError: It is no run directory.
    """
    path = Path(run_dir)
    known = [path / "metrics.jsonl", path / BATCHES_FILE, path / CONFIG_FILE, path / ROLLOUTS_DIR]
    if not any(item.exists() for item in known):
        raise RecordError(
            f"{path} {'is no run directory' if path.is_dir() else 'does not exist'}; expected a directory with "
            "config.yaml, metrics.jsonl, batches.jsonl.zst and rollouts/ in it; pass the --run_dir of `divopd train`."
        )
    run = Run(path, {}, [], [], {})
    if (path / CONFIG_FILE).exists():
        try:
            run.config = yaml.safe_load((path / CONFIG_FILE).read_text("utf-8")) or {}
        except yaml.YAMLError as error:
            run._notice(f"{path / CONFIG_FILE} cannot be read and is left out: {str(error).splitlines()[0]}")
    run.metrics = read_metrics(path, on_notice=run._notice)
    run.batches, run.settings = read_batches(path, run._notice)
    return run
