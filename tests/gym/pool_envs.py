"""A small text environment whose tasks misbehave in named ways, for the tests of the pool."""

import os
import signal
import tempfile
import time

import gymnasium


class Unpicklable(Exception):
    def __init__(self, a, b):
        super().__init__(f"{a}-{b}")


class Fake(gymnasium.Env):
    """Counts to `length`; the action "go" does what the task says at that turn, other actions just count."""

    def __init__(self, length=3, fail_at_start=False, leave_file=False):
        if fail_at_start:
            raise ValueError("cannot be built")
        self.length, self.leave_file = length, leave_file
        self.secret = 7

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.task = (options or {}).get("task") or f"seed {seed}"
        self.turns = 0
        if self.leave_file:
            tempfile.mkstemp()
        if self.task == "bad reset":
            raise KeyError("no such task")
        return f"start of {self.task}", self._info()

    def step(self, action):
        self.turns += 1
        if action == "go":
            self._misbehave()
        over = self.turns >= self.length
        return f"{action} {self.turns}", float(over), over, False, self._info()

    def variable(self, name):
        return os.environ.get(name)

    def _misbehave(self):
        match self.task:
            case "hang":
                time.sleep(600)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "exit":
                os._exit(3)
            case "raise":
                raise ValueError("broken turn")
            case "raise unpicklable":
                raise Unpicklable("a", "b")
            case "unpicklable info":
                self.bad = lambda: None
            case "big":
                self.big = "x" * 3_000_000

    def _info(self):
        info = {"task": self.task, "turns": self.turns, "success": False}
        if hasattr(self, "bad"):
            info["bad"] = self.__dict__.pop("bad")
        if hasattr(self, "big"):
            info["big"] = self.__dict__.pop("big")
        return info

    def expert(self):
        return Expert()

    def add(self, a, b):
        return a + b


class Expert:
    def reset(self, observation, info):
        self.seen = [observation]

    def act(self):
        return " | ".join(self.seen)

    def observe(self, action, observation, info):
        self.seen.append(f"{action}>{observation}")


if "fakes/Pool-v0" not in gymnasium.registry:
    gymnasium.register("fakes/Pool-v0", entry_point="tests.gym.pool_envs:Fake")
