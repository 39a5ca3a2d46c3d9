"""`divopd data`: download, check and prepare benchmark data."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path

from divopd_gym.errors import ConfigError

from ..cli_options import Parser

__all__ = ["main"]

KNOWN = {"alfworld": ("download", "check"), "webshop": ("prepare",)}
"""What can be done for which benchmark."""
_BRING = {
    "webshop": "Put the benchmark's item, attribute and instruction files into a folder and name it by --data_dir."
}
_VARIABLES = {"alfworld": "ALFWORLD_DATA", "webshop": "WEBSHOP_DATA"}


def main(argv: Sequence[str]) -> int:
    """Run the command; 1 when a check finds something wrong."""
    parser = Parser(
        "data",
        "divopd data download alfworld    fetch the official games: checksums, resumes where it stopped\n"
        "divopd data check alfworld       count games per split and type, name broken ones, tell the wording\n"
        "divopd data prepare webshop      index the catalogue in --data_dir: seconds for 1,000 products, about a\n"
        "                                 quarter of an hour for the full 1.18 million",
    )
    parser.add_argument("what", choices=("download", "check", "prepare"), help="what to do")
    parser.add_argument("benchmark", choices=tuple(KNOWN), help="whose data")
    parser.add_argument(
        "--data_dir",
        "--dest",
        metavar="DIR",
        help="where the data is or goes (default: DIVOPD_DATA, the benchmark's own variable, or the user's cache)",
    )
    parser.add_argument(
        "--full",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="also fetch what only research on the data needs",
    )
    parser.add_argument(
        "--progress", action=argparse.BooleanOptionalAction, default=True, help="show progress bars"
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument(
        "--size", choices=("small", "full"), help="webshop: which files (the full ones if there)"
    )
    parser.add_argument(
        "--rebuild", action="store_true", help="webshop: index again even if a good index is there"
    )
    args = parser.parse(argv)
    if args.what not in KNOWN[args.benchmark]:
        raise ConfigError(
            f"divopd data {args.what} {args.benchmark} does not exist; expected {' or '.join(KNOWN[args.benchmark])}. "
            + _BRING.get(args.benchmark, "")
        )
    if args.benchmark == "webshop":
        from divopd_gym.envs.webshop.prepare import prepare

        folder = _folder(args.benchmark, args.data_dir, must_exist=True)
        print(f"Index: {prepare(folder, args.progress, size=args.size, rebuild=args.rebuild)}")
        return 0
    from divopd_gym.download import check_alfworld, download_alfworld

    folder = _folder(args.benchmark, args.data_dir, must_exist=args.what == "check")
    if args.what == "download":
        report = download_alfworld(folder, args.progress, full=args.full)
    else:
        report = check_alfworld(folder)
    print(json.dumps(report.to_dict(), indent=1) if args.json else report.text())
    return 0 if report.ok else 1


def _folder(benchmark: str, given: str | None, must_exist: bool) -> Path:
    """The benchmark's folder: named, from the environment, or the default."""
    from divopd_gym.data import candidate_roots, default_root

    variable = _VARIABLES[benchmark]
    if given is not None:
        return Path(given).expanduser()
    if must_exist:
        for _, root in candidate_roots(benchmark, None, variable):
            if root.is_dir():
                return root
    if os.environ.get(variable):
        return Path(os.environ[variable]).expanduser()
    common = os.environ.get("DIVOPD_DATA")
    return (Path(common).expanduser() if common else default_root()) / benchmark
