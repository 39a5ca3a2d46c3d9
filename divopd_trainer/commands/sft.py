"""`divopd sft`: fine-tune on recorded episodes."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

from ..cli_options import Parser, add_function_options, whole_number

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
    parser.add_argument(
        "--vocab_size",
        type=whole_number(260),
        default=1024,
        metavar="N",
        help="entries of a tokenizer that is made for a new tiny model",
    )
    args = parser.parse(argv)
    options = {name: getattr(args, name) for name in names}
    if options["tokenizer"] is None and _is_new(options["model"]):
        options["tokenizer"] = _new_tokenizer(options, args.vocab_size)
    result = train_sft(**options)
    print(json.dumps(result, indent=1, default=str))
    return 0


def _is_new(model: str) -> bool:
    return model.partition(":")[0] == "tiny" and not os.path.isdir(model)


def _new_tokenizer(options: dict[str, Any], vocab_size: int) -> Any:
    """A tokenizer trained on the very texts that the model will read."""
    from divopd_gym.prompts import get_prompt

    from ..expert import read_episodes
    from ..sft import transcript_texts
    from ..tiny import train_tokenizer

    prompt = get_prompt(options["env_id"], options["prompt_style"], options["history"])
    episodes = read_episodes(options["episodes"], options["max_episodes"])
    return train_tokenizer(transcript_texts(prompt, episodes), vocab_size)
