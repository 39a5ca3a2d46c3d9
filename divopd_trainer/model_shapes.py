"""Sizes of models from their configuration alone: weights, keys and values, activations. Nothing is downloaded.

A model's own ``config.json`` is read where it lies on this machine; for the public models of the published settings a
small table stands in.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["KNOWN_SHAPES", "ModelShape", "find_shape"]

_DENSE = ("qwen2", "qwen3", "llama", "mistral")


@dataclass(frozen=True)
class ModelShape:
    """A dense decoder with grouped-query attention and a gated MLP.

    Attributes:
        layers: Decoder layers.
        hidden: Width of the residual stream.
        heads: Query heads.
        kv_heads: Key and value heads.
        head_dim: Width of a head.
        mlp: Width of the MLP.
        vocabulary: Rows of the embedding.
        tied: Whether the head is the embedding.
        positions: Tokens that the model was made for.
        qkv_bias: Whether queries, keys and values have biases (Qwen2).
        qk_norm: Whether queries and keys are normalised (Qwen3).
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocabulary: int
    tied: bool
    positions: int
    qkv_bias: bool = False
    qk_norm: bool = False

    @property
    def linears(self) -> tuple[tuple[int, int], ...]:
        """(inputs, outputs) of a layer's seven matrices: q, k, v, o, gate, up, down."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        h, m = self.hidden, self.mlp
        return ((h, q), (h, kv), (h, kv), (q, h), (h, m), (h, m), (m, h))

    @property
    def parameters(self) -> int:
        """All weights; a tied head counts once."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        layer = sum(inputs * outputs for inputs, outputs in self.linears) + 2 * self.hidden
        layer += (q + 2 * kv) * self.qkv_bias + 2 * self.head_dim * self.qk_norm
        embedding = self.vocabulary * self.hidden
        return self.layers * layer + self.hidden + embedding * (1 if self.tied else 2)

    def adapter_parameters(self, rank: int) -> int:
        """Weights of a LoRA adapter on every linear layer but the head."""
        return self.layers * rank * sum(inputs + outputs for inputs, outputs in self.linears)

    def kv_bytes(self, width: int = 2) -> int:
        """Bytes of keys and values a token.

        Args:
            width: Bytes a number.
        """
        return 2 * self.layers * self.kv_heads * self.head_dim * width

    def layer_activation_bytes(self) -> int:
        """Bytes that one layer's backward pass needs a token, in bfloat16 with fused attention; about.

        Inputs of both norms and of all seven matrices, the attention's output, both halves of the gated product, and
        float32 copies inside the norms.
        """
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return 2 * (4 * self.hidden + 2 * q + 2 * kv + 4 * self.mlp) + 2 * 4 * self.hidden


def _qwen2(
    layers: int, hidden: int, heads: int, kv: int, mlp: int, vocabulary: int, tied: bool
) -> ModelShape:
    return ModelShape(layers, hidden, heads, kv, 128, mlp, vocabulary, tied, 32768, qkv_bias=True)


_QWEN2_7B = _qwen2(28, 3584, 28, 4, 18944, 152064, False)
KNOWN_SHAPES: dict[str, ModelShape] = {
    "Qwen/Qwen3-1.7B": ModelShape(28, 2048, 16, 8, 128, 6144, 151936, True, 40960, qk_norm=True),
    "Qwen/Qwen3-4B": ModelShape(36, 2560, 32, 8, 128, 9728, 151936, True, 40960, qk_norm=True),
    "Qwen/Qwen2.5-1.5B-Instruct": _qwen2(28, 1536, 12, 2, 8960, 151936, True),
    "Qwen/Qwen2.5-3B-Instruct": _qwen2(36, 2048, 16, 2, 11008, 151936, True),
    "Qwen/Qwen2.5-7B-Instruct": _QWEN2_7B,
    "langfeng01/GiGPO-Qwen2.5-7B-Instruct-ALFWorld": _QWEN2_7B,
    "langfeng01/GiGPO-Qwen2.5-7B-Instruct-WebShop": _QWEN2_7B,
    "fnlp/Embodied_R1-ScienceWorld": _QWEN2_7B,
}
"""The models of the six published settings. The three teachers are fine-tuned Qwen2.5-7B-Instruct models; their shape is
taken from that and was not read from their own files."""


def find_shape(model: str) -> tuple[ModelShape | None, str]:
    """A model's shape and where it was found, without a network.

    Args:
        model: A directory or a Hub name.

    Returns:
        The shape, or None with the reason in the second place.
    """
    folder = Path(model).expanduser()
    path: Path | None = folder / "config.json" if folder.is_dir() else _cached(model)
    if path is not None and path.is_file():
        try:
            values = json.loads(path.read_text("utf-8"))
        except (OSError, ValueError) as error:
            return None, f"{path} cannot be read ({error})"
        shape = _read(values)
        return (
            shape,
            "its config.json" if shape else f"model type {values.get('model_type')!r} is not known here",
        )
    if model in KNOWN_SHAPES:
        return KNOWN_SHAPES[model], "a table in divopd, its config.json is not on this machine"
    return None, "its config.json is not on this machine"


def _cached(model: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(model, "config.json")
    except ValueError:
        return None  # no Hub name
    return Path(found) if isinstance(found, str) else None


def _read(values: dict[str, Any]) -> ModelShape | None:
    kind = values.get("model_type")
    if kind not in _DENSE:
        return None
    heads, hidden = values["num_attention_heads"], values["hidden_size"]
    return ModelShape(
        layers=values["num_hidden_layers"],
        hidden=hidden,
        heads=heads,
        kv_heads=values.get("num_key_value_heads") or heads,
        head_dim=values.get("head_dim") or hidden // heads,
        mlp=values["intermediate_size"],
        vocabulary=values["vocab_size"],
        tied=bool(values.get("tie_word_embeddings", False)),
        positions=values.get("max_position_embeddings", 0),
        qkv_bias=kind == "qwen2",
        qk_norm=kind == "qwen3",
    )
