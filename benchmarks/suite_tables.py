"""Tables of the benchmarks page: what a benchmark prints (its JSON object) to Markdown. Pure functions.

A figure that is not there is shown as "-"; a result that should hold and does not (texts that differ, gradients that
differ) is said in a sentence of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

__all__ = ["TABLES", "number", "table"]

Json = dict[str, Any]
_SAME_GRADIENT = 1e-4


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table; the first column is text, the others are numbers.

    Raises:
        ValueError: A row has another number of cells than the header.
    """
    lines = [_row(header), "|---|" + "---:|" * (len(header) - 1)]
    for row in rows:
        if len(row) != len(header):
            raise ValueError(f"a row has {len(row)} cells and the header {len(header)}; expected as many")
        lines.append(_row(row))
    return "\n".join(lines)


def number(value: Any) -> str:
    """Three significant digits, thousands with commas; text as it is, "-" for None and what is not finite."""
    if value is None or isinstance(value, float) and not math.isfinite(value):
        return "-"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value).replace("|", "\\|").replace("\n", " ")
    if isinstance(value, int) or abs(value) >= 100:
        return f"{round(value):,}"
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:.{min(digits, 6)}f}" if digits <= 6 else f"{value:.1e}"
    return text.rstrip("0").rstrip(".") if "." in text and "e" not in text else text


def share(value: float | None) -> str:
    """A share as per cent."""
    return "-" if value is None else f"{100 * value:.1f} %"


def times(more: float | None, less: float | None) -> str:
    """How many times one is of the other."""
    return "-" if not more or not less else f"{number(more / less)} x"


def _row(cells: Sequence[Any]) -> str:
    return "| " + " | ".join(number(cell) for cell in cells) + " |"


def alfworld_env(result: Json) -> str:
    rows = []
    for name, key in (("a turn", "turn_cpu_ms"), ("the next game: load and reset", "next_game_cpu_ms")):
        ours, stock = result[key]["divopd_gym"], result[key]["alfworld"]
        rows.append(
            (name, ours["mean"], ours["median"], stock["mean"], stock["median"])
            + (f"{result[key]['ratio_of_means']:g} x", f"{result[key]['ratio_of_medians']:g} x")
        )
    header = ("CPU ms", "here, mean", "median", "alfworld, mean", "median", "ratio of means", "of medians")
    same = (
        "Every text, every list of admissible commands and every `won` was the same on both sides."
        if result["identical"]
        else "**Texts, admissible commands or `won` differed between the two sides.**"
    )
    told = f"{result['turns']} turns in {result['games']} games ({result['source']}). {same}"
    return f"{table(header, rows)}\n\n{told}"


def alfworld_pool(result: Json) -> str:
    alone = result["in_process"]
    rows = [("none: in this process", alone["turns_per_s"], alone["cpu_ms_per_turn"], None, None)]
    for row in result["pool"]:
        rows.append(
            (f"{row['workers']}", row["turns_per_s"], row["cpu_ms_per_turn"])
            + (row["workers_own_mb"] / row["workers"], row["ready_s"])
        )
    header = ("workers", "turns/s", "CPU ms a turn", "own MB a worker", "s until ready")
    return f"{table(header, rows)}\n\nPlayed: {result['source']}; resets are in the time."


def scienceworld_env(result: Json) -> str:
    rows = []
    for count, both in result["envs"].items():
        ours, stock = both["ours"], both["stock"]
        rows.append(
            (count, ours["turns_per_s"], stock["turns_per_s"], f"{both['times_the_turns_per_s']:g} x")
            + (ours["turns_per_cpu_s"], stock["turns_per_cpu_s"], f"{both['times_the_turns_per_cpu_s']:g} x")
            + (ours["simulators"], ours["simulators_mb"], stock["simulators"], stock["simulators_mb"])
        )
    header = (
        "environments", "turns/s here", "stock", "ratio", "turns/CPU s here", "stock", "ratio", "simulators here",
        "their MB", "simulators, stock", "their MB",
    )  # fmt: skip
    told = f"\n\nNot ready in time and left out: {', '.join(result['not_ready'])}."
    return table(header, rows) + (told if result["not_ready"] else "")


def webshop_env(result: Json) -> str:
    rows = [
        (f"`{mode}`", row["median_ms"], row["mean_ms"], row["p99_ms"], row["mean_cpu_ms"])
        + (row["reset_median_ms"], row["turns"])
        for mode, row in result["modes"].items()
    ]
    header = ("observation", "ms a turn, median", "mean", "p99", "CPU ms, mean", "reset, median", "turns")
    cycles = [
        (f"{int(count):,}", used["rss_mb"], used["threads"], used["descriptors"])
        for count, used in result["cycles"].items()
    ]
    flat = table(("environments made and closed", "resident MB", "threads", "open files"), cycles)
    return f"{table(header, rows)}\n\n{flat}"


