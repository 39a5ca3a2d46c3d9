"""Options of commands: from a parser, a YAML file, or a function's own signature.

The command line wins over the file, and the file over the defaults. An unknown key in the file is an error that names
the closest known ones.
"""

from __future__ import annotations

import argparse
import difflib
import inspect
import re
import sys
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from divopd_gym.errors import ConfigError

__all__ = [
    "Parser", "add_function_options", "check_names", "console", "mapping", "named_file", "read_yaml", "take_option",
    "whole_number",
]  # fmt: skip


class _Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30, width=110)

    def _get_help_string(self, action: argparse.Action) -> str:
        if (
            not action.option_strings
            or action.default in (None, argparse.SUPPRESS)
            or action.const is not None
        ):
            return action.help or ""
        return super()._get_help_string(action) or ""


class Parser(argparse.ArgumentParser):
    """`argparse` with ``[--config] FILE.yaml`` and defaults in the help.

    Args:
        command: Name after ``divopd``.
        description: What it does; line breaks are kept.
    """

    def __init__(self, command: str, description: str) -> None:
        super().__init__(
            prog=f"divopd {command}", description=description, formatter_class=_Formatter, allow_abbrev=False
        )
        self.add_argument("--config", metavar="FILE.yaml", help="take options from this YAML file")

    def parse(self, argv: Sequence[str], ignore: Collection[str] = ()) -> argparse.Namespace:
        """Parse the command line over the file over the defaults.

        Args:
            argv: The command line; its first word may be the file where the command has no other words.
            ignore: Keys of the file that another command uses and this one does not.

        Raises:
            ConfigError: The file is missing, is no mapping, or has an unknown key or a bad value.
        """
        argv = list(argv)
        if all(action.option_strings for action in self._actions):
            argv = named_file(argv)
        finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        finder.add_argument("--config")
        path = finder.parse_known_args(argv)[0].config
        if path is not None:
            self._take(read_yaml(path), path, ignore)
        return self.parse_args(argv)

    def _take(self, values: Mapping[str, Any], path: str, ignore: Collection[str]) -> None:
        actions = {action.dest: action for action in self._actions if action.dest not in ("help", "config")}
        check_names([name for name in values if name not in ignore], actions, path)
        for name, value in values.items():
            action = actions.get(name)
            if action is None:
                continue
            # Values that YAML has typed already keep their type; text goes through the option's own.
            if isinstance(value, str) and action.type is not None:
                try:
                    value = action.type(value)
                except (ValueError, TypeError, argparse.ArgumentTypeError) as error:
                    raise ConfigError(f"{name} in {path} is {value!r}: {error}.") from None
            if action.choices is not None and value not in action.choices:
                raise ConfigError(
                    f"{name} in {path} is {value!r}; expected one of {', '.join(map(str, action.choices))}."
                )
            action.default, action.required = value, False


def read_yaml(path: str | Path) -> dict[str, Any]:
    """A YAML file that holds a mapping.

    Raises:
        ConfigError: It is missing, unreadable, or something else.
    """
    import yaml

    path = Path(path)
    if not path.is_file():
        raise ConfigError(
            f"There is no configuration file {path}; expected a YAML mapping of settings. Check the path."
        )
    try:
        values = yaml.safe_load(path.read_text("utf-8"))
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}. Mend the line that is named.") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(
            f"{path} holds a {type(values).__name__}; expected a YAML mapping of settings (name: value)."
        )
    return values


def check_names(names: Sequence[str], known: Collection[str], where: str) -> None:
    """Refuse unknown option names, naming the closest known ones."""
    unknown = [str(name) for name in names if name not in known]
    if not unknown:
        return
    parts = []
    for name in unknown:
        close = difflib.get_close_matches(name, list(known), 2)
        parts.append(f"{name!r}" + (f" (did you mean {' or '.join(map(repr, close))}?)" if close else ""))
    raise ConfigError(
        f"Unknown option{'s' if len(unknown) > 1 else ''} in {where}: {', '.join(parts)}. Known options: "
        f"{', '.join(sorted(known))}."
    )


def take_option(argv: list[str], name: str) -> tuple[list[str], str | None]:
    """A command line without one of its options, and that option's value.

    Args:
        argv: The command line.
        name: Such as ``--config``; ``--config=VALUE`` is understood too.

    Raises:
        ConfigError: The value is missing.
    """
    for at, argument in enumerate(argv):
        if argument.startswith(f"{name}="):
            return argv[:at] + argv[at + 1 :], argument.partition("=")[2]
        if argument == name:
            if at + 1 >= len(argv):
                what = "the path of a YAML file" if name == "--config" else "a name"
                raise ConfigError(f"{name} has no value; expected {what} after it.")
            return argv[:at] + argv[at + 2 :], argv[at + 1]
    return argv, None


