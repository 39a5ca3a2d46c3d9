"""Random models of a few thousand parameters, large enough weights that their distributions are far from flat."""

import numpy as np
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

torch.set_num_threads(1)
VOCAB, EOS = 48, 1


def qwen3(seed=0, tied=True, positions=256, **more):
    torch.manual_seed(seed)
    config = Qwen3Config(
        **{
            "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48, "max_position_embeddings": positions,
            "tie_word_embeddings": tied, "eos_token_id": EOS, "initializer_range": 0.25, **more,
        }
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # All-ones norms would hide one that is left out or exchanged.
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return model


def qwen2(seed=0):
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=1,
        intermediate_size=48, max_position_embeddings=256, tie_word_embeddings=False, eos_token_id=EOS,
        initializer_range=0.25,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.uniform_(-0.5, 0.5)
    return model


def gpt2(seed=0):
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=VOCAB,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=256,
        eos_token_id=EOS,
        initializer_range=0.25,
    )
    return GPT2LMHeadModel(config).eval()


def prompt(seed, length):
    return np.random.default_rng(seed).integers(2, VOCAB, length).astype(np.int32)


def logprobs(model, ids, temperature=1.0):
    """float32 [T - 1]: entry i is the log-prob of token i + 1, by a plain forward pass."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor(np.asarray(ids, np.int64))[None]).logits[0]
    scaled = (logits / temperature).log_softmax(-1)[:-1]
    return scaled.gather(1, torch.tensor(np.asarray(ids[1:], np.int64))[:, None])[:, 0].numpy()
