"""Waiting with a deadline, without `asyncio.wait_for`'s way of losing a cancellation.

Before Python 3.12 a task that is cancelled in the very moment in which what it waits for is done goes on as if
nothing had happened (https://github.com/python/cpython/issues/86296).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

__all__ = ["within"]

T = TypeVar("T")


async def within(seconds: float, work: Awaitable[T], undo: Callable[[T], Any] | None = None) -> T:
    """The result of `work`, if it comes in time.

    Args:
        seconds: How long to wait.
        work: What to wait for.
        undo: Called with a result that came although nobody waits for it any more, such as a thing that was lent.

    Raises:
        asyncio.TimeoutError: It did not; it has been cancelled.
    """
    task = asyncio.ensure_future(work)
    try:
        done, _ = await asyncio.wait({task}, timeout=max(0.0, seconds))
    except asyncio.CancelledError:
        _drop(task, undo)
        raise
    if not done:
        _drop(task, undo)
        raise asyncio.TimeoutError
    return task.result()


def _drop(task: asyncio.Future[T], undo: Callable[[T], Any] | None) -> None:
    def ended(task: asyncio.Future[T]) -> None:
        if not task.cancelled() and task.exception() is None and undo is not None:
            undo(task.result())

    task.cancel()
    task.add_done_callback(ended)
