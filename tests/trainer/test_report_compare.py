import numpy as np
import pytest
from report_fakes import curve_run, metric_run

from divopd_trainer.records import read_run
from divopd_trainer.report import write_report
from divopd_trainer.report.charts import charts_of
from divopd_trainer.report.collect import collect
from divopd_trainer.report.compare import compare, cost_ratio, ratio_text
from divopd_trainer.report.groups import group_runs, interval_of_mean, over_seeds


def grouped(*paths, labels=None):
    return group_runs([collect(read_run(path)) for path in paths], labels)


def test_runs_that_differ_in_seed_and_directory_are_one_method(tmp_path):
    paths = [metric_run(tmp_path / f"{m}{s}", m, s, updates=4) for s in (0, 1) for m in ("vanilla", "divopd")]
    groups = grouped(*paths)
    assert [(group.label, group.seeds) for group in groups] == [
        ("vanilla", ["0", "1"]), ("divopd", ["0", "1"]),
    ]  # fmt: skip


def test_runs_of_one_method_with_other_settings_are_told_apart_by_them(tmp_path):
    groups = grouped(*(metric_run(tmp_path / str(cap), updates=4, cap=cap) for cap in (2, 4)))
    assert [group.label for group in groups] == ["divopd (cap 2)", "divopd (cap 4)"]


def test_a_name_in_the_settings_wins_over_the_method(tmp_path):
    groups = grouped(
        metric_run(tmp_path / "a", updates=4, name="mine"), metric_run(tmp_path / "b", updates=4)
    )
    assert [group.label for group in groups] == ["mine", "divopd"]


def test_runs_of_one_given_label_are_one_method(tmp_path):
    paths = [metric_run(tmp_path / m, m, updates=4) for m in ("vanilla", "divopd", "turnopd")]
    groups = grouped(*paths, labels=["old", "new", "new"])
    assert [(group.label, len(group.runs)) for group in groups] == [("old", 1), ("new", 2)]


def test_runs_without_settings_are_methods_of_their_own(tmp_path):
    paths = [metric_run(tmp_path / name, updates=4) for name in "ab"]
    for path in paths:
        (path / "config.yaml").unlink()
    assert [group.label for group in grouped(*paths)] == ["a", "b"]


def test_the_band_is_students_interval_of_the_mean():
    # Three values 1, 2, 3: standard deviation 1, t(2) = 4.303.
    low, high = interval_of_mean([1.0, 2.0, 3.0])
    assert (low, high) == pytest.approx((2 - 4.303 / np.sqrt(3), 2 + 4.303 / np.sqrt(3)))
    assert interval_of_mean([1.0, 2.0]) is None


def test_seeds_with_other_positions_are_averaged_where_all_have_values():
    curve = over_seeds([[(0, 0.0), (10, 1.0)], [(5, 0.5), (15, 0.5)]])
    assert curve.x == [5, 10]
    assert curve.y == pytest.approx([0.5, 0.75])
    assert curve.low is None


def test_seeds_that_agree_have_no_band_width_and_shares_stay_shares():
    curve = over_seeds([[(0, 0.9), (1, 0.9)], [(0, 0.9), (1, 1.0)], [(0, 0.9), (1, 0.6)]], share=True)
    assert curve.low[0] == pytest.approx(0.9) == curve.high[0]
    assert curve.high[1] == 1.0 and 0 <= curve.low[1] < 0.833


def test_means_of_seeds_are_what_the_success_chart_shows(tmp_path):
    paths = [curve_run(tmp_path / str(s), [0.0, r, 0.9], seed=s) for s, r in enumerate((0.3, 0.5, 0.7))]
    chart = next(chart for chart in charts_of(grouped(*paths)) if chart.key == "success_updates")
    mean = next(series for series in chart.series if series.style == "solid")
    assert mean.y == pytest.approx([0.0, 0.5, 0.9])
    thin = [series.label for series in chart.series if series.style == "thin"]
    assert thin == ["divopd, seed 0", "divopd, seed 1", "divopd, seed 2"]
    assert mean.low[1] < 0.5 < mean.high[1]


def test_peak_final_five_and_area_are_means_over_seeds(tmp_path):
    a = curve_run(tmp_path / "a", [0.0, 0.2, 0.4, 0.6, 0.8, 0.6], seed=0)
    b = curve_run(tmp_path / "b", [0.2, 0.4, 0.6, 0.8, 1.0, 0.8], seed=1)
    result = compare(grouped(a, b)).results[0]
    assert result.peak.values == [0.8, 1.0] and result.peak.mean == pytest.approx(0.9)
    assert result.final.mean == pytest.approx((0.52 + 0.72) / 2)
    # Trapezoids of a: 0.1 + 0.3 + 0.5 + 0.7 + 0.7 over 5 updates; b is 0.2 higher everywhere.
    assert result.auc.values == pytest.approx([0.46, 0.66])


