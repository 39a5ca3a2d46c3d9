"""The benchmarks page and its tables: every figure stands where it belongs, and what does not hold is said."""

import gzip
import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import suite  # noqa: E402
import suite_page  # noqa: E402
import suite_tables as tables  # noqa: E402

FACTS = {
    "date": "2026-01-02 03:04 UTC", "scale": 1.0, "load_average": [0.1, 0.1, 0.1],
    "machine": {"cpu": "Some CPU", "cores": 2, "memory_gb": 8.0, "system": "Linux x86_64"},
    "versions": {"python": "3.11.1", "torch": None},
}  # fmt: skip


def cells(markdown):
    """Rows of every table, as lists of text."""
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in markdown.splitlines()
        if line.startswith("|") and not line.startswith("|---")
    ]


def measured(tmp_path):
    """A bench.json with one part done, one failed and one left out; its folder."""
    report = {**FACTS, "suite": 1, "finished": True, "parts": {}, "load_average_end": [1.5, 1.0, 0.5]}
    base = {
        "command": "python benchmarks/x.py",
        "date": FACTS["date"],
        "commit": "abc",
        "load_average": [0.2, 0.1, 0.1],
    }
    result = {
        "rows": [
            {"turns": size, "preset": "divopd", "pool_ms_median": ms, "unread_ms_median": ms / 2}
            for size, ms in ((256, 0.5), (1_000_000, 4000.0))
        ]
    }
    report["parts"]["composer"] = {**base, "status": "done", "seconds": 3.2, "result": result}
    report["parts"]["learner"] = {**base, "status": "failed", "seconds": 2.0, "why": "exit status 1: a|b"}
    report["parts"]["webshop_oracle"] = {**base, "status": "left out", "seconds": 1.0, "why": "no data"}
    (tmp_path / "bench.json").write_text(json.dumps(report))
    return report


def test_the_page_shows_what_was_measured_and_says_what_was_not(tmp_path):
    text = suite_page.page(measured(tmp_path), suite.parts(), "bench.json")
    rows = cells(text)
    assert ["256 (a pool of B * 4)", "0.5"] in rows and [
        "1,000,000 (B = 64, the rest unread)",
        "2,000",
    ] in rows
    assert [
        "composer: ms, `divopd`",
        "turns",
        "256",
        "1,000,000",
        "3,906 x",
        "0.5",
        "4,000",
        "8,000 x",
    ] in rows
    assert "`python benchmarks/x.py` (2026-01-02 03:04 UTC, commit abc, 3 s)" in text
    missing = text.partition("## Not measured")[2]
    assert "(`learner`): failed, exit status 1: a\\|b." in missing
    assert "(`webshop_oracle`): left out, no data." in missing and "(`idle`): not asked for." in missing
    assert "(`composer`)" not in missing and "not quiet" not in text and "Python" not in text
    assert ["machine", "Some CPU, 2 cores, 8 GB"] in rows and ["versions", "python 3.11.1"] in rows
    assert "[bench.json](bench.json)" in text


def test_a_busy_machine_is_named_on_the_page(tmp_path):
    report = measured(tmp_path)
    for part in report["parts"].values():
        part["load_average"] = [3.0, 1.0, 1.0]
    assert "**The machine was not quiet**: its load average was 3 " in suite_page.page(
        report, suite.parts(), "x"
    )


def test_parts_of_different_code_are_named_on_the_page(tmp_path):
    report = measured(tmp_path)
    assert "different states" not in suite_page.page(report, suite.parts(), "x")
    report["parts"]["learner"]["commit"] = "def"
    text = suite_page.page(report, suite.parts(), "x")
    assert "different states" in text and "| code | abc, def |" in text


def test_upstreams_figures_are_quoted_as_recorded_and_not_as_measured_here():
    text = suite_page.UPSTREAM
    assert "Not measured in this run" in text and "| 21 | 147 | 358 |" in text and "1.7" in text


