"""`Store`: a catalogue with its search index, on disk or in memory, opened once per process and shared by its shops.

A folder is built beside its final place and renamed when complete; it carries a fingerprint of the files it was made
from and is refused when they have changed, or when a file of its own is missing or cut short.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from divopd_gym.envs.webshop.catalogue import Catalogue, CatalogueWriter
from divopd_gym.envs.webshop.goals import KINDS, PRICE_SEED, Goals
from divopd_gym.envs.webshop.postings import Postings, PostingsBuilder
from divopd_gym.envs.webshop.products import Product
from divopd_gym.envs.webshop.search import SearchEngine
from divopd_gym.envs.webshop.sources import Sources, digest
from divopd_gym.errors import ConfigError, DataNotFoundError

__all__ = ["FORMAT", "Store", "build_store", "open_store"]

FORMAT = 1
_META, _CATALOGUE = "meta.json", "catalogue.sqlite"
# Shuffling this many goals is quick enough to do again whenever a shop opens.
_LONG_ORDER = 100_000


class Store:
    """An open catalogue with its index.

    Args:
        catalogue: the products.
        postings: the index.
        fingerprint: of the files that both were made from.
        folder: where they lie; None in memory.
    """

    def __init__(
        self, catalogue: Catalogue, postings: Postings, fingerprint: str, folder: Path | None = None
    ):
        self.catalogue, self.postings = catalogue, postings
        self.fingerprint, self.folder = fingerprint, folder
        self._engine: SearchEngine | None = None
        self._goals: dict[tuple[str, int], Goals] = {}

    @property
    def engine(self) -> SearchEngine:
        """The search engine, made when first needed."""
        if self._engine is None:
            self._engine = SearchEngine(self.postings, self.catalogue.term_number)
        return self._engine

    def goals(self, kind: str, seed: int = PRICE_SEED) -> Goals:
        """The goals of a kind under a seed; made once."""
        key = (kind, seed)
        if key not in self._goals:
            self._goals[key] = Goals(self.catalogue, kind, seed, self.folder)
        return self._goals[key]


def build_store(
    products: Iterable[Product],
    folder: Path | None = None,
    sources: Sources | None = None,
    limit: int | None = None,
    seen: Callable[[int], None] | None = None,
) -> Store:
    """Build a store.

    Args:
        products: in catalogue order.
        folder: where to put it, replacing what is there; None keeps it in memory.
        sources: the files that the products come from.
        limit: how many records of them were read at most.
        seen: told the number of products after each.

    Raises:
        ConfigError: there are no products.
    """
    if folder is None:
        content = hashlib.sha256()
        writer, (postings, terms) = _fill(_hashed(products, content), None, seen)
        return Store(writer.finish(terms), postings, content.hexdigest())
    stamps = [] if sources is None else [_stamp(path) for path in sources.files]
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        writer, (postings, terms) = _fill(products, work, seen)
        catalogue = writer.finish(terms)
        postings.save(work)
        for kind in KINDS:
            goals = Goals(catalogue, kind)
            if len(goals) > _LONG_ORDER:
                goals.save_order(work)
        catalogue.close()
        meta = {
            "format": FORMAT,
            "products": len(writer.asins),
            "limit": limit,
            "sources": stamps,
            "fingerprint": _fingerprint(stamps, limit),
            "files": {path.name: path.stat().st_size for path in sorted(work.iterdir())},
        }
        (work / _META).write_text(json.dumps(meta, indent=1), encoding="utf-8")
        if folder.exists():
            shutil.rmtree(folder)
        work.rename(folder)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    return open_store(folder, sources, limit)


def _hashed(products: Iterable[Product], content: Any) -> Iterator[Product]:
    for product in products:
        content.update(product.to_json().encode("utf-8", "surrogatepass"))
        yield product


def _fill(products: Iterable[Product], work: Path | None, seen: Callable[[int], None] | None):
    writer = CatalogueWriter(None if work is None else work / _CATALOGUE)
    builder = PostingsBuilder(work)
    for count, product in enumerate(products, 1):
        writer.add(product)
        builder.add(product.search_text)
        if seen is not None:
            seen(count)
    if not writer.asins:
        raise ConfigError("the catalogue has no products; check the item file")
    return writer, (builder.finish(writer.asins), builder.terms)


def _stamp(path: Path) -> dict[str, Any]:
    status = path.stat()
    return {
        "name": path.name,
        "size": status.st_size,
        "mtime_ns": status.st_mtime_ns,
        "sha256": digest(path),
    }


def _fingerprint(stamps: list[dict[str, Any]], limit: int | None) -> str:
    text = json.dumps([FORMAT, limit, [[s["name"], s["sha256"]] for s in stamps]])
    return hashlib.sha256(text.encode()).hexdigest()


_open: weakref.WeakValueDictionary[tuple, Store] = weakref.WeakValueDictionary()
# The last ones stay open, for environments that are made and closed again and again.
_recent: deque[Store] = deque(maxlen=2)


def open_store(folder: Path, sources: Sources | None = None, limit: int | None = None) -> Store:
    """Open a store that `build_store` wrote; one object per process and store.

    Args:
        folder: the store.
        sources: the files that it must have been made from; None asks no question.
        limit: the limit that it must have been made with.

    Raises:
        DataNotFoundError: there is none.
        ConfigError: it is incomplete, of another format, or made from other files.
    """
    remedy = "build it again with divopd_gym.envs.webshop.prepare.prepare(data_dir, rebuild=True)"
    if not folder.is_dir():
        raise DataNotFoundError(f"there is no search index at {folder}; {remedy}")
    meta = _read_meta(folder, remedy)
    if sources is not None:
        _check_sources(folder, meta, sources, limit, remedy)
    key = (os.path.realpath(folder), meta["fingerprint"], (folder / _META).stat().st_mtime_ns)
    found = _open.get(key)
    if found is None:
        found = Store(Catalogue(folder / _CATALOGUE), Postings.load(folder), meta["fingerprint"], folder)
        _open[key] = found
    if found not in _recent:
        _recent.append(found)
    return found


def _read_meta(folder: Path, remedy: str) -> dict[str, Any]:
    try:
        meta = json.loads((folder / _META).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the search index at {folder} is half built: it has no {_META}; {remedy}"
        ) from error
    if meta.get("format") != FORMAT:
        raise ConfigError(
            f"the search index at {folder} has format {meta.get('format')}; expected {FORMAT}; {remedy}"
        )
    for name, size in meta["files"].items():
        path = folder / name
        found = path.stat().st_size if path.is_file() else None
        if found != size:
            what = "is missing" if found is None else f"has {found} bytes instead of {size}"
            raise ConfigError(f"the search index at {folder} is half built: {name} {what}; {remedy}")
    return meta


def _check_sources(
    folder: Path, meta: dict[str, Any], sources: Sources, limit: int | None, remedy: str
) -> None:
    stamps = {stamp["name"]: stamp for stamp in meta["sources"]}
    names = {path.name for path in sources.files}
    changed = names ^ set(stamps)
    for path in sources.files:
        stamp = stamps.get(path.name)
        if stamp is None:
            continue
        status = path.stat()
        same = status.st_size == stamp["size"] and (
            status.st_mtime_ns == stamp["mtime_ns"] or digest(path) == stamp["sha256"]
        )
        if not same:
            changed.add(path.name)
    if changed or meta["limit"] != limit:
        what = ", ".join(sorted(changed)) or f"num_products={meta['limit']} instead of {limit}"
        raise ConfigError(
            f"the search index at {folder} was built from another catalogue (differs in {what}), so it would not "
            f"find this one's products; {remedy}"
        )
