"""`prepare`: make a catalogue that a user brings ready to shop in; `get_store` opens it, small ones without being asked."""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from divopd_gym.data import default_root
from divopd_gym.envs.webshop.generated import generate_products
from divopd_gym.envs.webshop.products import read_products
from divopd_gym.envs.webshop.sources import Sources, find_sources, read_array, read_object
from divopd_gym.envs.webshop.store import Store, build_store, open_store
from divopd_gym.errors import ConfigError, DataNotFoundError

__all__ = ["SMALL_BYTES", "generated_store", "get_store", "index_folder", "prepare"]

SMALL_BYTES = 64 << 20
"""Item files up to this size are indexed on the spot; larger ones need `prepare`."""

_LOCK_S = 600.0

Progress = Callable[[str, int, int], None]


def index_folder(sources: Sources, limit: int | None = None) -> Path:
    """Where the index of some files is kept by default: in the user's cache, by their place."""
    key = f"{sources.items.resolve()}|{limit}"
    return default_root() / "webshop" / f"index-{hashlib.sha256(key.encode()).hexdigest()[:16]}"


def prepare(
    data_dir: str | os.PathLike[str],
    progress: bool | Progress = False,
    *,
    size: str | None = None,
    num_products: int | None = None,
    index_dir: str | os.PathLike[str] | None = None,
    rebuild: bool = False,
) -> Path:
    """Index a catalogue: seconds for 1,000 products, about a quarter of an hour for the full 1.18 million.

    Args:
        data_dir: folder with the benchmark's item, attribute and instruction files.
        progress: True shows a bar; or a function of (what, done, total) in bytes read.
        size: ``small`` or ``full``; None takes the full one if it is there.
        num_products: index this many records only.
        index_dir: where to put the index; else the user's cache.
        rebuild: build it again even if a good one is there.

    Returns:
        The folder of the index.

    Raises:
        DataNotFoundError: a file is missing.
        ConfigError: a file is not what it should be.
    """
    sources = find_sources(data_dir, size)
    folder = index_folder(sources, num_products) if index_dir is None else Path(index_dir)
    with _locked(folder):
        if not rebuild and folder.is_dir():
            try:
                open_store(folder, sources, num_products)
                return folder
            except ConfigError:
                pass
        if progress is True:
            with _bar(sources.size) as shown:
                _build(sources, folder, num_products, shown)
        else:
            _build(sources, folder, num_products, progress or (lambda what, done, total: None))
    return folder


def get_store(
    data_dir: str | os.PathLike[str],
    size: str | None = None,
    num_products: int | None = None,
    index_dir: str | os.PathLike[str] | None = None,
) -> Store:
    """Open the store of a catalogue; a small one that has none yet gets it now.

    Raises:
        DataNotFoundError: there are no such files, or a large catalogue was not prepared.
        ConfigError: the index does not fit the files, or is half built.
    """
    sources = find_sources(data_dir, size)
    folder = index_folder(sources, num_products) if index_dir is None else Path(index_dir)
    if not folder.exists():
        if sources.size > SMALL_BYTES and num_products is None:
            raise DataNotFoundError(
                f"the catalogue {sources.items} has {sources.size >> 20} MB and no search index at {folder}; build "
                "it once with divopd_gym.envs.webshop.prepare.prepare(data_dir, progress=True)"
            )
        try:
            prepare(data_dir, size=size, num_products=num_products, index_dir=index_dir)
        except OSError:
            if index_dir is not None:
                raise
            # Nowhere to write: a small index fits into memory.
            return _in_memory(sources, num_products)
    return open_store(folder, sources, num_products)


@lru_cache(maxsize=2)
def _in_memory(sources: Sources, limit: int | None) -> Store:
    with _products(sources, limit, lambda what, done, total: None) as products:
        return build_store(products, None)


@lru_cache(maxsize=4)
def generated_store(count: int, seed: int) -> Store:
    """The store of a generated catalogue, in memory; one per process."""
    return build_store(generate_products(count, seed))


def _build(sources: Sources, folder: Path, limit: int | None, progress: Progress) -> None:
    with _products(sources, limit, progress) as products:
        build_store(products, folder, sources, limit)
    progress("done", sources.size, sources.size)


@contextmanager
def _products(sources: Sources, limit: int | None, progress: Progress) -> Iterator[Any]:
    total = sum(path.stat().st_size for path in sources.files)
    done = 0

    def report(characters: int) -> None:
        nonlocal done
        done += characters
        progress("reading and indexing", min(done, total), total)

    human = {} if sources.human is None else dict(read_object(sources.human, report))
    with _facts(sources, report) as facts:
        yield read_products(read_array(sources.items, report), facts, human, limit)


@contextmanager
def _facts(sources: Sources, report: Callable[[int], None]) -> Iterator[Mapping[str, Any] | _FactTable]:
    """The attribute file by asin; a large one in a temporary table rather than in memory."""
    if sources.facts.stat().st_size <= SMALL_BYTES:
        yield dict(read_object(sources.facts, report))
        return
    with tempfile.TemporaryDirectory(prefix="divopd-facts-") as folder:
        table = _FactTable(Path(folder) / "facts.sqlite", read_object(sources.facts, report))
        try:
            yield table
        finally:
            table.close()


class _FactTable:
    """Entries of a large attribute file, on disk."""

    def __init__(self, path: Path, entries: Iterator[tuple[str, Any]]):
        self._db = sqlite3.connect(path)
        self._db.executescript(
            "PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF;"
            "CREATE TABLE facts (asin TEXT PRIMARY KEY, data TEXT) WITHOUT ROWID"
        )
        self._db.executemany(
            "INSERT OR REPLACE INTO facts VALUES (?, ?)", ((asin, json.dumps(fact)) for asin, fact in entries)
        )

    def get(self, asin: str) -> Any:
        found = self._db.execute("SELECT data FROM facts WHERE asin = ?", (asin,)).fetchone()
        return None if found is None else json.loads(found[0])

    def close(self) -> None:
        self._db.close()


@contextmanager
def _bar(total: int) -> Iterator[Progress]:
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Bar(*columns) as bar:
        task = bar.add_task("WebShop catalogue", total=total)

        def show(what: str, done: int, of: int) -> None:
            bar.update(task, description=what, completed=done, total=of)

        yield show


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process at a time builds a folder; the lock goes with the process that holds it."""
    import fcntl

    folder.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + _LOCK_S
    with (folder.parent / f".{folder.name}.lock").open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    raise ConfigError(
                        f"another process has been building the search index {folder} for {_LOCK_S:.0f} s; wait for "
                        "it, or give another place by index_dir="
                    ) from error
                time.sleep(0.1)
        yield
