"""How many turns a training rollout may take: fixed, TCOD-F2B, or TurnOPD's depth controller.

Evaluation never asks a horizon: it is always full depth. Updates are numbered from 1 (completed updates + 1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

from divopd_gym.errors import ConfigError

__all__ = ["FixedHorizon", "Horizon", "TCODF2B", "TurnOPDHorizon"]


class Horizon(Protocol):
    """The seam: asked before a rollout starts."""

    max_turns: int

    def turns(self, update: int) -> int:
        """Turns that a rollout started at this update may take."""
        ...

    def is_probe(self, update: int) -> bool:
        """Whether rollouts started at this update run to `max_turns` and are reported back."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """All that the future depends on; JSON values only."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""
        ...


class FixedHorizon:
    """The same number of turns for every rollout.

    Args:
        max_turns: 1 or more.
    """

    def __init__(self, max_turns: int) -> None:
        _at_least("max_turns", max_turns, 1)
        self.max_turns = max_turns

    def turns(self, update: int) -> int:
        """`max_turns`."""
        return self.max_turns

    def is_probe(self, update: int) -> bool:
        """False."""
        return False

    def state_dict(self) -> dict[str, Any]:
        """Empty: nothing changes."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to restore."""


class TCODF2B(FixedHorizon):
    """TCOD front to back (arXiv 2604.24005): ``min(start_turns + floor(n / every), max_turns)``.

    n counts explorer rounds from 0 there; here it is the update less 1, which moves with them. A rollout that is cut
    counts as reward 0.

    Args:
        max_turns: The environment's own limit.
        start_turns: Turns at the start (k_start).
        every: Updates for one turn more (eta).
    """

    def __init__(self, max_turns: int, start_turns: int = 1, every: int = 4) -> None:
        super().__init__(max_turns)
        _at_least("start_turns", start_turns, 1)
        _at_least("every", every, 1)
        self.start_turns, self.every = start_turns, every

    def turns(self, update: int) -> int:
        """Turns allowed at this update."""
        return min(self.start_turns + max(0, update - 1) // self.every, self.max_turns)


class TurnOPDHorizon:
    """TurnOPD's depth controller (arXiv 2607.05804).

    Only probes feed it: rollouts that were free to use the full depth. Others would bias the tail. From a round of
    probes, with zero-based turn t, mean per-token reverse KL ``K_t`` and ``n_t`` probes that reached t:

    - ``m_t = max(K_t, 0) * n_t / n_0`` and ``H_eff = round(sum(t * m_t) / sum(m_t))``;
    - ``H_cov``: the least depth that covers `coverage` of the successful probes' last turns; renewed only by a round
      with 8 or more successes, left out while there was none;
    - ``H_bar``: moving average of ``max(H_eff, H_cov)``, starting at its first value;
    - turns allowed: ``clip(round(H_bar) + 1, min_turns, max_turns)``.

    Args:
        min_turns: Lower limit.
        max_turns: Full depth.
        warmup_updates: Updates 1 ... this run at full depth.
        probe_every: A round of full-depth probes at every update divisible by this.
        coverage: Share of successful probes to cover, 0 to 1.
        ema: Weight of a new value in the moving average, 0 to 1.
        min_successes: Successes that a round needs to renew H_cov.

    Raises:
        ConfigError: A value out of range.
    """

    def __init__(
        self,
        min_turns: int = 2,
        max_turns: int = 50,
        warmup_updates: int = 3,
        probe_every: int = 8,
        coverage: float = 0.8,
        ema: float = 0.3,
        min_successes: int = 8,
    ) -> None:
        _at_least("min_turns", min_turns, 1)
        _at_least("max_turns", max_turns, min_turns)
        _at_least("warmup_updates", warmup_updates, 0)
        _at_least("probe_every", probe_every, 1)
        _at_least("min_successes", min_successes, 1)
        for name, value in [("coverage", coverage), ("ema", ema)]:
            if not 0 < value <= 1:
                raise ConfigError(f"{name} is {value!r}; it must lie above 0 and at most at 1.")
        self.min_turns, self.max_turns = min_turns, max_turns
        self.warmup_updates, self.probe_every = warmup_updates, probe_every
        self.coverage, self.ema, self.min_successes = coverage, ema, min_successes
        self._probes: list[tuple[list[float], bool]] = []
        self._covered: int | None = None
        self._smoothed: float | None = None

    def observe_probe(self, reverse_kl_per_turn: Sequence[float], success: bool) -> None:
        """Report one rollout that was free to use the full depth.

        Args:
            reverse_kl_per_turn: Mean over a turn's tokens of student minus teacher log-prob, for every turn played.
                A turn that carries no score is NaN: it counts as reached and leaves the mean alone.
            success: Strict success.
        """
        if reverse_kl_per_turn:
            self._probes.append(([float(x) for x in reverse_kl_per_turn], bool(success)))

    def close_probe(self) -> None:
        """Recompute the depth from the probes observed since the last call; nothing happens without one."""
        if not self._probes:
            return
        mass = []
        for t in range(max(len(kl) for kl, _ in self._probes)):
            alive = [kl[t] for kl, _ in self._probes if len(kl) > t]
            scored = [x for x in alive if not math.isnan(x)]
            mean = math.fsum(scored) / len(scored) if scored else 0.0
            mass.append(max(mean, 0.0) * len(alive) / len(self._probes))
        total = math.fsum(mass) + 1e-12
        depth = round(math.fsum(t * m / total for t, m in enumerate(mass)))
        depths = sorted(len(kl) - 1 for kl, success in self._probes if success)
        if len(depths) >= self.min_successes:
            # 0.8 * 10 must need 8 of 10 whatever its last binary digit.
            self._covered = depths[max(1, math.ceil(self.coverage * len(depths) - 1e-9)) - 1]
        if self._covered is not None:
            depth = max(depth, self._covered)
        if self._smoothed is None:
            self._smoothed = float(depth)
        else:
            self._smoothed = (1 - self.ema) * self._smoothed + self.ema * depth
        self._probes = []

    def turns(self, update: int) -> int:
        """Turns that a rollout which is no probe may take; full depth before the first closed round."""
        if update <= self.warmup_updates or self._smoothed is None:
            return self.max_turns
        return min(max(round(self._smoothed) + 1, self.min_turns), self.max_turns)

    def is_probe(self, update: int) -> bool:
        """Whether this update's rollouts are probes: they take `max_turns`, not `turns`."""
        return update > 0 and update % self.probe_every == 0

    def state_dict(self) -> dict[str, Any]:
        """Open probes and both depths."""
        return {
            "probes": [[list(kl), success] for kl, success in self._probes],
            "covered": self._covered,
            "smoothed": self._smoothed,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""
        self._probes = [(list(kl), bool(success)) for kl, success in state["probes"]]
        self._covered, self._smoothed = state["covered"], state["smoothed"]


def _at_least(name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} is {value!r}; it must be a whole number, {least} or more.")
