"""The text of single tokens, read from a tokenizer.json as plain JSON: no code of a run is ever executed.

The file is looked for in the run directory, then where the run's `model` lies on this machine (a folder or the Hub's
local cache); nothing is downloaded. Without one the report shows token ids.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..records import Run

__all__ = ["find_vocabulary", "read_vocabulary"]

FILE = "tokenizer.json"


def find_vocabulary(run: Run) -> dict[int, str]:
    """Token id -> text for a run's student; empty when no tokenizer can be found or read."""
    for path in _candidates(run):
        try:
            if path.is_file():
                return read_vocabulary(path)
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            run.notices.append(f"{path} cannot be read as a tokenizer; the episodes show token ids.")
    return {}


def _candidates(run: Run) -> list[Path]:
    places = [run.path / FILE, run.path / "final" / FILE]
    places += [folder / FILE for folder in sorted(run.path.glob("checkpoints/checkpoint-*"))[-1:]]
    config = run.config if isinstance(run.config, dict) else {}
    model = config.get("model")
    if isinstance(model, str) and model:
        places.append(Path(model).expanduser() / FILE)
        cached = _cached(model)
        places += [cached] if cached is not None else []
    return places


def _cached(model: str) -> Path | None:
    """The file in the Hub's local cache; never asks the network."""
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(model, FILE)
    except (ImportError, ValueError):
        return None
    return Path(found) if isinstance(found, str) else None


def read_vocabulary(path: str | Path) -> dict[int, str]:
    """Token id -> text.

    Args:
        path: A tokenizer.json of the `tokenizers` library (BPE, WordPiece, WordLevel or Unigram).

    Raises:
        ValueError: It is no JSON, or holds no vocabulary.
    """
    data = json.loads(Path(path).read_text("utf-8"))
    model = data["model"]
    entries: Any = model["vocab"]
    pieces = (
        {int(token_id): str(piece) for piece, token_id in entries.items()}
        if isinstance(entries, dict)
        else {token_id: str(entry[0]) for token_id, entry in enumerate(entries)}
    )
    if _uses(data.get("decoder"), "ByteLevel") or _uses(data.get("pre_tokenizer"), "ByteLevel"):
        table = _byte_table()
        texts = {token_id: _from_bytes(piece, table) for token_id, piece in pieces.items()}
    else:
        # SentencePiece writes a space as a low line of its own.
        texts = {token_id: piece.replace("\u2581", " ") for token_id, piece in pieces.items()}
    for token in data.get("added_tokens") or ():
        texts[int(token["id"])] = str(token["content"])
    return texts


def _uses(part: Any, kind: str) -> bool:
    if isinstance(part, dict):
        return part.get("type") == kind or any(_uses(value, kind) for value in part.values())
    return isinstance(part, list) and any(_uses(value, kind) for value in part)


def _byte_table() -> dict[str, int]:
    """Character -> byte of the byte-level alphabet: printable bytes stand for themselves, others from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    return table | {chr(0x100 + place): byte for place, byte in enumerate(others)}


def _from_bytes(piece: str, table: dict[str, int]) -> str:
    if any(sign not in table for sign in piece):
        return piece
    return bytes(table[sign] for sign in piece).decode("utf-8", errors="replace")
