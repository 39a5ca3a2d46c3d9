"""`Goals`: the tasks of a shop in their fixed order, each made when it is asked for.

Prices and price caps come from one seeded generator in catalogue order, the order of the goals from another; the
defaults are those under which the benchmark's goals were published.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from divopd_gym.envs.webshop.catalogue import Catalogue
from divopd_gym.errors import ConfigError

__all__ = ["FULL_HUMAN_GOALS", "KINDS", "ORDER_SEED", "PRICE_SEED", "SPLITS", "Goal", "Goals", "goal_order"]

KINDS = ("synthetic", "human")
PRICE_SEED = 4
ORDER_SEED = 233
FULL_HUMAN_GOALS = 12_087
"""Goals written by people in the full catalogue."""

SPLITS = {"all": (0, None), "test": (0, 500), "eval": (500, 1500), "train": (1500, None)}
"""The benchmark's parts, as ranges of goal indices."""

NO_CAP = 1_000_000
_CAPS = [10.0 * i for i in range(1, 100)]


@dataclass(frozen=True)
class Goal:
    """One task.

    Attributes:
        index: its place in the order.
        asin: the product it was made from.
        text: the instruction.
        attributes: phrases that the bought product should have.
        options: wanted option values: by group name where generated, a list where written by people.
        price_upper: most the product may cost.
        title: the target's title.
        category: its department.
        query: its query.
        product_category: its category path.
        weight: how often the benchmark draws it, relative to others.
    """

    index: int
    asin: str
    text: str
    attributes: tuple[str, ...]
    options: dict[str, str] | tuple[str, ...]
    price_upper: float
    title: str
    category: str
    query: str
    product_category: str
    weight: float


def goal_order(count: int, seed: int = ORDER_SEED) -> list[int]:
    """The shuffled order of goals: entry i is the place, in catalogue order, of goal i."""
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return order


class Goals(Sequence[Goal]):
    """The goals of one kind.

    Args:
        catalogue: the products.
        kind: ``synthetic`` or ``human``.
        seed: of prices and caps.
        folder: where a large order may have been written down by `save_order`.

    Raises:
        ConfigError: an unknown kind.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        kind: str = "synthetic",
        seed: int = PRICE_SEED,
        folder: Path | None = None,
    ):
        if kind not in KINDS:
            raise ConfigError(f"goals={kind!r}; choose one of {', '.join(KINDS)}")
        self.kind, self.seed = kind, seed
        self._catalogue = catalogue
        rng = random.Random(seed)
        self.prices = _prices(catalogue, rng)
        self._human: list = []
        if kind == "human":
            self._human = catalogue.human()
            self._caps = [_cap(self.prices[row], rng) for row, _ in self._human]
            count = len(self._human)
        else:
            choices = catalogue.choices()
            self._rows = np.flatnonzero(choices >= 0)
            self._caps = [_cap(price, rng) for price in self.prices[self._rows].tolist()]
            self._ends = np.cumsum(choices[self._rows]).tolist()
            count = self._ends[-1] if self._ends else 0
        self._order = _order(count, kind, folder)
        self._make = lru_cache(maxsize=4096)(self._goal)

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Goal]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> Goal:
        """The goal of an index.

        Raises:
            ConfigError: there is no such goal; the message says how many there are.
        """
        if not 0 <= index < len(self):
            full = f"; the full set has {FULL_HUMAN_GOALS:,}" if self.kind == "human" else ""
            raise ConfigError(
                f"{len(self):,} {self.kind} goals in this catalogue, index {index} asked for{full}. "
                "Choose a smaller index or prepare the full catalogue"
            )
        return self._make(int(index))

    def _goal(self, index: int) -> Goal:
        place = int(self._order[index])
        if self.kind == "human":
            row, asked = self._human[place]
            cap = self._caps[place]
            text = asked["instruction"].strip(".")
            attributes, options = asked["attributes"], tuple(asked["options"])
            weight = 1.0
            product = self._catalogue.product(row)
        else:
            number = bisect_right(self._ends, place)
            first = self._ends[number - 1] if number else 0
            product = self._catalogue.product(int(self._rows[number]))
            cap = self._caps[number]
            attributes, options = product.instruction_attributes, _combination(product.options, place - first)
            text = product.instruction or ""
            if options:
                text += " with " + ", and ".join(f"{name}: {value}" for name, value in options.items())
            weight = self._weight(attributes)
        if cap != NO_CAP:
            text += f", and price lower than {cap:.2f} dollars"
        return Goal(
            index=index,
            asin=product.asin,
            text=text,
            attributes=tuple(attributes),
            options=options,
            price_upper=cap,
            title=product.title,
            category=product.category,
            query=product.query,
            product_category=product.product_category,
            weight=weight,
        )

    def _weight(self, attributes: Sequence[str]) -> float:
        counts = self._catalogue.attribute_counts(attributes)
        return sum(1.0 / count for count in counts) / len(counts) if counts else 0.0

    def save_order(self, folder: Path) -> None:
        """Write the order down, so that opening a large shop need not shuffle millions of goals again."""
        np.save(folder / f"order_{self.kind}.npy", np.asarray(self._order, dtype=np.int32))


def _order(count: int, kind: str, folder: Path | None) -> Sequence[int]:
    path = None if folder is None else folder / f"order_{kind}.npy"
    if path is not None and path.is_file():
        stored = np.load(path, mmap_mode="r")
        if len(stored) == count:
            return stored
    return goal_order(count)


def _prices(catalogue: Catalogue, rng: random.Random) -> np.ndarray:
    low, high = catalogue.price_ranges()
    for row in np.flatnonzero(~np.isnan(high)):
        low[row] = rng.uniform(float(low[row]), float(high[row]))
    return low


def _cap(price: float, rng: random.Random) -> float:
    dearer = [cap for cap in _CAPS if cap > price][:4]
    return max(rng.sample(dearer, 2)) if len(dearer) >= 2 else NO_CAP


def _combination(options: dict[str, list[str]], number: int) -> dict[str, str]:
    """The choice of that number, where the last of the sorted groups varies fastest."""
    chosen = {}
    for name in sorted(options, reverse=True):
        number, which = divmod(number, len(options[name]))
        chosen[name] = options[name][which]
    return {name: chosen[name] for name in sorted(options)}
