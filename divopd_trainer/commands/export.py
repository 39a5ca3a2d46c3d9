"""`divopd export`: recorded episodes for other tools."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from ..cli_options import Parser, whole_number

__all__ = ["main"]


def _parser() -> Parser:
    from ..export import FORMATS

    parser = Parser(
        "export",
        "Write the episodes of a run, or of a recording of `divopd expert`, in a form that other tools read. Token ids,\n"
        "log-probs and masks are copied, never made again from text.",
    )
    parser.add_argument(
        "source", metavar="RUN|EPISODES", nargs="+", help="a run directory, or recordings of an expert"
    )
    parser.add_argument(
        "--out", metavar="DIR", default=argparse.SUPPRESS, help="directory to write (required)"
    )
    parser.add_argument(
        "--format",
        choices=FORMATS,
        default=FORMATS[0],
        help="datasets: for datasets.load_from_disk, one row a token sequence; sft-jsonl: lines of input_ids and labels "
        "for divopd sft and TRL's SFTTrainer",
    )
    parser.add_argument(
        "--only",
        choices=("success", "all"),
        help="which episodes (default: success for sft-jsonl, all for datasets)",
    )
    parser.add_argument("--limit", type=whole_number(1), metavar="N", help="at most this many episodes")
    parser.add_argument(
        "--tokenizer",
        metavar="MODEL",
        help="folder or hub name (default: the run's; a recording needs it for ids)",
    )
    parser.add_argument(
        "--env_id", default="divopd_gym/ALFWorld-v0", help="whose prompts a recording is written in"
    )
    parser.add_argument("--prompt_style", default="tiny", help="style of these prompts")
    parser.add_argument("--history", default="accumulate", help="accumulate or window:n, for a recording")
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the command."""
    from ..export import export

    parser = _parser()
    args = parser.parse(argv)
    if not hasattr(args, "out"):
        parser.error("--out DIR is required")
    options = {name: value for name, value in vars(args).items() if name not in ("source", "out", "config")}
    figures = export(
        args.source if len(args.source) > 1 else args.source[0],
        args.out,
        on_notice=lambda sentence: print(f"Note: {sentence}", file=sys.stderr),
        **options,
    )
    print(json.dumps(figures, indent=1))
    return 0
