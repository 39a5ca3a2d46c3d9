"""`divopd play`: any environment in the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from divopd_gym.errors import ConfigError

from ..cli_options import Parser, mapping, whole_number

__all__ = ["main"]


def main(argv: Sequence[str]) -> int:
    """Run the command."""
    parser = Parser(
        "play",
        "Play an environment in the terminal. Type an action, or the number of one; '?' asks the expert, 'gold' shows a\n"
        "way to solve the task, 'quit' leaves. Also works with piped input.",
    )
    parser.add_argument(
        "env", nargs="?", metavar="ID", help="Gymnasium id, e.g. divopd_gym/WebShop-v0 (--env_id)"
    )
    parser.add_argument("--env_id", default="divopd_gym/ALFWorld-v0", metavar="ID", help="Gymnasium id")
    parser.add_argument(
        "--env_kwargs",
        type=mapping,
        default={},
        metavar="{..}",
        help="arguments of the environment, e.g. family=tiny",
    )
    parser.add_argument(
        "--split", metavar="NAME", help="split of tasks (ALFWorld: 'generated' needs no download)"
    )
    parser.add_argument("--data_dir", metavar="DIR", help="where benchmark data lies")
    parser.add_argument("--task", metavar="ID", help="task to play; without it the seed decides")
    parser.add_argument(
        "--seed", type=int, metavar="N", help="which task, and its chance (default: a random one)"
    )
    parser.add_argument(
        "--list",
        type=whole_number(0),
        default=60,
        metavar="N",
        help="admissible actions shown at once; 0: none",
    )
    parser.add_argument(
        "--web", action="store_true", help="WebShop: shop in the browser, on this machine only"
    )
    parser.add_argument("--port", type=whole_number(0), default=0, metavar="N", help="of --web (a free one)")
    args = parser.parse(argv)
    env_id = args.env or args.env_id
    kwargs = dict(args.env_kwargs)
    kwargs |= {name: getattr(args, name) for name in ("split", "data_dir") if getattr(args, name) is not None}
    if args.web:
        if env_id != "divopd_gym/WebShop-v0":
            raise ConfigError(f"--web shows WebShop only, not {env_id}; name divopd_gym/WebShop-v0.")
        from divopd_gym.envs.webshop.serve import serve

        serve(kwargs, port=args.port, task=args.task, seed=args.seed)
        return 0
    from ..play import play

    play(env_id, kwargs, task=args.task, seed=args.seed, list_limit=args.list)
    return 0
