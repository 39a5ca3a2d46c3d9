import dataclasses
import json
import math
import multiprocessing
import os
import signal
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from divopd_trainer.framelog import FrameLogWriter, read_frames
from divopd_trainer.records import (
    BatchRecord,
    MetricsWriter,
    RecordError,
    RunWriter,
    read_batches,
    read_metrics,
    read_rollouts,
    read_run,
    rollout_from_dict,
    rollout_to_dict,
)
from divopd_trainer.turns import Rollout, Segment, make_turn


def make_rollout(rid=0, turns=3, seed=0, window=False, topk=False, version=0):
    rng = np.random.default_rng(seed + rid)
    rollout = Rollout(
        rid, task=f"task/{rid}", seed=seed, policy_versions=(version, version), turns_played=turns
    )
    segment = Segment(rid)
    for t in range(turns):
        if window:
            segment = Segment(rid, t)
        segment.append(rng.integers(0, 1000, 5))
        n = int(rng.integers(1, 6))
        start, end = segment.append(rng.integers(0, 1000, n))
        teacher = rng.normal(size=n).astype(np.float32)
        teacher[0] = np.nan
        rollout.turns.append(
            make_turn(
                rollout_id=rid,
                index=t,
                segment=segment,
                start=start,
                end=end,
                student_logprobs=rng.normal(size=n),
                teacher_logprobs=teacher if t != 1 else None,
                teacher_mask=rng.random(n) < 0.7 if t == 0 else None,
                teacher_topk_ids=rng.integers(0, 9, (n, 3)) if topk else None,
                teacher_topk_logprobs=rng.normal(size=(n, 3)) if topk else None,
                policy_version=version,
                action="go to \u2028 \ud800 x",
                observation="Ünïcode \U0001f600",
                info={"admissible": ["a", "b"]},
            )
        )
    return rollout


def same_array(a, b):
    if a is None or b is None:
        return a is None and b is None
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def assert_same(a: Rollout, b: Rollout):
    for name in vars(a):
        if name != "turns":
            assert getattr(a, name) == getattr(b, name), name
    assert len(a.turns) == len(b.turns)
    assert [s.token_ids.tobytes() for s in a.segments] == [s.token_ids.tobytes() for s in b.segments]
    for x, y in zip(a.turns, b.turns):
        for name, value in vars(x).items():
            if isinstance(value, np.ndarray) or value is None:
                assert same_array(value, getattr(y, name)), name
            elif name != "segment":
                assert value == getattr(y, name), name
        assert a.segments.index(x.segment) == b.segments.index(y.segment)


@pytest.mark.parametrize("window", [False, True])
@pytest.mark.parametrize("topk", [False, True])
def test_a_rollout_comes_back_bit_for_bit(tmp_path, window, topk):
    rollouts = [make_rollout(i, window=window, topk=topk) for i in range(4)] + [Rollout(9)]
    with RunWriter(tmp_path) as writer:
        for rollout in rollouts:
            writer.write_rollout(rollout)
    back = list(read_rollouts(tmp_path))
    assert len(back) == 5
    for a, b in zip(rollouts, back):
        assert_same(a, b)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(width=32), min_size=1, max_size=6),
    st.text(),
    st.dictionaries(st.text(), st.integers() | st.text() | st.none(), max_size=3),
)
def test_any_float_and_any_text_survive_json(logprobs, text, meta):
    segment = Segment(3, 0, np.arange(len(logprobs) + 1))
    turn = make_turn(
        rollout_id=3,
        index=0,
        segment=segment,
        start=1,
        end=len(segment),
        student_logprobs=logprobs,
        teacher_logprobs=logprobs[:-1],
        action=text,
    )
    rollout = Rollout(3, task=text, turns=[turn], meta=meta)
    assert_same(rollout, rollout_from_dict(json.loads(json.dumps(rollout_to_dict(rollout)))))


def test_turns_of_one_segment_share_it_again(tmp_path):
    with RunWriter(tmp_path) as writer:
        writer.write_rollout(make_rollout())
    (back,) = read_rollouts(tmp_path)
    assert len({id(turn.segment) for turn in back.turns}) == 1


