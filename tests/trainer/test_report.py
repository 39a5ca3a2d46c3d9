import csv
import os
import re
import sys
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
from report_fakes import metric_run
from run_fakes import fake_rollout, fake_run

from divopd_trainer.commands.report import main
from divopd_trainer.diagnostics import DEPTH_BANDS, depth_band
from divopd_trainer.records import RecordError, RunWriter, read_run
from divopd_trainer.report import write_report
from divopd_trainer.report.charts import charts_of, time_unit
from divopd_trainer.report.collect import EvalPoint, collect
from divopd_trainer.report.episodes import scan_rollouts
from divopd_trainer.report.groups import group_runs
from divopd_trainer.report.svg import format_number, ticks


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    return fake_run(tmp_path_factory.mktemp("runs") / "divopd <0>", updates=12)


def charts_by_key(*paths):
    groups = group_runs([collect(read_run(path)) for path in paths])
    scans = [[scan_rollouts(run.run) for run in group.runs] for group in groups]
    return {chart.key: chart for chart in charts_of(groups, scans)}


def test_the_page_is_one_file_without_outside_requests(run_dir, tmp_path):
    page = write_report([run_dir], tmp_path / "r.html", png=False).html.read_text()
    assert not re.search(r"""(?:src|href)\s*=\s*["'](?!#)|@import|url\(|fetch\(|XMLHttp""", page)
    assert "default-src 'none'" in page
    assert "{{" not in page


def test_recorded_text_cannot_break_out_of_the_page(run_dir, tmp_path):
    page = write_report([run_dir], tmp_path / "r.html", png=False).html.read_text()
    assert page.count("<script") == 4 == page.count("</script>")
    assert "<b>You see</b>" not in page
    assert "divopd &lt;0&gt;" in page and "divopd <0>" not in page


@pytest.mark.parametrize(
    "evil", ["</script><script>alert(1)</script>", "<img src=x onerror=alert(1)>", "{{body}}"]
)
def test_hostile_names_and_settings_stay_text(tmp_path, evil):
    paths = [
        metric_run(
            tmp_path / f"r{seed}", method=evil, seed=evil, updates=8, env_id=evil, model=evil, teacher=evil
        )
        for seed in range(2)
    ] + [metric_run(tmp_path / "other", method="vanilla", updates=8)]
    with RunWriter(paths[0]) as writer:
        line = dict(kind="eval", update=8, policy_version=8, env_turns=0, success_rate=0.5, episodes=4)
        writer.write_metrics(**line, per_type={evil: 0.5})
    for chosen in (paths, paths[:1]):
        page = write_report(chosen, tmp_path / "r.html", png=False, title=evil).html.read_text()
        assert page.count("<script") == 1 and "<img" not in page
        assert page.count("<main>") == 1


def test_values_of_the_wrong_kind_are_left_out(tmp_path):
    path = metric_run(tmp_path / "run", updates=4)
    at = dict(update=4, policy_version=4, env_turns=0)
    with RunWriter(path) as writer:
        writer.write_metrics(
            kind="train", **at, loss={}, kl_per_token="high", staleness="old", learner_s=[1], never_used="x"
        )
        writer.write_metrics(kind="eval", **at, success_rate="0.5", episodes="many", per_type=3)
        writer.write_metrics(kind="eval", **at, success_rate=7.0, episodes=-4)
    (path / "config.yaml").write_text("- a list\n")
    assert "no mapping" in write_report([path], png=False).notices[0]


def test_the_headline_gives_teacher_before_and_after_with_intervals(run_dir):
    figures = collect(read_run(run_dir))
    assert figures.teacher.rate == 0.92
    assert figures.initial.update == 0 and figures.final.update == 12
    for point in (figures.teacher, figures.initial, figures.final):
        assert point.low < point.rate < point.high


def test_a_teachers_evaluation_beside_the_run_is_found(tmp_path):
    path = fake_run(tmp_path / "run", updates=2, teacher=False)
    assert collect(read_run(path)).teacher is None
    (path / "teacher_eval.json").write_text('{"success_rate": 0.75, "episodes": 100}')
    assert collect(read_run(path)).teacher.rate == 0.75
    (path / "teacher_eval.json").write_text("{")
    run = read_run(path)
    assert collect(run).teacher is None and "no JSON" in run.notices[0]


def test_evaluations_stand_at_the_tokens_trained_before_them(run_dir):
    figures = collect(read_run(run_dir))
    per_update = {line["update"]: line["trained_tokens"] for line in figures.train}
    for point in figures.evals:
        assert point.trained_tokens == sum(n for update, n in per_update.items() if update <= point.update)


