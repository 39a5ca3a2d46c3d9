"""Faults that no other test shows: full disks, teachers that are late or say NaN, and what is said about servers."""

import errno
import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_vllm import FakeVLLM
from fakes import ByteCodec, FakeStudent
from learner_fakes import FakeExplorer, config, random_rollout, save_student
from loop_fakes import config as explorer_config
from loop_fakes import run

from divopd_trainer import checkpoint as checkpoints
from divopd_trainer.checkpoint import CheckpointError
from divopd_trainer.collator import TurnCollator
from divopd_trainer.composer import BatchComposer
from divopd_trainer.costs import engine_troubles
from divopd_trainer.engines.http import Server
from divopd_trainer.engines.vllm_teacher import VLLMTeacher
from divopd_trainer.explorer.engines import Engines
from divopd_trainer.explorer.messages import EpisodeFailed, Heartbeat, RolloutDone
from divopd_trainer.framelog import FrameLogWriter, RecordError, append, read_frames
from divopd_trainer.metrics_log import MetricsWriter, read_metrics
from divopd_trainer.policy_files import PolicyFiles, PolicyWriteError
from divopd_trainer.records import RunWriter, read_rollouts
from divopd_trainer.session import RunSession
from divopd_trainer.trainer import DivOPDTrainer

TIMES = {"kind": "train", "policy_version": 0, "env_turns": 0}


class Disk:
    """A raw file on a disk with room for so many more bytes."""

    def __init__(self, file, room):
        self.file, self.room = file, room

    def write(self, data):
        taken = bytes(data)[: self.room]
        if not taken:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.room -= len(taken)
        return self.file.write(taken)

    def __getattr__(self, name):
        return getattr(self.file, name)


@pytest.mark.parametrize("room", [0, 1, 20])
def test_a_record_is_written_whole_or_not_at_all_and_what_follows_can_be_read(tmp_path, room):
    path = tmp_path / "log.zst"
    with FrameLogWriter(path) as log:
        log.write({"number": 1})
        whole, log._file = log._file, Disk(log._file, room)
        with pytest.raises(RecordError, match="No space left.*Make room.*resume"):
            log.write({"number": 2})
        log._file = whole
        log.write({"number": 3})
    notices = []
    assert [record["number"] for record in read_frames(path, notices.append)] == [1, 3] and not notices


def test_a_metrics_line_is_written_whole_or_not_at_all(tmp_path):
    writer = MetricsWriter(tmp_path)
    writer.write(update=1, **TIMES)
    whole, writer._file = writer._file, Disk(writer._file, 9)
    with pytest.raises(RecordError, match="No space left"):
        writer.write(update=2, **TIMES)
    writer._file = whole
    writer.write(update=3, **TIMES)
    assert [line["update"] for line in read_metrics(tmp_path)] == [1, 3]