@pytest.mark.parametrize("change", [lambda r: r.pop("task"), lambda r: r.update(colour=1)])
def test_a_missing_or_unknown_field_is_named(change):
    record = rollout_to_dict(make_rollout())
    change(record)
    with pytest.raises(RecordError, match="'task'|'colour'"):
        rollout_from_dict(record)


def test_extra_draws_come_back_and_records_without_them_load():
    rollout = make_rollout(1)
    plain = rollout_to_dict(rollout)
    assert not any(name.startswith("extra") for turn in plain["turns"] for name in turn)
    n = rollout.turns[0].n_tokens
    drawn = {
        "extra_ids": np.arange(2 * n, dtype=np.int32).reshape(n, 2),
        "extra_teacher_logprobs": np.full((n, 2), np.nan, np.float32),
    }
    rollout.turns[0] = dataclasses.replace(rollout.turns[0], **drawn)
    record = json.loads(json.dumps(rollout_to_dict(rollout)))
    assert_same(rollout, rollout_from_dict(record))
    old = rollout_from_dict(plain)
    assert old.turns[0].extra_ids is None and old.turns[0].extra_teacher_logprobs is None


def test_another_schema_is_refused():
    record = rollout_to_dict(make_rollout()) | {"schema": 2}
    with pytest.raises(RecordError, match="schema 2"):
        rollout_from_dict(record)


@pytest.mark.parametrize("cut", [1, 7, 60])
def test_a_torn_tail_loses_one_record_and_is_told(tmp_path, cut):
    with RunWriter(tmp_path) as writer:
        for i in range(5):
            writer.write_rollout(make_rollout(i))
    (part,) = (tmp_path / "rollouts").iterdir()
    os.truncate(part, part.stat().st_size - cut)
    with pytest.warns(UserWarning, match="torn"):
        assert [r.rollout_id for r in read_rollouts(tmp_path)] == [0, 1, 2, 3]


def test_damage_inside_a_record_is_noticed(tmp_path):
    with FrameLogWriter(tmp_path / "x.zst") as log:
        ends = [log.write({"text": "abcdefgh" * i}) for i in range(1, 4)]
    data = bytearray((tmp_path / "x.zst").read_bytes())
    data[ends[0] + ends[1] - 6] ^= 255
    (tmp_path / "x.zst").write_bytes(data)
    notices = []
    assert len(list(read_frames(tmp_path / "x.zst", notices.append))) == 1
    assert len(notices) == 1


def _write_for_ever(path):
    writer = RunWriter(path)
    for i in range(10**9):
        writer.write_rollout(make_rollout(i, turns=20))
        writer.write_metrics(kind="train", update=i, policy_version=i, env_turns=i)


def test_kill_9_of_the_writer_loses_at_most_the_record_being_written(tmp_path):
    child = multiprocessing.get_context("fork").Process(target=_write_for_ever, args=(tmp_path,))
    child.start()
    deadline = time.monotonic() + 60
    while len(read_metrics(tmp_path)) < 5 and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(child.pid, signal.SIGKILL)
    child.join(10)
    run = read_run(tmp_path)
    ids = [r.rollout_id for r in run.rollouts()]
    assert ids == list(range(len(ids)))
    assert len(ids) >= len(run.metrics) >= 5


def test_a_log_torn_by_a_kill_can_be_appended_to(tmp_path):
    path = tmp_path / "x.zst"
    with FrameLogWriter(path) as log:
        log.write({"a": 1})
        log.write({"a": 2})
    os.truncate(path, path.stat().st_size - 3)
    with FrameLogWriter(path) as log:
        log.write({"a": 3})
    assert list(read_frames(path, pytest.fail)) == [{"a": 1}, {"a": 3}]


