"""Keys and values of running and recent conversations: slots, and which prefix each slot holds.

`SlotTable` is the bookkeeping (no tensors): it finds the slot whose tokens share the longest prefix with a
prompt. `KVBuffers` holds the tensors, [slots, kv_heads, T, dim] a layer, growing on demand. `SlotCache` shows a
batch of slots to a transformers model.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache

__all__ = ["KVBuffers", "Lease", "SlotCache", "SlotTable"]

_ROUND = 128
# Copying a shorter prefix from another slot costs more than computing it.
_MIN_COPY = 16


@dataclass
class _Slot:
    tokens: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    key: Hashable | None = None
    busy: bool = False
    used: int = 0


@dataclass(frozen=True)
class Lease:
    """A slot given to a request.

    Attributes:
        slot: Its number.
        reused: How many leading prompt tokens it holds already, once `copy_from` was copied.
        copy_from: Another slot whose first `reused` entries must be copied here first, or None.
    """

    slot: int
    reused: int
    copy_from: int | None = None


class SlotTable:
    """Which slot holds which tokens; the least recently used idle slot is given away first."""

    def __init__(self, slots: int) -> None:
        self._slots = [_Slot() for _ in range(slots)]
        self._by_key: dict[Hashable, int] = {}
        self._clock = 0

    def acquire(self, key: Hashable | None, prompt: np.ndarray) -> Lease | None:
        """A slot for a prompt, or None while all are busy.

        At least the prompt's last token is left to compute, since its logits are wanted.
        """
        limit = len(prompt) - 1
        own = self._by_key.get(key) if key is not None else None
        if own is not None and not self._slots[own].busy:
            return self._take(own, key, min(self._shared(own, prompt), limit))
        idle = [i for i, s in enumerate(self._slots) if not s.busy]
        if not idle:
            return None
        chosen = min(idle, key=lambda i: (self._slots[i].used, i))
        source, shared = chosen, 0
        for i, slot in enumerate(self._slots):
            # A longer array than what is shared now is the only kind that can beat it.
            if len(slot.tokens) > shared and (n := min(self._shared(i, prompt), limit)) > shared:
                source, shared = i, n
        if source != chosen and shared < _MIN_COPY:
            source, shared = chosen, min(self._shared(chosen, prompt), limit)
        return self._take(chosen, key, shared, None if source == chosen else source)

    def release(self, slot: int, tokens: np.ndarray) -> None:
        """The request is over; `tokens` are those whose keys and values the slot now holds."""
        entry = self._slots[slot]
        entry.busy = False
        entry.tokens = tokens
        if entry.key is None:
            entry.used = 0

    def forget(self, key: Hashable) -> None:
        """The conversation is over: its slot is the first to be given away."""
        slot = self._by_key.pop(key, None)
        if slot is not None:
            self._slots[slot].key = None
            self._slots[slot].used = 0

    def invalidate(self) -> None:
        """Nothing held is valid any more (the weights changed)."""
        for slot in self._slots:
            slot.tokens = slot.tokens[:0]

    def _take(self, slot: int, key: Hashable | None, reused: int, copy_from: int | None = None) -> Lease:
        entry = self._slots[slot]
        if entry.key is not None and entry.key != key:
            self._by_key.pop(entry.key, None)
        if key is not None and key not in self._by_key:
            self._by_key[key] = slot
            entry.key = key
        elif key is None or self._by_key[key] != slot:
            entry.key = None
        self._clock += 1
        entry.used, entry.busy = self._clock, True
        # Until release only the reused part is certain; another request may copy no more than that.
        source = self._slots[slot if copy_from is None else copy_from]
        entry.tokens = source.tokens[:reused]
        return Lease(slot, reused, copy_from)

    def _shared(self, slot: int, prompt: np.ndarray) -> int:
        tokens = self._slots[slot].tokens
        n = min(len(tokens), len(prompt))
        differs = tokens[:n] != prompt[:n]
        first = int(differs.argmax()) if n else 0
        return first if n and differs[first] else n


class KVBuffers:
    """The tensors behind the slots.

    Layers are created at their first use, since only the model knows its heads. All share one capacity T.

    Args:
        slots: How many conversations fit.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.capacity = _ROUND
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def ensure_layer(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Create a layer's buffers from the first states [_, kv_heads, _, dim] written to it."""
        if layer < len(self.keys):
            return
        # Zeros, because a masked position still takes part as 0 * value and must not be NaN.
        self.keys.append(keys.new_zeros(self.slots, keys.shape[1], self.capacity, keys.shape[-1]))
        self.values.append(values.new_zeros(self.slots, values.shape[1], self.capacity, values.shape[-1]))

    def reserve(self, length: int) -> None:
        """Make room for `length` positions a slot."""
        if length <= self.capacity:
            return
        capacity = -(-max(length, self.capacity * 3 // 2) // _ROUND) * _ROUND
        try:
            self._resize(capacity)
        except Exception:
            self._resize(self.capacity)  # layers of unlike capacity would be written to in the wrong places
            raise
        self.capacity = capacity

    def _resize(self, capacity: int) -> None:
        for buffers in (self.keys, self.values):
            for i, old in enumerate(buffers):
                if old.shape[2] != capacity:
                    kept = min(capacity, self.capacity)
                    sized = old.new_zeros(self.slots, old.shape[1], capacity, old.shape[-1])
                    sized[:, :, :kept] = old[:, :, :kept]
                    buffers[i] = sized

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of one slot to another."""
        for buffers in (self.keys, self.values):
            for buffer in buffers:
                buffer[target, :, :length] = buffer[source, :, :length]

    @property
    def bytes(self) -> int:
        """Memory held."""
        return sum(b.numel() * b.element_size() for b in [*self.keys, *self.values])


class _SlotLayer:
    """What a transformers model asks of one layer of a cache."""

    is_sliding = False
    is_compileable = False
    is_initialized = True

    def __init__(self, cache: SlotCache) -> None:
        self._cache = cache

    def get_seq_length(self) -> int:
        return self._cache.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.length, 0

    def get_max_length(self) -> int:
        return -1


class SlotCache(Cache):
    """A batch of slots, as a transformers model sees them.

    Row r of the batch writes its q new states at positions ``starts[r] ... starts[r] + q - 1`` of its slot and
    attends over the first `length` positions; the caller's mask hides what is not the row's own.

    Args:
        buffers: The tensors.
        slots: Slot number of each row.
        starts: First new position of each row.
        width: q, the padded number of new tokens.
        layers: How many layers the model has.
        device: Where the model is.
    """

    def __init__(
        self,
        buffers: KVBuffers,
        slots: Sequence[int],
        starts: Sequence[int],
        width: int,
        layers: int,
        device: torch.device,
    ) -> None:
        self.length = max(starts) + width
        self.seen = max(starts)
        self.layer_class_to_replicate = None
        self.offloading = False
        self.layers = [_SlotLayer(self) for _ in range(layers)]
        buffers.reserve(self.length)
        self._buffers = buffers
        first, count = slots[0], len(slots)
        contiguous = list(slots) == list(range(first, first + count))
        self._range = slice(first, first + count) if contiguous else None
        self._slots = torch.tensor(slots, device=device)
        self._positions = torch.tensor(starts, device=device)[:, None] + torch.arange(width, device=device)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new states [R, kv_heads, q, dim]; returns the rows' keys and values [R, kv_heads, length, dim]."""
        self._buffers.ensure_layer(layer_idx, key_states, value_states)
        out = []
        for buffer, new in (
            (self._buffers.keys[layer_idx], key_states),
            (self._buffers.values[layer_idx], value_states),
        ):
            buffer[self._slots[:, None], :, self._positions] = new.transpose(1, 2)
            rows = buffer[self._range] if self._range is not None else buffer.index_select(0, self._slots)
            out.append(rows[:, :, : self.length])
        return out[0], out[1]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions seen before this forward pass by the longest row."""
        return self.seen
