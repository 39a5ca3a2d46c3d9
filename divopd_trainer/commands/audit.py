"""`divopd audit`: diagnostics of a recorded run, and the gradient audit with its checkpoints."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from divopd_gym.errors import ConfigError

from ..cli_options import Parser, console, whole_number

__all__ = ["main"]

PRESETS = "vanilla,divopd-base,divopd,no-cap,top-b"
# An update, and the checkpoint whose weights it is audited with.
Audit = tuple[int, Path]


def _updates(text: str) -> list[int]:
    number = whole_number(1)
    return [number(part) for part in text.split(",")]


def _parser() -> Parser:
    parser = Parser(
        "audit",
        "Show what the batches of a run were made of: spread of disagreement over rollouts, depth and outcome of the\n"
        "selected turns, staleness, teacher tokens scored per token trained. With a checkpoint, also compare gradients:\n"
        "G is the mean over all valid turns that could have been chosen at an update, Ghat the mean over the rows that\n"
        "a preset chooses from them; every turn's gradient is computed exactly. For small models.",
    )
    parser.add_argument("run", metavar="RUN", help="run directory")
    parser.add_argument(
        "--model",
        metavar="CHECKPOINT",
        help="the student right before the updates (default: every checkpoint in RUN, each at the update after it; "
        "'none' for no gradients)",
    )
    parser.add_argument(
        "--presets",
        default=PRESETS,
        metavar="A,B,..",
        help="composer presets, separated by commas, each with ':CAP' behind it for another cap",
    )
    parser.add_argument(
        "--updates",
        type=_updates,
        metavar="N,M,..",
        help="updates to audit (default: the one after the checkpoint, as its name says)",
    )
    parser.add_argument(
        "--temperature", type=float, metavar="X", help="of the run's sampling (as its configuration says)"
    )
    parser.add_argument(
        "--threads", type=whole_number(1), default=1, metavar="N", help="CPU threads of a forward pass"
    )
    parser.add_argument(
        "--json", metavar="FILE", help="write the figures there too; - for standard output alone"
    )
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the command."""
    args = _parser().parse(argv)
    from ..diagnostics import run_diagnostics
    from ..records import read_run
    from ..replay import Variant, load_stream

    run = read_run(args.run)
    variants = [Variant.parse(name.strip()) for name in str(args.presets).split(",") if name.strip()]
    if not variants:
        raise ConfigError("No preset was given; expected one or more, separated by commas.")
    temperature = float(run.config.get("temperature", 1.0) if args.temperature is None else args.temperature)
    if not temperature > 0:
        raise ConfigError(f"temperature is {temperature}; expected a number above 0.")
    stream = load_stream(run)
    notices: list[str] = []
    audits = _audits(args, [update for update, _ in stream.arrivals], notices)
    found = run_diagnostics(run)
    lines = list(_gradients(run, stream, variants, audits, temperature, args.threads))
    figures = {
        "run": str(args.run),
        "diagnostics": dataclasses.asdict(found),
        "temperature": temperature,
        "audits": lines,
        "notices": [*stream.notices, *notices],
    }
    if args.json == "-":
        print(json.dumps(figures, indent=1))
        return 0
    _print(figures)
    if args.json:
        target = Path(args.json)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(figures, indent=1) + "\n", "utf-8")
        print(f"Written to {target}")
    return 0


def _audits(args: Any, recorded: Sequence[int], notices: list[str]) -> list[Audit]:
    """Which weights to audit at which update.

    Raises:
        ConfigError: A checkpoint without a number in its name and no --updates, or nothing there.
    """
    if args.model == "none":
        return []
    if args.model is None:
        folder = Path(args.run) / "checkpoints"
        models = sorted(
            (path for path in folder.glob("checkpoint-*") if _version(path) is not None), key=_version
        )
        if not models:
            notices.append(
                f"{folder} holds no checkpoint, so there is no gradient audit; name one with --model."
            )
            return []
    else:
        models = [Path(args.model)]
    audits: list[Audit] = []
    for model in models:
        version = _version(model)
        if args.updates is None and version is None:
            raise ConfigError(
                f"{model} does not say which update its weights are of; expected a name such as checkpoint-40. Name "
                "the updates to audit with --updates."
            )
        audits += [(update, model) for update in args.updates or [min(version + 1, recorded[-1])]]
    for update, model in audits:
        if _version(model) not in (None, update - 1):
            notices.append(
                f"Update {update} started from version {update - 1}; its gradients are those of {model.name}."
            )
    return audits


