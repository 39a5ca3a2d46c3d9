"""`DivOPDConfig` from YAML files, mappings and command lines, and back.

Settings are looked up in this order: command line, a profile of the file, the file, the method's preset, the default.
A file's ``profiles`` are sets of settings by name, such as those of another machine; ``--profile NAME`` takes one.
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

from .cli_options import named_file, read_yaml, take_option
from .config import RECOVERY_OPTIONS, DivOPDConfig
from .methods import MERGED, method_settings
from .registry import SEAMS, import_plugins

# After .config, which silences TRL's notice.
from trl import TrlParser  # isort: skip

__all__ = ["PROFILES", "config_from_mapping", "load_config", "parse_config", "save_config"]

PROFILES = "profiles"
"""The key of a file that is no setting."""
# Noted before a parser is made: it takes None out of the fields' types.
_OPTIONAL = {f.name for f in dataclasses.fields(DivOPDConfig) if "None" in str(f.type)}


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


def load_config(
    path: str | os.PathLike, overrides: Mapping[str, Any] | None = None, profile: str | None = None
) -> DivOPDConfig:
    """Read a YAML file, replace some of its values, and check it.

    Args:
        path: The file.
        overrides: Settings that win over it.
        profile: One of the file's own ``profiles``, whose settings win over the others in the file.

    Raises:
        ConfigError: The file is missing or no mapping, it has no such profile, or see `config_from_mapping`.
    """
    return config_from_mapping(_over(_read_settings(path, profile), overrides or {}), where=str(path))


def parse_config(argv: Sequence[str]) -> DivOPDConfig:
    """Command line in TRL's convention: ``[--config] file.yaml --name value ...``; the command line wins.

    ``--profile NAME`` takes one of the file's ``profiles``.

    Raises:
        ConfigError: Unknown names or values that cannot work.
    """
    argv, profile = take_option(named_file(argv), "--profile")
    names = [a[2:].partition("=")[0] for a in argv if a.startswith("--") and len(a) > 2]
    fields = {f.name for f in dataclasses.fields(DivOPDConfig)}
    names = [n for n in names if not (n.startswith("no_") and n[3:] in fields)]
    _check_keys([n for n in names if n not in ("config", "help")], "the command line")
    settings: dict[str, Any] = {}
    argv, path = take_option(argv, "--config")
    if path is not None:
        settings = _read_settings(path, profile)
        _check_keys(list(settings), path)
    elif profile is not None:
        raise ConfigError(
            f"--profile {profile} is given without --config; profiles stand in a YAML file. Name it."
        )

    def parse() -> DivOPDConfig:
        # The parser hands over every setting; only what was given may win over the method's preset.
        parser = TrlParser(DivOPDConfig)
        parser.error = _refuse  # its own would print the usage of 200 options
        given = vars(parser.parse_args(argv))
        absent = vars(parser.parse_args([]))
        named = {a[2:].partition("=")[0].replace("-", "_") for a in argv if a.startswith("--")}
        named |= {name.removeprefix("no_") for name in named if name.startswith("no_")}
        values = {
            name: None if value in ("null", "none") and name in _OPTIONAL else value
            for name, value in given.items()
            if name in named or value != absent[name]
        }
        return config_from_mapping(_over(settings, values), where="the settings")

    return _guard(parse, "the command line")


def _refuse(message: str) -> None:
    hint = " The file of settings is the first word." if message.startswith("unrecognized") else ""
    raise ConfigError(
        f"The command line: {message}.{hint} 'divopd train --help' lists every setting with its unit."
    )


def _over(settings: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a file under those that were given; with another method, what was the old one's own goes.

    The file of a run holds every resolved value, so the parts of its method would win over those of the new one.
    """
    old, new = settings.get("method", "divopd"), given.get("method")
    if new is None or new == old:
        return {**settings, **given}
    import_plugins(settings.get("plugins") or [])
    import_plugins(given.get("plugins") or [])
    before, after = method_settings(old), method_settings(new)
    fields = DivOPDConfig.__dataclass_fields__
    parts = [name for name in SEAMS if name in fields]
    own = {name: fields[name].default for name in {*parts, *before, *after} if name in fields} | before
    kept = {}
    for name, value in settings.items():
        part = name.removesuffix("_kwargs")
        if name in MERGED:
            # Options of a part that the file did not choose itself.
            if settings.get(part, own[part]) == own[part]:
                continue
        elif name in own and value == own[name]:
            continue
        kept[name] = value
    return {**kept, **given}


def _guard(build: Any, where: str) -> DivOPDConfig:
    try:
        return build()
    except ConfigError:
        raise
    except (ValueError, TypeError) as error:
        raise ConfigError(f"Bad value in {where}: {error}") from error


def _read_settings(path: str | os.PathLike, profile: str | None) -> dict[str, Any]:
    """A file's settings, those of one of its profiles on top."""
    values = read_yaml(path)
    profiles = values.pop(PROFILES, None) or {}
    if not isinstance(profiles, dict) or not all(isinstance(one, dict) for one in profiles.values()):
        raise ConfigError(
            f"{PROFILES} in {path} is {profiles!r}; expected mappings of settings by name, e.g. one-gpu: {{lora_rank: 64}}."
        )
    for name, settings in profiles.items():
        _check_keys(list(settings), f"profile {name!r} of {path}")
    if profile is None:
        return values
    if profile not in profiles:
        there = ", ".join(map(repr, profiles)) or "none"
        raise ConfigError(
            f"{path} has no profile {profile!r}; it has {there}. Choose one of these, or leave --profile out."
        )
    return {**values, **profiles[profile]}


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
        if f.name == "controller_kwargs" and config.controller == "recovery":
            # They have settings of their own, which would lose against these.
            value = {name: v for name, v in value.items() if name not in RECOVERY_OPTIONS}
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
