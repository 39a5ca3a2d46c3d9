"""`divopd eval`: every task of a split once, by the student or the teacher alone."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from argparse import ArgumentTypeError
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from divopd_gym.errors import ConfigError

from ..cli_options import Parser, check_names, console, mapping, named_file, read_yaml, whole_number

__all__ = ["main"]

# Option -> the setting of a training run that means the same.
_OF_TRAINING = {
    "env_id": "env_id",
    "prompt_style": "prompt_style",
    "history": "history",
    "max_turns": "max_turns",
    "max_tokens": "max_tokens",
    "max_model_len": "max_model_len",
    "engine": "engine",
    "data_dir": "data_dir",
    "seed": "seed",
    "split": "eval_split",
    "episodes": "eval_episodes",
    "temperature": "eval_temperature",
    "workers": "env_workers",
    "threads": "explorer_threads",
}
_DEFAULTS = {
    "env_id": "divopd_gym/ALFWorld-v0",
    "env_kwargs": {},
    "prompt_style": "think",
    "history": "accumulate",
    "max_turns": 30,
    "max_tokens": 512,
    "engine": "local",
    "seed": 0,
    "temperature": 0.4,
    "threads": 1,
}


def _parser() -> Parser:
    parser = Parser(
        "eval",
        "Play every task of a split exactly once and tell the strict success rate with its 95 % interval.\n"
        "FILE.yaml (or --config FILE.yaml) holds these options or is one of `divopd train`; --run takes a run's settings and student.",
    )
    count = whole_number(1)
    add = parser.add_argument
    add("--run", metavar="DIR", help="a run: its config.yaml, and its final student")
    add("--model", metavar="PATH", help="model to evaluate: directory or Hub name")
    add(
        "--policy",
        choices=("student", "teacher"),
        default="student",
        help="which model of the configuration plays",
    )
    add("--teacher", metavar="PATH", help="the model that --policy teacher means")
    add("--env_id", metavar="ID", help="Gymnasium id (divopd_gym/ALFWorld-v0)")
    add("--env_kwargs", type=mapping, metavar="{..}", help="arguments of the environment, e.g. family=tiny")
    add("--split", metavar="NAME", help="split of tasks")
    add("--data_dir", metavar="DIR", help="where benchmark data lies")
    add("--episodes", type=count, metavar="N", help="tasks, from the split's beginning (all)")
    add("--temperature", type=float, metavar="X", help="sampling temperature, 0 for greedy (0.4)")
    add("--max_turns", type=count, metavar="N", help="turns an episode may take (30)")
    add("--max_tokens", type=count, metavar="N", help="tokens a response may take (512)")
    add(
        "--max_model_len",
        type=count,
        metavar="N",
        help="tokens of prompt and response together (the model's own)",
    )
    add("--prompt_style", metavar="NAME", help="think, action or tiny (think)")
    add("--history", metavar="FORM", help="accumulate or window:N (accumulate)")
    add("--seed", type=int, metavar="N", help="of sampling (0)")
    add("--workers", type=count, metavar="N", help="environment processes (CPU cores)")
    add("--concurrency", type=count, metavar="N", help="episodes at once (workers)")
    add("--threads", type=count, metavar="N", help="CPU threads of a forward pass (1)")
    add("--engine", metavar="NAME", help="local, or a factory module:function (local)")
    add("--out", metavar="FILE.json", help="write the result there")
    add("--records", metavar="DIR", help="record the episodes there, for divopd report")
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the command."""
    options = _options(argv)
    result = asyncio.run(_evaluate(options))
    record = {
        "who": options["policy"],
        "model": options["model"],
        "env_id": options["env_id"],
        "env_kwargs": options["env_kwargs"],
        "split": options["split"],
        "seed": options["seed"],
        **result.to_dict(),
    }
    _print(record)
    if options["out"]:
        target = Path(options["out"])
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
        print(f"Written to {target}")
    return 0


