import json

import pytest
from run_fakes import fake_run

from divopd_gym.errors import ConfigError
from divopd_trainer.commands.replay import main
from divopd_trainer.records import RecordError, RunWriter, read_run
from divopd_trainer.replay import ReplayTurn, Stream, Variant, compare, load_stream, replay, results_table

SETTINGS = dict(
    preset="vanilla", batch_rows=2, pool_multiplier=4, cap=1, max_staleness=2, max_pending_age=8, seed=0
)


def light(rid, index, version, valid=True):
    return ReplayTurn(rid, index, version, float(index), valid, 0, 10 * (index + 1), 5 if valid else 0, 5)


def known_stream():
    """Two rollouts of four turns at once, nothing at update 2, a short rollout at update 3."""
    first = [light(rid, t, 0) for rid in (0, 1) for t in range(4)]
    return Stream([(1, first), (2, []), (3, [light(2, 0, 2), light(2, 1, 2)])], dict(SETTINGS))


def test_vanilla_on_the_known_stream():
    summary = replay(known_stream(), "vanilla").summary
    assert summary["never_used_share"] == pytest.approx(1 / 3)
    assert summary["gini"] == pytest.approx(4 / 9)
    assert summary["dropped_stale"] == 4 and summary["stale_share"] == pytest.approx(0.4)
    assert summary["effective_rollouts"] == 1 and summary["top1_share"] == 1
    assert summary["effective_rollouts_forwarded"] == 1 and summary["top1_share_forwarded"] == 1
    assert summary["turns_per_rollout"] == 2
    assert summary["forwarded_tokens_rows"] == 30 + 70 + 30
    assert summary["forwarded_tokens_merged"] == 20 + 40 + 20
    assert summary["trained_tokens"] == 30
    assert summary["scored_per_trained"] == pytest.approx(50 / 30)


def test_divopd_on_the_known_stream():
    result = replay(known_stream(), "divopd")
    summary = result.summary
    assert summary["never_used_share"] == 0 and summary["gini"] == pytest.approx(0)
    assert [line["effective_rollouts"] for line in result.updates] == pytest.approx([2, 2, 1])
    assert summary["forwarded_tokens_rows"] == 80 + 60 + 30
    assert summary["forwarded_tokens_merged"] == 80 + 60 + 20
    assert summary["dropped_stale"] == 4
    assert replay(known_stream(), "divopd", tail=0.34).summary["effective_rollouts"] == 1


def test_dead_rows_take_rows_in_vanilla_and_never_after_the_gate():
    stream = Stream([(1, [light(0, 0, 0, False), light(0, 1, 0), light(1, 0, 0)])], dict(SETTINGS))
    assert replay(stream, "vanilla").summary["dead_row_share"] == 0.5
    assert replay(stream, "gate-only").summary["dead_row_share"] == 0


def test_composition_counts_trained_tokens_and_forwarded_tokens_apart():
    stream = Stream([(1, [light(0, 0, 0), light(1, 2, 0)])], dict(SETTINGS))
    summary = replay(stream, "divopd").summary
    assert summary["effective_rollouts"] == pytest.approx(2)
    assert summary["effective_rollouts_forwarded"] == pytest.approx(1 / (0.25**2 + 0.75**2))
    assert summary["top1_share_forwarded"] == pytest.approx(0.75)


def test_an_empty_stream_has_no_figures_and_no_crash():
    summary = replay(Stream([(1, [])], dict(SETTINGS)), "divopd").summary
    assert summary["never_used_share"] is None and summary["effective_rollouts"] is None


@pytest.mark.parametrize("preset", ["divopd", "vanilla", "divopd-base"])
def test_the_replay_makes_the_batches_that_were_recorded(tmp_path, preset):
    run = read_run(fake_run(tmp_path / "run", updates=12, preset=preset))
    stream = load_stream(run)
    assert stream.settings["preset"] == preset
    assert replay(stream, preset).same_as_recorded == (12, 12)
    assert replay(stream, "top-b").same_as_recorded is None
    assert replay(stream, preset, cap=2).same_as_recorded is None


def test_vanilla_wastes_rollouts_that_divopd_uses(tmp_path):
    stream = load_stream(read_run(fake_run(tmp_path / "run", updates=30, load=2.0)))
    vanilla, divopd = (result.summary for result in compare(stream, ["vanilla", "divopd"]))
    assert vanilla["never_used_share"] > 2 * divopd["never_used_share"]
    assert vanilla["effective_rollouts"] < divopd["effective_rollouts"]
    assert vanilla["gini"] > divopd["gini"]


