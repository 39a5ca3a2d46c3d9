"""Sharded weights (FSDP2): what must hold before accelerate wraps the model, so that every layout trains alike.

Accelerate's defaults reduce gradients in half precision and cast the loss to it, and write checkpoints that no
explorer can read; here gradients add up in float32 and checkpoints hold whole weights.
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate.utils import DistributedType

from divopd_gym.errors import ConfigError

__all__ = ["prepare_sharding"]

_UNTESTED = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)


def prepare_sharding(accelerator: Any) -> bool:
    """Settle how weights are sharded; call it on every rank before the model is wrapped.

    Args:
        accelerator: The run's `accelerate.Accelerator`.

    Returns:
        Whether weights are sharded.

    Raises:
        ConfigError: FSDP1, DeepSpeed or Megatron, with which the loss of one update would not be whole.
    """
    kind = accelerator.distributed_type
    if kind in _UNTESTED:
        raise ConfigError(
            f"The learner was launched with {kind.value}; expected data parallelism (DDP) or FSDP2. Launch it with "
            "'accelerate launch --multi_gpu', or add --use_fsdp --fsdp_version 2."
        )
    if kind != DistributedType.FSDP:
        return False
    plugin = accelerator.state.fsdp_plugin
    if plugin.fsdp_version != 2:
        raise ConfigError(
            f"The learner was launched with FSDP version {plugin.fsdp_version}; expected version 2, whose gathered "
            "parameters weight files are written from. Add --fsdp_version 2, or set fsdp: true in the settings."
        )
    # Sharded state dicts would leave checkpoints without a model, and no model at the end.
    plugin.state_dict_config = plugin.optim_state_dict_config = None
    plugin.set_state_dict_type("FULL_STATE_DICT")
    policy = plugin.mixed_precision_policy
    if policy is not None:
        from torch.distributed.fsdp import MixedPrecisionPolicy

        plugin.mixed_precision_policy = MixedPrecisionPolicy(
            param_dtype=policy.param_dtype,
            # Micro-batches of one update add up in this type, so it must hold their sum.
            reduce_dtype=torch.float32,
            # The wrapped forward returns the loss and sums over tokens, which half precision would round.
            output_dtype=None,
            cast_forward_inputs=policy.cast_forward_inputs,
        )
    return True
