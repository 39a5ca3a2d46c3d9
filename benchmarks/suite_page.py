"""The benchmarks page: bench.json and the parts' titles to Markdown. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from suite_tables import number, table

__all__ = ["UPSTREAM", "growth", "page"]

Json = dict[str, Any]
_QUIET = 0.5

UPSTREAM = """\
### Upstream's search, as recorded

Not measured in this run. These figures were recorded when the original was read and run to specify this environment: of Lucene,
the search engine behind the original's pyserini, on another day on a shared machine with 2 cores. The catalogue of
1.18 million listings was mixed from the 1,000 real ones, as `benchmarks/webshop_search.py` mixes its own. No figure of a
turn of the original's environment was recorded; both are queries alone.

| Lucene, recorded | listings | s to index | index MB | ms a query, median | p95 | p99 |
|---|---:|---:|---:|---:|---:|---:|
| real catalogue, 5,421 queries | 1,000 | - | - | 1.7 | - | - |
| mixed catalogue, 2 threads to index | 1,180,000 | 132 | 574 | 21 | 147 | 358 |
"""
"""Of WebShop's original, quoted: wall-clock milliseconds."""


def page(report: Json, parts: Sequence[Any], json_name: str) -> str:
    """The whole page.

    Args:
        report: What bench.json holds.
        parts: The suite's parts (`suite_run.Part`), in the order of the page.
        json_name: File of the raw figures beside the page.
    """
    records = report["parts"]
    blocks = [_head(report, json_name)]
    results = {}
    for part in parts:
        record = records.get(part.name)
        if not record or record["status"] != "done":
            continue
        results[part.name] = record["result"]
        blocks.append(f"## {part.title}\n\n{part.about}\n\n{part.table(record['result'])}\n\n{_foot(record)}")
        if part.name == "webshop_search":
            blocks.append(UPSTREAM.rstrip())
    if rows := list(growth(results)):
        header = ("figure", "grows with", "from", "to", "that is", "the figure", "then", "that is")
        told = "From the smallest to the largest size of the tables above."
        blocks.append(f"## How each grows\n\n{told}\n\n{table(header, rows)}")
    if missing := list(_missing(records, parts)):
        blocks.append("## Not measured\n\n" + "\n".join(missing))
    return "\n\n".join(blocks) + "\n"


def _head(report: Json, json_name: str) -> str:
    machine, first = report["machine"], min(report["parts"].values(), key=lambda r: r["date"], default={})
    load = first.get("load_average")
    dates = {record["date"] for record in report["parts"].values()}
    commits = {record["commit"] or "no git checkout" for record in report["parts"].values()}
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items() if version)
    seconds = sum(record.get("seconds", 0) for record in report["parts"].values())
    rows = [
        ("date", " to ".join(dict.fromkeys((min(dates), max(dates)))) if dates else report["date"]),
        ("machine", f"{machine['cpu']}, {machine['cores']} cores, {number(machine['memory_gb'])} GB"),
        ("system", f"{machine['system']}, no GPU used"),
        ("versions", versions),
        ("code", ", ".join(sorted(commits))),
        ("load average before, after", f"{_load(load)}; {_load(report.get('load_average_end'))}"),
        ("duration", f"{seconds / 60:.1f} minutes"),
    ]
    lines = [
        "# Benchmarks",
        "What the parts cost, each beside something that it can be compared with in the same run. "
        "Written by `python benchmarks/suite.py --docs`; `make bench` measures all of it in less than 20 minutes on 2 cores "
        "and writes the same page to `runs/bench/`. No word is added by hand. "
        f"The raw figures are in [{json_name}]({json_name}).",
        "Absolute figures are those of this machine at that time, and the ratios carry further. What is said to be CPU time is "
        "disturbed less by neighbours than what is by the clock.",
        "| | |\n|---|---|\n" + "\n".join(f"| {name} | {number(value)} |" for name, value in rows),
    ]
    if load and load[0] > _QUIET * (machine["cores"] or 1):
        lines.append(
            f"**The machine was not quiet**: its load average was {load[0]:g} before the first part. Figures by the clock "
            "are worse than they would be alone."
        )
    if report.get("scale", 1) != 1:
        lines.append(f"**Sizes were multiplied by {report['scale']:g}**: not the figures of the whole suite.")
    if len(commits) > 1:
        lines.append("Parts were measured on different states of the code; each says below on which.")
    return "\n\n".join(lines)


