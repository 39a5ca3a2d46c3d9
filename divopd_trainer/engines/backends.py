"""Forward passes over slots for any transformers causal LM with full attention.

A backend takes ragged feeds (each: a slot, where its new tokens start, the new ids) and gives the logits after
the last new token of each; and it scores whole sequences. `load_model` reads a checkpoint and picks the backend:
`DenseBackend` (divopd_trainer.engines.dense) where the architecture is known to it, else `TransformersBackend`.
"""

from __future__ import annotations

import copy
import inspect
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from divopd_gym.errors import ConfigError
from divopd_trainer.engines.slot_cache import KVBuffers, SlotCache

__all__ = ["Backend", "Feed", "TransformersBackend", "load_model", "make_backend", "max_positions"]

logger = logging.getLogger(__name__)


@dataclass
class Feed:
    """New tokens for one slot.

    Attributes:
        slot: Its number.
        start: Position of the first new token; the slot holds everything before it.
        ids: int32 [n], n >= 1.
        wanted: Whether the logits after the last new token are wanted.
    """

    slot: int
    start: int
    ids: Sequence[int] | np.ndarray
    wanted: bool = True


class Backend(Protocol):
    """Forward passes of one model."""

    model: Any
    buffers: KVBuffers
    device: torch.device
    vocab_size: int

    def extend(self, feeds: Sequence[Feed]) -> torch.Tensor:
        """Run the new tokens; logits [number of wanted feeds, V]."""

    def hidden(self, sequences: Sequence[np.ndarray], positions: Sequence[np.ndarray]) -> torch.Tensor:
        """Final hidden states [sum of len(positions), D] at the given positions of each whole sequence."""

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [N, V] of hidden states [N, D]."""


def load_model(source: str | Path | Any, *, device: str = "auto", dtype: str = "auto") -> Any:
    """A causal LM in inference mode.

    Args:
        source: A directory or hub name; or a model object, which is copied.
        device: "auto" takes a GPU if there is one: the last if the learner's ranks leave any, else the first.
        dtype: "auto" is float32 on a CPU and bfloat16 on a GPU.

    Raises:
        ConfigError: The checkpoint cannot be read.
    """
    if not isinstance(source, (str, Path)):
        return copy.deepcopy(source).eval().requires_grad_(False)
    from transformers import AutoModelForCausalLM

    if device == "auto":
        device = _free_device()
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else "bfloat16"
    try:
        model = AutoModelForCausalLM.from_pretrained(
            source, dtype=getattr(torch, dtype), attn_implementation="sdpa"
        )
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"No causal language model could be read from {str(source)!r} ({error}). Expected a directory with "
            "config.json and safetensors files, or the name of a model on the hub."
        ) from error
    return model.to(device).eval().requires_grad_(False)


def _free_device() -> str:
    gpus, ranks = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if not gpus:
        return "cpu"
    return f"cuda:{gpus - 1 if gpus > ranks else 0}"


def max_positions(model: Any) -> int:
    """The longest sequence that the model's configuration allows."""
    config = model.config.get_text_config()
    for name in ("max_position_embeddings", "n_positions"):
        if getattr(config, name, None):
            return int(getattr(config, name))
    return 1 << 20


def make_backend(model: Any, slots: int, kind: str = "auto") -> Backend:
    """The backend for a model.

    Args:
        model: A causal LM.
        slots: How many conversations it holds at once.
        kind: "auto", "dense" or "transformers".

    Raises:
        ConfigError: The model has sliding-window, linear or recurrent layers, or `kind` cannot run it.
    """
    from divopd_trainer.engines.dense import DenseBackend

    if kind not in ("auto", "dense", "transformers"):
        raise ConfigError(f"backend is {kind!r}; expected 'auto', 'dense' or 'transformers'.")
    config = model.config.get_text_config()
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    if layer_types != {"full_attention"}:
        raise ConfigError(
            f"The model {config.model_type!r} has layers of types {sorted(layer_types)}; the local engine holds "
            "full attention only. Serve it with vLLM, or use a model with full attention."
        )
    if kind != "transformers":
        why_not = DenseBackend.unsupported(model)
        if why_not is None:
            backend = DenseBackend(model, slots)
            difference = backend.check()
            if difference is None:
                return backend
            why_not = difference
        if kind == "dense":
            raise ConfigError(
                f"The dense backend cannot run {config.model_type!r}: {why_not}. Use backend='auto'."
            )
        logger.warning("%s runs through transformers' own forward pass: %s", config.model_type, why_not)
    return TransformersBackend(model, slots)


