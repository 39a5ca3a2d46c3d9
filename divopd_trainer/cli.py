"""`divopd`: one command line for training, evaluation, play, data and reports.

A command's module is imported only when that command runs, so that help and errors come at once. Errors of the project
are one block of text and exit status 2; ``DIVOPD_DEBUG=1`` shows where they came from.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
import textwrap
from collections.abc import Sequence

from divopd_gym.errors import DivOPDError

__all__ = ["COMMANDS", "main"]

COMMANDS: dict[str, tuple[str, str]] = {
    "train": (
        "train",
        "distil a student from a teacher: divopd train FILE.yaml --learning_rate 2e-6",
    ),
    "launch": ("launch", "start a run's vLLM servers and its trainer together: divopd launch FILE.yaml"),
    "serve": ("serve", "run one vLLM server of a run by itself"),
    "eval": ("evaluate", "play every task of a split once; success with interval, per task type"),
    "play": ("play", "play any environment in the terminal"),
    "expert": ("expert", "record an expert's episodes, off-path states included"),
    "sft": ("sft", "fine-tune a model on recorded episodes, or make a tiny one from scratch"),
    "export": (
        "export",
        "recorded episodes as a Hugging Face data set, or as JSON lines for supervised training",
    ),
    "replay": ("replay", "run any composer preset over the rollouts that a run recorded"),
    "audit": (
        "audit",
        "diagnostics of a recorded run, and how well each preset's gradient stands for its pool's",
    ),
    "compare": ("compare", "several methods over several seeds, with a report that compares them"),
    "methods": ("methods", "the methods that --method knows, and what each stands for"),
    "report": ("report", "one HTML page and PNG curves of one or several runs"),
    "data": ("data", "download and check benchmark data"),
}
"""Command -> (module in divopd_trainer.commands, what it does)."""


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: divopd COMMAND [options]",
            "",
            "Asynchronous on-policy distillation of language-model agents on multi-turn text environments.",
            "",
            "commands:",
            *lines,
            "",
            "divopd COMMAND --help shows a command's options with units and defaults. Options can come from a YAML file",
            "(FILE.yaml or --config FILE.yaml) where the help says so; the command line wins. DIVOPD_DEBUG=1 shows tracebacks.",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status.

    0 done, 1 the command ran and says no (data check), 2 it cannot work as asked, 130 interrupted.
    """
    try:
        try:
            return _run(argv)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # The reader of our output left; the interpreter must not complain about it when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(argv: Sequence[str] | None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_help())
        return 0
    if argv[0] in ("-V", "--version"):
        from importlib.metadata import version

        print(f"divopd {version('divopd')}")
        return 0
    name, rest = argv[0], argv[1:]
    if name not in COMMANDS:
        import difflib

        close = difflib.get_close_matches(name, COMMANDS, 1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        return _complain(
            f"divopd {name}", f"There is no command {name!r}; choose one of {', '.join(COMMANDS)}.{hint}"
        )
    try:
        module = importlib.import_module(f"divopd_trainer.commands.{COMMANDS[name][0]}")
        return module.main(rest) or 0
    except DivOPDError as error:
        if _debugging():
            raise
        return _complain(f"divopd {name}", str(error), type(error).__name__)
    except ModuleNotFoundError as error:
        if _debugging() or (error.name or "").startswith(("divopd_gym", "divopd_trainer")):
            raise
        return _complain(
            f"divopd {name}",
            f"The Python package {error.name!r} is not installed, and this command needs it. Install it with "
            "`pip install 'divopd[all]'`, or only the extra that brings it (see pyproject.toml).",
            "missing package",
        )
    except KeyboardInterrupt:
        print(f"divopd {name}: interrupted.", file=sys.stderr)
        return 130


def _debugging() -> bool:
    return os.environ.get("DIVOPD_DEBUG", "0") not in ("", "0")


def _complain(who: str, message: str, kind: str = "unknown command") -> int:
    """Commands between backticks stay on one line, so that they can be copied."""
    kept = re.sub(r"`[^`\n]*`", lambda found: found.group().replace(" ", "\0"), message)
    lines = (
        textwrap.fill(line, 96, break_long_words=False, break_on_hyphens=False) for line in kept.splitlines()
    )
    text = textwrap.indent("\n".join(lines).replace("\0", " "), "  ")
    print(f"{who} cannot go on ({kind}):\n{text}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
