"""MkDocs hooks: pages that do not exist yet leave the navigation, and the table of settings is read from the source."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "divopd_trainer" / "config.py"
MARK = "<!-- settings -->"


def on_config(config: Any) -> Any:
    """Drop pages of ``extra.written_later`` that are not there."""
    absent = {
        page for page in config["extra"].get("written_later", ()) if not (ROOT / "docs" / page).exists()
    }
    config["nav"] = without(config["nav"], absent)
    return config


def without(nav: list[Any], absent: set[str]) -> list[Any]:
    """The navigation without some pages and without sections that are then empty."""
    kept = []
    for item in nav:
        if isinstance(item, str):
            kept += [] if item in absent else [item]
            continue
        ((title, target),) = item.items()
        if isinstance(target, list):
            target = without(target, absent)
        if target and not (isinstance(target, str) and target in absent):
            kept.append({title: target})
    return kept


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the table of settings where it is asked for."""
    return markdown.replace(MARK, settings_tables()) if MARK in markdown else markdown


def settings() -> list[tuple[str, list[tuple[str, str, str]]]]:
    """(heading, [(name, default, help)]) of every setting of a run, in the order of the source."""
    source = CONFIG.read_text("utf-8")
    lines = source.splitlines()
    (config,) = [
        n for n in ast.parse(source).body if isinstance(n, ast.ClassDef) and n.name == "DivOPDConfig"
    ]
    groups: list[tuple[str, list[tuple[str, str, str]]]] = []
    seen = 0
    for node in config.body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.value, ast.Call):
            continue
        if getattr(node.value.func, "id", "") != "_option":
            continue
        for line in lines[seen : node.lineno - 1]:
            if found := re.fullmatch(r"    # (.+?)\.?", line):
                groups.append((found[1], []))
        seen = node.end_lineno
        values = {k.arg: k.value for k in node.value.keywords}
        default = node.value.args[0] if node.value.args else values["default"]
        text = node.value.args[1] if len(node.value.args) > 1 else values["help"]
        if not groups:
            groups.append(("Settings", []))
        groups[-1][1].append((node.target.id, _shown(default), ast.literal_eval(text)))
    return [group for group in groups if group[1]]


def _shown(default: ast.expr) -> str:
    try:
        value = ast.literal_eval(default)
    except ValueError:
        return ast.unparse(default)
    return (
        {None: "null", True: "true", False: "false"}.get(value, str(value))
        if not isinstance(value, (dict, list))
        else str(value)
    )


def settings_tables() -> str:
    """The settings as Markdown."""
    parts = []
    for heading, rows in settings():
        parts += [f"## {heading}", "", "| setting | default | meaning |", "|---|---|---|"]
        for name, default, text in rows:
            cell = text.replace("|", "\\|").replace("<", "&lt;")
            parts.append(f"| `{name}` | `{default}` | {cell} |")
        parts.append("")
    return "\n".join(parts)
