"""Pages as HTML, for the observation form ``html`` and for a person in a browser. The templates are our own."""

from __future__ import annotations

from collections.abc import Callable
from html import escape

from divopd_gym.envs.webshop.pages import Kind, Node, Page

__all__ = ["html_page"]

_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}"
    ".goal{background:#f3f0e8;border-left:4px solid #b8860b;padding:.6rem 1rem}"
    "form{display:inline}button{font:inherit;margin:.15rem;padding:.3rem .8rem;border:1px solid #888;"
    "border-radius:.4rem;background:#fff;cursor:pointer}button.chosen{background:#2d6a4f;color:#fff}"
    "button.link{border:0;color:#0b5394;text-decoration:underline;padding:0}"
    ".entry{border-top:1px solid #ddd;padding:.6rem 0}"
)


def _form(action: str, label: str, style: str = "") -> str:
    kind = f' class="{style}"' if style else ""
    return (
        f'<form method="post" action="/act"><input type="hidden" name="action" value="{escape(action)}">'
        f"<button{kind}>{escape(label)}</button></form>"
    )


def _node(node: Node, clicked: Callable[[Node], bool]) -> str:
    if node.kind is Kind.BUTTON:
        return _form(f"click[{node.text.lower()}]", node.text)
    if node.kind is Kind.OPTION:
        return _form(f"click[{node.text}]", node.text, "chosen" if clicked(node) else "option")
    if node.kind is Kind.LINK:
        return '<div class="entry">' + _form(f"click[{node.text.lower()}]", node.text, "link") + "</div>"
    return f"<p>{escape(node.text)}</p>"


def html_page(page: Page, clicked: Callable[[Node], bool], footer: str = "") -> str:
    """A page as a complete HTML document that works without scripts.

    Args:
        page: the page.
        clicked: whether an option counts as chosen.
        footer: HTML to put under it.
    """
    parts = []
    for number, node in enumerate(page.nodes):
        if page.search_bar and node.kind is Kind.BUTTON:
            parts.append(
                '<form method="post" action="/act"><input id="search_input" name="query" autofocus required '
                f'placeholder="What are you looking for?"><button>{escape(node.text)}</button></form>'
            )
        elif number and page.nodes[number - 1].text.strip() == "Instruction:":
            parts.append(f'<p class="goal">{escape(node.text)}</p>')
        else:
            parts.append(_node(node, clicked))
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>WebShop</title>'
        f'<link rel="icon" href="data:,"><style>{_STYLE}</style></head><body>'
        f'<main id="{page.name}">{"".join(parts)}</main>{footer}</body></html>'
    )
