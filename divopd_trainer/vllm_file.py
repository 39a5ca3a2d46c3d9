"""Inside a vLLM server: weights from a safetensors file, for instance in shared memory. Imported by vLLM alone.

An update is one file and all of it: the file is read and compared with the model before anything is changed. Tied
heads are tied again and repacked, because vLLM on a CPU keeps the old head otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from divopd_trainer.vllm_plugin import UNCHANGED

__all__ = ["FileInitInfo", "FileUpdateInfo", "FileWeightTransferEngine"]


@dataclass
class FileInitInfo(WeightTransferInitInfo):
    """Nothing has to be agreed on beforehand."""


@dataclass
class FileUpdateInfo(WeightTransferUpdateInfo):
    """One update.

    Attributes:
        path: A safetensors file with every weight of the checkpoint, by its names there.
    """

    path: str


class FileWeightTransferEngine(WeightTransferEngine[FileInitInfo, FileUpdateInfo]):
    """Reads the weights that a path names."""

    init_info_cls = FileInitInfo
    update_info_cls = FileUpdateInfo

    def init_transfer_engine(self, init_info: FileInitInfo) -> None:
        """Nothing to set up."""

    def start_weight_update(self) -> None:
        """Nothing is touched before the file was read."""

    def finish_weight_update(self) -> None:
        """The weights are complete when they were received."""

    def receive_weights(self, update_info: FileUpdateInfo) -> None:
        """Read the file and load it.

        Raises:
            ValueError: It cannot be read, or lacks weights of the model; the server's weights are as before.
            RuntimeError: Weights of the model were not replaced by it; they are of no one version then.
        """
        tensors = _read(update_info.path)
        heads = _tied_heads(self.model)
        wanted = _tensor_names(self.model)
        _check_whole(tensors, self.model, tied=bool(heads))
        with torch.device(self.device):
            loaded = self._load(tensors)
        if loaded is not None and (left := sorted(wanted - set(loaded) - {name for name, _, _ in heads})):
            raise RuntimeError(
                f"{len(left)} weights of the model were not in {update_info.path} ({', '.join(left[:3])}, ...); expected "
                "all of them. Learner and server must be started from the same checkpoint."
            )
        for _, head, embedding in heads:
            head.weight = embedding.weight
            head.quant_method.process_weights_after_loading(head)

    @torch.no_grad()
    def _load(self, tensors: Mapping[str, torch.Tensor]) -> set[str] | None:
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        initialize_layerwise_reload(self.model)
        try:
            return self.model.load_weights(iter(tensors.items()))
        finally:
            finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Nothing to take down."""


def _read(path: str) -> dict[str, torch.Tensor]:
    if Path(path).suffix != ".safetensors":
        raise ValueError(f"{UNCHANGED} {path!r} is no safetensors file; expected the path of one.")
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"{UNCHANGED} the file {path} cannot be read here ({error}); learner and server must see the same folder."
        ) from error


def _tied_heads(model: torch.nn.Module) -> list[tuple[str, Any, Any]]:
    """Heads that share their weight with an embedding: (name of the weight, head, embedding)."""
    parts = dict(model.named_modules())
    embeddings = [
        part
        for part in parts.values()
        if isinstance(part, VocabParallelEmbedding) and not isinstance(part, ParallelLMHead)
    ]
    return [
        (f"{name}.weight", part, embedding)
        for name, part in parts.items()
        if isinstance(part, ParallelLMHead)
        for embedding in embeddings
        if part.weight is embedding.weight
    ]


def _tensor_names(model: torch.nn.Module) -> set[str]:
    return {name for name, _ in model.named_parameters(remove_duplicate=False)}


def _check_whole(tensors: Mapping[str, torch.Tensor], model: torch.nn.Module, tied: bool) -> None:
    """Refuse a file that is plainly another model's, while nothing is changed yet."""
    layers = getattr(getattr(model, "config", None), "num_hidden_layers", None)
    names = set(tensors)
    if layers is not None:
        given = {int(part) for name in names for part in name.split(".")[:4] if part.isdigit()}
        if given and max(given) + 1 != layers:
            raise ValueError(
                f"{UNCHANGED} the file has weights of {max(given) + 1} layers, but the server's model has {layers}. "
                "Learner and server must be started from the same checkpoint."
            )
    if not any("embed" in name for name in names) or not (tied or any("lm_head" in name for name in names)):
        raise ValueError(
            f"{UNCHANGED} the file has {len(names)} weights, but no embedding or no head of its own; expected all weights of the "
            "model. Hand over whole models, not adapters."
        )