def named_file(argv: Sequence[str]) -> list[str]:
    """A command line whose file of settings, if its first word is one, stands behind ``--config``.

    Raises:
        ConfigError: Two files are named.
    """
    argv = list(argv)
    if not argv or argv[0].startswith("-"):
        return argv
    named = take_option(argv, "--config")[1]
    if named is not None:
        raise ConfigError(
            f"Two files of settings are named, {argv[0]} and {named}; expected one. Leave one out."
        )
    return ["--config", *argv]


def console() -> Any:
    """A rich console on standard output; piped output is wide enough for the tables."""
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else 120)


def mapping(text: str) -> dict[str, Any]:
    """An option that is a mapping, written as YAML: ``'{family: tiny}'`` or ``family=tiny,size=3``."""
    import yaml

    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        value = None
    if isinstance(value, str) and re.fullmatch(r"\w+=[^,]*(,\w+=[^,]*)*", text):
        value = {
            key: yaml.safe_load(item) for key, _, item in (part.partition("=") for part in text.split(","))
        }
    if value is None and not text.strip():
        value = {}
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no mapping; write '{{name: value}}' or name=value,name=value"
        )
    return value


def whole_number(least: int) -> Callable[[str], int]:
    """An option that is a whole number of at least ``least``."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least {least}")
        return value

    parse.__name__ = "whole number"
    return parse


def _docs(function: Callable[..., Any]) -> dict[str, str]:
    """Parameter -> text, from the Args section of a Google docstring."""
    text = inspect.getdoc(function) or ""
    found = re.search(r"^Args:\n(.*?)(?=^\S|\Z)", text, re.M | re.S)
    if not found:
        return {}
    block = inspect.cleandoc(found.group(1))
    entries = re.split(r"^(?=\**\w+[^:\n]*:)", block, flags=re.M)
    docs = {}
    for entry in entries:
        name, _, rest = entry.partition(":")
        if rest:
            docs[name.split("(")[0].strip().lstrip("*")] = " ".join(rest.split())
    return docs


class _OneOrMore(argparse.Action):
    """A single value stays a value, several become a list."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, values[0] if len(values) == 1 else values)


def _kind(annotation: Any) -> tuple[Any, str]:
    """(type to parse with, "one" | "many" | "either") of an annotation."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        kinds = [_kind(argument) for argument in arguments if argument is not type(None)]
        scalars = [kind for kind, number in kinds if number == "one"]
        lists = [kind for kind, number in kinds if number == "many"]
        # The widest wins: what can be text is given as text.
        scalar = next((wide for wide in (str, float, int, bool) if wide in scalars), (scalars or [str])[0])
        if lists and scalars:
            return scalar, "either"
        return (lists[0], "many") if lists else (scalar, "one")
    if annotation in (int, float, bool):
        return annotation, "one"
    if annotation in (dict, Mapping) or origin in (dict, Mapping):
        return mapping, "one"
    if origin in (list, tuple, set, Sequence, Collection):
        return (_kind(arguments[0])[0] if arguments else str), "many"
    return str, "one"


def add_function_options(
    parser: argparse.ArgumentParser, function: Callable[..., Any], skip: Collection[str] = ()
) -> list[str]:
    """One option a parameter of a function, with its type, default and the help of its docstring.

    Args:
        parser: Gets the options.
        function: Has annotations and a Google docstring.
        skip: Parameters that are no options.

    Returns:
        The names of the options, to call the function with.
    """
    hints, docs, names = typing.get_type_hints(function), _docs(function), []
    for name, parameter in inspect.signature(function).parameters.items():
        if name in skip or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        kind, number = _kind(hints.get(name, str))
        required = parameter.default is parameter.empty
        options: dict[str, Any] = {
            "required": required,
            "default": None if required else parameter.default,
            "help": (docs.get(name, "").replace("%", "%%") + (" (required)" if required else "")).strip()
            or " ",
        }
        if kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        else:
            options["type"] = kind
            options["metavar"] = {mapping: "{..}", int: "N", float: "X"}.get(kind, "TEXT")
            if number != "one":
                options["nargs"] = "+"
            if number == "either":
                options["action"] = _OneOrMore
        parser.add_argument(f"--{name}", **options)
        names.append(name)
    return names
