"""How deep the next rollout may go, and which rollouts are the full-depth probes of a horizon that asks for them.

A round of probes is the first `probe_rollouts` episodes begun once the horizon asks for one (`is_probe`, or its
warm-up, when every rollout is at full depth anyway). It is closed when all of them have ended; a horizon never
hears of a rollout that was cut.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..turns import Rollout

__all__ = ["DepthControl", "reverse_kl_per_turn"]


class DepthControl:
    """Asks a horizon at the begin of every training episode, and reports probes back.

    Args:
        horizon: A `divopd_trainer.horizon.Horizon`.
        max_turns: Full depth.
        probe_rollouts: Rollouts of a round.
    """

    def __init__(self, horizon: Any, max_turns: int, probe_rollouts: int = 16) -> None:
        self.horizon, self.max_turns, self.probe_rollouts = horizon, max_turns, probe_rollouts
        self._last_round, self._seen = -1, 0
        self._to_begin = 0
        self._playing = 0

    def begin(self, completed: int) -> tuple[int, bool]:
        """Depth of an episode that begins now, and whether it is a probe.

        Args:
            completed: Updates the learner has completed.
        """
        update = completed + 1
        if self._to_begin == self._playing == 0 and (number := self._round(update)) > self._last_round:
            self._last_round, self._to_begin = number, self.probe_rollouts
        if self._to_begin:
            self._to_begin -= 1
            self._playing += 1
            return self.max_turns, True
        return max(1, min(self.horizon.turns(update), self.max_turns)), False

    def _round(self, update: int) -> int:
        """Number of the round that is due: its update, 0 in the warm-up, -1 for none."""
        if not hasattr(self.horizon, "observe_probe"):
            return -1
        # An update may pass without a begin, or while the last round is still played; its probe is made up for.
        due = [number for number in range(self._seen + 1, update + 1) if self.horizon.is_probe(number)]
        self._seen = max(self._seen, update)
        if due:
            return due[-1]
        return 0 if update <= getattr(self.horizon, "warmup_updates", 0) else -1

    def end(self, rollout: Rollout | None, probe: bool) -> None:
        """An episode ended; None when it failed or was called off."""
        if rollout is not None and (observe := getattr(self.horizon, "observe", None)):
            observe(rollout)
        if not probe:
            return
        self._playing -= 1
        if rollout is not None:
            self.horizon.observe_probe(reverse_kl_per_turn(rollout), rollout.success)
        if self._to_begin == self._playing == 0:
            self.horizon.close_probe()

    def state_dict(self) -> dict[str, Any]:
        """JSON values; probes in flight are to begin again."""
        state = getattr(self.horizon, "state_dict", dict)()
        to_begin = self._to_begin + self._playing
        return {"horizon": state, "round": self._last_round, "seen": self._seen, "to_begin": to_begin}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""
        if hasattr(self.horizon, "load_state_dict"):
            self.horizon.load_state_dict(state["horizon"])
        self._last_round, self._seen = state["round"], state.get("seen", 0)
        self._to_begin, self._playing = state["to_begin"], 0


def reverse_kl_per_turn(rollout: Rollout) -> list[float]:
    """Mean over a turn's valid tokens of student minus teacher log-prob, nats, for every turn played.

    NaN without any. Turns that a review added were not played.
    """
    values = []
    for turn in rollout.turns[: rollout.turns_played]:
        mask = turn.valid_mask() if not turn.imitated else np.zeros(turn.n_tokens, np.bool_)
        if not mask.any():
            values.append(float("nan"))
            continue
        gaps = turn.student_logprobs[mask].astype(np.float64) - turn.teacher_logprobs[mask]
        values.append(float(gaps.mean()))
    return values
