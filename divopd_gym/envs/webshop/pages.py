"""Pages as lists of nodes, and their three text forms: ``text``, ``text_rich`` and the clickables.

The node order and the white space are those in which agents trained on the benchmark expect them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from divopd_gym.envs.webshop.products import Product

__all__ = [
    "BACK",
    "BUY",
    "NEXT",
    "PREV",
    "SUB_PAGES",
    "Kind",
    "Node",
    "Page",
    "done_page",
    "index_page",
    "item_page",
    "results_page",
    "rich_text",
    "sub_page",
    "plain_text",
]

BACK, NEXT, PREV, BUY = "Back to Search", "Next >", "< Prev", "Buy Now"
SUB_PAGES = ("Description", "Features", "Reviews", "Attributes")
_BLANKS = " \n\t\f\r"


class Kind(str, Enum):
    """What a node of a page is."""

    TEXT = "text"
    BUTTON = "button"
    LINK = "link"
    OPTION = "option"


@dataclass(frozen=True)
class Node:
    """A piece of text on a page.

    Attributes:
        kind: what it is.
        text: as it stands.
        group: the option group of an option.
    """

    kind: Kind
    text: str
    group: str = ""


@dataclass
class Page:
    """One page.

    Attributes:
        name: ``index``, ``results``, ``item``, ``sub`` or ``done``.
        nodes: its texts in order.
        search_bar: whether it has a field to search.
        product: the product that it shows, if one.
        found: the products that it lists.
    """

    name: str
    nodes: list[Node]
    search_bar: bool = False
    product: Product | None = None
    found: list[Product] = field(default_factory=list)

    def clickables(self) -> dict[str, Node]:
        """What can be clicked, by the text to click: buttons, product links, options.

        Where two go by the same text, the later one counts, in the place of the earlier.
        """
        found: dict[str, Node] = {}
        for kind in (Kind.BUTTON, Kind.LINK, Kind.OPTION):
            for node in self.nodes:
                if node.kind is kind:
                    found[node.text if kind is Kind.OPTION else node.text.lower()] = node
        return found


def _text(text: str) -> Node:
    return Node(Kind.TEXT, text)


def _button(text: str) -> Node:
    return Node(Kind.BUTTON, text)


def _head(instruction: str) -> list[Node]:
    return [_text("Instruction:"), _text(instruction), _button(BACK)]


def index_page(instruction: str) -> Page:
    """The page with the search field."""
    nodes = [_text("WebShop"), _text("Instruction: "), _text(instruction), _button("Search")]
    return Page("index", nodes, search_bar=True)


def results_page(instruction: str, found: Sequence[Product], total: int, number: int, more: bool) -> Page:
    """A page of search results.

    Args:
        instruction: the goal's text.
        found: products on this page.
        total: results in all.
        number: of this page; the first is 1.
        more: whether a next page is offered.
    """
    nodes = [*_head(instruction), _text(f"Page {number} (Total results: {total})")]
    if number > 1:
        nodes.append(_button(PREV))
    if more:
        nodes.append(_button(NEXT))
    for product in found:
        nodes += [Node(Kind.LINK, product.asin), _text(product.title), _text(product.price_text)]
    return Page("results", nodes, found=list(found))


def item_page(instruction: str, product: Product, attributes: bool) -> Page:
    """A product's own page; `attributes` adds the button to its attributes."""
    nodes = [*_head(instruction), _button(PREV)]
    for group, values in product.options.items():
        nodes.append(_text(group))
        nodes += [Node(Kind.OPTION, value, group) for value in values]
    nodes += [_text(product.title), _text(f"Price: {product.price_text}"), _text("Rating: N.A.")]
    nodes += [_button(name) for name in SUB_PAGES[: 4 if attributes else 3]]
    nodes.append(_button(BUY))
    return Page("item", nodes, product=product)


def sub_page(instruction: str, product: Product, name: str) -> Page:
    """Description, features, reviews or attributes of a product. No catalogue has reviews."""
    nodes = [*_head(instruction), _button(PREV)]
    if name == "Description":
        nodes.append(_text(product.description))
    elif name == "Features":
        nodes += [_text(f" {bullet}") for bullet in product.bullets]
    elif name == "Attributes":
        nodes += [_text(f" {attribute}") for attribute in product.attributes]
        nodes += [_text(product.category), _text(product.query), _text(product.product_category)]
    return Page("sub", nodes, product=product)


def _json(options: Mapping[str, str]) -> str:
    text = json.dumps(dict(sorted(options.items())))
    for letter in "<>&'":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


_TARGET = (
    "asin",
    "options",
    "attrs",
    "price upper",
    "instuction text",
    "category",
    "product category",
    "query",
)


def done_page(asin: str, options: Mapping[str, str], reward: float | None) -> Page:
    """The page after a purchase.

    Args:
        asin: what was bought.
        options: the chosen options.
        reward: shown as the benchmark does, with its empty fields; None shows neither.
    """
    nodes = [_text("Thank you for shopping with us!")]
    if reward is None:
        nodes += [_text("Purchased"), _text(asin)]
        nodes += [_text(f"{group}: {value}") for group, value in options.items()]
        return Page("done", nodes)
    nodes += [_text("Your code: "), _text("None"), _text(" (Paste it in your MTurk interface.)")]
    nodes += [_text("Purchased"), _text("asin"), _text(asin), _text("options"), _text(_json(options))]
    for name in ("attrs", "category", "query", "product category"):
        nodes += [_text(name), _text("None")]
    nodes += [_text("Target"), *(_text(name) for name in _TARGET), _text("Goal "), _text("None")]
    nodes += [_text("Reward"), _text("Your score (min 0.0, max 1.0)"), _text(str(reward))]
    nodes += [_text("Reward Details "), _text("None")]
    return Page("done", nodes)


def _shown(nodes: Iterable[Node]) -> Iterable[Node]:
    """The nodes as an HTML reader keeps them: no empty ones; blank ones are one blank, or gone if they break lines."""
    for node in nodes:
        text = node.text
        if not text.strip(_BLANKS):
            if not text or "\n" in text:
                continue
            text = " "
        yield node if text is node.text else Node(node.kind, text, node.group)


def plain_text(page: Page) -> str:
    """The ``text`` form: stripped nodes joined by ``[SEP]``."""
    return " [SEP] ".join(node.text.strip() for node in _shown(page.nodes))


def rich_text(page: Page, clicked: Callable[[Node], bool]) -> str:
    """The ``text_rich`` form: a line per node, buttons marked, what was clicked marked and told first.

    Args:
        page: the page.
        clicked: whether an option or product link counts as clicked.
    """
    first: list[str] = []
    lines = []
    for node in _shown(page.nodes):
        text = node.text
        if node.kind is Kind.BUTTON:
            text = f"[button] {text} [button_]"
        elif node.kind in (Kind.OPTION, Kind.LINK):
            lead = "  " if node.kind is Kind.OPTION else "\n"
            if clicked(node):
                if node.kind is Kind.OPTION:
                    first.insert(0, f"You have clicked {text}.")
                text = f"{lead}[clicked button] {text} [clicked button_]"
            else:
                text = f"{lead}[button] {text} [button_]"
        lines.append(text)
    return "".join(line + "\n" for line in first + lines)
