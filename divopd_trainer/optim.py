"""Muon for matrices and AdamW for the rest, as one torch optimizer.

Muon: Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks"; orthogonalisation by the
Newton-Schulz coefficients of You Jiacheng (2024). In float32, because CPUs without bfloat16 units are 15 times slower
in bfloat16 (torch.optim.Muon casts to it).
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["MuonWithAdamW", "make_optimizer"]

_NEWTON_SCHULZ = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)


def make_optimizer(
    model: torch.nn.Module, lr: float, matrix_lr: float, weight_decay: float
) -> torch.optim.Optimizer:
    """AdamW for all weights, or Muon for the hidden matrices if `matrix_lr` is above 0.

    Args:
        model: Whose weights.
        lr: Of AdamW.
        matrix_lr: Of Muon.
        weight_decay: Decoupled, of matrices only.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    hidden = [p for name, p in named if p.ndim == 2 and "embed" not in name and "lm_head" not in name]
    inside = {id(p) for p in hidden}
    rest = [p for _, p in named if id(p) not in inside]
    if matrix_lr > 0:
        groups = [
            {"params": hidden, "lr": matrix_lr, "weight_decay": weight_decay, "muon": True},
            {"params": rest, "lr": lr, "weight_decay": 0.0, "muon": False},
        ]
        return MuonWithAdamW(groups)
    groups = [{"params": hidden, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))


class MuonWithAdamW(torch.optim.Optimizer):
    """Each group says with ``muon`` which of the two rules it follows.

    Args:
        groups: Parameter groups with ``lr``, ``weight_decay`` and ``muon``.
        momentum: Of Muon (Nesterov).
        betas: Of AdamW.
        eps: Of AdamW.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
    ) -> None:
        super().__init__(groups, {"momentum": momentum, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            rule = self._muon if group["muon"] else self._adamw
            for p in group["params"]:
                if p.grad is not None:
                    rule(p, self.state[p], group)
        return loss

    def _muon(self, p: torch.Tensor, state: dict, group: dict) -> None:
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(p)
        average = state["momentum"].lerp_(p.grad, 1 - group["momentum"])
        update = _orthogonal(p.grad.lerp(average, group["momentum"]))
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.add_(update, alpha=-group["lr"] * max(1.0, p.shape[0] / p.shape[1]) ** 0.5)

    def _adamw(self, p: torch.Tensor, state: dict, group: dict) -> None:
        if "count" not in state:
            state.update(count=0, first=torch.zeros_like(p), second=torch.zeros_like(p))
        beta1, beta2 = group["betas"]
        state["count"] += 1
        state["first"].lerp_(p.grad, 1 - beta1)
        state["second"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
        scale = (state["second"] / (1 - beta2 ** state["count"])).sqrt_().add_(group["eps"])
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.addcdiv_(state["first"], scale, value=-group["lr"] / (1 - beta1 ** state["count"]))


def _orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """The nearest matrix with singular values near 1."""
    x = matrix / (matrix.norm() + 1e-7)
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    for a, b, c in _NEWTON_SCHULZ:
        square = x @ x.T
        x = a * x + (b * square + c * (square @ square)) @ x
    return x.T if tall else x