def test_docs_gets_the_page_and_small_figures_beside_it(tmp_path):
    docs = tmp_path / "docs"
    docs.mkdir()
    report = measured(tmp_path)
    (docs / "benchmarks.json.gz").write_bytes(b"old")
    words = ["--render", "--docs", "--docs-dir", str(docs), "--out", str(tmp_path)]
    assert suite.main(words) == 0
    text = (docs / "benchmarks.md").read_text()
    assert "[benchmarks.json](benchmarks.json)" in text
    assert json.loads((docs / "benchmarks.json").read_text()) == report
    assert sorted(path.name for path in docs.iterdir()) == ["benchmarks.json", "benchmarks.md"]
    report["parts"]["composer"]["result"]["rows"] *= 3000
    (tmp_path / "bench.json").write_text(json.dumps(report))
    assert suite.main(words) == 0
    assert sorted(path.name for path in docs.iterdir()) == ["benchmarks.json.gz", "benchmarks.md"]
    assert json.loads(gzip.decompress((docs / "benchmarks.json.gz").read_bytes())) == report
    assert "(benchmarks.json.gz)" in (docs / "benchmarks.md").read_text()


def test_render_without_figures_says_what_is_missing(tmp_path, capsys):
    assert suite.main(["--render", "--out", str(tmp_path)]) == 2
    assert "found no bench.json" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"), (float("nan"), "-"), (float("inf"), "-"), (True, "True"), ("a|b\nc", "a\\|b c"), (0.0, "0"), (0, "0"),
        (1234567, "1,234,567"), (123.6, "124"), (12.34, "12.3"), (1.005, "1"), (0.5, "0.5"), (0.00123, "0.00123"),
        (99.96, "100"), (-2.5, "-2.5"), (1e-7, "1.0e-07"), (100, "100"),
    ],
)  # fmt: skip
def test_numbers_keep_three_digits(value, text):
    assert tables.number(value) == text


def test_a_row_of_another_length_than_the_header_is_refused():
    with pytest.raises(ValueError, match="2 cells and the header 3"):
        tables.table(("a", "b", "c"), [(1, 2)])
    assert tables.table(("a", "b"), [("x", 1)]).splitlines() == ["| a | b |", "|---|---:|", "| x | 1 |"]


def layouts(merged, other, difference=1e-7):
    def one(tokens, seconds, ratio):
        return {
            "forwarded_tokens": tokens, "tokens_vs_merged": ratio, "cpu_s": seconds, "wall_s": 2 * seconds,
            "seconds_vs_merged": ratio, "tokens_per_s": 1000, "trained_tokens_per_s": 10, "mfu": None,
            "gradient_difference": difference,
        }  # fmt: skip

    return {
        "merged": one(merged, 1.0, 1.0),
        "row_per_turn": one(other, 3.0, 3.0),
        "trl": one(other, 4.0, 4.0),
    }


def learner_result(difference=1e-7):
    depths = [
        {
            "turns": turns, "parameters": 525056,
            "composed": {"rows": 64, "layouts": layouts(100 * turns, 300 * turns)},
            "all_turns": {"rows": 4 * turns, "layouts": layouts(200 * turns, 900 * turns, difference)},
        }
        for turns in (10, 40)
    ]  # fmt: skip
    return {"device": "cpu", "dtype": "float32", "depths": depths}


def test_the_learners_table_has_a_row_for_every_depth_batch_and_layout():
    text = tables.learner(learner_result())
    rows = cells(text)
    assert len(rows) == 1 + 2 * 2 * 3
    assert rows[-1] == [
        "40 turns, every turn: TRL's layout",
        "160",
        "36,000",
        "4 x",
        "4",
        "8",
        "4 x",
        "1,000",
        "10",
        "-",
    ]
    assert "gradients of a batch are equal: by 1.0e-07" in text
    assert "**The gradients of the layouts differ**" in tables.learner(learner_result(0.01))


def test_the_alfworld_table_says_when_the_sides_differ():
    figures = {
        "divopd_gym": {"mean": 0.3, "median": 0.25}, "alfworld": {"mean": 30.0, "median": 25.5},
        "ratio_of_means": 100.0, "ratio_of_medians": 102.0,
    }  # fmt: skip
    result = {
        "turns": 200, "games": 8, "source": "s", "identical": True, "turn_cpu_ms": figures, "next_game_cpu_ms": figures,
    }  # fmt: skip
    text = tables.alfworld_env(result)
    assert ["a turn", "0.3", "0.25", "30", "25.5", "100 x", "102 x"] in cells(text) and "was the same" in text
    text = tables.alfworld_env(result | {"identical": False})
    assert "differed" in text and "was the same" not in text


