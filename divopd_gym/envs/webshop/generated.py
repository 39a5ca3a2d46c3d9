"""A catalogue made up from a seed, of the shape of the benchmark's: licence-free, and ready without any download.

Departments, option groups, price ranges, missing prices and descriptions come in about the benchmark's proportions;
near-duplicate listings, quotes, stars, emoji, Chinese characters, slashes and empty bullets occur as they do there.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from divopd_gym.envs.webshop import vocabulary as words
from divopd_gym.envs.webshop.products import Product, make_product
from divopd_gym.errors import ConfigError

__all__ = ["DEFAULT_PRODUCTS", "generate_products"]

DEFAULT_PRODUCTS = 300
_LETTERS = "0123456789ABCDEFGHJKLMNPQRSTUVWXYZ"


def generate_products(count: int = DEFAULT_PRODUCTS, seed: int = 0) -> Iterator[Product]:
    """Products of a made-up shop.

    Args:
        count: how many.
        seed: decides everything about them; a longer catalogue begins with the shorter one.

    Raises:
        ConfigError: `count` is not positive.
    """
    if count < 1:
        raise ConfigError(f"a generated catalogue of {count} products; give at least 1")
    rng = random.Random(f"webshop-catalogue-{seed}")
    used: set[str] = set()
    twin: dict[str, Any] | None = None
    for number in range(count):
        if twin is not None and rng.random() < 0.06:
            record = _again(rng, twin)
        else:
            record = _listing(rng)
        while (asin := "G" + "".join(rng.choices(_LETTERS, k=9))) in used:
            pass
        used.add(asin)
        record["asin"] = asin
        facts, human = _requests(rng, record, number)
        twin = record
        yield make_product(record, facts, human)


def _listing(rng: random.Random) -> dict[str, Any]:
    department = rng.choices(list(words.DEPARTMENTS), weights=words.DEPARTMENT_WEIGHTS)[0]
    kinds = words.DEPARTMENTS[department]
    kind = kinds[rng.randrange(len(kinds))]
    brand = "".join(rng.choices(words.SYLLABLES, k=rng.choice((2, 2, 3)))).capitalize()
    attributes = rng.sample(kind.attributes, k=min(len(kind.attributes), rng.choice((2, 2, 3, 4))))
    material = rng.choice(kind.materials)
    use = rng.choice(kind.uses)
    options = _options(rng, kind, department)
    colour = rng.choice(words.COLOURS)
    title = (
        f"{brand} {kind.noun.title()} {attributes[0].title()}, {attributes[-1].title()} {material} {kind.noun} "
        f"for {use}, {rng.choice(words.TAILS)}"
    )
    nouns = [brand.lower(), *kind.noun.split(), *material.split(), *kind.noun.split(), *use.split()]
    if "color" not in options and rng.random() < 0.5:
        title += f", {colour.title()}"
        nouns += colour.split()
    if rng.random() < 0.25:
        size = rng.choice(words.EXTRAS)
        title += f" {size}"
    return {
        "name": title,
        "full_description": _description(rng, kind, brand, attributes, material),
        "small_description": _bullets(rng, kind, attributes, material, use),
        "customization_options": options,
        "pricing": _pricing(rng, kind),
        "images": [],
        "category": department,
        "query": kind.query,
        "product_category": " › ".join(kind.path),
        "nouns": nouns,
        "attributes": attributes,
        "plain": (kind.noun, material),
    }


def _again(rng: random.Random, record: dict[str, Any]) -> dict[str, Any]:
    """The same listing once more, as shops have it, at another price or in other options."""
    twin = dict(record)
    if rng.random() < 0.5:
        twin["pricing"] = f"${rng.uniform(5, 60):.2f}"
    return twin


def _options(rng: random.Random, kind: words.ProductKind, department: str) -> dict[str, Any]:
    groups: dict[str, Any] = {}
    wanted = rng.choices((0, 1, 2, 3), weights=(45, 30, 21, 4))[0]
    for name in kind.groups[:wanted]:
        pool = words.SIZES[department] if name == "size" else words.OPTION_VALUES[name]
        values = rng.sample(pool, k=min(len(pool), rng.choice((2, 3, 4, 4, 5, 6, 9))))
        groups[name] = [{"value": value, "image": None} for value in values]
    if rng.random() < 0.1:
        groups["package"] = None
    return groups


def _pricing(rng: random.Random, kind: words.ProductKind) -> str:
    draw = rng.random()
    if draw < 0.09:
        return ""
    low = round(kind.price * rng.uniform(0.5, 2.2), 2)
    if draw < 0.18:
        return f"${low} - ${round(low * rng.uniform(1.1, 2.0), 2)}"
    return f"${low}"


def _description(rng: random.Random, kind, brand: str, attributes: list[str], material: str) -> str:
    if rng.random() < 0.27:
        return ""
    parts = [rng.choice(words.OPENINGS).format(brand=brand, noun=kind.noun, material=material)]
    parts += [rng.choice(words.PRAISES).format(attribute=a, noun=kind.noun) for a in attributes]
    parts += rng.sample(words.CLOSINGS, k=rng.randint(0, 3))
    return " ".join(parts)


def _bullets(rng: random.Random, kind, attributes: list[str], material: str, use: str) -> list[str]:
    found = [f"Material: {material}. Made for {use}. "]
    found += [rng.choice(words.PRAISES).format(attribute=a, noun=kind.noun) for a in attributes]
    found += rng.sample(words.CLOSINGS, k=rng.randint(0, 3))
    if rng.random() < 0.05:
        found.append("")
    return found[:8]


def _requests(rng: random.Random, record: dict[str, Any], number: int):
    """Entry of the attribute file and human instructions of a listing."""
    attributes, (noun, material) = record["attributes"], record["plain"]
    facts: dict[str, Any] = {"attributes": attributes}
    human = []
    asked = rng.sample(attributes, k=min(len(attributes), rng.choice((1, 2, 2))))
    # The first listing always has one, so that the smallest shop has a task.
    if number == 0 or rng.random() < 0.45:
        listed = " and ".join(asked)
        facts["instruction"] = rng.choice(words.REQUESTS).format(
            listed=listed, noun=noun, query=record["query"], material=material
        )
        facts["instruction_attributes"] = asked
    if number == 0 or rng.random() < 0.3:
        chosen = [
            rng.choice(contents)["value"] for contents in record["customization_options"].values() if contents
        ]
        text = rng.choice(words.HUMAN).format(noun=noun, material=material, attribute=asked[0])
        if chosen:
            text += f", in {' and '.join(chosen)}"
        wanted = [value.strip().replace("/", " | ").lower() for value in chosen]
        human.append(
            {
                "instruction": text.lower() + ".",
                "instruction_attributes": asked[:1],
                "instruction_options": wanted,
            }
        )
    return facts, human
