"""A LoRA adapter that is being trained, as the folder that vLLM and PEFT load: base weights are neither merged nor sent."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from divopd_gym.errors import ConfigError

__all__ = ["adapter_tensors", "make_lora", "write_adapter"]


def make_lora(rank: int, alpha: float | None, targets: list[str] | None) -> Any:
    """The `peft.LoraConfig` of a run's settings.

    Args:
        rank: Rank of the adapter, at least 1.
        alpha: Scale; None: twice the rank.
        targets: Names of the linear layers; None: all but the head.

    Raises:
        ConfigError: A target that a server cannot serve as an adapter.
    """
    from peft import LoraConfig

    if bad := [name for name in targets or () if "embed" in name or "lm_head" in name]:
        raise ConfigError(
            f"lora_targets has {bad[0]!r}; vLLM does not serve adapters of embeddings and heads. Name linear layers such as "
            "q_proj, or leave lora_targets null."
        )
    return LoraConfig(
        r=rank, lora_alpha=alpha or 2 * rank, target_modules=targets or "all-linear", task_type="CAUSAL_LM"
    )


def adapter_tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The adapter's weights under the names that files have; sharded ones are gathered, so every rank must iterate.

    Args:
        model: A `peft.PeftModel` with one active adapter.
    """
    adapter = model.active_adapters[0]
    for name, parameter in model.named_parameters():
        if "lora_" in name and f".{adapter}." in name:
            gather = getattr(parameter, "full_tensor", parameter.detach)
            yield name.replace(f".{adapter}.", ".").replace("_checkpoint_wrapped_module.", ""), gather()


def write_adapter(
    tensors: Iterable[tuple[str, torch.Tensor]], directory: str | Path, version: int, model: Any
) -> Path:
    """Write one version of an adapter; a reader sees the whole folder or none.

    Args:
        tensors: From `adapter_tensors`.
        directory: Where; made if absent.
        version: Completed updates.
        model: The `peft.PeftModel`, for its settings.

    Returns:
        The folder.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"policy-{version:08d}"
    partial = Path(tempfile.mkdtemp(prefix=".adapter-", dir=directory))
    try:
        given = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors}
        save_file(given, partial / "adapter_model.safetensors", metadata={"format": "pt"})
        config = model.peft_config[model.active_adapters[0]]
        training, config.inference_mode = config.inference_mode, True
        try:
            config.save_pretrained(str(partial))
        finally:
            config.inference_mode = training
        shutil.rmtree(path, ignore_errors=True)
        os.replace(partial, path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return path
