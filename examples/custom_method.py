"""A method of your own in one file: a horizon that follows the student's success, and a preset that uses it.

    python examples/custom_method.py --config examples/tiny/divopd.yaml --updates 20 --run_dir runs/mine

The same file works with the command line: `divopd train --plugins examples/custom_method.py --method success-depth ...`.
"""

import sys

from divopd_trainer import register, register_method


@register("horizon", "success-depth")
class SuccessDepth:
    """As many turns as the recent successful rollouts needed, and `slack` more.

    Args:
        max_turns: Full depth; filled in from the run when the preset does not say.
        slack: Turns beyond what the successes needed.
        memory: Weight of a new success in the moving average, 0 to 1.
    """

    def __init__(self, max_turns: int, slack: int = 3, memory: float = 0.2) -> None:
        self.max_turns, self.slack, self.memory = max_turns, slack, memory
        self.needed = float(max_turns)

    def turns(self, update: int) -> int:
        """Turns that a rollout begun at this update may take."""
        return min(self.max_turns, round(self.needed) + self.slack)

    def is_probe(self, update: int) -> bool:
        """No rollout has to run to full depth."""
        return False

    def observe(self, rollout) -> None:
        """Learn from a finished rollout."""
        if rollout.success:
            self.needed += self.memory * (rollout.turns_played - self.needed)

    def state_dict(self) -> dict:
        """For checkpoints."""
        return {"needed": self.needed}

    def load_state_dict(self, state: dict) -> None:
        """From a checkpoint."""
        self.needed = state["needed"]


register_method(
    "success-depth", {"about": "DivOPD, cut at the depth of success.", "horizon": "success-depth"}
)

if __name__ == "__main__":
    from divopd_trainer.cli import main

    sys.exit(main(["train", "--method", "success-depth", *sys.argv[1:]]))