def test_never_used_rollouts_are_counted_as_in_the_replay(run_dir):
    from divopd_trainer.replay import load_stream, replay

    run = read_run(run_dir)
    scan = scan_rollouts(run)
    assert scan.never_used / scan.valid_rollouts == pytest.approx(
        replay(load_stream(run), "divopd").summary["never_used_share"]
    )


def test_rollouts_that_came_after_the_last_batch_are_not_called_unused(tmp_path):
    path = fake_run(tmp_path / "run", updates=3)
    before = scan_rollouts(read_run(path))
    with RunWriter(path) as writer:
        writer.write_rollout(fake_rollout(999, 3, 4, np.random.default_rng(0)))
    after = scan_rollouts(read_run(path))
    assert after.rollouts == before.rollouts + 1
    assert (after.valid_rollouts, after.never_used) == (before.valid_rollouts, before.never_used)


def test_an_evaluation_stands_at_the_time_its_weights_were_there():
    point = EvalPoint.from_line({"success_rate": 0.5, "episodes": 4, "wall_s": 90.0, "asked_s": 60.0})
    assert point.wall_s == 60.0


def test_methods_share_the_charts(run_dir, tmp_path):
    other = fake_run(tmp_path / "vanilla", updates=6, preset="vanilla", seed=3)
    charts = charts_by_key(run_dir, other)
    assert [s.run for s in charts["kl"].series] == [0, 1]
    assert [s.run for s in charts["success_updates"].series] == [-1, 0, 1]
    assert [s.label for s in charts["kl"].series] == ["divopd", "vanilla"]


def test_costs_that_were_not_recorded_have_no_chart(tmp_path):
    with_accounts = metric_run(tmp_path / "a", updates=8)
    without = metric_run(tmp_path / "b", updates=8, accounts=False)
    assert {"success_end_to_end", "work"} <= set(charts_by_key(with_accounts))
    assert not {"success_end_to_end", "work"} & set(charts_by_key(without))


def test_end_to_end_time_adds_generator_teacher_and_learner(tmp_path):
    figures = collect(read_run(metric_run(tmp_path / "a", updates=8)))
    spent = sum(line["generator_s"] + line["teacher_s"] + line["learner_s"] for line in figures.train)
    assert figures.evals[0].end_to_end_s == 0
    assert figures.evals[-1].end_to_end_s == pytest.approx(spent)


def test_layers_of_depth_add_up_to_the_whole_batch(run_dir):
    layers = charts_by_key(run_dir)["depth_time"].series
    assert [sum(values) for values in zip(*(layer.y for layer in layers))] == pytest.approx([1.0] * 12)
    assert {layer.label for layer in layers} <= {f"turn {band}" for band in DEPTH_BANDS}


def test_the_staleness_histogram_counts_rows_of_every_update(run_dir):
    figures = collect(read_run(run_dir))
    chart = charts_by_key(run_dir)["staleness_histogram"]
    rows = sum(line["rows"] for line in figures.train)
    stale = sum(line["staleness"].get("1", 0) for line in figures.train)
    place = chart.categories.index("1")
    assert chart.series[0].y[place] == pytest.approx(stale / rows)


def test_lags_beyond_all_use_share_one_bar(tmp_path):
    path = metric_run(tmp_path / "run", updates=4)
    with RunWriter(path) as writer:
        at = dict(update=5, policy_version=5, env_turns=0)
        writer.write_metrics(kind="train", **at, staleness={"0": 1, "999999": 3, "1" * 5000: 4, "-1": 9})
    chart = charts_by_key(path)["staleness_histogram"]
    assert chart.categories[-1] == "30+" and len(chart.categories) == 31
    assert chart.series[0].y[-1] == pytest.approx(3 / (4 * 64 + 4))


def test_idle_shares_are_of_waiting_time_and_of_episode_slots(run_dir):
    figures = collect(read_run(run_dir))
    learner, explorer = charts_by_key(run_dir)["idle"].series
    line = figures.train[0]
    assert learner.y[0] == pytest.approx(line["wait_s"] / (line["wait_s"] + line["learner_s"]))
    assert explorer.y[0] == pytest.approx(max(0, 1 - figures.explorer[0]["in_flight"] / 16))


