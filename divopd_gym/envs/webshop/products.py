"""`Product` and how a raw listing becomes one: the benchmark's loading rules, record by record.

A raw record is what the benchmark's ``items_shuffle*.json`` holds; attributes and instructions come from two more files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from divopd_gym.errors import ConfigError

__all__ = ["NO_ATTRIBUTES", "NO_PRICE", "Product", "read_products"]

NO_PRICE = 100.0
"""What a listing without a price costs."""

NO_ATTRIBUTES = ("DUMMY_ATTR",)
"""Attributes of a product that the attribute file does not know."""

_NEEDED = ("asin", "name", "full_description", "small_description", "category", "query", "product_category")
_LONGEST_ASIN = 10


@dataclass
class Product:
    """One listing.

    Attributes:
        asin: identity, at most 10 characters.
        title: its name.
        description: free text, often empty.
        bullets: the features.
        prices: one number, or the two ends of a range, in dollars.
        options: for each option group its values, lower case.
        images: option value -> image address or None.
        image: main image address, empty if none.
        category: one of the shop's five departments.
        query: the search under which the listing was collected.
        product_category: path of categories, parts joined by ``›``.
        attributes: short phrases that hold of it.
        instruction: generated request that it fulfils, or None.
        instruction_attributes: the attributes named in that request.
        human: requests written by people: instruction, attributes and options each.
        nouns: nouns of the title where the catalogue itself knows them, else None.
    """

    asin: str
    title: str
    description: str = ""
    bullets: list[str] = field(default_factory=list)
    prices: list[float] = field(default_factory=lambda: [NO_PRICE])
    options: dict[str, list[str]] = field(default_factory=dict)
    images: dict[str, str | None] = field(default_factory=dict)
    image: str = ""
    category: str = ""
    query: str = ""
    product_category: str = ""
    attributes: list[str] = field(default_factory=lambda: list(NO_ATTRIBUTES))
    instruction: str | None = None
    instruction_attributes: list[str] = field(default_factory=list)
    human: list[dict[str, Any]] = field(default_factory=list)
    nouns: list[str] | None = None

    @property
    def price_text(self) -> str:
        """The price as pages show it: ``$12.5`` or ``$12.5 to $20.0``."""
        return " to ".join(f"${price}" for price in self.prices)

    @property
    def search_text(self) -> str:
        """What the search engine knows of it: title, description, first bullet and options, lower case."""
        options = ", and ".join(f"{name}: {', '.join(values)}" for name, values in self.options.items())
        first = self.bullets[0] if self.bullets else ""
        return f"{self.title} {self.description} {first} {options}".lower()

    def to_json(self) -> str:
        """The product as compact JSON."""
        return json.dumps(asdict(self), ensure_ascii=False, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> Product:
        """Inverse of `to_json`."""
        return cls(**json.loads(text))


def parse_prices(text: str | None) -> list[float]:
    """Read a price text: none, one or the first two of its dollar amounts.

    Raises:
        ConfigError: an amount is no number.
    """
    if not text:
        return [NO_PRICE]
    amounts = [re.sub(r"[^\d.]", "", part) for part in text.split("$")[1:]][:2]
    try:
        return [float(amount) for amount in amounts] or [NO_PRICE]
    except ValueError as error:
        raise ConfigError(f"the price {text!r} has an amount that is no number, like $12.50") from error


def _options(raw: Any) -> tuple[dict[str, list[str]], dict[str, str | None]]:
    options: dict[str, list[str]] = {}
    images: dict[str, str | None] = {}
    for name, contents in (raw or {}).items():
        if contents is None:
            continue
        values = []
        for content in contents:
            value = content["value"].strip().replace("/", " | ").lower()
            values.append(value)
            images[value] = content.get("image")
        options[name.lower()] = values
    return options, images


def make_product(
    record: Mapping[str, Any],
    facts: Mapping[str, Any] | None = None,
    human: Iterable[Mapping[str, Any]] = (),
) -> Product:
    """Build a product from its raw record.

    Args:
        record: one listing.
        facts: its entry in the attribute file, if any.
        human: its entries in the file of human instructions.

    Raises:
        ConfigError: the record lacks a key or its price cannot be read.
    """
    missing = [key for key in _NEEDED if key not in record]
    if missing:
        raise ConfigError(
            f"listing {record.get('asin', '(no asin)')!r} has no {', '.join(missing)}; expected the benchmark's "
            f"item file with the keys {', '.join(_NEEDED)}"
        )
    options, images = _options(record.get("customization_options"))
    small = record["small_description"]
    facts = facts or {}
    pictures = record.get("images") or []
    return Product(
        asin=record["asin"],
        title=record["name"] or "",
        description=record["full_description"] or "",
        bullets=[str(b) for b in small] if isinstance(small, list) else [small or ""],
        prices=parse_prices(record.get("pricing")),
        options=options,
        images=images,
        image=pictures[0] if pictures else "",
        category=record["category"],
        query=record["query"].lower().strip(),
        product_category=record["product_category"],
        attributes=list(facts.get("attributes", NO_ATTRIBUTES)),
        instruction=facts.get("instruction"),
        instruction_attributes=list(facts.get("instruction_attributes") or []),
        human=[
            {
                "instruction": one["instruction"],
                "attributes": list(one["instruction_attributes"]),
                "options": list(one["instruction_options"]),
            }
            for one in human
        ],
        nouns=record.get("nouns"),
    )


def read_products(
    records: Iterable[Mapping[str, Any]],
    facts: Mapping[str, Any],
    human: Mapping[str, Any],
    limit: int | None = None,
) -> Iterator[Product]:
    """Products in catalogue order.

    Args:
        records: raw listings. Those with asin ``nan``, a longer asin than 10 characters or a repeated one are left out.
        facts: asin -> entry of the attribute file; anything with ``get``.
        human: asin -> list of human instructions.
        limit: read this many records at most; cut before the filters.

    Raises:
        ConfigError: see `make_product`.
    """
    seen: set[str] = set()
    for count, record in enumerate(records):
        if limit is not None and count >= limit:
            return
        asin = record.get("asin")
        if not isinstance(asin, str):
            raise ConfigError(f"listing number {count} has asin {asin!r}; expected a text")
        if asin == "nan" or len(asin) > _LONGEST_ASIN or asin in seen:
            continue
        seen.add(asin)
        yield make_product(record, facts.get(asin), human.get(asin) or ())