def test_append_goes_on_after_a_short_write(tmp_path):
    class Slow(Disk):
        def write(self, data):
            return self.file.write(bytes(data)[:3])

    with open(tmp_path / "file", "ab", buffering=0) as file:
        append(Slow(file, 0), b"0123456789", tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == b"0123456789"


def test_a_rollout_that_cannot_be_recorded_is_kept_and_not_counted(tmp_path):
    explorer = FakeExplorer(random_rollout)
    writer = RunWriter(tmp_path, settings={})
    collator = TurnCollator(explorer, BatchComposer(batch_rows=4), writer=writer)
    for _ in range(3):
        explorer.make()
    written, rooms = writer.write_rollout, [True, False, True, True]

    def write(rollout):
        if not rooms.pop(0):
            raise RecordError("full")
        written(rollout)

    writer.write_rollout = write
    with pytest.raises(RecordError):
        collator.drain()
    assert collator.counters["rollouts"] == 1 and collator.composer.unread == 3
    assert collator.drain() == 2
    writer.close()
    assert [rollout.rollout_id for rollout in read_rollouts(tmp_path)] == [0, 1, 2]


def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before_and_nothing_of_itself(
    tmp_path, monkeypatch
):
    def full(folder, state):
        raise OSError(errno.ENOSPC, "No space left on device")

    student = save_student(tmp_path / "student")
    settings = config(tmp_path, student, updates=4, save_every=1)
    trainer = DivOPDTrainer(settings, explorer=lambda s, p: FakeExplorer(random_rollout, state=s))
    save = checkpoints.save_side_state
    monkeypatch.setattr(
        checkpoints,
        "save_side_state",
        lambda folder, state: (save if state.update < 2 else full)(folder, state),
    )
    with pytest.raises(CheckpointError, match="No space left.*Make room.*resume"):
        trainer.train()
    folders = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert folders == ["checkpoint-1"]
    assert checkpoints.whole(tmp_path / "run" / "checkpoints" / "checkpoint-1") is None
    assert trainer.rollout_worker.stopped


def test_other_errors_of_a_checkpoint_keep_their_names(tmp_path):
    with pytest.raises(ZeroDivisionError), checkpoints.writing(tmp_path / "x"):
        raise ZeroDivisionError("division by zero")
    with pytest.raises(CheckpointError, match="PytorchStreamWriter"), checkpoints.writing(tmp_path / "x"):
        raise RuntimeError("PytorchStreamWriter failed writing file data/0")


def test_weights_that_find_no_room_end_the_run_with_the_folder_in_the_message(tmp_path):
    def write(tensors, folder, version):
        raise OSError(errno.ENOSPC, "No space left on device")

    files = PolicyFiles(tmp_path, lambda: 3, size_bytes=5_000_000, write=write)
    with pytest.raises(PolicyWriteError, match=r"update 3.*No space left.*5 MB"):
        files.send_weights([])
    files.destroy()


@pytest.mark.parametrize("kind", [CheckpointError, PolicyWriteError, RecordError])
def test_errors_survive_a_pipe(kind):
    assert str(pickle.loads(pickle.dumps(kind("why")))) == "why"


def build(config):
    """Fake student, and a teacher behind the server whose address is in the options."""
    url, timeout_s = config.engine_kwargs["url"], config.engine_kwargs["timeout_s"]
    teacher = VLLMTeacher([Server(url)], max_model_len=4000, request_timeout_s=timeout_s)
    return Engines(FakeStudent(), ByteCodec(), teacher)


@pytest.fixture
def teacher():
    fake = FakeVLLM(vocab=300, max_model_len=4000, stop_id=256)
    yield fake
    fake.stop()


def play(teacher, faults, episodes=6, timeout_s=20.0):
    teacher.faults.extend(faults)

    async def talk(channel, explorer):
        await channel.until(lambda: len(channel.of((RolloutDone, EpisodeFailed))) >= episodes)
        seen = len(channel.of(Heartbeat))
        await channel.until(lambda: len(channel.of(Heartbeat)) > seen)

    options = {"url": teacher.url, "timeout_s": timeout_s}
    values = {"engine": "test_faults:build", "engine_kwargs": options, "epochs": 1, "heartbeat_s": 0.05}
    channel, _ = run(explorer_config(**values, env_kwargs={"tasks": episodes}), talk)
    return channel


def test_a_teacher_that_says_nan_costs_the_turns_of_that_answer_and_no_other(teacher):
    channel = play(teacher, ["nan", None, None, "nan"])
    rollouts = [m.rollout for m in channel.of(RolloutDone)]
    dead = [r for r in rollouts if not any(turn.valid for turn in r.turns)]
    assert len(rollouts) == 6 and len(dead) == 2
    assert {turn.why_not for r in dead for turn in r.turns} == {"no_valid_token"}
    assert all(turn.valid for r in rollouts if r not in dead for turn in r.turns)


def test_a_teacher_that_is_late_is_waited_for_and_one_that_is_too_late_costs_that_episode(teacher):
    channel = play(teacher, [("late", 0.5)])
    assert not channel.of(EpisodeFailed) and len(channel.of(RolloutDone)) == 6
    channel = play(teacher, [("late", 3.0)], timeout_s=1.0)
    (failed,) = channel.of(EpisodeFailed)
    assert "request_timeout" in failed.why and len(channel.of(RolloutDone)) == 5


def test_what_servers_did_is_counted_in_the_heartbeat(teacher):
    channel = play(teacher, [429, 500, "truncate"])
    assert not channel.of(EpisodeFailed)
    counters = channel.of(Heartbeat)[-1].counters
    assert counters["teacher_retries"] == 3 and counters["teacher_restarts"] == 0
    assert "student_retries" not in counters


def test_troubles_add_up_over_teachers():
    engines = [SimpleNamespace(counters={"retries": n, "restarts": 1}) for n in (2, 3)]
    assert engine_troubles(object(), engines) == {"teacher_retries": 5, "teacher_restarts": 2}


def test_what_servers_did_is_told_once_and_a_restarted_explorer_counts_anew():
    notes = []
    session = RunSession.__new__(RunSession)
    session._troubles, session.progress = {}, SimpleNamespace(note=notes.append)
    for total in (0, 2, 2, 5, 1):
        session._note_troubles({"teacher_retries": total}, 0.0)
    assert [note.rpartition(" ")[2] for note in notes] == ["2.", "3.", "1."]
    assert all(note.startswith("Requests to the teacher's servers") for note in notes)


def test_the_fault_table_finds_what_is_gone_doubled_or_left_running(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import faults

    rollouts = {n: random_rollout(None, n) for n in range(3)}

    def judge(after, trained, left=(), name="explorer"):
        run = SimpleNamespace(rollouts=lambda: after, trained=lambda: trained)
        row = faults.Row(name, "", left=list(left))
        faults.compare(run, row, faults.snapshot(SimpleNamespace(rollouts=lambda: rollouts)), [(0, 0)])
        return " ".join(row.wrong)

    more = {**rollouts, 3: random_rollout(None, 3)}
    assert judge(more, [(0, 0), (1, 0)]) == ""
    assert "gone or changed: [2]" in judge({0: rollouts[0], 1: rollouts[1]}, [(0, 0)])
    assert "gone or changed: [1]" in judge({**more, 1: random_rollout(None, 1, seed=8)}, [(0, 0)])
    assert "holes" in judge({**more, 9: random_rollout(None, 9)}, [(0, 0)])
    assert "twice" in judge(more, [(0, 0), (0, 0)])
    assert "batches" in judge(more, [(1, 0)])
    assert "task" in judge({**more, 3: random_rollout(None, 3, seed=7), 2: rollouts[1]}, [(0, 0)])
    assert "left running" in judge(more, [(0, 0)], left=[4711])
    # A killed learner's run goes on from its checkpoint and plays in another order.
    assert judge({**more, 2: random_rollout(None, 2, seed=9)}, [(0, 0)], name="learner") == ""
