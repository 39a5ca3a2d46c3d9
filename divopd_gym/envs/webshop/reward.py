"""`judge`: the benchmark's reward for a purchase, with its parts.

Share of wanted attributes, options and the price met, times a factor for the kind of product (S. Yao et al., "WebShop",
2022, section 3.2, as its code has it: option names count as words of a generated goal's options, colours are reduced to
the first colour name they contain, and the words 'red' or 'tan' count anywhere in a word).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from divopd_gym.envs.webshop.fuzzy import alike
from divopd_gym.envs.webshop.goals import Goal
from divopd_gym.envs.webshop.nouns import NounTagger
from divopd_gym.envs.webshop.products import Product

__all__ = ["COLOURS", "judge", "reduce_colour"]

COLOURS = tuple(
    """
    alabaster apricot aqua ash asphalt azure banana beige black blue blush bordeaux bronze brown burgundy camel camo
    caramel champagne charcoal cheetah chestnut chocolate christmas coffee cognac copper coral cranberry cream crystal
    dark denim eggplant elephant espresso fuchsia gold granite grape graphite grass gray green grey heather indigo ivory
    ivy khaki lavender lemon leopard light lilac lime magenta maroon mauve merlot midnight mint mocha multicolor mushroom
    mustard natural navy nude olive orange peach pewter pink plum purple rainbow red rose royal rust sand sapphire
    seashell silver skull slate steel stone stonewash sunflower tan taupe teal tiger turquoise violet walnut wheat white
    wine yellow
    """.split()  # noqa: SIM905
)
"""The benchmark's colour names, in the order in which they are looked for."""


def reduce_colour(value: str | tuple[str, str]) -> str | tuple[str, str]:
    """The first colour name that an option value contains, else the value; of a pair, one that is an element."""
    return next((colour for colour in COLOURS if colour in value), value)


def _kind(bought: Product, goal: Goal, nouns: Sequence[str], wanted: Sequence[str]) -> dict[str, Any]:
    same_query = bought.query == goal.query

    def parts(path: str) -> set[str]:
        return {part.strip() for part in path.split("›")}

    same_category = len(parts(bought.product_category) & parts(goal.product_category)) >= 2
    title = len(set(nouns) & set(wanted)) / len(wanted) if wanted else 0.2
    factor = 1.0 if same_query or same_category or title > 0.2 else 0.5
    if title < 0.1:
        factor = 0.1
    if title == 0.0:
        factor = 0.0
    return {
        "r_type": factor,
        "query_match": same_query,
        "category_match": same_category,
        "title_score": title,
    }


def _attributes_met(bought: Product, goal: Goal) -> int:
    texts = (bought.title.lower(), " ".join(bought.bullets).lower(), bought.description.lower())
    return sum(
        any(alike(has, wanted) for has in bought.attributes) or any(wanted in text for text in texts)
        for wanted in goal.attributes
    )


def options_met(chosen: Sequence[str], goal: Goal) -> int:
    """How many of the goal's options some chosen value fulfils."""
    wanted = list(goal.options.items()) if isinstance(goal.options, dict) else list(goal.options)
    has = [reduce_colour(value) for value in chosen]
    return sum(any(alike(value, reduce_colour(one)) for value in has) for one in wanted)


def judge(
    bought: Product, goal: Goal, price: float, options: Mapping[str, str], tagger: NounTagger, target: Product
) -> tuple[float, dict[str, Any]]:
    """Reward of buying a product.

    Args:
        bought: the product.
        goal: what was asked for.
        price: what it costs.
        options: chosen value of each option group.
        tagger: finds the nouns of titles.
        target: the product that the goal was made from.

    Returns:
        The reward, 0 to 1, and its parts under the benchmark's names.
    """
    parts = _kind(bought, goal, tagger.nouns(bought), tagger.nouns(target))
    attributes, wanted = _attributes_met(bought, goal), len(goal.options)
    chosen = options_met(list(options.values()), goal)
    cheap = price <= goal.price_upper
    total = len(goal.attributes) + wanted + 1
    parts |= {
        "r_att": attributes / len(goal.attributes) if goal.attributes else 0.0,
        "w_att": len(goal.attributes) / total,
        "r_price": cheap,
        "w_price": 1 / total,
    }
    if wanted:
        parts |= {"r_option": chosen / wanted, "w_option": wanted / total}
    return (attributes + chosen + cheap) / total * parts["r_type"], parts