def _version(path: Path) -> int | None:
    """Completed updates of a checkpoint, by its name."""
    found = re.fullmatch(r"checkpoint-(\d+)", path.name)
    return int(found[1]) if found else None


def _gradients(
    run: Any, stream: Any, variants: Sequence[Any], audits: Sequence[Audit], temperature: float, threads: int
) -> Iterator[dict[str, Any]]:
    """One line an update, checkpoint and preset."""
    if not audits:
        return
    import torch
    from rich.console import Console
    from transformers.utils.logging import disable_progress_bar

    from ..engines.backends import load_model
    from ..gradient_audit import audit_choice, choices, load_turns

    disable_progress_bar()
    torch.set_num_threads(threads)
    by_update = {c.update: c for c in choices(stream, variants, sorted({update for update, _ in audits}))}
    wanted = {key for c in by_update.values() for keys in (c.pool, *c.selected.values()) for key in keys}
    turns = load_turns(run, wanted)
    screen, held, model = Console(stderr=True), None, None
    for update, path in sorted(audits, key=lambda audit: (str(audit[1]), audit[0])):
        if path != held:
            model, held = load_model(path, dtype="float32").requires_grad_(True), path
        choice = by_update[update]
        with screen.status(f"Update {update}, {path.name}") as status:

            def shown(done: int, total: int, text: str = f"Update {update}, {path.name}") -> None:
                status.update(f"{text}: gradient {done:,} of {total:,}")  # noqa: B023

            agreements = audit_choice(model, choice, turns, temperature, shown)
        for label, agreement in agreements.items():
            yield {
                "update": update,
                "model": str(path),
                "preset": label,
                "pool": len(choice.pool),
                **dataclasses.asdict(agreement),
            }


def _print(figures: Mapping[str, Any]) -> None:
    from rich.table import Table

    screen, found = console(), figures["diagnostics"]

    def number(value: float | None, form: str = "{:.3f}") -> str:
        return "-" if value is None else form.format(value)

    facts = Table(
        title=f"{figures['run']}: {found['updates']:,} batches", title_justify="left", show_header=False
    )
    facts.add_column("")
    facts.add_column("", justify="right")
    facts.add_row("disagreement by rollout, std in a batch (nats)", number(found["disagreement_std"]))
    facts.add_row("teacher tokens scored per token trained", number(found["scored_per_trained"], "{:.2f}"))
    rows = sum(found["staleness"].values())
    for age, count in found["staleness"].items():
        facts.add_row(f"rows {age} updates old", f"{count:,} ({count / rows:.1%})")
    screen.print(facts)
    outcome = Table(title="Selected turns by depth and outcome", title_justify="left")
    bands = list(next(iter(found["depth_outcome"].values()), {}))
    outcome.add_column("turn of the episode")
    for band in bands:
        outcome.add_column(band, justify="right")
    for name, counts in found["depth_outcome"].items():
        outcome.add_row(name, *(f"{counts[band]:,}" for band in bands))
    screen.print(outcome)
    if figures["audits"]:
        table = Table(title="Gradient of the batch against that of its pool", title_justify="left")
        for name in (
            "update",
            "weights",
            "pool",
            "preset",
            "rows",
            "dead",
            "<G,Ghat>/|G|²",
            "cos(G,Ghat)",
            "|Ghat|/|G|",
        ):
            table.add_column(name, justify="left" if name in ("weights", "preset") else "right")
        for line in figures["audits"]:
            ratio = line["norm_batch"] / line["norm_pool"] if line["norm_pool"] else None
            table.add_row(
                *(str(line["update"]), Path(line["model"]).name, f"{line['pool']:,}", line["preset"]),
                *(f"{line['rows']:,}", f"{line['dead_rows']:,}"),
                *(number(line["projection"]), number(line["cosine"]), number(ratio)),
            )
        screen.print(table)
    for notice in figures["notices"]:
        screen.print(f"Note: {notice}", style="yellow")
