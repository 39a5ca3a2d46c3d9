"""`divopd methods`: the presets, what each is, and the settings behind one."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from ..cli_options import Parser

__all__ = ["main"]


def main(argv: Sequence[str]) -> int:
    """Run the command."""
    import yaml

    from ..methods import about, method_names, method_settings
    from ..registry import SEAMS, import_plugins, known

    parser = Parser(
        "methods",
        "List the methods that --method knows. With a name: the settings that it stands for; each can be overridden "
        "in a configuration or on the command line.",
    )
    parser.add_argument("name", metavar="METHOD", nargs="?", help="a method, or a preset file")
    parser.add_argument(
        "--plugins", metavar="FILE,..", help="modules or .py files that register more", default=None
    )
    args = parser.parse(argv)
    import_plugins([name for name in str(args.plugins or "").split(",") if name])
    if args.name:
        settings = method_settings(args.name)
        print(textwrap.fill(f"# {about(args.name)}", 96, subsequent_indent="# "))
        print(yaml.safe_dump({"method": args.name, **settings}, sort_keys=False), end="")
        return 0
    width = max(map(len, method_names()))
    for name in method_names():
        print(textwrap.fill(f"{name:<{width}}  {about(name)}", 110, subsequent_indent=" " * (width + 2)))
    print("\nParts by seam; 'module:name' and registered ones of your own work too:")
    for seam, question in SEAMS.items():
        names = known(seam)
        if seam == "composer":
            from ..composer import PRESETS

            names = [*PRESETS, *names]
        print(
            textwrap.fill(
                f"{seam:<{width}}  {question}: {', '.join(names)}", 110, subsequent_indent=" " * (width + 2)
            )
        )
    return 0
