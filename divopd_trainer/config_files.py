"""`DivOPDConfig` from YAML files, mappings and command lines, and back.

Settings are looked up in this order: command line, file, the method's preset, the default.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from divopd_gym.errors import ConfigError

from .config import DivOPDConfig

# After .config, which silences TRL's notice.
from trl import TrlParser  # isort: skip

__all__ = ["config_from_mapping", "load_config", "parse_config", "save_config"]


def _check_keys(keys: Sequence[str], where: str) -> None:
    known = [f.name for f in dataclasses.fields(DivOPDConfig) if f.init]
    unknown = [key for key in keys if key not in known]
    if not unknown:
        return
    parts = []
    for key in unknown:
        close = difflib.get_close_matches(key, known, 3, 0.6)
        parts.append(f"{key!r}" + (f" (did you mean {' or '.join(map(repr, close))}?)" if close else ""))
    raise ConfigError(
        f"Unknown setting{'s' if len(unknown) > 1 else ''} in {where}: {', '.join(parts)}. "
        "'divopd train --help' lists every setting."
    )


def config_from_mapping(values: Mapping[str, Any], *, where: str = "the configuration") -> DivOPDConfig:
    """Build a configuration from names and values.

    Args:
        values: Settings by name.
        where: What the error should call their source.

    Raises:
        ConfigError: An unknown name (the closest known ones are named) or a value that cannot work.
    """
    _check_keys(list(values), where)
    return _guard(lambda: DivOPDConfig(**_numbers(values)), where)


def load_config(path: str | os.PathLike, overrides: Mapping[str, Any] | None = None) -> DivOPDConfig:
    """Read a YAML file, replace some of its values, and check it.

    Raises:
        ConfigError: The file is missing or no mapping, or see `config_from_mapping`.
    """
    return config_from_mapping({**_read_yaml(path), **(overrides or {})}, where=str(path))


def parse_config(argv: Sequence[str]) -> DivOPDConfig:
    """Command line in TRL's convention: ``--config file.yaml --name value ...``; the command line wins.

    Raises:
        ConfigError: Unknown names or values that cannot work.
    """
    argv = list(argv)
    names = [a[2:].partition("=")[0] for a in argv if a.startswith("--") and len(a) > 2]
    fields = {f.name for f in dataclasses.fields(DivOPDConfig)}
    names = [n for n in names if not (n.startswith("no_") and n[3:] in fields)]
    _check_keys([n for n in names if n not in ("config", "help")], "the command line")
    settings: dict[str, Any] = {}
    if "--config" in argv:
        at = argv.index("--config")
        if at + 1 >= len(argv):
            raise ConfigError("--config has no value; expected the path of a YAML file after it.")
        path = argv[at + 1]
        settings = _read_yaml(path)
        _check_keys(list(settings), path)
        del argv[at : at + 2]

    def parse() -> DivOPDConfig:
        # The parser hands over every setting; only what was given may win over the method's preset.
        parser = TrlParser(DivOPDConfig)
        given = vars(parser.parse_args(argv))
        absent = vars(parser.parse_args([]))
        named = {a[2:].partition("=")[0].replace("-", "_") for a in argv if a.startswith("--")}
        named |= {name.removeprefix("no_") for name in named if name.startswith("no_")}
        values = {name: value for name, value in given.items() if name in named or value != absent[name]}
        return config_from_mapping({**settings, **values}, where="the settings")

    return _guard(parse, "the command line")


def _guard(build: Any, where: str) -> DivOPDConfig:
    try:
        return build()
    except ConfigError:
        raise
    except (ValueError, TypeError) as error:
        raise ConfigError(f"Bad value in {where}: {error}") from error


def _read_yaml(path: str | os.PathLike) -> dict[str, Any]:
    path = Path(path)
    if not path.is_file():
        raise ConfigError(
            f"There is no configuration file {path}; expected a YAML mapping of settings. Check the path."
        )
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}. Mend the line that is named.") from error
    if not isinstance(values, dict):
        raise ConfigError(
            f"{path} holds {type(values).__name__}; expected a YAML mapping of settings (name: value)."
        )
    return values


def _numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """YAML reads 1e-6 as text; turn such text into the number its field wants."""
    kinds = {f.name: str(f.type) for f in dataclasses.fields(DivOPDConfig)}
    result = dict(values)
    for name, value in values.items():
        if isinstance(value, str) and "dict" in kinds[name] and value.lstrip().startswith("{"):
            result[name] = json.loads(value)
        if isinstance(value, str) and "float" in kinds[name] and "str" not in kinds[name]:
            try:
                result[name] = float(value)
            except ValueError:
                raise ConfigError(f"{name} is {value!r}; expected a number.") from None
    return result


def save_config(config: DivOPDConfig, path: str | os.PathLike) -> None:
    """Write every resolved value as YAML, so that the file alone repeats the run."""
    values = {}
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if hasattr(value, "value") and not isinstance(value, (dict, list)):
            value = value.value
        if f.init and not f.name.endswith("_token") and _plain(value):
            values[f.name] = value
    for name in ("output_dir", "max_steps", "max_completion_length", "resume_from_checkpoint"):
        values.pop(name, None)
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=110)
    path = Path(path)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def _plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _plain(item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return all(_plain(item) for item in value)
    return value is None or isinstance(value, (str, int, float, bool))
