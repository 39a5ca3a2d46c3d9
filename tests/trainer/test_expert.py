"""Recorded episodes: the expert's label in every state, mistakes marked, the same again from the same seed."""

import pytest
from counter_expert import EXPERT_ENV_ID
from fakes import ENV_ID

from divopd_gym.errors import ConfigError, PoolError
from divopd_trainer.expert import read_episodes, record_expert
from divopd_trainer.framelog import FrameLogWriter


def record(tmp_path, name="a", **given):
    given = {
        "env_id": EXPERT_ENV_ID,
        "episodes": 24,
        "workers": 0,
        "concurrency": 3,
        "max_turns": 12,
        **given,
    }
    out = tmp_path / f"{name}.jsonl.zst"
    stats = record_expert(out=out, **given)
    return stats, sorted(read_episodes(out), key=lambda r: r["episode"])


def test_without_noise_every_action_is_the_experts_and_wins(tmp_path):
    stats, episodes = record(tmp_path, noise=0.0)
    assert stats["episodes"] == 24 and stats["success"] == 1.0 and stats["wrong"] == 0
    assert all(e["success"] for e in episodes)
    assert all(t["action"] == t["expert"] and not t["noise"] for e in episodes for t in e["turns"])
    assert sum(len(e["turns"]) for e in episodes) == stats["turns"]


def test_mistakes_are_marked_and_the_label_stays_the_experts(tmp_path):
    stats, episodes = record(tmp_path, noise=0.5, clean=0.25)
    turns = [t for e in episodes for t in e["turns"]]
    assert (
        0 < stats["wrong"] == sum(t["action"] != t["expert"] for t in turns) == sum(t["noise"] for t in turns)
    )
    # The expert of the counter says what the observation, or the last one that named a number, asked for.
    assert all(t["expert"] in t["admissible"] for t in turns)
    assert any(t["action"] not in t["admissible"] for t in turns)
    clean = [e for e in episodes if e["noise"] == 0]
    assert clean and all(not t["noise"] for e in clean for t in e["turns"])


def test_same_seed_gives_the_same_episodes_however_many_run_at_once(tmp_path):
    one = record(tmp_path, "one", noise=(0.1, 0.5), concurrency=1)[1]
    many = record(tmp_path, "many", noise=(0.1, 0.5), concurrency=5)[1]
    other = record(tmp_path, "other", noise=(0.1, 0.5), seed=1)[1]
    assert one == many
    assert [e["turns"] for e in one] != [e["turns"] for e in other]


def test_worker_processes_record_the_same_as_this_process(tmp_path):
    here = record(tmp_path, "here", episodes=8, noise=0.3)[1]
    there = record(tmp_path, "there", episodes=8, noise=0.3, workers=1)[1]
    assert here == there


def test_episodes_of_one_task_come_with_different_noise(tmp_path):
    _, episodes = record(tmp_path, noise=0.5, repeats=4, clean=0.0, tasks=["4/0", "4/1"])
    assert {e["task"] for e in episodes[:4]} == {"4/0"} and {e["task"] for e in episodes[4:8]} == {"4/1"}
    assert len({tuple(t["action"] for t in e["turns"]) for e in episodes[:4]}) > 1


@pytest.mark.parametrize("given", [{"noise": 1.5}, {"episodes": 0}, {"clean": -0.1}])
def test_figures_out_of_range_are_refused(tmp_path, given):
    with pytest.raises(ConfigError, match="expected"):
        record(tmp_path, **given)


def test_an_existing_file_is_never_mixed_into(tmp_path):
    record(tmp_path)
    with pytest.raises(ConfigError, match="exists"):
        record(tmp_path)


def test_environment_without_expert_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="expert"):
        record(tmp_path, env_id=ENV_ID)


def test_records_of_another_kind_are_refused_with_a_remedy(tmp_path):
    with pytest.raises(ConfigError, match="divopd expert"):
        read_episodes(tmp_path / "none.jsonl.zst")
    with FrameLogWriter(tmp_path / "odd.zst") as log:
        log.write({"schema": 99})
    with pytest.raises(ConfigError, match="schema"):
        read_episodes(tmp_path / "odd.zst")


def test_a_worker_that_dies_costs_its_episode_alone(tmp_path):
    notes = []
    stats, episodes = record(
        tmp_path,
        workers=1,
        env_kwargs={"die": ["2/3"]},
        episodes=16,
        repeats=2,
        max_failures=3,
        note=notes.append,
    )
    assert stats["failed"] == 2 and stats["episodes"] == 14
    assert [e["episode"] for e in episodes] == [n for n in range(16) if n // 2 != 3]
    assert sum("task '2/3' is left out" in note for note in notes) == 2


def test_failures_in_a_row_end_the_recording_with_the_first_cause(tmp_path):
    with pytest.raises(PoolError, match=r"2 episodes in a row failed \(max_failures\); the first: .*0"):
        record(tmp_path, workers=1, env_kwargs={"die": ["2/0"]}, episodes=8, max_failures=2)
