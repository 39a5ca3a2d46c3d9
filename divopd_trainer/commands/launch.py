"""`divopd launch`: servers and trainer of a run, started and ended together."""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Sequence
from typing import Any

from divopd_gym.errors import ConfigError

__all__ = ["main", "split"]

_USAGE = """usage: divopd launch CONFIG.yaml [--dry-run] [--NAME VALUE ...]

Start the vLLM servers of a run (engine: vllm) on this machine's GPUs, or on its CPU cores where there is none, wait
until they are healthy, and train. Every other option goes to `divopd train`. Logs are in RUN_DIR/logs. Ctrl-C ends the
run with a checkpoint; the same command with --resume_from_checkpoint true goes on. Everything ends with the launcher.

--dry-run prints the commands, for another scheduler; `divopd serve` runs one server by itself.

The mapping `launch` of the settings says which servers:
"""


def main(argv: Sequence[str]) -> int:
    """Run the command."""
    from ..serve import LaunchSettings

    if not argv or any(argument in ("-h", "--help") for argument in argv):
        docs = inspect.getdoc(LaunchSettings).partition("Attributes:\n")[2].rstrip()
        print(_USAGE + "\n".join(f"  {line.strip()}" for line in docs.splitlines()))
        return 0
    dry, options = split(argv)
    from ..config_files import parse_config
    from ..launch import Launcher, logs_of, plan_run

    config = parse_config(options)
    servers, trainer = plan_run(config, options)
    if dry:
        for part in (*servers, trainer):
            print(f"# {part.name}{f': {part.url}' if part.url else ''}\n{part.shell()}\n")
        return 0
    # What cannot work is refused before a server takes minutes to start.
    from ..run_dir import RunDir

    RunDir(config.run_dir).check(resume=bool(config.resume_from_checkpoint))
    settings = LaunchSettings.of(config)
    launcher = Launcher(
        servers,
        trainer,
        logs_of(config.run_dir),
        start_timeout_s=settings.start_timeout_s,
        stop_timeout_s=settings.stop_timeout_s,
        show=View(config),
    )
    code = launcher.run()
    print(f"Everything is stopped; logs: {launcher.logs}")
    return code


def split(argv: Sequence[str], command: str = "launch") -> tuple[bool, list[str]]:
    """(dry run, options for `parse_config`) of a command line that names a file of settings.

    Raises:
        ConfigError: It names none, or two.
    """
    from ..cli_options import named_file, take_option

    rest = [argument for argument in argv if argument not in ("--dry-run", "--dry_run")]
    dry = len(rest) != len(argv)
    rest = named_file(rest)
    if take_option(rest, "--config")[1] is None:
        raise ConfigError(
            f"divopd {command} needs a file of settings: divopd {command} CONFIG.yaml [--NAME VALUE ...]"
        )
    return dry, rest


class View:
    """One line on how all parts are, with the run's newest update.

    Args:
        config: The run's settings.
    """

    def __init__(self, config: Any) -> None:
        self._config, self._began = config, time.monotonic()

    def __call__(self, parts: list[Any]) -> None:
        """Print it."""
        seconds = int(time.monotonic() - self._began)
        states = "  ".join(
            f"{part.name} {part.state}" + (f" ({part.code})" if part.code else "") for part in parts
        )
        print(f"[{seconds // 60}:{seconds % 60:02}] {states}{self._progress()}", file=sys.stderr, flush=True)

    def _progress(self) -> str:
        from ..metrics_log import read_metrics

        try:
            lines = read_metrics(self._config.run_dir, ["train"])
        except Exception:
            # Nothing is written yet, or just now.
            return ""
        if not lines:
            return ""
        last = lines[-1]
        gap = last.get("kl_per_token")
        return f"  | update {last['update']}/{self._config.updates}" + (
            f"  gap {gap:.3f}" if gap is not None else ""
        )
