"""Asynchronous on-policy distillation of language-model agents on the environments of `divopd_gym`.

Names are imported when they are first used, so that `import divopd_trainer` needs no torch.
"""

from importlib import import_module
from typing import Any

_HOME = {
    "BatchComposer": "composer",
    "DivOPDConfig": "config",
    "DivOPDTrainer": "trainer",
    "load_config": "config_files",
    "register": "registry",
    "register_method": "methods",
    "run": "running",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
