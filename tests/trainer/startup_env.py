"""Environments for the start-up checks; registered when this module is imported (``startup_env:Name-v0``)."""

import gymnasium

from divopd_gym.errors import DataNotFoundError

TEXT = gymnasium.spaces.Text(100)


class Rooms(gymnasium.Env):
    observation_space = action_space = TEXT

    def __init__(self, split="train", tasks=2, fail=None, data_dir=None, gold=None):
        if fail == "data":
            raise DataNotFoundError(
                f"No games in {data_dir}; expected a folder per game. Run 'divopd data download'."
            )
        if fail == "crash":
            raise RuntimeError("engine exploded")
        self.gold = gold
        self.tasks = [f"{split}-{i}" for i in range(0 if split == "empty" else tasks)]

    def reset(self, *, seed=None, options=None):
        info = {"task": (options or {}).get("task"), "goal": "w2 w3", "admissible_actions": ["w4"]}
        info |= {"score": 0.0, "success": False, "valid_action": True, "done_reason": None, "turns": 0}
        return "w5 w6 w7", info

    def gold_path(self):
        return self.gold and ["w4"] * self.gold

    def versions(self):
        return {"rooms": "1"}


gymnasium.register("Rooms-v0", Rooms)
