"""`divopd sft`: fine-tune on recorded episodes."""

from __future__ import annotations

import json
from collections.abc import Sequence

from ..cli_options import Parser, add_function_options

__all__ = ["main"]


def main(argv: Sequence[str]) -> int:
    """Run the command."""
    from ..sft import train_sft

    parser = Parser(
        "sft",
        "Fine-tune a model on episodes that `divopd expert` recorded, in exactly the token form in which the explorer\n"
        "will play. --model tiny:layers=4,width=256 makes a new model, and without --tokenizer a tokenizer for it too.",
    )
    names = add_function_options(parser, train_sft)
    args = parser.parse(argv)
    result = train_sft(**{name: getattr(args, name) for name in names})
    print(json.dumps(result, indent=1, default=str))
    return 0
