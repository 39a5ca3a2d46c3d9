"""What is handed to vLLM servers beyond plain policies: LoRA adapters as they are, and the learner's own log-probs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from divopd_gym.errors import ConfigError

from .chat import ChatCodec
from .engines.adapter_files import adapter_tensors, write_adapter
from .engines.sync_probe import trained_probe, write_probe
from .engines.weights import write_policy

__all__ = ["HandOver"]


class HandOver:
    """A trainer's side of weight syncs.

    Args:
        trainer: Has ``args``, ``accelerator``, ``model``, ``processing_class`` and ``policy_files``.

    Attributes:
        of_adapter: Whether the adapter alone is handed over; if not, it is merged into whole policies.
        probe_next: Have the next sync compare served with trained log-probs.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer, args = trainer, trainer.args
        self.of_adapter = args.engine == "vllm" and args.weight_sync == "lora"
        # Engines on a GPU compute in bfloat16 and would round the weights themselves.
        self._dtype = torch.bfloat16 if args.on_gpu and args.bf16 and not self.of_adapter else None
        self.probe_next = False
        self._syncs = 0

    @property
    def model(self) -> Any:
        """The student without the wrappers of distributed training."""
        return self._trainer.accelerator.unwrap_model(self._trainer.model)

    def check(self, validate: Callable[[Any], Any]) -> None:
        """Refuse adapters that servers would misread.

        Args:
            validate: Raises ValueError for them.

        Raises:
            ConfigError: No adapter is trained, or not one that can be served.
        """
        if not self.of_adapter:
            return
        if not hasattr(self.model, "peft_config"):
            raise ConfigError(
                "weight_sync is 'lora', but no adapter is trained. Set lora_rank, or weight_sync to file."
            )
        try:
            validate(self.model)
        except ValueError as error:
            raise ConfigError(f"weight_sync is 'lora', but: {error} Set weight_sync to file.") from error

    def tensors(self) -> Iterator[tuple[str, Any]]:
        """The adapter's weights; every rank must iterate."""
        return adapter_tensors(self.model)

    def write(self, tensors: Any, folder: Path, version: int) -> Path:
        """Write the adapter, or the whole policy; see `divopd_trainer.policy_files.PolicyFiles`."""
        if self.of_adapter:
            return write_adapter(tensors, folder, version, self.model)
        return write_policy(tensors, folder, version, dtype=self._dtype)

    def size_bytes(self) -> int:
        """About what one hand-over takes."""
        parameters = [p for p in self.model.parameters() if p.requires_grad or not self.of_adapter]
        return sum(p.numel() * (self._dtype or p.dtype).itemsize for p in parameters)

    @contextlib.contextmanager
    def unmerged(self) -> Iterator[None]:
        """Merging and unmerging would round the base weights anew at every sync."""
        model = self.model
        model.merge_adapter = model.unmerge_adapter = lambda *args, **kwargs: None
        try:
            yield
        finally:
            del model.merge_adapter, model.unmerge_adapter

    def write_probe(self, version: int) -> None:
        """Put the learner's log-probs beside the first policies; every rank must call it."""
        trainer, args = self._trainer, self._trainer.args
        due = self.probe_next or args.sync_probes < 0 or self._syncs < args.sync_probes
        self._syncs, self.probe_next = self._syncs + 1, False
        if args.engine != "vllm" or not due:
            return
        codec = ChatCodec(trainer.processing_class)
        with trainer.accelerator.autocast():
            probe = trained_probe(self.model, codec, args.max_model_len, args.sync_probe_limit)
        if trainer.accelerator.is_main_process:
            write_probe(probe, trainer.policy_files.path(version))
