"""Which attention the learner computes with on this machine, and the layout of rows that suits it.

TRL's default is a FlashAttention-3 kernel of the package ``kernels``, fetched from the model hub when it is first used
(without a hub set ``model_init_kwargs: {attn_implementation: sdpa}``). It is built for CUDA capabilities 8 and 9 (Ampere
to Hopper) and computes in half precision. Everywhere else it is PyTorch's own attention. Rows that hold several
sequences end to end cost that one the square of their length.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.utils.generic import is_flash_attention_requested
from transformers.utils.import_utils import is_kernels_available

__all__ = ["attention_options", "choose_layout"]

_CAPABILITIES = (8, 9)


def attention_options(on_gpu: bool, half: bool) -> dict[str, Any]:
    """What a model is loaded with.

    Args:
        on_gpu: Whether it is trained on a GPU.
        half: Whether it computes in bfloat16 or float16.

    Returns:
        Nothing where TRL's default serves, PyTorch's attention where it does not.
    """
    if on_gpu and half and is_kernels_available() and torch.cuda.get_device_capability()[0] in _CAPABILITIES:
        return {}
    return {"attn_implementation": "sdpa"}


def choose_layout(wanted: str, model_config: Any) -> str:
    """The layout of rows: what is wanted, or for "auto" "packed" with FlashAttention and "padded" without."""
    if wanted != "auto":
        return wanted
    return "packed" if is_flash_attention_requested(model_config) else "padded"