def test_without_batch_records_a_rollout_arrives_before_the_update_after_its_version(tmp_path):
    path = fake_run(tmp_path / "run", updates=6)
    (path / "batches.jsonl.zst").unlink()
    stream = load_stream(read_run(path))
    assert any("No arrivals" in notice for notice in stream.notices)
    assert all(turn.policy_version == update - 1 for update, turns in stream.arrivals for turn in turns)
    assert replay(stream, "divopd").summary["dropped_stale"] == 0


def test_a_higher_load_spreads_the_same_turns_over_fewer_updates():
    stream = known_stream().paced(5.0)
    assert [len(turns) for _, turns in stream.arrivals] == [10]
    stream = known_stream().paced(1.0)
    assert [(update, [t.rollout_id for t in turns]) for update, turns in stream.arrivals] == [
        (1, [0] * 4),
        (2, []),
        (3, [1] * 4),
        (4, []),
        (5, [2] * 2),
    ]
    assert {update - t.policy_version for update, turns in stream.arrivals for t in turns} == {1}


def test_a_run_without_rollouts_is_refused(tmp_path):
    RunWriter(tmp_path).close()
    with pytest.raises(RecordError, match="no student turn"):
        load_stream(read_run(tmp_path))


def test_the_table_has_a_column_for_each_preset():
    table = results_table(compare(known_stream(), ["vanilla", "divopd"]))
    assert [column.header for column in table.columns] == ["", "vanilla", "divopd"]


def test_a_variant_is_a_preset_with_another_cap_or_budget():
    assert Variant.parse("divopd").settings == {"preset": "divopd"}
    assert Variant.parse("divopd:8").settings == {"preset": "divopd", "cap": 8}
    assert Variant.parse("divopd-base:none").settings == {"preset": "divopd-base", "cap": None}
    assert Variant.parse("auto").settings == {"preset": "divopd", "cap": "auto"}
    assert Variant.parse("divopd-cost:900").settings == {"preset": "divopd-cost", "token_budget": 900}
    for wrong in ("nope", "divopd:0", "divopd:x", ""):
        with pytest.raises(ConfigError, match="choose from auto"):
            Variant.parse(wrong)


def test_variants_replay_and_only_the_recorded_settings_are_compared_with_the_record(tmp_path):
    stream = load_stream(read_run(fake_run(tmp_path / "run", updates=6)))
    assert replay(stream, "divopd:4").same_as_recorded == (6, 6)
    assert replay(stream, "divopd:2").same_as_recorded is None
    assert replay(stream, "auto").same_as_recorded is None
    cost = replay(stream, "divopd-cost").summary
    divopd = replay(stream, "divopd").summary
    assert 0 < cost["forwarded_tokens_merged"] < 1.5 * divopd["forwarded_tokens_merged"]


def test_loads_print_a_table_for_each_load_and_cost_model(tmp_path, capsys):
    path = str(fake_run(tmp_path / "run", updates=6))
    target = tmp_path / "out" / "stress.json"
    assert main([path, "--load", "2,6", "--presets", "vanilla,auto", "--json", str(target)]) == 0
    out = capsys.readouterr().out
    assert out.count("episodes in flight") == 4 and "prefixes merged" in out and "one row per turn" in out
    tables = json.loads(target.read_text())["loads"]
    assert [(t["load"], t["cost_model"]) for t in tables] == [
        (2, "rows"),
        (6, "rows"),
        (2, "merged"),
        (6, "merged"),
    ]
    assert set(tables[0]["presets"]) == {"vanilla", "auto"}
    argv = [path, "--load", "4", "--cost_model", "merged", "--lazy", "--updates", "3", "--json", "-"]
    assert main(argv) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["updates"] == 3 and figures["loads"][0]["lazy"]
    assert list(figures["loads"][0]["presets"]) == ["vanilla", "divopd-base", "divopd", "divopd-cost", "auto"]


@pytest.mark.parametrize("more", [["--load", "2,x"], ["--load", "0"], ["--load", "2", "--pace", "1"]])
def test_loads_that_cannot_be_simulated_are_refused(tmp_path, more):
    path = str(fake_run(tmp_path / "run", updates=3))
    with pytest.raises(ConfigError, match="expected"):
        main([path, *more])
