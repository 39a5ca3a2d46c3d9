"""Checkpoints: whole or absent, and everything in them comes back."""

import numpy as np
import pytest
from learner_fakes import random_rollout

from divopd_gym.errors import ConfigError
from divopd_trainer.checkpoint import (
    SideState,
    find_checkpoint,
    load_side_state,
    publish,
    rotate,
    save_side_state,
    set_aside,
    whole,
)
from divopd_trainer.composer import BatchComposer
from divopd_trainer.run_dir import RunDir


def make_checkpoint(root, number, content="weights"):
    partial = root / f".partial-{number}" / f"checkpoint-{number}"
    partial.mkdir(parents=True)
    (partial / "model.bin").write_text(content)
    publish(partial, root / f"checkpoint-{number}")
    return root / f"checkpoint-{number}"


def test_pending_and_unread_turns_come_back_with_all_their_data(tmp_path):
    rollouts = [random_rollout(None, i, turns=4) for i in range(4)]
    composer = BatchComposer(batch_rows=3, pool_multiplier=2, cap=1)
    composer.compose(1, [t for r in rollouts for t in r.turns])
    state = SideState(1, 1, 16, 2.5, {"next_rollout_id": 4}, composer.state_dict(), {"a": 1})
    save_side_state(tmp_path, state)
    back = load_side_state(tmp_path)

    assert (back.update, back.policy_version, back.env_turns, back.wall_s) == (1, 1, 16, 2.5)
    assert back.explorer == {"next_rollout_id": 4} and back.counters == {"a": 1}
    for name in ("pending", "unread"):
        pairs = zip(back.composer[name], state.composer[name], strict=True)
        for mine, theirs in pairs:
            seen = (mine[0], theirs[0]) if name == "pending" else (0, 0)
            a, b = (mine[1], theirs[1]) if name == "pending" else (mine, theirs)
            assert seen[0] == seen[1]
            assert (a.rollout_id, a.index, a.start, a.end, a.score) == (
                b.rollout_id,
                b.index,
                b.start,
                b.end,
                b.score,
            )
            np.testing.assert_array_equal(a.segment.token_ids, b.segment.token_ids)
            np.testing.assert_array_equal(a.teacher_logprobs, b.teacher_logprobs)
    assert len(back.composer["unread"]) > 0 and len(back.composer["pending"]) > 0


def test_turns_of_one_rollout_share_their_segment_again(tmp_path):
    composer = BatchComposer(batch_rows=1, pool_multiplier=4)
    composer.compose(1, random_rollout(None, 0, turns=4).turns)
    save_side_state(tmp_path, SideState(1, 1, composer=composer.state_dict()))
    pending = [turn for _, turn in load_side_state(tmp_path).composer["pending"]]
    assert len({id(turn.segment) for turn in pending}) == 1 and len(pending) == 3


def test_the_same_batches_follow_a_restored_composer(tmp_path):
    stream = [random_rollout(None, i, turns=4) for i in range(9)]
    composer = BatchComposer(batch_rows=4, pool_multiplier=2, cap=1)
    composer.compose(1, [t for r in stream[:5] for t in r.turns])
    save_side_state(tmp_path, SideState(1, 1, composer=composer.state_dict()))
    other = BatchComposer(batch_rows=4, pool_multiplier=2, cap=1)
    other.load_state_dict(load_side_state(tmp_path).composer)
    for update in (2, 3):
        arrivals = [t for r in stream[5 : 3 + 2 * update] for t in r.turns]
        mine, theirs = composer.compose(update, arrivals), other.compose(update, arrivals)
        key = [(t.rollout_id, t.index) for t in mine.selected]
        assert key == [(t.rollout_id, t.index) for t in theirs.selected]


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(tmp_path):
    make_checkpoint(tmp_path, 5)
    newest = make_checkpoint(tmp_path, 10)
    (newest / "model.bin").write_text("cut")
    said = []
    assert find_checkpoint(tmp_path, True, said.append).name == "checkpoint-5"
    assert "checkpoint-10 is damaged" in said[0]
    with pytest.raises(ConfigError, match="3 bytes instead of 7"):
        find_checkpoint(tmp_path, str(newest))


def test_numbers_are_compared_as_numbers(tmp_path):
    for number in (9, 10):
        make_checkpoint(tmp_path, number)
    assert find_checkpoint(tmp_path, True).name == "checkpoint-10"


def test_nothing_to_resume_is_an_error_with_a_remedy(tmp_path):
    with pytest.raises(ConfigError, match="no whole checkpoint"):
        find_checkpoint(tmp_path, True)
    assert find_checkpoint(tmp_path, None) is None and find_checkpoint(tmp_path, False) is None


def test_an_interrupted_writer_leaves_no_checkpoint(tmp_path):
    (tmp_path / ".partial-3" / "checkpoint-3").mkdir(parents=True)
    with pytest.raises(ConfigError):
        find_checkpoint(tmp_path, True)
    make_checkpoint(tmp_path, 4)
    rotate(tmp_path, 2)
    assert not list(tmp_path.glob(".partial-*"))


def test_a_checkpoint_may_be_written_twice(tmp_path):
    make_checkpoint(tmp_path, 3, "first")
    folder = make_checkpoint(tmp_path, 3, "second")
    assert (folder / "model.bin").read_text() == "second" and whole(folder) is None


def test_rotation_keeps_the_newest_whole_ones(tmp_path):
    for number in (1, 2, 3, 12):
        make_checkpoint(tmp_path, number)
    (tmp_path / "checkpoint-12" / "model.bin").unlink()
    rotate(tmp_path, 2)
    assert sorted(p.name for p in tmp_path.glob("checkpoint-*")) == [
        "checkpoint-12",
        "checkpoint-2",
        "checkpoint-3",
    ]
    rotate(tmp_path, 0)
    assert len(list(tmp_path.glob("checkpoint-*"))) == 3


def test_state_of_another_schema_is_refused(tmp_path):
    save_side_state(tmp_path, SideState(1, 1))
    path = tmp_path / "divopd_state" / "state.json"
    path.write_text(path.read_text().replace('"schema": 1', '"schema": 9'))
    with pytest.raises(ConfigError, match="schema 9"):
        load_side_state(tmp_path)


def test_a_run_directory_never_holds_two_runs(tmp_path):
    run = RunDir(tmp_path / "run")
    run.claim(resume=False)
    run.claim(resume=False)
    run.metrics.write_text("")
    with pytest.raises(ConfigError, match="already holds a run.*resume_from_checkpoint"):
        run.claim(resume=False)
    run.claim(resume=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        RunDir(tmp_path / "file").claim(resume=False)


def test_newer_checkpoints_than_the_one_resumed_rule_no_more(tmp_path):
    for number in (10, 20, 30):
        make_checkpoint(tmp_path, number)
    said = []
    set_aside(tmp_path, None, said.append)
    set_aside(tmp_path, tmp_path / "checkpoint-30", said.append)
    assert said == []
    set_aside(tmp_path, tmp_path / "elsewhere" / "checkpoint-20", said.append)
    assert "abandoned-checkpoint-30" in said[0]
    make_checkpoint(tmp_path, 25)
    rotate(tmp_path, 2)
    assert find_checkpoint(tmp_path, True).name == "checkpoint-25"
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "abandoned-checkpoint-30",
        "checkpoint-20",
        "checkpoint-25",
    ]
