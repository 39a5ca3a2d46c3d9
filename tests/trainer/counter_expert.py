"""The counting environment with an expert that knows only what it reads."""

import re

import gymnasium
from fakes import CounterEnv

EXPERT_ENV_ID = "counter_expert:divopd_test/CounterWithExpert-v0"


class CountExpert:
    """Says the number that the last observation asked for."""

    def reset(self, observation, info):
        self.observe("", observation, info)

    def observe(self, action, observation, info):
        found = re.findall(r"Next is (\d+)", observation)
        self.wanted = found[-1] if found else getattr(self, "wanted", "1")

    def act(self):
        return f"go {self.wanted}"


class CounterWithExpert(CounterEnv):
    def expert(self):
        return CountExpert()


gymnasium.register(
    "divopd_test/CounterWithExpert-v0", CounterWithExpert, disable_env_checker=True, order_enforce=False
)
