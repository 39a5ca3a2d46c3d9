"""Tiny chat models from scratch: a byte-level BPE trained on transcripts, and a Qwen3 model of a few million weights.

The chat template has one special token a role and one that ends a reply, so that a turn costs three tokens beside its
words. `ChatCodec` reads it like any other template.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from divopd_gym.errors import ConfigError

__all__ = [
    "CHAT_TEMPLATE",
    "PHRASES",
    "SPECIAL_TOKENS",
    "TinySpec",
    "build_model",
    "count_parameters",
    "save_model",
    "train_tokenizer",
]

USER, ASSISTANT, END, PAD = "<|user|>", "<|assistant|>", "<|end|>", "<|pad|>"
SPECIAL_TOKENS = (PAD, USER, ASSISTANT, END)
"""In the order of their ids, from 0."""

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'assistant' -%}<|assistant|>{{ message['content'] }}<|end|>"
    "{%- else -%}<|user|>{{ message['content'] }}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)
"""System messages are written like the user's; tiny prompts have none."""

PHRASES: dict[str, tuple[str, ...]] = {
    "divopd_gym/ALFWorld-v0": (
        "you arrive at", "you open the", "you close the", "you pick up the", "you move the", "you heat the",
        "you clean the", "you cool the", "you turn on the", "you turn off the", ". on the", ". the", " is closed.",
        " is open. in it, you see", ", you see", " from the", " to the", " using the", "nothing happens.",
        "you are facing the", ". next to it, you see", "you are carrying:", "you are not carrying anything.",
        "this is a normal", ". in it, you see", "there's nothing special about", "this is a", ", and a", ", a",
        " under the", " nothing.", "go to", "\nput a", "\nput a clean", "\nput a hot", "\nput a cool", "\nput two",
        "\nlook at",
    ),
}  # fmt: skip
"""The fixed wording of an environment in the "tiny" prompt style: phrases that may be one token each."""

# A name and its number are two words, so that "egg" in a goal and in "egg 1" are the same token: a tiny model learns to
# match them at once, and hardly ever where they are not.
_WORDS = r" ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s"


@dataclass(frozen=True)
class TinySpec:
    """Shape of a tiny Qwen3 model.

    Attributes:
        layers: decoder layers.
        width: hidden size.
        heads: attention heads, each with its own keys and values; they divide the width.
        mlp: width of the gated middle layer.
        positions: most tokens of a conversation.
        rope_theta: base of the rotary positions.
    """

    layers: int = 4
    width: int = 256
    heads: int = 8
    mlp: int = 768
    positions: int = 1024
    rope_theta: float = 10_000.0

    def __post_init__(self) -> None:
        if self.width % self.heads or (self.width // self.heads) % 2:
            raise ConfigError(
                f"A tiny model of width {self.width} with {self.heads} heads; expected heads that divide the width "
                "into an even number of dimensions each."
            )

    @classmethod
    def parse(cls, text: str) -> TinySpec:
        """Read ``tiny:layers=4,width=256``; what is not given keeps its default.

        Raises:
            ConfigError: Not of this form, or a key that a spec does not have.
        """
        kinds = {f.name: float if f.name == "rope_theta" else int for f in dataclasses.fields(cls)}
        head, _, rest = text.partition(":")
        given = [part.partition("=") for part in rest.split(",") if part]
        wrong = [key for key, _, value in given if key not in kinds or not re.fullmatch(r"[0-9.]+", value)]
        if head != "tiny" or wrong:
            raise ConfigError(
                f"Model {text!r}: expected 'tiny' or 'tiny:key=number,...' with keys {', '.join(kinds)}"
                f"{f'; not {wrong}' if wrong else ''}."
            )
        return cls(**{key: kinds[key](value) for key, _, value in given})


def train_tokenizer(texts: Iterable[str], vocab_size: int = 1024, keep: Sequence[str] = ()) -> Any:
    """Train a byte-level BPE whose words are one token each once they are frequent.

    Any text can be encoded and comes back unchanged.

    Args:
        texts: What it is trained on: the messages as they will be written.
        vocab_size: At most this many entries, the special tokens and the 256 bytes included.
        keep: Phrases of several words that may become one token (the environment's fixed wording).

    Returns:
        A `PreTrainedTokenizerFast` with `CHAT_TEMPLATE`; its EOS is the end of a reply.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    phrases = "".join(f"{re.escape(p)}(?![A-Za-z0-9])|" for p in sorted(keep, key=len, reverse=True))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(phrases + _WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=2,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def build_model(spec: TinySpec, tokenizer: Any, seed: int = 0) -> Any:
    """A freshly initialised Qwen3 model in float32 with tied embeddings.

    Args:
        spec: Its shape.
        tokenizer: Fixes the vocabulary and the special ids.
        seed: Of the initial weights; torch's global stream is left as it was.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=spec.width,
        intermediate_size=spec.mlp,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.heads,
        head_dim=spec.width // spec.heads,
        max_position_embeddings=spec.positions,
        rope_parameters={"rope_type": "default", "rope_theta": spec.rope_theta},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        attn_implementation="sdpa",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model


def count_parameters(model: Any) -> int:
    """Weights of a model, tied ones counted once."""
    return sum(p.numel() for p in model.parameters())


def save_model(model: Any, tokenizer: Any, folder: str | Path, dtype: str = "bfloat16") -> None:
    """Write a model and its tokenizer so that ``Auto...from_pretrained`` reads them.

    Args:
        model: Its weights are copied before they are cast.
        tokenizer: Written beside it.
        folder: Made if it is not there.
        dtype: Type of the stored weights.
    """
    import copy

    import torch

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    stored = copy.deepcopy(model).to(getattr(torch, dtype))
    stored.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
