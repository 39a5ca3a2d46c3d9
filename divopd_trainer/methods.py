"""Methods as presets: a file of settings that names one part a seam.

A preset is a mapping of `DivOPDConfig` settings. Whatever the user gives wins over it, option by option. The files
in `presets/` are ours; ``--method path/to/mine.yaml`` reads another, and `register_method` makes one known to a script.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from divopd_gym.errors import ConfigError

__all__ = ["MERGED", "about", "method_names", "method_settings", "register_method"]

MERGED = ("controller_kwargs", "horizon_kwargs", "weighting_kwargs", "advantage_kwargs", "review_kwargs")
"""Settings that are mappings: a preset's options stand where the user gives no others."""

_NOTES = ("about", "source")
_own: dict[str, dict[str, Any]] = {}


def register_method(name: str, settings: Mapping[str, Any]) -> None:
    """Make a method known to this program under a name.

    Args:
        name: Not one of ours.
        settings: `DivOPDConfig` settings; ``about`` and ``source`` are for the reader.

    Raises:
        ConfigError: The name is taken.
    """
    if name in _ours():
        raise ConfigError(f"The method {name!r} is one of divopd's own; register yours under another name.")
    _own[name] = dict(settings)


def method_names() -> tuple[str, ...]:
    """Known methods, by name."""
    return (*_ours(), *_own)


def method_settings(name: str) -> dict[str, Any]:
    """The settings of a method.

    Args:
        name: A known name, or the path of a YAML file.

    Raises:
        ConfigError: There is no such method, or its file is no mapping.
    """
    return {key: value for key, value in _read(name).items() if key not in _NOTES}


def about(name: str) -> str:
    """One sentence on a method, with its source."""
    values = _read(name)
    return " ".join(str(values[key]).strip() for key in _NOTES if values.get(key))


def _read(name: str) -> dict[str, Any]:
    if name in _own:
        return _own[name]
    if name in _ours():
        return dict(_load(_ours()[name]))
    if name.endswith((".yaml", ".yml")):
        return _load(Path(name))
    close = difflib.get_close_matches(name, method_names(), 1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise ConfigError(
        f"method is {name!r}; expected one of {', '.join(method_names())}, or the path of a preset file (.yaml).{hint}"
    )


@lru_cache(maxsize=1)
def _ours() -> dict[str, Path]:
    folder = Path(str(files("divopd_trainer") / "presets"))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def _load(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"The preset file {path} cannot be read ({error.strerror}); check the path."
        ) from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}. Mend the line that is named.") from None
    if not isinstance(values, dict) or "method" in values:
        raise ConfigError(
            f"{path} is no preset: expected a YAML mapping of settings (name: value) without 'method' in it."
        )
    return values