def webshop_search(result: Json) -> str:
    rows = []
    for row in result["rows"]:
        build, serve = row["build"], row["serve"]
        rows.append(
            (f"{row['documents']:,}", build["inverting_s"], build["index_mb"], serve["serve_peak_rss_mb"])
            + (serve["cpu_ms"]["median"], serve["cpu_ms"]["p99"])
            + (serve["numpy_cpu_ms"]["median"], serve["numpy_cpu_ms"]["p99"], serve["equal_results"])
        )
    header = (
        "listings", "s to invert", "index MB", "MB to serve", "CPU ms a query, median", "p99", "NumPy alone, median",
        "p99", "same results",
    )  # fmt: skip
    return table(header, rows)


def webshop_oracle(result: Json) -> str:
    rows = [
        (name, result["queries"], result["same_tokens"])
        + tuple(result[key]["same"][what] for what in ("first", "ten", "fifty", "scores"))
        + (result[key]["median_ms"],)
        for name, key in (("NumPy", "numpy"), ("compiled", "compiled"))
    ]
    header = (
        "search", "queries", "same tokens", "same first hit", "first ten in order", "first fifty in order",
        "scores within 0.001", "ms, median",
    )  # fmt: skip
    return f"{table(header, rows)}\n\nCounts of queries, over {result['documents']:,} listings."


LAYOUTS = {"merged": "merged", "row_per_turn": "one row a turn, here", "trl": "TRL's layout"}


def learner(result: Json) -> str:
    rows, worst = [], 0.0
    for depth in result["depths"]:
        for batch, title in (("composed", "k turns a rollout"), ("all_turns", "every turn")):
            for key, layout in LAYOUTS.items():
                one = depth[batch]["layouts"][key]
                worst = max(worst, one["gradient_difference"])
                rows.append(
                    (f"{depth['turns']} turns, {title}: {layout}", depth[batch]["rows"])
                    + (one["forwarded_tokens"], f"{one['tokens_vs_merged']:g} x")
                    + (one["cpu_s"], one["wall_s"], f"{one['seconds_vs_merged']:g} x")
                    + (one["tokens_per_s"], one["trained_tokens_per_s"], share(one["mfu"]))
                )
    header = (
        "rollouts of", "rows", "tokens forwarded", "to merged", "CPU s", "s", "to merged", "tokens/s",
        "trained tokens/s", "MFU",
    )  # fmt: skip
    same = (
        "The three gradients of a batch are equal"
        if worst <= _SAME_GRADIENT or result["dtype"] != "float32"
        else "**The gradients of the layouts differ**"
    )
    size = result["depths"][0]["parameters"]
    told = f"{same}: by {worst:.1e} of the largest entry at most. {size:,} parameters, {result['dtype']}, {result['device']}"
    return f"{table(header, rows)}\n\n{told}{', ' + result['gpu'] if 'gpu' in result else ''}."


def engine(result: Json) -> str:
    played, scored = [], []
    for row in result["rows"]:
        name = f"{row['model']}, {row['concurrency']} at once, {row['turns']} turns"
        ours = {key.removeprefix("engine_"): row[key] for key in row if key.startswith("engine_")}
        plain, rate, read = row["plain_generate"], row["scored_tokens_per_s"], row["scored_tokens"]
        for backend, rates in ours.items():
            gain = times(rates["turns_per_s"], plain["turns_per_s"])
            played.append((f"{name}, {backend}", rates["turns_per_s"], plain["turns_per_s"], gain))
        scored.append(
            (name, read["once"], read["per_turn"], times(read["per_turn"], read["once"]))
            + (read["once"] / rate["engine"], read["once"] / rate["per_turn"])
            + (times(rate["engine"], rate["per_turn"]),)
        )
    one = table(
        ("conversations", "turns/CPU s here", "every prompt computed again each turn", "ratio"), played
    )
    header = (
        "teacher scores", "tokens read once", "turn by turn", "ratio", "CPU s once", "turn by turn", "ratio",
    )  # fmt: skip
    return f"{one}\n\n{table(header, scored)}"