def _options(argv: Sequence[str]) -> dict[str, Any]:
    """Command line over file over defaults; files of `divopd train` are understood too."""
    parser = _parser()
    values = vars(parser.parse_args(named_file(argv)))
    own = {name: value for name, value in values.items() if value is not None}
    if own.get("policy") == "student" and not any(a.startswith("--policy") for a in argv):
        del own["policy"]
    source: dict[str, Any] = {}
    if values["config"] and values["run"]:
        raise ConfigError(
            "--config and --run are both given; expected one of them, since a run has its own config."
        )
    path = values["config"] or (values["run"] and Path(values["run"]) / "config.yaml")
    if path:
        source = read_yaml(path)
        source.pop("profiles", None)  # of training
        known = {action.dest for action in parser._actions} - {"help", "config", "run"}
        if set(source) - known:
            from ..config import DivOPDConfig

            check_names(list(source), known | set(DivOPDConfig.__dataclass_fields__), str(path))
            source = _from_training(source, known)
    if values["run"] and own.get("policy", "student") == "student" and "model" not in own:
        source["model"] = _final_student(Path(values["run"]))
    source = _typed(source, parser, path)
    options = dict.fromkeys(values) | _DEFAULTS | {"policy": "student"}
    options |= {name: value for name, value in source.items() if value is not None} | own
    if options["policy"] == "teacher" and "model" not in own:
        options["model"] = options["teacher"]
    if not options["model"]:
        raise ConfigError(
            f"No model to evaluate as {options['policy']}; expected --model PATH, --run DIR, or a --config that names "
            "one."
        )
    if not isinstance(options["env_kwargs"], dict):
        raise ConfigError(f"env_kwargs is {options['env_kwargs']!r}; expected a mapping.")
    if options["temperature"] < 0:
        raise ConfigError(f"temperature is {options['temperature']}; expected 0 (greedy) or more.")
    options["workers"] = options["workers"] or min(16, os.cpu_count() or 1)
    options["concurrency"] = options["concurrency"] or options["workers"]
    return options


def _final_student(run: Path) -> str:
    final = run / "final"
    if not final.is_dir():
        saved = sorted(str(path) for path in (run / "checkpoints").glob("checkpoint-*"))
        rest = f"pass one of its checkpoints as --model: {', '.join(saved)}" if saved else "pass --model PATH"
        raise ConfigError(f"{run} has no final student ({final} is missing: the run did not end); {rest}.")
    return str(final)


def _typed(source: dict[str, Any], parser: Parser, path: Any) -> dict[str, Any]:
    """Text in a file, such as 1e-1, in the type of its option."""
    types = {action.dest: action.type for action in parser._actions if action.type is not None}
    typed = dict(source)
    for name, value in source.items():
        if isinstance(value, str) and name in types:
            try:
                typed[name] = types[name](value)
            except (ValueError, ArgumentTypeError) as error:
                raise ConfigError(f"{name} in {path} is {value!r}: {error}.") from None
    return typed


def _from_training(source: dict[str, Any], known: set[str]) -> dict[str, Any]:
    """Options that follow from the settings of a run; what the file leaves out has that command's default."""
    from ..config import DivOPDConfig

    fields = DivOPDConfig.__dataclass_fields__
    settings = {name: fields[name].default for name in (*_OF_TRAINING.values(), "model", "teacher")} | source
    values = {name: settings[name] for name in known if name in settings and name not in _OF_TRAINING}
    values |= {name: settings[theirs] for name, theirs in _OF_TRAINING.items()}
    instead = source.get("eval_env_kwargs") or {}
    values["env_kwargs"] = {**(source.get("env_kwargs") or {}), **instead}
    if "split" in instead:
        values["split"] = instead["split"]
    return values


