"""Seeded sampling that does not depend on which other requests share the batch.

Token i of a request is drawn by inverting the distribution's cumulative sum at the i-th number of a Philox
stream keyed by the request's seed. One number a token is enough, whatever the size of the vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch

__all__ = ["sample", "uniform_stream"]


def uniform_stream(seed: int, count: int) -> np.ndarray:
    """The first `count` numbers of a request's stream.

    Args:
        seed: Any integer; taken modulo 2**128.
        count: How many.

    Returns:
        float64 [count] in [0, 1); a longer stream of the same seed starts with the same numbers.
    """
    return np.random.Generator(np.random.Philox(key=int(seed) % (1 << 128))).random(count)


def sample(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    uniforms: torch.Tensor,
    greedy: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token a row from ``softmax(logits / temperature)``.

    Args:
        logits: [R, V], any float type; computed in float32.
        temperatures: float32 [R], above 0.
        uniforms: float64 [R] in [0, 1).
        greedy: bool [R]; True takes the most likely token instead. None: no row does.

    Returns:
        Ids int64 [R], and their float32 [R] log-probs under that distribution.
    """
    logprobs = torch.log_softmax(logits.float() / temperatures[:, None], dim=-1)
    # float64, because a float32 sum over 150,000 tokens would shift the last ones' share.
    cumulative = logprobs.exp().cumsum(-1, dtype=torch.float64)
    # Scaled by the total, so that rounding cannot put the target beyond the last token; a token of
    # probability 0 has no interval to be hit in.
    targets = uniforms[:, None] * cumulative[:, -1:]
    ids = torch.searchsorted(cumulative, targets, right=True).clamp_(max=logits.shape[-1] - 1)
    if greedy is not None:
        ids = torch.where(greedy[:, None], logits.argmax(-1, keepdim=True), ids)
    return ids[:, 0], logprobs.gather(1, ids)[:, 0]
