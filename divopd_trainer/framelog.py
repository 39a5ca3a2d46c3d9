"""Append-only files of JSON lines, each line a zstd frame of its own.

A writer that is killed loses at most the line it was writing; `zstdcat FILE` shows every line that was finished.
The reader stops at a torn or damaged frame, yields all that came before it, and says so.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

from divopd_gym.errors import DivOPDError

__all__ = ["FrameLogWriter", "RecordError", "append", "good_length", "read_frames"]

_CHUNK = 1 << 20


class RecordError(DivOPDError, ValueError):
    """A file of a run that cannot be written or read as what it claims to be."""


def plain(value: Any) -> Any:
    """Numpy scalars and arrays as JSON values; for `json.dumps(default=...)`."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, set | frozenset):
        return sorted(value)
    raise TypeError(f"{type(value).__name__} is not a JSON value; convert it before it is recorded")


def append(file: Any, data: bytes, path: Path) -> None:
    """Write all of it at the end of an unbuffered file, or nothing.

    Raises:
        RecordError: The system refuses it, as it does on a full disk.
    """
    before = file.seek(0, 2)
    view = memoryview(data)
    try:
        while view:
            view = view[file.write(view) :]
    except OSError as error:
        # What follows a torn record could not be read.
        with contextlib.suppress(OSError):
            file.truncate(before)
        raise RecordError(
            f"{path} cannot be written ({error.strerror or error}); what was recorded before is whole. Make room on its "
            "disk, then go on with --resume_from_checkpoint true."
        ) from error


class FrameLogWriter:
    """Appends JSON objects; safe to use from several threads of one process.

    Args:
        path: Made if missing. A torn last frame, left by a writer that was killed, is cut off.
        level: zstd compression level.
    """

    def __init__(self, path: str | Path, level: int = 3):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            end = good_length(self.path)
            if end < self.path.stat().st_size:
                with open(self.path, "r+b") as file:
                    file.truncate(end)
        self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115
        self._zstd = zstandard.ZstdCompressor(level=level, write_checksum=True)
        self._lock = threading.Lock()

    def write(self, record: dict[str, Any]) -> int:
        """Append one object; returns the bytes it takes. It is with the operating system when this returns.

        Raises:
            RecordError: The writer is closed, the disk is full, or the object holds something that JSON cannot say.
        """
        try:
            line = json.dumps(record, default=plain, separators=(",", ":")) + "\n"
        except (TypeError, ValueError) as error:
            raise RecordError(f"{self.path}: a record could not be written: {error}.") from error
        with self._lock:
            if self._file.closed:
                raise RecordError(
                    f"{self.path} is closed; expected an open writer; make a new one to append more."
                )
            frame = self._zstd.compress(line.encode("ascii"))
            append(self._file, frame, self.path)
            return len(frame)

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            self._file.close()

    def __enter__(self) -> FrameLogWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _frames(path: Path) -> Iterator[tuple[bytes | None, int]]:
    """(content, end offset) of each whole frame; (None, start offset) last if the rest cannot be read."""
    decompressor = zstandard.ZstdDecompressor()
    with open(path, "rb") as file:
        offset, data = 0, file.read(_CHUNK)
        while data:
            frame, parts, used = decompressor.decompressobj(), [], 0
            try:
                while True:
                    parts.append(frame.decompress(data))
                    used += len(data)
                    if frame.eof:
                        data = frame.unused_data
                        used -= len(data)
                        break
                    data = file.read(_CHUNK)
                    if not data:
                        yield None, offset
                        return
            except zstandard.ZstdError:
                yield None, offset
                return
            offset += used
            yield b"".join(parts), offset
            data = data or file.read(_CHUNK)


def good_length(path: str | Path) -> int:
    """Bytes of the file up to the end of its last whole frame."""
    end = 0
    for content, offset in _frames(Path(path)):
        end = offset if content is not None else end
    return end


def read_frames(path: str | Path, on_notice: Callable[[str], None] | None = None) -> Iterator[dict[str, Any]]:
    """Every finished object of a frame log, in order.

    Args:
        path: The file.
        on_notice: Called with one sentence if the file ends in the middle of a record.

    Raises:
        RecordError: A whole frame holds something else than one JSON object.
    """
    path = Path(path)
    for number, (content, offset) in enumerate(_frames(path)):
        if content is None:
            if on_notice is not None:
                lost = path.stat().st_size - offset
                on_notice(
                    f"{path} cannot be read beyond record {number}: its last {lost} bytes are a torn or damaged "
                    "record (a writer was killed, or is still writing); everything before it was read."
                )
            return
        try:
            record = json.loads(content)
        except ValueError as error:
            raise RecordError(
                f"{path}: record {number} is no JSON ({error}); expected one JSON object a zstd frame; this file "
                "was not written by divopd or has been changed."
            ) from None
        if not isinstance(record, dict):
            raise RecordError(
                f"{path}: record {number} is a {type(record).__name__}; expected a JSON object."
            )
        yield record
