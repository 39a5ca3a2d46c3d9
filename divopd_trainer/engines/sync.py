"""How new weights reach a vLLM server: the protocol that ways of doing it keep, and their names.

A way is a factory ``factory(config, purpose) -> WeightSync``; ``purpose`` is "train" or "eval", whose adapters must
not share names, because both may be on one server.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from divopd_gym.errors import ConfigError
from divopd_trainer.engines.http import Server

__all__ = ["WAYS", "WeightSync", "make_weight_sync"]

WAYS: dict[str, str] = {
    "file": "divopd_trainer.engines.vllm_sync:files",
    "nccl": "divopd_trainer.engines.vllm_nccl:broadcast",
    "lora": "divopd_trainer.engines.vllm_sync:adapters",
}
"""Names that the setting ``weight_sync`` may have, and the factory "module:function" of each."""


class WeightSync(Protocol):
    """A way of giving weights to one server.

    Attributes:
        adapters: Whether a server holds several versions at once, told apart by the model that requests name. If not, a server is
            closed to new requests and emptied of running ones before `push`, so that no response is of two versions.
    """

    adapters: bool

    async def push(
        self, server: Server, source: str | Path | Mapping[str, Any], version: int, load: int
    ) -> str | None:
        """Have a server serve these weights from its next request on; returns when it does.

        It is called for all servers at the same time, and again for one that was restarted; pushing one load twice
        must not fail.

        Args:
            server: Which.
            source: What the learner handed over.
            version: What it is called in turns and metrics. Two loads may have one version: candidates that are
                evaluated have that of the update they were made from.
            load: Number of these weights in the life of the engine, rising; no two have the same.

        Returns:
            The model that requests name to be answered by these weights (adapters: a name of their own for each
            load); None: the server's own.

        Raises:
            EngineError: The server does not have them. `ServerUnavailable` says that it may have them later.
        """

    async def retire(self, server: Server, model: str) -> None:
        """No request names this model any more (adapters only)."""


def make_weight_sync(name: str | None, config: Any, purpose: str = "train") -> WeightSync | None:
    """Build the way that the setting ``weight_sync`` names.

    Args:
        name: One of `WAYS`, or an importable factory "module:function"; None: the weights never change.
        config: The `ExplorerConfig`.
        purpose: "train" or "eval".

    Raises:
        ConfigError: There is no such way.
    """
    if name is None:
        return None
    target = WAYS.get(name, name)
    module, _, function = target.partition(":")
    if not function:
        raise ConfigError(
            f"weight_sync is {name!r}; expected one of {', '.join(map(repr, WAYS)) or '(none built in)'} or an importable "
            "factory 'module:function'."
        )
    try:
        factory = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"weight_sync is {name!r}, which cannot be imported ({error}); expected 'module:function' on the Python "
            "path."
        ) from error
    return factory(config, purpose)
