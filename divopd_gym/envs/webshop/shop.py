"""`Shop`: what a visit needs of the shop: products, search, prices, rewards. Light; the store behind it is shared."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from divopd_gym.envs.webshop.goals import PRICE_SEED, Goal, Goals
from divopd_gym.envs.webshop.nouns import NounTagger
from divopd_gym.envs.webshop.products import Product
from divopd_gym.envs.webshop.reward import judge
from divopd_gym.envs.webshop.store import Store

__all__ = ["Shop"]


class Shop:
    """A store with one kind of goals and a noun tagger.

    Args:
        store: products and index.
        tagger: finds the nouns of titles for the reward.
        kind: of the goals, ``synthetic`` or ``human``.
        seed: of prices and price caps.
    """

    def __init__(self, store: Store, tagger: NounTagger, kind: str = "synthetic", seed: int = PRICE_SEED):
        self.store, self.tagger = store, tagger
        self.goals: Goals = store.goals(kind, seed)
        self._engine = store.engine
        # Each page of results searches again.
        self._search = lru_cache(maxsize=256)(self._find)

    def __len__(self) -> int:
        return len(self.store.catalogue)

    def product(self, row: int) -> Product:
        """The product of a row."""
        return self.store.catalogue.product(row)

    def row_of(self, asin: str) -> int | None:
        """Row of an asin, None if there is none."""
        return self.store.catalogue.row_of(asin)

    def rows_where(self, key: str, value: str) -> list[int]:
        """Rows of the products of a ``category`` or ``query``."""
        return self.store.catalogue.rows_where(key, value)

    def search(self, query: str, k: int) -> list[int]:
        """Rows of the best products for a query, best first."""
        return list(self._search(query, k))

    def _find(self, query: str, k: int) -> tuple[int, ...]:
        return tuple(row for row, _ in self._engine.search(query, k))

    def price(self, asin: str) -> float:
        """What a product costs; of a price range the one drawn for this shop."""
        return float(self.goals.prices[self.row_of(asin)])

    def judge(self, asin: str, goal: Goal, options: Mapping[str, str]) -> tuple[float, dict[str, Any]]:
        """Reward of buying a product for a goal, and its parts."""
        bought, target = self.product(self.row_of(asin)), self.product(self.row_of(goal.asin))
        return judge(bought, goal, self.price(asin), options, self.tagger, target)