def test_the_area_ends_where_the_shortest_run_ends(tmp_path):
    a = curve_run(tmp_path / "a", [0.0, 1.0], method="vanilla")
    b = curve_run(tmp_path / "b", [0.0, 1.0, 0.0, 0.0])
    comparison = compare(grouped(a, b))
    assert comparison.budget == 1
    assert [result.auc.mean for result in comparison.results] == pytest.approx([0.5, 0.5])


def test_costs_to_the_target_are_divided_by_the_methods_own(tmp_path):
    slow = curve_run(tmp_path / "a", [0.0, 0.2, 0.4, 0.63], method="vanilla")
    fast = curve_run(tmp_path / "b", [0.0, 0.6, 0.6, 0.7], tokens=150)
    comparison = compare(grouped(fast, slow))
    assert comparison.baseline.label == "vanilla" and comparison.target == pytest.approx(0.6)
    ratios = {key: ratio.value for key, ratio in comparison.results[0].ratios.items()}
    assert ratios == pytest.approx(
        {"updates": 3.0, "tokens": 2.0, "learner": 3.0, "end_to_end": 3.0, "wall": 3.0}
    )


def test_the_target_is_one_that_every_seed_of_the_baseline_reaches(tmp_path):
    a = curve_run(tmp_path / "a", [0.0, 0.71], method="vanilla", seed=0)
    b = curve_run(tmp_path / "b", [0.0, 0.58], method="vanilla", seed=1)
    assert compare(grouped(a, b)).target == pytest.approx(0.55)


def test_a_seed_that_never_reached_the_target_counts_with_all_it_spent():
    ratio = cost_ratio([[(4.0, 0.6)], [(4.0, 0.6)]], [[(2.0, 0.6)], [(10.0, 0.1)]], 0.5)
    assert ratio.value == pytest.approx(4 / 6) and ratio.interval is None
    assert ratio_text(ratio) == "< 0.67x (1 of 2 seeds)"
    assert cost_ratio([[(4.0, 0.6)]], [[(2.0, 0.1)]], 0.5) is None


def test_the_interval_of_a_ratio_covers_the_seeds_of_both_sides():
    base = [[(cost, 0.9)] for cost in (8.0, 10.0, 12.0)]
    method = [[(cost, 0.9)] for cost in (4.0, 5.0, 6.0)]
    ratio = cost_ratio(base, method, 0.5)
    low, high = ratio.interval
    assert ratio.value == pytest.approx(2.0)
    # Means of three draws lie between the least and the greatest seed.
    assert 8 / 6 <= low < 1.8 and 2.2 < high <= 12 / 4
    assert ratio.interval == cost_ratio(base, method, 0.5).interval


def test_a_comparison_has_its_tables_and_one_legend(tmp_path):
    paths = [
        metric_run(tmp_path / f"{m}{s}", m, s, updates=20) for m in ("vanilla", "divopd") for s in range(3)
    ]
    page = write_report(paths, tmp_path / "out", png=False).html.read_text()
    assert page.count('class="chip"') == 2
    assert "cost(vanilla) / cost(method)" in page and "All 6 runs" in page
    assert "3 (0, 1, 2)" in page


def test_methods_that_were_never_evaluated_are_still_compared_in_the_charts(tmp_path):
    paths = [metric_run(tmp_path / m, m, updates=8, every=100) for m in ("vanilla", "divopd")]
    for path in paths:
        lines = path.joinpath("metrics.jsonl").read_text().splitlines()
        path.joinpath("metrics.jsonl").write_text(
            "\n".join(line for line in lines if '"eval"' not in line) + "\n"
        )
    comparison = compare(grouped(*paths))
    assert comparison.target is None and comparison.budget == 0
    page = write_report(paths, tmp_path / "out", png=False).html.read_text()
    assert 'id="chart-kl"' in page and 'id="chart-success' not in page


def test_no_target_is_chosen_that_a_run_began_at(tmp_path):
    a = curve_run(tmp_path / "a", [0.33, 0.38], method="vanilla")
    b = curve_run(tmp_path / "b", [0.36, 0.5])
    comparison = compare(grouped(a, b))
    assert comparison.target is None and not comparison.results[1].ratios
    assert compare(grouped(a, b), target=0.35).target == 0.35
