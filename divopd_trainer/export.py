"""Recorded episodes for other tools: Hugging Face data sets, and JSON lines for supervised training.

Ids, log-probs and masks are copied from the record; text is decoded from the ids. Nothing is encoded again, with one
exception that has no ids yet: an expert's recording is encoded once, as `divopd sft` and the explorer would.
"""

from __future__ import annotations

import itertools
import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from divopd_gym.errors import ConfigError, DivOPDError
from divopd_gym.prompts import get_prompt

from .expert import read_episodes
from .export_rows import IGNORED, expert_features, expert_rows, rollout_features, rollout_rows, sft_lines
from .records import read_run

__all__ = ["FORMATS", "SFT_FILE", "export", "find_tokenizer", "read_sft_samples"]

FORMATS = ("datasets", "sft-jsonl")
SFT_FILE = "sft.jsonl"
ABOUT_FILE = "export.json"


def export(
    source: str | Path | Sequence[str | Path],
    out: str | Path,
    format: str = "datasets",
    *,
    only: str | None = None,
    limit: int | None = None,
    tokenizer: str | None = None,
    env_id: str = "divopd_gym/ALFWorld-v0",
    prompt_style: str = "tiny",
    history: str = "accumulate",
    on_notice: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Write recorded episodes in another form.

    Args:
        source: A run directory, or one or several recordings of `divopd expert`.
        out: Directory to write; must not exist, or be empty.
        format: "datasets": a data set for ``datasets.load_from_disk``, one row a token sequence. "sft-jsonl": lines of
            input_ids and labels in OUT/sft.jsonl, which ``divopd sft --episodes`` and TRL's ``SFTTrainer`` read.
        only: "success" leaves out episodes that failed; "all" keeps them. Default: success for sft-jsonl, else all.
        limit: At most this many episodes.
        tokenizer: Folder or hub name. Default: that of the run. A recording needs one for ids.
        env_id: Whose prompts a recording is written in.
        prompt_style: Style of these prompts.
        history: "accumulate" or "window:n", for a recording.
        on_notice: Called with a sentence about what could not be read.

    Returns:
        Figures, also written to OUT/export.json: format, source, episodes, rows, tokens, trained_tokens.

    Raises:
        ConfigError: An argument cannot work, or nothing is left to write.
        RecordError: The source is neither a run nor a recording.
    """
    if format not in FORMATS or only not in (None, "success", "all") or (limit is not None and limit < 1):
        raise ConfigError(
            f"format={format!r}, only={only!r}, limit={limit!r}: expected a format of {', '.join(FORMATS)}, only "
            "'success' or 'all', and a limit of at least 1."
        )
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists and is not an empty directory; give another --out.")
    sources = [Path(source)] if isinstance(source, (str, Path)) else [Path(item) for item in source]
    only = only or ("success" if format == "sft-jsonl" else "all")
    notices: list[str] = []
    if any(path.is_dir() for path in sources):
        rows = _from_run(sources, tokenizer, notices)
        features = rollout_features
    else:
        rows = _from_recording(sources, tokenizer, get_prompt(env_id, prompt_style, history), history)
        features = expert_features
        if format == "sft-jsonl" and tokenizer is None:
            raise ConfigError(
                "A recording of an expert has no token ids, and sft-jsonl is made of them; give --tokenizer (the "
                "model that is to be trained), or export --format datasets, which can do without."
            )
    kept = _Kept(rows, only, limit)
    stream = iter(kept)
    first = next(stream, None)
    if first is None:
        raise ConfigError(
            f"None of the {kept.seen} episodes of {', '.join(map(str, sources))} is left with only={only!r}; "
            "take --only all, or another source."
        )
    stream = itertools.chain([first], stream)
    if format == "datasets":
        _write_dataset(stream, features(), out)
    else:
        kept.counts["trained_tokens"] = _write_lines(stream, out)
    figures = {
        "format": format,
        "source": [str(path) for path in sources],
        "only": only,
        "episodes": kept.episodes,
        **{name: kept.counts[name] for name in ("rows", "tokens", "trained_tokens")},
    }
    (out / ABOUT_FILE).write_text(json.dumps(figures, indent=1) + "\n", "utf-8")
    for notice in dict.fromkeys(notices):
        if on_notice is not None:
            on_notice(notice)
    return figures


class _Kept:
    """The rows of the episodes that are wanted, counted as they pass."""

    def __init__(self, episodes: Iterator[tuple[bool, list[dict[str, Any]]]], only: str, limit: int | None):
        self._episodes, self._only, self._limit = episodes, only, limit
        self.episodes = self.seen = 0
        self.counts: Counter[str] = Counter()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for success, rows in self._episodes:
            self.seen += 1
            if not rows or (self._only == "success" and not success):
                continue
            self.episodes += 1
            for row in rows:
                self.counts["rows"] += 1
                if row["input_ids"] is not None:
                    self.counts["tokens"] += len(row["input_ids"])
                    self.counts["trained_tokens"] += int(np.sum(row["loss_mask"]))
                yield row
            if self.episodes == self._limit:
                return


def _from_run(
    sources: Sequence[Path], name: str | None, notices: list[str]
) -> Iterator[tuple[bool, list[dict[str, Any]]]]:
    if len(sources) > 1:
        raise ConfigError(f"{len(sources)} sources, a run directory among them; export one run at a time.")
    run = read_run(sources[0])
    tokenizer = find_tokenizer(run.path, run.config.get("model"), name)
    if tokenizer is None:
        notices.append(
            f"No tokenizer was found for {run.path}; messages hold observations and actions in place of what the model "
            "read and wrote. Give --tokenizer."
        )
    reader = None
    if tokenizer is not None:
        from .dialogue import DialogueReader

        reader = DialogueReader(tokenizer)

    def rows() -> Iterator[tuple[bool, list[dict[str, Any]]]]:
        for rollout in run.rollouts():
            yield rollout.success, rollout_rows(rollout, reader)
        notices.extend(run.notices)

    return rows()


def _from_recording(
    sources: Sequence[Path], name: str | None, prompt: Any, history: str
) -> Iterator[tuple[bool, list[dict[str, Any]]]]:
    records = read_episodes(sources)
    codec = None
    if name is not None:
        from .chat import ChatCodec

        codec = ChatCodec(_load(name))
    return (
        (bool(record["success"]), expert_rows(codec, prompt, record, number, history))
        for number, record in enumerate(records)
    )


def find_tokenizer(run_dir: Path, model: Any, name: str | None = None) -> Any:
    """The tokenizer of a run, from the run itself or this machine's copy of its model; None where there is none.

    Args:
        run_dir: The run.
        model: The model's name in its configuration.
        name: A folder or hub name that is taken instead.

    Raises:
        ConfigError: `name` holds no tokenizer.
    """
    if name is not None:
        return _load(name)
    places = [run_dir / "final", *sorted(run_dir.glob("checkpoints/checkpoint-*"))[-1:]]
    for place in [str(folder) for folder in places if (folder / "tokenizer.json").is_file()] + [model]:
        if not isinstance(place, str) or not place:
            continue
        try:
            return _load(place, local_files_only=True)
        except ConfigError:
            continue
    return None


def _load(name: str, **options: Any) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name, **options)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"There is no tokenizer in {name} ({str(error).splitlines()[0]}); expected a model folder or a hub name."
        ) from error


def _write_dataset(rows: Iterator[dict[str, Any]], features: Any, out: Path) -> None:
    import datasets

    out.parent.mkdir(parents=True, exist_ok=True)
    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        # Beside the output, since a run may not fit into the usual temporary folder.
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=".export-") as cache:
            made = datasets.Dataset.from_generator(
                lambda: rows, features=features, cache_dir=cache, fingerprint="divopd-export"
            )
            made.save_to_disk(str(out))
    except datasets.exceptions.DatasetGenerationError as error:
        if isinstance(error.__cause__, DivOPDError):
            raise error.__cause__ from None
        raise
    finally:
        if shown:
            datasets.enable_progress_bars()


def _write_lines(rows: Iterator[dict[str, Any]], out: Path) -> int:
    out.mkdir(parents=True, exist_ok=True)
    part, trained = out / f"{SFT_FILE}.part", 0
    with open(part, "w", encoding="utf-8") as file:
        for line in sft_lines(rows):
            trained += sum(label != IGNORED for label in line["labels"])
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
    os.replace(part, out / SFT_FILE)
    return trained


def read_sft_samples(
    paths: str | Path | Sequence[str | Path], limit: int | None = None, vocabulary: int | None = None
) -> list[Any]:
    """Lines of ``sft.jsonl`` as samples of `divopd_trainer.sft`, id for id.

    Where a line has no ``response_mask``, tokens without a label are not trained at all, not even with the small
    weight of observations.

    Args:
        paths: One file or several.
        limit: At most this many lines.
        vocabulary: Entries of the tokenizer; ids beyond are refused.

    Raises:
        ConfigError: A file is missing or a line is not of this form.
    """
    from .sft import OBSERVED, SKIPPED, TRAINED, Sample

    found: list[Sample] = []
    for path in [paths] if isinstance(paths, (str, Path)) else paths:
        if not Path(path).is_file():
            raise ConfigError(f"There is no file {path}; make one with: divopd export RUN --format sft-jsonl")
        with open(path, encoding="utf-8") as file:
            for number, text in enumerate(file, 1):
                if limit is not None and len(found) >= limit:
                    return found
                ids, labels, replies = _line(text, f"{path}, line {number}")
                if vocabulary is not None and ids.size and ids.max() >= vocabulary:
                    raise ConfigError(
                        f"{path}, line {number} has id {int(ids.max())}, and the tokenizer {vocabulary} entries; it was "
                        "exported with another tokenizer. Train that one's model, or export again."
                    )
                trained = labels != IGNORED
                kind = np.where(trained, TRAINED, np.where(replies, SKIPPED, OBSERVED)).astype(np.int8)
                found.append(Sample(ids, np.where(trained, labels, ids).astype(np.int32), kind))
    return found


def _line(text: str, where: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    try:
        line: Mapping[str, Any] = json.loads(text)
        ids, labels = (np.asarray(line[name], np.int32) for name in ("input_ids", "labels"))
        replies = np.asarray(line.get("response_mask", [True] * len(ids)), bool)
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{where} is no line of input_ids and labels ({error!r}); export it again with this version."
        ) from None
    if not ids.shape == labels.shape == replies.shape or ids.ndim != 1:
        raise ConfigError(
            f"{where} has {ids.size} input_ids, {labels.size} labels and a response_mask of {replies.size}; expected "
            "as many of each. Export it again."
        )
    return ids, labels, replies
