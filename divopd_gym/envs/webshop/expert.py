"""`ShopExpert`: searches for the goal, opens the target, chooses its options, buys. `gold_path` plays it in advance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from divopd_gym.envs.webshop.fuzzy import similarity
from divopd_gym.envs.webshop.goals import Goal
from divopd_gym.envs.webshop.products import Product
from divopd_gym.envs.webshop.reward import reduce_colour
from divopd_gym.envs.webshop.shop import Shop
from divopd_gym.envs.webshop.site import Visit

__all__ = ["ShopExpert", "gold_path", "plan_options", "queries"]

LONGEST_QUERY = 250
"""Characters of a query at most; replies longer than 300 characters count as prose."""


def plan_options(product: Product, goal: Goal) -> dict[str, str]:
    """Values to choose, by option group: those of a generated goal, the likest ones where people wrote it."""
    if isinstance(goal.options, dict):
        return {name: value for name, value in goal.options.items() if value in product.options.get(name, ())}
    plan: dict[str, str] = {}
    for wanted in goal.options:
        choices = [
            (wanted == value, similarity(str(reduce_colour(value)), str(reduce_colour(wanted))), name, value)
            for name, values in product.options.items()
            if name not in plan
            for value in values
        ]
        if choices:
            # The first of the best, so that the plan does not depend on spelling.
            best = max(choices, key=lambda one: one[:2])
            plan[best[2]] = best[3]
    return plan


def queries(goal: Goal) -> list[str]:
    """Searches worth trying: what was asked for without the price, then the title of the target."""
    asked = goal.text.rpartition(", and price lower than")[0] or goal.text
    return [_short(text) for text in (asked, goal.title) if text.strip()]


def _short(text: str) -> str:
    text = " ".join(text.split())
    if len(text) <= LONGEST_QUERY:
        return text
    return text[: LONGEST_QUERY + 1].rpartition(" ")[0] or text[:LONGEST_QUERY]


class ShopExpert:
    """Knows which product a goal was made from, and goes on from any page, whoever led there.

    Args:
        shop: the shop.
        goal_of: gives the goal of a task id.
    """

    def __init__(self, shop: Shop, goal_of: Callable[[str], Goal]):
        self._shop, self._goal_of = shop, goal_of
        self._info: dict = {}

    def reset(self, observation: str, info: dict) -> None:
        """See `Expert.reset`."""
        goal = self._goal_of(info["task"])
        product = self._shop.product(self._shop.row_of(goal.asin))
        self._target = goal.asin.lower()
        self._plan = plan_options(product, goal)
        self._queries: Sequence[str] = queries(goal)
        self._tried = 0
        self._clicks: Counter[str] = Counter()
        self._info = info

    def act(self) -> str:
        """See `Expert.act`."""
        info = self._info
        clickables = info["available_actions"]["clickables"]
        if info["page"] == "index":
            return f"search[{self._queries[min(self._tried, len(self._queries) - 1)]}]"
        if info["page"] == "results":
            if self._target in clickables:
                return f"click[{self._target}]"
            # Looking at more pages of a poor search costs more turns than a better search.
            last = self._tried >= len(self._queries)
            return "click[next >]" if last and "next >" in clickables else "click[back to search]"
        if info["page"] == "item" and (info["asin"] or "").lower() == self._target:
            for name, value in self._plan.items():
                chosen = info["options"].get(name.lower()) == value
                # A value that two groups share may land in the other one; clicking on for ever would not help.
                if not chosen and value in clickables and self._clicks[value] < 2:
                    return f"click[{value}]"
            return "click[buy now]"
        return "click[< prev]" if "< prev" in clickables else "click[back to search]"

    def observe(self, action: str, observation: str, info: dict) -> None:
        """See `Expert.observe`."""
        if info["page"] == "item" and action.startswith("click["):
            self._clicks[action[6:-1]] += 1
        if (
            info["page"] == "results"
            and action == f"search[{self._queries[min(self._tried, len(self._queries) - 1)]}]"
        ):
            self._tried += 1
        self._info = info


def gold_path(shop: Shop, goal: Goal, compat: str) -> list[str] | None:
    """Actions that earn the full reward, or None where no way is known.

    Args:
        shop: the shop.
        goal: the goal.
        compat: rules of the visit.
    """
    row = shop.row_of(goal.asin)
    if row is None:
        return None
    plan = plan_options(shop.product(row), goal)
    for query in reversed(queries(goal)):
        visit = Visit(shop, goal, "gold", compat=compat)
        path = [f"search[{query}]"]
        visit.act(path[0])
        while goal.asin.lower() not in visit.available()["clickables"]:
            if visit.page.name != "results" or not visit.page.found:
                break
            path.append("click[next >]")
            if not visit.act(path[-1]).valid:
                break
        path += [
            f"click[{goal.asin.lower()}]",
            *(f"click[{value}]" for value in plan.values()),
            "click[buy now]",
        ]
        answers = [visit.act(action) for action in path[path.index(f"click[{goal.asin.lower()}]") :]]
        if all(answer.valid for answer in answers) and answers[-1].reward == 1.0:
            return path
    return None