class TransformersBackend:
    """Forward passes through the model's own `forward`, in padded batches.

    Args:
        model: A causal LM.
        slots: How many conversations fit.
    """

    def __init__(self, model: Any, slots: int) -> None:
        self.model = model
        self.buffers = KVBuffers(slots)
        self.device = next(model.parameters()).device
        self.dtype = next(model.parameters()).dtype
        config = model.config.get_text_config()
        self.vocab_size = int(model.get_output_embeddings().weight.shape[0])
        self._layers = int(config.num_hidden_layers)
        self._limit = max_positions(model)
        self._body = model.get_decoder() if hasattr(model, "get_decoder") else model.base_model
        parameters = inspect.signature(type(model).forward).parameters
        # Renamed in transformers 5.2x; the old name warns at every call there.
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        # Some families scale or cap their logits after the head; then only the whole model gives the right ones.
        self._split = self._head_is_linear()

    def extend(self, feeds: Sequence[Feed]) -> torch.Tensor:
        """See `Backend.extend`."""
        order = sorted(range(len(feeds)), key=lambda i: (len(feeds[i].ids) > 1, feeds[i].slot))
        rows: list[torch.Tensor | None] = [None] * len(feeds)
        # One-token rows apart from the others, which would pad them to their width.
        for many in (False, True):
            group = [i for i in order if (len(feeds[i].ids) > 1) is many]
            if group:
                logits = self._extend_padded([feeds[i] for i in group])
                for i, row in zip(group, logits):
                    rows[i] = row
        wanted = [row for feed, row in zip(feeds, rows) if feed.wanted]
        return torch.stack(wanted) if wanted else torch.zeros(0, self.vocab_size, device=self.device)

    def _extend_padded(self, feeds: list[Feed]) -> torch.Tensor:
        width = max(len(f.ids) for f in feeds)
        starts = [f.start for f in feeds]
        ids = np.zeros((len(feeds), width), np.int64)
        for row, feed in zip(ids, feeds):
            row[: len(feed.ids)] = feed.ids
        cache = SlotCache(
            self.buffers, [f.slot for f in feeds], starts, width, self._layers, device=self.device
        )
        positions = torch.tensor(starts, device=self.device)[:, None] + torch.arange(
            width, device=self.device
        )
        # A row sees positions up to its query's own: whatever padding wrote lies behind and is overwritten later.
        visible = torch.arange(cache.length, device=self.device) <= positions[:, :, None]
        mask = torch.zeros(visible.shape, dtype=self.dtype, device=self.device)
        mask.masked_fill_(~visible, torch.finfo(self.dtype).min)
        hidden = self._run(
            torch.from_numpy(ids).to(self.device), mask[:, None], positions.clamp(max=self._limit - 1), cache
        )
        last = torch.tensor([len(f.ids) - 1 for f in feeds], device=self.device)
        return self.head(hidden[torch.arange(len(feeds), device=self.device), last])

    def hidden(self, sequences: Sequence[np.ndarray], positions: Sequence[np.ndarray]) -> torch.Tensor:
        """See `Backend.hidden`."""
        width = max(len(s) for s in sequences)
        ids = np.zeros((len(sequences), width), np.int64)
        for row, sequence in zip(ids, sequences):
            row[: len(sequence)] = sequence
        # Right padding needs no mask: causal attention keeps it from every position that is read.
        at = torch.arange(width, device=self.device)[None].expand(len(sequences), -1)
        hidden = self._run(torch.from_numpy(ids).to(self.device), None, at, None)
        flat = np.concatenate([i * width + np.asarray(p, np.int64) for i, p in enumerate(positions)])
        return hidden.flatten(0, 1).index_select(0, torch.from_numpy(flat).to(self.device))

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Backend.head`."""
        return self.model.get_output_embeddings()(hidden) if self._split else hidden

    def _run(self, ids: torch.Tensor, mask: Any, positions: torch.Tensor, cache: SlotCache | None) -> Any:
        arguments: dict[str, Any] = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
        arguments["use_cache"] = cache is not None
        if cache is not None:
            arguments[self._cache_name] = cache
        if self._split:
            return self._body(**arguments).last_hidden_state
        return self.model(**arguments).logits

    def _head_is_linear(self) -> bool:
        ids = torch.arange(1, 5, device=self.device)[None] % self.vocab_size
        with torch.inference_mode():
            logits = self.model(input_ids=ids, use_cache=False).logits
            hidden = self._body(input_ids=ids, use_cache=False).last_hidden_state
            rebuilt = self.model.get_output_embeddings()(hidden)
        return bool(torch.allclose(logits, rebuilt, rtol=1e-3, atol=1e-4))
