"""Which attention and which layout a machine gets; no GPU is needed to ask."""

import importlib.util

import pytest
import torch
from transformers import Qwen3Config

from divopd_trainer import attention
from divopd_trainer.attention import attention_options, choose_layout

SDPA = {"attn_implementation": "sdpa"}


@pytest.fixture
def gpu(monkeypatch):
    def have(capability, kernels=True):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: capability)
        monkeypatch.setattr(attention, "is_kernels_available", lambda: kernels)

    return have


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0)])
def test_trls_kernel_is_left_in_place_where_it_is_built_for_the_gpu(gpu, capability):
    gpu(capability)
    assert attention_options(on_gpu=True, half=True) == {}


@pytest.mark.parametrize(
    ("on_gpu", "half", "capability", "kernels"),
    [
        (False, True, (9, 0), True),
        (True, False, (9, 0), True),
        (True, True, (7, 5), True),
        (True, True, (10, 0), True),
        (True, True, (12, 0), True),
        (True, True, (9, 0), False),
    ],
)
def test_pytorchs_attention_is_used_everywhere_else(gpu, on_gpu, half, capability, kernels):
    gpu(capability, kernels)
    assert attention_options(on_gpu, half) == SDPA


def test_rows_are_packed_for_flash_attention_alone():
    config = Qwen3Config(num_hidden_layers=1, hidden_size=16, num_attention_heads=2, num_key_value_heads=2)
    for name, layout in {
        "sdpa": "padded",
        "eager": "padded",
        "flash_attention_2": "packed",
        "kernels-community/flash-attn3": "packed",
    }.items():
        config._attn_implementation = name
        assert choose_layout("auto", config) == layout
        assert choose_layout("padded", config) == "padded"


def test_trl_still_asks_for_the_kernel_that_the_choice_is_about():
    path = importlib.util.find_spec("trl.experimental.async_distillation.async_distillation_trainer").origin
    with open(path) as file:
        source = file.read()
    assert "kernels-community/flash-attn3" in source
    assert 'setdefault(\n            "attn_implementation"' in source