def test_the_scienceworld_table_names_what_was_not_ready():
    ours = {"turns_per_s": 260.0, "turns_per_cpu_s": 200.0, "simulators": 1, "simulators_mb": 300}
    stock = {"turns_per_s": 20.0, "turns_per_cpu_s": 10.0, "simulators": 16, "simulators_mb": 6000}
    both = {"ours": ours, "stock": stock, "times_the_turns_per_s": 13.0, "times_the_turns_per_cpu_s": 20.0}
    text = tables.scienceworld_env({"envs": {"16": both}, "not_ready": []})
    assert cells(text)[1] == ["16", "260", "20", "13 x", "200", "10", "20 x", "1", "300", "16", "6,000"]
    assert "Not ready" not in text
    assert "left out: 16 stock" in tables.scienceworld_env({"envs": {}, "not_ready": ["16 stock"]})


def engine_row(turns, once, per_turn):
    return {
        "model": "2M", "concurrency": 4, "turns": turns, "engine_dense": {"turns_per_s": 50.0},
        "plain_generate": {"turns_per_s": 25.0}, "scored_tokens": {"once": once, "per_turn": per_turn},
        "scored_tokens_per_s": {"engine": 1000, "plain": 800, "per_turn": 100},
    }  # fmt: skip


def test_the_engines_tables_compare_once_with_turn_by_turn():
    text = tables.engine({"rows": [engine_row(10, 2000, 12000)]})
    assert ["2M, 4 at once, 10 turns, dense", "50", "25", "2 x"] in cells(text)
    assert ["2M, 4 at once, 10 turns", "2,000", "12,000", "6 x", "2", "20", "10 x"] in cells(text)


def test_growth_compares_the_smallest_with_the_largest_size():
    results = {"engine_context": {"rows": [engine_row(10, 2000, 12000), engine_row(40, 8000, 160000)]}}
    results["learner"] = learner_result()
    rows = {row[0]: row[1:] for row in suite_page.growth(results)}
    assert rows["engine: CPU s to score, turn by turn"] == (
        "turns of history",
        10,
        40,
        "4 x",
        20.0,
        80.0,
        "4 x",
    )
    assert rows["engine: CPU ms a turn, generation"][-1] == "1 x"
    assert rows["learner, every turn: CPU s an update, TRL's layout"][1:3] == (10, 40)
    assert list(suite_page.growth({"engine_context": {"rows": [engine_row(10, 1, 1)]}})) == []


def test_shares_of_a_run_are_counted_from_the_end_of_the_first_update():
    import idle

    def line(update, wall, **more):
        return {
            "kind": "train",
            "update": update,
            "wall_s": wall,
            "env_turns": 100 * update,
            "rows": 64,
            **more,
        }

    lines = [
        line(1, 30.0, wait_s=25.0, learner_s=2.0, generator_s=9.0, teacher_s=1.0),
        line(2, 34.0, wait_s=1.0, learner_s=2.0, generator_s=3.0, teacher_s=0.5, trained_tokens=400),
        line(3, 40.0, wait_s=0.5, learner_s=3.0, generator_s=2.0, teacher_s=0.5, trained_tokens=600),
        {"kind": "explorer", "turns": 350},
    ]
    found = idle.summary(lines)
    assert (found["wall_s"], found["wait_share"], found["generator_share"]) == (10.0, 0.15, 0.5)
    assert found["trained_tokens_per_s"] == 100.0 and found["first_update_s"] == 30.0
    assert (found["turns_arrived"], found["turns_trained"], found["turns_played_in_all"]) == (200, 128, 350)
    shown = cells(tables.idle({"methods": {"divopd": found}}))
    assert ["learner waited", "15.0 %"] in shown and ["generator idle", "50.0 %"] in shown
    with pytest.raises(SystemExit, match="has 1 updates; two or more"):
        idle.summary(lines[:1])


def test_errors_of_the_reports_page_are_said():
    text = tables.report_page({"episodes": 600, "write_s": 0.25, "script_errors": []})
    assert cells(text)[1:] == [["episodes", "600"], ["s to write it", "0.25"]] and "errors" not in text
    assert "**The page reported errors**: a; b" in tables.report_page({"script_errors": ["a", "b"]})