async def _evaluate(options: dict[str, Any]) -> Any:
    from divopd_gym.pool import EnvPool
    from divopd_gym.prompts import get_prompt

    from ..evaluate import evaluate
    from ..explorer.config import ExplorerConfig
    from ..explorer.engines import build_engines
    from ..records import RunWriter

    env_kwargs = dict(options["env_kwargs"])
    env_kwargs |= {
        n: options[n] for n in ("split", "data_dir") if options[n] is not None and n not in env_kwargs
    }
    if options["split"] is not None:
        env_kwargs["split"] = options["split"]
    config = ExplorerConfig(
        env_id=options["env_id"],
        env_kwargs=env_kwargs,
        workers=options["workers"],
        engine=options["engine"],
        student=str(options["model"]),
        prompt_style=options["prompt_style"],
        history=options["history"],
        max_turns=options["max_turns"],
        max_tokens=options["max_tokens"],
        max_model_len=options["max_model_len"],
        temperature=options["temperature"] or 1.0,
        max_concurrent=options["concurrency"],
        seed=options["seed"],
        threads=options["threads"],
    )
    _check_model(config)
    prompt = get_prompt(config.env_id, config.prompt_style, history=config.history)
    pool = EnvPool(config.env_id, env_kwargs, min(config.workers, options["concurrency"]))
    writer = RunWriter(options["records"]) if options["records"] else None
    engines = None
    try:
        await pool.start()
        async with pool.lend() as env:
            tasks = list(await env.call("tasks"))[: options["episodes"]]
        engines = await asyncio.to_thread(build_engines, config)
        with _progress(len(tasks)) as tick:

            def finished(rollout: Any) -> None:
                if writer is not None:
                    writer.write_rollout(rollout)
                tick(rollout.success)

            return await evaluate(
                engines.student,
                pool,
                engines.codec,
                prompt,
                tasks,
                temperature=options["temperature"],
                max_turns=options["max_turns"],
                seed=options["seed"],
                concurrency=options["concurrency"],
                history=options["history"],
                max_tokens=options["max_tokens"],
                max_model_len=options["max_model_len"],
                on_rollout=finished,
            )
    finally:
        await pool.close()
        if engines is not None and hasattr(engines.student, "close"):
            engines.student.close()
        if writer is not None:
            writer.close()


def _check_model(config: Any) -> None:
    """A wrong path is told before environments are started."""
    path = config.student
    if config.engine == "local" and path.startswith((".", "/", "~")) and not Path(path).expanduser().is_dir():
        raise ConfigError(
            f"There is no model directory {path}; expected one written by save_pretrained. Check --model."
        )


class _progress:  # noqa: N801
    """A bar on standard error, where that is a terminal."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.done = self.solved = 0
        self.bar: Any = None

    def __enter__(self) -> Any:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
            )
            self.bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self.bar.start()
            self.bar.add_task("solved -", total=self.total)
        return self.tick

    def tick(self, solved: bool) -> None:
        """One episode is over."""
        self.done += 1
        self.solved += bool(solved)
        if self.bar is not None:
            text = f"solved {100 * self.solved / self.done:.0f} %"
            self.bar.update(self.bar.task_ids[0], completed=self.done, description=text)

    def __exit__(self, *exc: object) -> None:
        if self.bar is not None:
            self.bar.stop()


def _print(record: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table(title=f"{record['who']}: {record['model']}", title_justify="left")
    table.add_column("task type")
    for name in ("success", "95 %", "done", "score", "turns", "invalid", "episodes"):
        table.add_column(name, justify="right")

    def add(name: str, values: dict[str, Any], **more: Any) -> None:
        table.add_row(
            name,
            f"{values['success_rate']:.1%}",
            f"{100 * values['success_low']:.0f}-{100 * values['success_high']:.0f}",
            f"{values['done_rate']:.1%}",
            f"{values['score']:.3f}",
            f"{values['turns']:.1f}",
            f"{values['invalid_action_rate']:.1%}",
            str(values["episodes"]),
            **more,
        )

    for name, values in record["per_type"].items():
        add(name, values, end_section=name == list(record["per_type"])[-1])
    add("all", record, style="bold")
    screen = console()
    screen.print(table)
    if record["errors"]:
        first = record["error_tasks"][0]
        screen.print(
            f"{record['errors']} episodes could not be played and count as not solved; first: {first['task']}: "
            f"{first['why']}",
            style="yellow",
        )
