"""`divopd serve`: one vLLM server of a run by itself."""

from __future__ import annotations

import os
from collections.abc import Sequence

from divopd_gym.errors import ConfigError

__all__ = ["main"]

_USAGE = """usage: divopd serve student|eval|teacher CONFIG.yaml [--index N] [--label NAME] [--dry-run] [--NAME VALUE ...]

Run one vLLM server of a run (engine: vllm) in this terminal, with the flags that training needs: the N-th of its kind
(default 0), of the teacher with this label. It listens on this machine only unless the setting `launch` names another
host. `divopd launch --help` describes that setting; --dry-run prints the command.
"""


def main(argv: Sequence[str]) -> int:
    """Run the command; does not return where the server is started."""
    if not argv or any(argument in ("-h", "--help") for argument in argv):
        print(_USAGE)
        return 0
    role, rest = argv[0], list(argv[1:])
    if role not in ("student", "eval", "teacher"):
        raise ConfigError(
            f"divopd serve {role}: expected student, eval or teacher. See `divopd serve --help`."
        )
    index = int(_take(rest, "--index") or 0)
    label = _take(rest, "--label") or ""
    from ..config_files import parse_config
    from ..serve import server_commands
    from .launch import split

    dry, options = split(rest, f"serve {role}")
    commands = [c for c in server_commands(parse_config(options)) if c.role == role and c.label == label]
    if index >= len(commands):
        raise ConfigError(
            f"There is no {role} server {index}{f' of {label!r}' if label else ''}: the settings have {len(commands)} of this "
            f"kind. Set launch.{role}_servers, or choose --index and --label."
        )
    command = commands[index]
    if dry:
        print(command.shell())
        return 0
    print(f"{command.name}: {command.url}", flush=True)
    try:
        os.execvpe(command.argv[0], command.argv, {**os.environ, **command.env})
    except OSError as error:
        raise ConfigError(
            f"{command.argv[0]} cannot be started ({error}); set launch.python to the interpreter of the environment that "
            "has vLLM."
        ) from error


def _take(argv: list[str], name: str) -> str | None:
    if name not in argv:
        return None
    at = argv.index(name)
    if at + 1 >= len(argv):
        raise ConfigError(f"{name} has no value; see `divopd serve --help`.")
    value = argv[at + 1]
    del argv[at : at + 2]
    return value