def test_resume_takes_back_what_lay_beyond_the_checkpoint(tmp_path):
    with RunWriter(tmp_path) as writer:
        for i in range(6):
            writer.write_rollout(make_rollout(i, seed=1))
            writer.write_batch(BatchRecord(i + 1, [(i, 0)]))
            writer.write_metrics(kind="train", update=i + 1, policy_version=i, env_turns=i)
    with RunWriter(tmp_path) as writer:
        writer.resume(update=3, policy_version=3, env_turns=3, next_rollout_id=4)
        writer.write_rollout(make_rollout(4, seed=2))
        writer.write_batch(BatchRecord(4, [(4, 1)]))
        writer.write_metrics(kind="train", update=4, policy_version=4, env_turns=9)
    run = read_run(tmp_path)
    assert [(r.rollout_id, r.seed) for r in run.rollouts()] == [(0, 1), (1, 1), (2, 1), (3, 1), (4, 2)]
    assert [(b.update, b.selected) for b in run.batches] == [
        (1, [(0, 0)]),
        (2, [(1, 0)]),
        (3, [(2, 0)]),
        (4, [(4, 1)]),
    ]
    assert [line["update"] for line in run.lines("train")] == [1, 2, 3, 4]
    assert run.notices == []


def test_batches_and_settings_come_back(tmp_path):
    record = BatchRecord(
        update=3,
        selected=[(1, 2), (0, 1)],
        arrivals=[(1, 2)],
        pending=[(4, 4)],
        dropped_stale=2,
        gated=1,
        versions=(0, 2),
    )
    with RunWriter(tmp_path, settings={"preset": "divopd"}) as writer:
        writer.write_batch(record)
        writer.write_batch(BatchRecord(4, [], pending=7))
    batches, noted = read_batches(tmp_path)
    assert batches[0] == record and batches[1].n_pending == 7
    assert noted == {"preset": "divopd"}


@pytest.mark.parametrize("missing", ["kind", "update", "policy_version", "env_turns"])
def test_every_metrics_line_must_say_when_it_was(tmp_path, missing):
    line = {"kind": "train", "update": 1, "policy_version": 0, "env_turns": 5, "loss": 0.1}
    with MetricsWriter(tmp_path) as writer:
        writer.write(line)
        del line[missing]
        with pytest.raises(RecordError, match=missing):
            writer.write(line)
        with pytest.raises(RecordError, match=missing):
            writer.write(line | {missing: None})
    (written,) = read_metrics(tmp_path)
    assert set(written) == {"kind", "update", "policy_version", "env_turns", "wall_s", "loss"}


def test_wall_time_counts_from_the_start_of_the_run(tmp_path):
    now = [100.0]
    with MetricsWriter(tmp_path, start_time=90.0, clock=lambda: now[0]) as writer:
        line = writer.write(kind="eval", update=0, policy_version=0, env_turns=0)
        assert line["wall_s"] == 10.0


def test_metrics_have_one_writer(tmp_path):
    with MetricsWriter(tmp_path):
        with pytest.raises(RecordError, match="already has a writer"):
            MetricsWriter(tmp_path)
    MetricsWriter(tmp_path).close()


def test_metrics_are_strict_json_and_take_numpy_values(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(
            kind="train",
            update=np.int64(1),
            policy_version=0,
            env_turns=0,
            kl=math.nan,
            deep={"a": [np.float32(0.5), math.inf]},
        )

    def refuse(constant):
        raise AssertionError(constant)

    text = (tmp_path / "metrics.jsonl").read_text()
    line = json.loads(text, parse_constant=refuse)
    assert line["kl"] is None and line["deep"] == {"a": [0.5, None]}


def test_a_torn_metrics_line_is_cut_before_the_next_is_written(tmp_path):
    when = {"kind": "train", "policy_version": 0, "env_turns": 0}
    with MetricsWriter(tmp_path) as writer:
        writer.write(when, update=1)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"kind":"tra')
    with MetricsWriter(tmp_path) as writer:
        writer.write(when, update=2)
    assert [line["update"] for line in read_metrics(tmp_path, on_notice=pytest.fail)] == [1, 2]


def test_no_run_directory_is_told_as_such(tmp_path):
    with pytest.raises(RecordError, match="no run directory"):
        read_run(tmp_path)
    with pytest.raises(RecordError, match="does not exist"):
        read_run(tmp_path / "nothing")
    with pytest.raises(RecordError, match="no rollouts"):
        next(read_rollouts(tmp_path))
