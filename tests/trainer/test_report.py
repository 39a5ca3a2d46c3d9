import dataclasses
import json
import re
import sys

import numpy as np
import pytest
from run_fakes import fake_rollout, fake_run

from divopd_trainer.records import RecordError, RunWriter, read_run
from divopd_trainer.report import write_report
from divopd_trainer.report.collect import EvalPoint, charts_of, collect
from divopd_trainer.report.episodes import Thinning, depth_band, episode_json, scan_rollouts
from divopd_trainer.report.svg import format_number, ticks


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    return fake_run(tmp_path_factory.mktemp("runs") / "divopd <0>", updates=12)


def embedded(page):
    return json.loads(re.search(r'id="episode-data">(.*?)</script>', page, re.S).group(1))


def test_the_page_is_one_file_without_outside_requests(run_dir, tmp_path):
    page = write_report([run_dir], tmp_path / "r.html", png=False).html.read_text()
    assert not re.search(r"""(?:src|href)\s*=\s*["']|@import|url\(|fetch\(|XMLHttp""", page)
    assert "default-src 'none'" in page
    assert "{{" not in page


def test_recorded_text_cannot_break_out_of_the_page(run_dir, tmp_path):
    page = write_report([run_dir], tmp_path / "r.html", png=False).html.read_text()
    assert page.count("<script") == 2 == page.count("</script>")
    assert "<b>You see</b>" not in page
    assert "divopd &lt;0&gt;" in page and "divopd <0>" not in page
    assert "<b>You see</b>" in embedded(page)[0]["episodes"][0]["turns"][0]["o"]


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


def test_every_turn_tells_whether_and_when_it_trained(run_dir):
    run = read_run(run_dir)
    when = {key: batch.update for batch in run.batches for key in batch.selected}
    scan = scan_rollouts(run)
    turns = [(e["id"], i, t) for e in scan.episodes for i, t in enumerate(e["turns"])]
    assert any(t["u"] is not None for _, _, t in turns)
    for rid, i, turn in turns:
        assert turn["u"] == (when.get((rid, i)) if turn["why"] is None else None)
    assert scan.trained_turns == len(when)


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


def test_several_runs_share_the_charts(run_dir, tmp_path):
    other = fake_run(tmp_path / "vanilla", updates=6, preset="vanilla", seed=3)
    charts = {chart.key: chart for chart in charts_of([collect(read_run(p)) for p in (run_dir, other)])}
    assert [s.run for s in charts["kl"].series] == [0, 1]
    assert [s.run for s in charts["success_updates"].series] == [-1, 0, 1]
    page = write_report([run_dir, other], tmp_path / "r.html", png=False).html.read_text()
    assert [part["run"] for part in embedded(page)] == ["divopd <0>", "vanilla"]


def test_idle_shares_are_of_waiting_time_and_of_episode_slots(run_dir):
    figures = collect(read_run(run_dir))
    learner, explorer = next(chart for chart in charts_of([figures]) if chart.key == "idle").series
    line = figures.train[0]
    assert learner.y[0] == pytest.approx(line["wait_s"] / (line["wait_s"] + line["learner_s"]))
    assert explorer.y[0] == pytest.approx(max(0, 1 - figures.explorer[0]["in_flight"] / 16))


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


@pytest.mark.parametrize("length", [0, 1, 5, 10, 11, 97, 1000])
def test_the_sample_is_bounded_even_and_holds_both_ends(length):
    sample = Thinning(10)
    for i in range(length):
        sample.add([i])
    kept = [item[0] for item in sample.sample()]
    assert kept == sorted(set(kept)) and len(kept) <= 11
    assert len(kept) >= min(length, 5)
    if length:
        assert kept[0] == 0 and kept[-1] == length - 1
        assert len({b - a for a, b in zip(kept[:-1], kept[1:-1])}) <= 1


def test_depth_bands_cover_every_turn_once():
    assert [depth_band(i) for i in (0, 1, 2, 4, 5, 9, 10, 19, 20, 400)] == [
        "1", "2", "3-5", "3-5", "6-10", "6-10", "11-20", "11-20", "21+", "21+",
    ]  # fmt: skip


def test_axis_ticks_are_round_and_inside():
    assert ticks(0, 40) == [0, 10, 20, 30, 40]
    assert ticks(0, 1) == [0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert format_number(12345) == "12.3k" and format_number(7680) == "7680"


def test_a_long_observation_is_cut(tmp_path):
    rollout = fake_rollout(0, 0, 1, np.random.default_rng(0))
    rollout.turns[0] = dataclasses.replace(rollout.turns[0], observation="x" * 10_000)
    text = episode_json(rollout, {})["turns"][0]["o"]
    assert len(text) < 5000 and "6000 more" in text
