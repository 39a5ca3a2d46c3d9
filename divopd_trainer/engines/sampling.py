"""Seeded sampling that does not depend on which other requests share the batch.

Token i of a request is drawn by inverting the distribution's cumulative sum at the i-th number of a Philox
stream keyed by the request's seed. One number a token is enough, whatever the size of the vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch

__all__ = ["extra_uniforms", "sample", "uniform_stream"]


def uniform_stream(seed: int, count: int) -> np.ndarray:
    """The first `count` numbers of a request's stream.

    Args:
        seed: Any integer; taken modulo 2**128.
        count: How many.

    Returns:
        float64 [count] in [0, 1); a longer stream of the same seed starts with the same numbers.
    """
    return np.random.Generator(np.random.Philox(key=int(seed) % (1 << 128))).random(count)


def extra_uniforms(seed: int, count: int, samples: int) -> np.ndarray:
    """Numbers for draws beside a request's own, so that asking for them changes no response.

    Args:
        seed: As in `uniform_stream`.
        count: How many tokens.
        samples: Draws a token.

    Returns:
        float64 [count, samples] in [0, 1), independent of `uniform_stream`'s; more tokens begin with the same rows.
    """
    stream = np.random.Philox(key=int(seed) % (1 << 128)).jumped()
    return np.random.Generator(stream).random((count, samples))


def sample(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    uniforms: torch.Tensor,
    greedy: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw from ``softmax(logits / temperature)``, one token a row or several independent ones.

    Args:
        logits: [R, V], any float type; computed in float32.
        temperatures: float32 [R], above 0.
        uniforms: float64 [R] or [R, M] in [0, 1).
        greedy: bool [R]; True takes the most likely token as the row's first. None: no row does.

    Returns:
        Ids int64 and their float32 log-probs under that distribution, both shaped like `uniforms`.
    """
    columns = uniforms if uniforms.ndim == 2 else uniforms[:, None]
    logprobs = torch.log_softmax(logits.float() / temperatures[:, None], dim=-1)
    # float64, because a float32 sum over 150,000 tokens would shift the last ones' share.
    cumulative = logprobs.exp().cumsum(-1, dtype=torch.float64)
    # Scaled by the total, so that rounding cannot put the target beyond the last token; a token of
    # probability 0 has no interval to be hit in.
    targets = columns * cumulative[:, -1:]
    ids = torch.searchsorted(cumulative, targets, right=True).clamp_(max=logits.shape[-1] - 1)
    if greedy is not None:
        first = torch.where(greedy[:, None], logits.argmax(-1, keepdim=True), ids[:, :1])
        ids = torch.cat([first, ids[:, 1:]], 1)
    return ids.reshape(uniforms.shape), logprobs.gather(1, ids).reshape(uniforms.shape)
