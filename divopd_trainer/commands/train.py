"""`divopd train`: a run from its settings to the report."""

from __future__ import annotations

import dataclasses
import os
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

from divopd_gym.errors import ConfigError, DivOPDError

__all__ = ["main", "settings_help"]

_USAGE = """usage: divopd train [--check [--strict] [--gpu_gb N]] [FILE.yaml [--profile NAME]] [--NAME VALUE ...]

Distil a student from a frozen teacher, asynchronously: an explorer plays episodes and has them scored while the
learner trains. Settings come from the YAML file; the command line wins. Ctrl-C ends the run with a checkpoint, and
--resume_from_checkpoint true goes on from the last one. The report is written to the run directory at the end.

--check resolves and checks the settings and prints estimates of tokens and memory; it starts nothing and needs no
network. What this machine does not have is "not checked" (exit status 1 with --strict), what cannot work on GPUs of
--gpu_gb (80) GB is a problem (exit status 1). --profile takes one of the sets of settings under `profiles` of the file.

--help shows the settings of a run, --help_all also those inherited from TRL and transformers.
"""

INHERITED = (
    "learning_rate",
    "temperature",
    "lr_scheduler_type",
    "warmup_steps",
    "weight_decay",
    "max_grad_norm",
    "adam_beta1",
    "adam_beta2",
    "seed",
    "bf16",
    "use_cpu",
    "resume_from_checkpoint",
    "report_to",
)
"""Inherited settings that the short help shows."""


def main(argv: Sequence[str]) -> int:
    """Run the command."""
    if not argv or any(argument in ("-h", "--help", "--help_all") for argument in argv):
        print(settings_help(everything="--help_all" in argv))
        return 0
    if "--check" in argv:
        return _check(argv)
    from ..config_files import parse_config
    from ..running import run

    config = parse_config(argv)
    result = run(config)
    if int(os.environ.get("RANK", "0")) != 0:
        return 0
    if result.interrupted is not None:
        print(
            f"Stopped by {result.interrupted} after update {result.update}. Go on with the same command and "
            "--resume_from_checkpoint true."
        )
        return 130
    print(f"{result.update} updates done; the student is in {result.final_model}")
    _report(config.run_dir)
    return 0


def _check(argv: Sequence[str]) -> int:
    from ..check import check
    from ..cli_options import take_option
    from ..config_files import parse_config

    strict = "--strict" in argv
    rest, gpu_gb = take_option([a for a in argv if a not in ("--check", "--strict")], "--gpu_gb")
    try:
        size = float(gpu_gb or 80.0)
    except ValueError:
        size = 0.0
    if not 0 < size < float("inf"):
        raise ConfigError(f"--gpu_gb is {gpu_gb!r}; expected the memory of a GPU in GB, such as 80.")
    report = check(parse_config(rest), size)
    print(report.text())
    return int(bool(report.problems or (strict and report.unchecked)))


def _report(run_dir: str) -> None:
    """A finished run must not fail for the sake of its report."""
    from ..report import write_report

    try:
        files = write_report([run_dir])
    except (DivOPDError, OSError) as error:
        print(f"The report could not be written: {error}", file=sys.stderr)
        return
    print(f"Report: {files.html}")
    for notice in files.notices:
        print(f"Note: {notice}")


def settings_help(everything: bool = False) -> str:
    """Every setting with its help text and default, from the fields of `DivOPDConfig`.

    Args:
        everything: Also those inherited from TRL and transformers that runs seldom change.
    """
    from ..config import DivOPDConfig

    own = list(DivOPDConfig.__annotations__)
    fields = {field.name: field for field in dataclasses.fields(DivOPDConfig) if field.init}
    parts = [_USAGE, "settings of a run:"]
    parts += [_entry(fields[name]) for name in own if name in fields and name not in INHERITED]
    parts.append("\ninherited from TRL and transformers:")
    parts += [_entry(fields[name]) for name in INHERITED if name in fields]
    if everything:
        parts += [
            _entry(field) for name, field in fields.items() if name not in own and name not in INHERITED
        ]
    return "\n".join(parts)


def _entry(field: dataclasses.Field) -> str:
    text = " ".join(str(field.metadata.get("help", "")).split())
    default = _default(field)
    if default is not None:
        text = f"{text} (default: {default})"
    head = f"  --{field.name} "
    lines = textwrap.wrap(text, 78, break_long_words=False, break_on_hyphens=False) or [""]
    if len(head) >= 32:
        return "\n".join([head.rstrip(), *(" " * 32 + line for line in lines)])
    return "\n".join([head.ljust(32) + lines[0], *(" " * 32 + line for line in lines[1:])])


def _default(field: dataclasses.Field) -> Any:
    value = field.default
    if value is dataclasses.MISSING:
        if field.default_factory is dataclasses.MISSING:
            return "required"
        value = field.default_factory()
    value = getattr(value, "value", value)
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else value