def composer(result: Json) -> str:
    found = {(row["turns"], row["preset"]): row for row in result["rows"]}
    sizes, presets = (list(dict.fromkeys(key[i] for key in found)) for i in (0, 1))
    rows = [
        (f"{size:,} ({what})", *(found[size, preset][f"{key}_ms_median"] for preset in presets))
        for size in sizes
        for what, key in (("a pool of B * 4", "pool"), ("B = 64, the rest unread", "unread"))
    ]
    return table(("ms (median) to compose from turns", *(f"`{preset}`" for preset in presets)), rows)


def explorer(result: Json) -> str:
    rows = [
        (name, row["episodes_per_s"], row["turns_per_s"], row["cpu_us_per_turn"] / 1000)
        for name, row in [("the episode loop alone", result["play"])]
        + [(f"the explorer's process, {row['concurrent']} in flight", row) for row in result["process"]]
    ]
    told = f"{result['episodes']:,} episodes of {result['turns_per_episode']} turns each."
    return f"{table(('what', 'episodes/s', 'turns/s', 'CPU ms a turn'), rows)}\n\n{told}"


def pacing(result: Json) -> str:
    names = ("scored", "trained", "never", "passed", "waited")
    rows = [
        (f"`{row['preset']}`, load {row['load']:g}", row["made"], *(share(row[name]) for name in names))
        + (row["length made"], row["length trained"])
        for row in result["rows"]
    ]
    header = (
        "setting", "turns made an update", "scored", "trained", "too late for any batch", "passed over, then stale",
        "learner waited", "turns of rollouts made", "of rollouts trained",
    )  # fmt: skip
    told = f"{result['updates']} updates of {result['batch_rows']} rows; a learner {result['slower']:g} times as slow as the making."
    return f"{table(header, rows)}\n\n{told}"


def idle(result: Json) -> str:
    methods = result["methods"]

    def row(name: str, read: Any) -> tuple:
        return (name, *(read(one) for one in methods.values()))

    rows = [
        row("updates counted", lambda m: m["updates"]),
        row("seconds", lambda m: m["wall_s"]),
        row("learner waited", lambda m: share(m["wait_share"])),
        row("learner in updates", lambda m: share(m["learner_share"])),
        row("learner computing", lambda m: share(m["learner_work_share"])),
        row("generator computing", lambda m: share(m["generator_share"])),
        row("generator idle", lambda m: share(1 - m["generator_share"])),
        row("teacher computing", lambda m: share(m["teacher_share"])),
        row("CPU s: learner", lambda m: m["learner_work_s"]),
        row("CPU s: generator", lambda m: m["generator_s"]),
        row("CPU s: teacher", lambda m: m["teacher_s"]),
        row("tokens/s: generator", lambda m: m["generator_tokens_per_s"]),
        row("tokens/s: teacher", lambda m: m["teacher_tokens_per_s"]),
        row("tokens/s: learner, forwarded", lambda m: m["forwarded_tokens_per_s"]),
        row("tokens/s: learner, trained", lambda m: m["trained_tokens_per_s"]),
        row("turns that arrived", lambda m: m["turns_arrived"]),
        row("turns trained", lambda m: m["turns_trained"]),
        row("trained of those that arrived", lambda m: share(m["turns_trained_share"])),
        row("s until the end of the first update", lambda m: m["first_update_s"]),
    ]
    told = (
        "Shares of the time by the clock. Computing is CPU time of the thread that does it: what is missing to 100 % was spent "
        "waiting, for work or for a core. CPU s are those of one thread each."
    )
    return f"{table(('', *(f'`{name}`' for name in methods)), rows)}\n\n{told}"


def report_page(result: Json) -> str:
    keys = {
        "episodes": "episodes", "updates": "updates", "recorded_mb": "recorded, MB", "page_mb": "page, MB",
        "write_s": "s to write it", "curves_drawn_ms": "ms until the curves are drawn",
        "list_ready_ms": "ms until the episodes are listed", "open_episode_ms": "ms to open an episode",
    }  # fmt: skip
    rows = [(title, result[key]) for key, title in keys.items() if key in result]
    errors = f"\n\n**The page reported errors**: {'; '.join(map(number, result.get('script_errors') or ()))}"
    return table(("a run's report", ""), rows) + (errors if result.get("script_errors") else "")


TABLES = {
    function.__name__: function
    for function in (
        alfworld_env, alfworld_pool, scienceworld_env, webshop_env, webshop_search, webshop_oracle, learner, engine,
        composer, explorer, pacing, idle, report_page,
    )
}  # fmt: skip
"""Name of a script, without its ending -> the function that makes its table."""
