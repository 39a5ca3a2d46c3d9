"""Waiting with a deadline, without `asyncio.wait_for`'s way of losing a cancellation.

Before Python 3.12 a task that is cancelled in the very moment in which what it waits for is done goes on as if
nothing had happened (https://github.com/python/cpython/issues/86296).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

__all__ = ["within"]

T = TypeVar("T")


async def within(seconds: float, work: Awaitable[T]) -> T:
    """The result of `work`, if it comes in time.

    Raises:
        asyncio.TimeoutError: It did not; it has been cancelled.
    """
    task = asyncio.ensure_future(work)
    try:
        done, _ = await asyncio.wait({task}, timeout=max(0.0, seconds))
    except asyncio.CancelledError:
        _drop(task)
        raise
    if not done:
        _drop(task)
        raise asyncio.TimeoutError
    return task.result()


def _drop(task: asyncio.Future) -> None:
    task.cancel()
    task.add_done_callback(lambda t: t.cancelled() or t.exception())
