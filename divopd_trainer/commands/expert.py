"""`divopd expert`: record an expert's episodes."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from ..cli_options import Parser, add_function_options

__all__ = ["main"]


def main(argv: Sequence[str]) -> int:
    """Run the command."""
    from ..expert import record_expert

    parser = Parser(
        "expert",
        "Record episodes of an environment's own expert. Some actions are replaced by random ones, so that states off\n"
        "the path occur; every turn is labelled with what the expert would do, and the random actions carry no loss.",
    )
    names = add_function_options(parser, record_expert, skip=["note"])
    args = parser.parse(argv)
    stats = record_expert(
        **{name: getattr(args, name) for name in names},
        note=lambda line: print(line, file=sys.stderr, flush=True),
    )
    print(json.dumps(stats, indent=1, default=str))
    return 0