def _foot(record: Json) -> str:
    when = f"{record['date']}, commit {record['commit'] or 'unknown'}, {record['seconds']:.0f} s"
    return f"`{record['command']}` ({when})"


def _load(values: Sequence[float] | None) -> str:
    return " ".join(f"{value:g}" for value in values) if values else "-"


def _missing(records: Mapping[str, Json], parts: Sequence[Any]) -> Iterator[str]:
    for part in parts:
        record = records.get(part.name)
        if record is None:
            yield f"- {part.title} (`{part.name}`): not asked for."
        elif record["status"] != "done":
            yield f"- {part.title} (`{part.name}`): {record['status']}, {number(record.get('why', ''))}."


def growth(results: Mapping[str, Json]) -> Iterator[tuple]:
    """Rows of the table of growth, of the parts that are there and have two or more sizes."""
    for part, what, size, points in _curves(results):
        points = [(x, y) for x, y in points if x and y]
        if len(points) < 2:
            continue
        (x, y), (x2, y2) = points[0], points[-1]
        yield f"{part}: {what}", size, x, x2, f"{number(x2 / x)} x", y, y2, f"{number(y2 / y)} x"


def _curves(results: Mapping[str, Json]) -> Iterator[tuple[str, str, str, list[tuple[float, float]]]]:
    if found := results.get("alfworld_pool"):
        pool = found["pool"]
        yield "ALFWorld", "turns/s", "workers", [(r["workers"], r["turns_per_s"]) for r in pool]
        yield "ALFWorld", "CPU ms a turn", "workers", [(r["workers"], r["cpu_ms_per_turn"]) for r in pool]
    if found := results.get("scienceworld"):
        for side in ("ours", "stock"):
            for what, key in (("turns/s", "turns_per_s"), ("MB of simulators", "simulators_mb")):
                points = [(int(count), both[side][key]) for count, both in found["envs"].items()]
                yield f"ScienceWorld, {side}", what, "environments", points
    if found := results.get("webshop_search"):
        points = [(r["documents"], r["serve"]["cpu_ms"]["median"]) for r in found["rows"]]
        yield "WebShop", "CPU ms a query", "listings", points
    for name, key in (("engine_concurrency", "concurrency"), ("engine_context", "turns")):
        rows = results.get(name, {}).get("rows", [])
        size = "conversations" if key == "concurrency" else "turns of history"
        for what, read in (
            ("CPU ms a turn, generation", lambda r: 1e3 / _best(r)),
            ("the same, prompts computed again", lambda r: 1e3 / r["plain_generate"]["turns_per_s"]),
            (
                "CPU s to score, once",
                lambda r: r["scored_tokens"]["once"] / r["scored_tokens_per_s"]["engine"],
            ),
            ("CPU s to score, turn by turn", lambda r: _per_turn_s(r)),
        ):
            yield "engine", what, size, [(row[key], read(row)) for row in rows]
    if found := results.get("learner"):
        for layout, title in (("merged", "merged"), ("trl", "TRL's layout")):
            points = [(d["turns"], d["all_turns"]["layouts"][layout]["cpu_s"]) for d in found["depths"]]
            yield "learner, every turn", f"CPU s an update, {title}", "turns of history", points
    if found := results.get("composer"):
        for preset in dict.fromkeys(row["preset"] for row in found["rows"]):
            points = [(r["turns"], r["pool_ms_median"]) for r in found["rows"] if r["preset"] == preset]
            yield "composer", f"ms, `{preset}`", "turns", points
    if found := results.get("explorer"):
        points = [(row["concurrent"], row["cpu_us_per_turn"] / 1000) for row in found["process"]]
        yield "explorer", "CPU ms a turn", "episodes in flight", points


def _best(row: Json) -> float:
    return max(rates["turns_per_s"] for key, rates in row.items() if key.startswith("engine_"))


def _per_turn_s(row: Json) -> float:
    return row["scored_tokens"]["once"] / row["scored_tokens_per_s"]["per_turn"]
