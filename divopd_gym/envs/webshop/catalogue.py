"""`Catalogue`: the products of a shop in SQLite, one decoded at a time, in catalogue order.

A file is opened read-only and shared by any number of processes; a generated catalogue lives in memory.
"""

from __future__ import annotations

import json
import math
import os
import sqlite3
import threading
import zlib
from array import array
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from divopd_gym.envs.webshop.products import Product
from divopd_gym.errors import ConfigError

__all__ = ["Catalogue", "CatalogueWriter"]

_SCHEMA = """
CREATE TABLE products (
    row INTEGER PRIMARY KEY, asin TEXT NOT NULL, category TEXT, query TEXT, data BLOB
);
CREATE TABLE arrays (name TEXT PRIMARY KEY, data BLOB) WITHOUT ROWID;
CREATE TABLE terms (term TEXT PRIMARY KEY, number INTEGER) WITHOUT ROWID;
CREATE TABLE attributes (attribute TEXT PRIMARY KEY, goals INTEGER) WITHOUT ROWID;
CREATE TABLE human (number INTEGER PRIMARY KEY, row INTEGER, data TEXT);
"""
_INDEXES = """
CREATE UNIQUE INDEX by_asin ON products (asin);
CREATE INDEX by_category ON products (category);
CREATE INDEX by_query ON products (query);
"""


class CatalogueWriter:
    """Writes a catalogue.

    Args:
        path: file to create; None keeps it in memory.
    """

    def __init__(self, path: Path | None = None):
        self.path = path
        self._db = sqlite3.connect(":memory:" if path is None else path, check_same_thread=False)
        # The folder is renamed into place when complete, so a torn file is never seen.
        self._db.executescript("PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF;" + _SCHEMA)
        self._attributes: Counter[str] = Counter()
        self._prices, self._choices = array("d"), array("q")
        self.asins: list[str] = []

    def add(self, product: Product) -> None:
        """Add the next product."""
        row = len(self.asins)
        # -1 tells a product without a request from one whose options leave no choice.
        choices = -1
        if product.instruction is not None:
            choices = 1
            for values in product.options.values():
                choices *= len(values)
            for attribute in product.instruction_attributes:
                self._attributes[attribute] += choices
        self._db.execute(
            "INSERT INTO products VALUES (?, ?, ?, ?, ?)",
            (
                row,
                product.asin,
                product.category,
                product.query,
                zlib.compress(product.to_json().encode(), 1),
            ),
        )
        self._prices.extend((product.prices[0], product.prices[1] if len(product.prices) > 1 else math.nan))
        self._choices.append(choices)
        # Goals are made of those that name at least one attribute.
        self._db.executemany(
            "INSERT INTO human (row, data) VALUES (?, ?)",
            [(row, json.dumps(one, ensure_ascii=False)) for one in product.human if one["attributes"]],
        )
        self.asins.append(product.asin)

    def finish(self, terms: dict[str, int]) -> Catalogue:
        """Write the rest and open the catalogue.

        Args:
            terms: number of each index term.
        """
        db = self._db
        db.executemany("INSERT INTO attributes VALUES (?, ?)", self._attributes.items())
        db.executemany("INSERT INTO terms VALUES (?, ?)", sorted(terms.items()))
        # Read as a whole whenever a shop opens, so kept as a whole.
        db.executemany(
            "INSERT INTO arrays VALUES (?, ?)",
            [("prices", self._prices.tobytes()), ("choices", self._choices.tobytes())],
        )
        db.executescript(_INDEXES)
        db.commit()
        if self.path is None:
            return Catalogue(None, db)
        db.close()
        return Catalogue(self.path)


class Catalogue:
    """Read access to a catalogue; safe to use from several threads, and after a fork.

    Args:
        path: file written by `CatalogueWriter`; None with `connection` for one in memory.
        connection: an open database.
    """

    def __init__(self, path: Path | None, connection: sqlite3.Connection | None = None):
        self.path = path
        self._connection = connection
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self.product = lru_cache(maxsize=2048)(self._read)
        self._count = int(self._one("SELECT count(*) FROM products")[0])

    def __len__(self) -> int:
        return self._count

    def _rows(self, query: str, *values: Any) -> list[tuple]:
        with self._lock:
            # SQLite's file handles must not be used across a fork; memory is copied by it.
            if self.path is not None and (self._connection is None or self._pid != os.getpid()):
                self._connection = sqlite3.connect(
                    f"{self.path.resolve().as_uri()}?mode=ro&immutable=1", uri=True, check_same_thread=False
                )
                self._pid = os.getpid()
            return self._connection.execute(query, values).fetchall()

    def _one(self, query: str, *values: Any) -> tuple | None:
        found = self._rows(query, *values)
        return found[0] if found else None

    def _read(self, row: int) -> Product:
        found = self._one("SELECT data FROM products WHERE row = ?", int(row))
        if found is None:
            raise ConfigError(f"product row {row} asked for; this catalogue has {len(self)} products")
        return Product.from_json(zlib.decompress(found[0]))

    def row_of(self, asin: str) -> int | None:
        """Row of a product, None if there is no such asin."""
        found = self._one("SELECT row FROM products WHERE asin = ?", asin)
        return None if found is None else found[0]

    def rows_where(self, key: str, value: str) -> list[int]:
        """Rows of the products whose ``category`` or ``query`` equals a value, in catalogue order."""
        if key not in ("category", "query"):
            raise ConfigError(f"products are found by category or query, not by {key!r}")
        return [row for (row,) in self._rows(f"SELECT row FROM products WHERE {key} = ? ORDER BY row", value)]

    def term_number(self, term: str) -> int | None:
        """Number of an index term, None if no product has it."""
        # Lone surrogates occur in no document and cannot be asked for.
        if not term.isascii() and any("\ud800" <= c <= "\udfff" for c in term):
            return None
        found = self._one("SELECT number FROM terms WHERE term = ?", term)
        return None if found is None else found[0]

    def attribute_counts(self, attributes: Iterable[str]) -> list[int]:
        """In how many generated goals each attribute occurs."""
        return [
            (self._one("SELECT goals FROM attributes WHERE attribute = ?", a) or (0,))[0] for a in attributes
        ]

    def price_ranges(self) -> tuple[np.ndarray, np.ndarray]:
        """``float64[N]`` each: the price or its lower end, and the upper end or NaN."""
        both = np.frombuffer(self._array("prices"), dtype=np.float64).reshape(-1, 2)
        return both[:, 0].copy(), both[:, 1].copy()

    def _array(self, name: str) -> bytes:
        return self._one("SELECT data FROM arrays WHERE name = ?", name)[0]

    def choices(self) -> np.ndarray:
        """``int64[N]``: how many generated goals each product has; -1 where it has no generated request."""
        return np.frombuffer(self._array("choices"), dtype=np.int64)

    def human(self) -> list[tuple[int, dict[str, Any]]]:
        """Row and request of each goal written by people, in catalogue order."""
        return [
            (row, json.loads(data)) for row, data in self._rows("SELECT row, data FROM human ORDER BY number")
        ]

    def close(self) -> None:
        """Close the database; the next read opens a file again."""
        with self._lock:
            if self.path is not None and self._connection is not None and self._pid == os.getpid():
                self._connection.close()
                self._connection = None
