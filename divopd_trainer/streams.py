"""The learner's stream of batches, on one rank or many.

The main process composes; every rank gets its share of each batch. While the main process waits for turns it tells
the others so in regular intervals, so that no collective outlives its deadline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from divopd_gym.errors import DivOPDError

__all__ = ["BatchStream", "RemoteError"]


class RemoteError(DivOPDError, RuntimeError):
    """The main process failed; its own message is repeated here."""


class BatchStream:
    """Iterable over ``{"share": micro-batches of this rank, "facts": dict}``, one item an update.

    Args:
        collator: On the main process a `TurnCollator`; None elsewhere.
        next_update: Completed updates + 1.
        last_update: No batch is composed beyond this update.
        rank: This process.
        world: Processes.
        stopping: On the main process: whether to end the stream instead of composing another batch.
        on_end: Called on every rank when the stream ends.
        scatter: ``scatter(items or None) -> item``, a collective; the default is torch.distributed's.
    """

    tick_s = 20.0

    def __init__(
        self,
        collator: Any,
        *,
        next_update: Callable[[], int],
        last_update: int,
        rank: int = 0,
        world: int = 1,
        stopping: Callable[[], bool] = lambda: False,
        on_end: Callable[[], None] = lambda: None,
        scatter: Callable[[list[Any] | None], Any] | None = None,
    ) -> None:
        self._collator = collator
        self._next_update = next_update
        self._last_update = last_update
        self._rank, self._world = rank, world
        self._stopping, self._on_end = stopping, on_end
        self._scatter = scatter or _scatter

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while True:
            kind, value = self._turn()
            if kind == "error":
                raise RemoteError(f"The main process failed: {value}. See its own output for the cause.")
            if kind == "end":
                self._on_end()
                return
            if kind == "batch":
                yield value

    def _turn(self) -> tuple[str, Any]:
        if self._rank != 0:
            return self._scatter(None)
        try:
            items = self._compose()
        except BaseException as error:
            if self._world > 1:
                self._scatter([("error", f"{type(error).__name__}: {error}")] * self._world)
            raise
        return items[0] if self._world == 1 else self._scatter(items)

    def _compose(self) -> list[tuple[str, Any]]:
        update = self._next_update()
        if self._stopping() or update > self._last_update:
            return [("end", None)] * self._world
        batch = self._collator.poll(update, float("inf") if self._world == 1 else self.tick_s)
        if batch is not None:
            return [("batch", {"share": share, "facts": batch.facts}) for share in batch.shares]
        over = self._world == 1 or self._stopping() or self._collator.finished
        return [("end" if over else "wait", None)] * self._world


def _scatter(items: list[Any] | None) -> Any:
    import torch.distributed as dist

    received: list[Any] = [None]
    dist.scatter_object_list(received, items, src=0)
    return received[0]
