"""`Visit`: one shopper's way through the shop: which page follows which action, as the benchmark's server has it.

``compat="upstream"`` keeps its quirks: pages are recognised by words in their address, searching works everywhere, next
pages never end, the reward stands on the last page. ``compat="fixed"`` mends these.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import Any

from divopd_gym.envs.webshop import pages
from divopd_gym.envs.webshop.goals import Goal
from divopd_gym.envs.webshop.pages import Kind, Node, Page
from divopd_gym.envs.webshop.shop import Shop
from divopd_gym.errors import ConfigError

__all__ = ["BASE_URL", "COMPAT", "MODES", "PER_PAGE", "RESULTS", "Answer", "Visit", "parse_action"]

BASE_URL = "http://127.0.0.1:3000"
COMPAT = ("fixed", "upstream")
MODES = ("text", "text_rich", "html", "url")
PER_PAGE, RESULTS = 10, 50
_SUB = {name.lower(): name for name in pages.SUB_PAGES}


def parse_action(action: str) -> tuple[str, str | None]:
    """Name and lower-case argument of ``name[argument]``; the argument is None where the form is another."""
    # What the benchmark's pattern `(.+)\[(.+)\]` finds, which takes minutes for 100 kB of brackets.
    line = action.partition("\n")[0]
    end = line.rfind("]")
    start = line.rfind("[", 1, max(end - 1, 0))
    return (action, None) if start < 0 else (line[:start], line[start + 1 : end].lower())


@dataclass
class Answer:
    """What an action brought.

    Attributes:
        valid: whether it did anything.
        reward: of the purchase; 0 otherwise.
        done: whether something was bought.
    """

    valid: bool
    reward: float = 0.0
    done: bool = False


@dataclass
class _Memory:
    """What a visit remembers until the shopper goes back to the search page."""

    keywords: list[str] = field(default_factory=list)
    number: int = 1
    asin: str | None = None
    seen: set[str] = field(default_factory=set)
    options: dict[str, str] = field(default_factory=dict)


class Visit:
    """A visit of one shopper with one goal.

    Args:
        shop: products, search, prices.
        goal: what the shopper wants.
        session: name that stands in the addresses.
        compat: ``fixed`` or ``upstream``.
        attributes: whether product pages offer their attributes.
        seed: of the random products that ``search[<r>]`` gives.
    """

    def __init__(
        self,
        shop: Shop,
        goal: Goal,
        session: str,
        *,
        compat: str = "fixed",
        attributes: bool = False,
        seed: int = 0,
    ):
        if compat not in COMPAT:
            raise ConfigError(f"compat={compat!r}; choose one of {', '.join(COMPAT)}")
        self.shop, self.goal, self.session = shop, goal, session
        self._upstream = compat == "upstream"
        self._attributes = attributes
        self._rng = random.Random(seed)
        self.details: dict[str, Any] | None = None
        self.reward: float | None = None
        self._index()

    # What a shopper can see.
    @property
    def options(self) -> dict[str, str]:
        """Chosen option values by group."""
        return dict(self._memory.options)

    @property
    def number(self) -> int:
        """Number of the page of results."""
        return self._memory.number

    def available(self) -> dict[str, Any]:
        """``has_search_bar`` and ``clickables`` of the page."""
        names = list(self._clickables)
        if not self._upstream and self.page.search_bar:
            names.remove("search")
        return {"has_search_bar": self.page.search_bar, "clickables": names}

    def text(self) -> str:
        """The page in the form ``text``."""
        return pages.plain_text(self.page)

    def rich(self) -> str:
        """The page in the form ``text_rich``."""
        return pages.rich_text(self.page, self.clicked)

    def clicked(self, node: Node) -> bool:
        """Whether an option is chosen, or a product was looked at since the last search page."""
        if node.kind is Kind.LINK:
            return node.text in self._memory.seen
        if self._upstream:
            return f'"{node.text}"' in self.url
        return self._memory.options.get(node.group.lower()) == node.text

    # What a shopper can do.
    def act(self, action: str) -> Answer:
        """Do one action; what is not understood changes nothing."""
        if not self.understands(action):
            return Answer(False)
        name, argument = parse_action(action)
        if name == "search":
            return self._search(argument.split(" "), 1)
        return self._click(argument, self._clickables[argument])

    def understands(self, action: str) -> bool:
        """Whether an action would do something now."""
        name, argument = parse_action(action)
        if argument is None:
            return False
        if name == "search":
            keywords = argument.split(" ")
            # Two special searches for which the benchmark raises an exception.
            crash = keywords[0] == "<a>" or (keywords == ["<c>"] and self._upstream)
            return (self._upstream or self.page.search_bar) and not crash
        return name == "click" and argument in self._clickables and not self._is_search(argument)

    def _is_search(self, name: str) -> bool:
        return name == "search" and (self._upstream or self._clickables[name].kind is Kind.BUTTON)

    def _click(self, name: str, node: Node) -> Answer:
        where = self._where()
        lower = name.lower()
        # In the mended form a button is a button and an option an option, whatever their texts are.
        plain = self._upstream or node.kind is Kind.BUTTON
        if plain and lower == pages.BUY.lower():
            return self._buy()
        if plain and lower == pages.BACK.lower():
            self._index()
            return Answer(True)
        if plain and where == "results" and lower == pages.NEXT.lower():
            return self._search(self._memory.keywords, self._memory.number + 1)
        if plain and where == "results" and lower == pages.PREV.lower():
            return self._search(self._memory.keywords, self._memory.number - 1)
        if plain and where == "item" and lower == pages.PREV.lower():
            return self._search(self._memory.keywords, self._memory.number)
        if plain and where == "sub" and lower == pages.PREV.lower():
            self._item()
        elif plain and lower in _SUB:
            self._sub(_SUB[lower])
        else:
            self._choose(name, node)
            self._item()
        return Answer(True)

    def _where(self) -> str:
        if not self._upstream:
            return self.page.name
        # The words of a query can be taken for the name of a page.
        names = {"search_results": "results", "item_page": "item", "item_sub_page": "sub", "done": "done"}
        return next((page for word, page in names.items() if word in self.url), "")

    def _choose(self, name: str, node: Node) -> None:
        if node.kind is Kind.LINK:
            self._memory.asin = name.upper()
            self._memory.seen.add(self._memory.asin)
        elif node.kind is Kind.OPTION:
            self._memory.options[self._group(name, node).lower()] = name

    def _group(self, value: str, node: Node) -> str:
        if self._upstream:
            return node.group
        groups = [n.group for n in self.page.nodes if n.kind is Kind.OPTION and n.text == value]
        # A value that several groups have goes to the first where it is not chosen yet.
        return next((g for g in groups if self._memory.options.get(g.lower()) != value), node.group)

    def _show(self, page: Page, url: str) -> None:
        self.page, self.url = page, f"{BASE_URL}/{url}"
        self._clickables = page.clickables()
        if not self._upstream:
            buttons = {n.text.lower(): n for n in page.nodes if n.kind is Kind.BUTTON}
            self._clickables.update(buttons)

    def _index(self) -> None:
        self._memory = _Memory()
        self._show(pages.index_page(self.goal.text), self.session)

    def _search(self, keywords: list[str], number: int) -> Answer:
        rows = self._rows(keywords)
        memory = self._memory
        memory.keywords, memory.number, memory.asin, memory.options = keywords, number, None, {}
        found = [self.shop.product(row) for row in rows[(number - 1) * PER_PAGE : number * PER_PAGE]]
        more = self._upstream or number * PER_PAGE < len(rows)
        page = pages.results_page(self.goal.text, found, len(rows), number, more)
        self._show(page, f"search_results/{self.session}/{'+'.join(keywords)}/{number}")
        return Answer(True)

    def _rows(self, keywords: list[str]) -> list[int]:
        first, rest = keywords[0], " ".join(keywords[1:]).strip()
        if first == "<r>":
            return self._rng.sample(range(len(self.shop)), min(RESULTS, len(self.shop)))
        if first == "<c>":
            return self.shop.rows_where("category", keywords[1].strip() if self._upstream else rest)
        if first == "<q>":
            return self.shop.rows_where("query", rest)
        return self.shop.search(" ".join(keywords), RESULTS)

    def _path(self) -> str:
        return f"{self.session}/{self._memory.asin}/{'+'.join(self._memory.keywords)}/{self._memory.number}"

    def _product(self):
        return self.shop.product(self.shop.row_of(self._memory.asin))

    def _item(self) -> None:
        page = pages.item_page(self.goal.text, self._product(), self._attributes)
        self._show(page, f"item_page/{self._path()}/{json.dumps(self._memory.options)}")

    def _sub(self, name: str) -> None:
        page = pages.sub_page(self.goal.text, self._product(), name)
        self._show(page, f"item_sub_page/{self._path()}/{name}/{self._memory.options}")

    def _buy(self) -> Answer:
        asin, options = self._memory.asin, self._memory.options
        self.reward, self.details = self.shop.judge(asin, self.goal, options)
        page = pages.done_page(asin, options, self.reward if self._upstream else None)
        page.product = self._product()
        self._show(page, f"done/{self.session}/{asin}/{options}")
        return Answer(True, self.reward, True)
