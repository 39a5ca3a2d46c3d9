"""Seeds that follow from what they are for, so no two requests share one and a replay has the same ones."""

from __future__ import annotations

import hashlib

__all__ = ["derive_seed", "episode_seed", "request_seed"]


def derive_seed(*parts: int | str) -> int:
    """A number from 0 to 2**63 - 1 that depends on these parts, their order and their types, and on nothing else.

    Every part is written with its type and length, so no two lists of parts read the same.
    """
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        kind, text = ("s", part) if isinstance(part, str) else ("i", str(int(part)))
        data = text.encode("utf-8", "surrogatepass")
        digest.update(f"{kind}{len(data)}:".encode() + data)
    return int.from_bytes(digest.digest(), "big") >> 1


def request_seed(run_seed: int, task: str, attempt: int, turn: int) -> int:
    """Seed of the sampling of one turn."""
    return derive_seed("request", run_seed, task, attempt, turn)


def episode_seed(run_seed: int, task: str, attempt: int) -> int:
    """Seed of an environment's reset; below 2**31, which every simulator takes."""
    return derive_seed("episode", run_seed, task, attempt) >> 32
