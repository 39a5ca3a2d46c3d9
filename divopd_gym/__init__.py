"""Text environments as true Gymnasium environments; importing this registers their ids."""

import gymnasium

from divopd_gym.errors import (
    ConfigError,
    DataNotFoundError,
    DivOPDError,
    PoolError,
    ResetNeeded,
    WorkerDied,
    WorkerTimeout,
)

__all__ = [
    "ConfigError",
    "DataNotFoundError",
    "DivOPDError",
    "PoolError",
    "ResetNeeded",
    "WorkerDied",
    "WorkerTimeout",
]

# Each id's module is imported only when an environment is made.
_ENVIRONMENTS = {
    "divopd_gym/ALFWorld-v0": "divopd_gym.envs.alfworld.env:ALFWorldEnv",
    "divopd_gym/WebShop-v0": "divopd_gym.envs.webshop.env:WebShopEnv",
    "divopd_gym/ScienceWorld-v0": "divopd_gym.envs.scienceworld.env:ScienceWorldEnv",
    "divopd_gym/TextWorld-v0": "divopd_gym.envs.textworld.env:TextWorldEnv",
}

for _id, _entry_point in _ENVIRONMENTS.items():
    if _id not in gymnasium.registry:
        gymnasium.register(_id, entry_point=_entry_point, disable_env_checker=False)