def test_every_curve_is_written_as_svg_and_csv(run_dir, tmp_path):
    files = write_report([run_dir], tmp_path / "out", png=False)
    assert files.html == tmp_path / "out" / "report.html" and os.fspath(files) == str(files.html)
    charts = charts_by_key(run_dir)
    folder = tmp_path / "out" / "report_curves"
    assert {path.name for path in files.curves} == {
        *(f"{key}.{kind}" for key in charts for kind in ("svg", "csv")), "summary.csv",
    }  # fmt: skip
    for key in charts:
        ElementTree.parse(folder / f"{key}.svg")
    rows = list(csv.DictReader((folder / "success_updates.csv").open()))
    points = [row for row in rows if row["series"] == "student"]
    evals = collect(read_run(run_dir)).evals
    assert [float(row["update"]) for row in points] == [point.update for point in evals]
    assert [float(row["low"]) for row in points] == [point.low for point in evals]


def test_a_label_is_no_formula_in_a_table_program(tmp_path):
    path = metric_run(tmp_path / "a", method="=1+1", updates=4)
    other = metric_run(tmp_path / "b", updates=4)
    files = write_report([path, other], tmp_path / "out", png=False)
    text = (files.html.parent / "report_curves" / "summary.csv").read_text()
    assert "\n'=1+1," in text


def test_the_command_writes_to_a_directory_and_names_what_it_wrote(tmp_path, capsys):
    path = metric_run(tmp_path / "a", updates=4)
    assert main([str(path), str(path), "--out", str(tmp_path / "out"), "--no-png", "--title", "A title"]) == 0
    printed = capsys.readouterr().out
    assert str(tmp_path / "out" / "report.html") in printed and "given twice" in printed
    assert "<h1>A title</h1>" in (tmp_path / "out" / "report.html").read_text()


def test_times_are_shown_in_a_unit_that_fits():
    assert [time_unit(s)[1] for s in (20, 2000, 200_000)] == ["seconds", "minutes", "hours"]


def test_png_curves_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    with RunWriter(tmp_path) as writer:
        for update in (0, 5):
            writer.write_metrics(
                kind="eval", update=update, policy_version=update, env_turns=0, success_rate=0.5, episodes=20
            )
    files = write_report([tmp_path])
    assert [path.name for path in files.pngs][:2] == ["overview.png", "success_updates.png"]
    assert {path.parent for path in files.pngs} == {tmp_path / "report_curves"}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in files.pngs)


def test_without_matplotlib_the_page_is_written_and_the_lack_told(run_dir, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "divopd_trainer.report.figures", None)
    files = write_report([run_dir], tmp_path / "r.html")
    assert files.html.exists() and not files.pngs
    assert "matplotlib" in files.notices[0]


def test_a_run_that_only_just_began_has_a_page(tmp_path):
    with RunWriter(tmp_path / "a") as writer:
        writer.write_metrics(
            kind="eval", update=0, policy_version=0, env_turns=0, success_rate=0.1, episodes=20
        )
    assert write_report([tmp_path / "a"], png=False).html == tmp_path / "a" / "report.html"
    with RunWriter(tmp_path / "b"):
        pass
    assert write_report([tmp_path / "b"], png=False).html.exists()


def test_a_killed_run_is_reported_up_to_where_it_came(tmp_path):
    path = fake_run(tmp_path / "run", updates=4)
    part = next((path / "rollouts").iterdir())
    part.write_bytes(part.read_bytes()[:-9])
    files = write_report([path], png=False)
    assert "torn" in files.notices[0]


def test_no_run_is_refused(tmp_path):
    with pytest.raises(RecordError, match="no run directory"):
        write_report([tmp_path])


@pytest.mark.parametrize("form", [{"pick": {"success_rate": 0.5, "episodes": 4}}, {"pick": 0.5}])
def test_both_forms_of_per_type_results_are_read(form):
    point = EvalPoint.from_line({"success_rate": 0.5, "episodes": 4, "per_type": form})
    assert point.per_type["pick"][0] == 0.5


def test_a_recorded_interval_is_kept():
    point = EvalPoint.from_line({"success_rate": 0.5, "episodes": 4, "success_ci": [0.2, 0.8]})
    assert (point.low, point.high) == (0.2, 0.8)


def test_depth_bands_cover_every_turn_once():
    assert [depth_band(i) for i in (0, 1, 2, 4, 5, 9, 10, 19, 20, 400)] == [
        "1", "2", "3-5", "3-5", "6-10", "6-10", "11-20", "11-20", "21+", "21+",
    ]  # fmt: skip


def test_axis_ticks_are_round_and_inside():
    assert ticks(0, 40) == [0, 10, 20, 30, 40]
    assert ticks(0, 1) == [0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert format_number(12345) == "12.3k" and format_number(7680) == "7680"
