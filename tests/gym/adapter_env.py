"""A small text environment for the tests of the adapters: say the words of the task in order."""

import gymnasium

from divopd_gym.core import Outcome, TextEnv


class WordsEnv(TextEnv):
    tasks = ("a b", "c d e", "f")

    def _start(self, task, seed, options):
        self.words, self.place, self.seed = task.split(), 0, seed
        return f"Say {task}.", self._outcome("You stand before a door.", True)

    def _play(self, action):
        if action == "raise":
            raise RuntimeError("the game broke")
        understood = action == self.words[self.place]
        self.place += understood
        return self._outcome("Click." if understood else "Nothing happens.", understood)

    def _outcome(self, text, understood):
        over = self.place == len(self.words)
        return Outcome(
            text,
            self.place / len(self.words),
            over,
            over,
            understood,
            None if over else [self.words[self.place], "wait"],
        )

    def gold_path(self):
        return list(self.words)


ID = "divopd_test/Words-v0"
if ID not in gymnasium.registry:
    gymnasium.register(ID, entry_point="adapter_env:WordsEnv")
