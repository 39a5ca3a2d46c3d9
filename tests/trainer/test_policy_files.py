"""Policy files: there while anybody reads them, gone afterwards, also after a trainer that was killed."""

import fcntl
import os
import time
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from divopd_trainer import policy_files
from divopd_trainer.handover import HandOver
from divopd_trainer.policy_files import PolicyFiles


@pytest.fixture
def make_files(tmp_path, monkeypatch):
    monkeypatch.setattr(policy_files, "_MEMORY", tmp_path / "shm")
    (tmp_path / "shm").mkdir()

    def write(tensors, folder, version):
        path = folder / f"{version}.bin"
        path.write_text(",".join(name for name, _ in tensors))
        return path

    made = []

    def make():
        versions = iter(range(100))
        made.append(PolicyFiles(tmp_path / "run", lambda: next(versions), write=write))
        return made[-1]

    yield make
    for files in made:
        files.destroy()


@pytest.fixture
def files(make_files):
    return make_files()


def send(files, count):
    for _ in range(count):
        files.send_weights([("w", None)])


def held(files):
    return sorted(int(p.stem) for p in files.folder.glob("*.bin"))


def test_files_stay_until_a_later_version_is_loaded(files):
    send(files, 4)
    assert held(files) == [0, 1, 2, 3]
    files.loaded(2)
    assert held(files) == [2, 3]


def test_the_newest_file_always_stays_for_an_explorer_that_is_started_again(files):
    send(files, 2)
    files.loaded(9)
    assert held(files) == [1]


def test_a_pinned_version_stays_until_its_last_evaluation_is_done(files):
    send(files, 1)
    files.pin(0)
    files.pin(0)
    send(files, 2)
    files.loaded(2)
    assert held(files) == [0, 2]
    files.unpin(0)
    assert held(files) == [0, 2]
    files.unpin(0)
    assert held(files) == [2]


def test_nothing_is_left_at_the_end(files, tmp_path):
    send(files, 2)
    files.destroy()
    assert list((tmp_path / "shm").iterdir()) == []


def test_the_run_directory_is_used_when_memory_is_too_small(files, tmp_path):
    files.size_bytes = 1 << 60
    send(files, 1)
    assert files.folder.parent == tmp_path / "run" / ".weights"
    files.destroy()
    assert not (tmp_path / "run" / ".weights").exists()


def test_what_a_killed_trainer_left_is_cleared_at_once_and_what_a_living_one_holds_is_not(files, tmp_path):
    shm = tmp_path / "shm"
    dead, living, unlocked = (shm / f"divopd-policies-{name}" for name in ("dead", "living", "unlocked"))
    making, given_up = (shm / f".divopd-policies-{name}" for name in ("making", "given-up"))
    for folder in (dead, living, unlocked, making, given_up):
        folder.mkdir()
    for folder in (dead, living, given_up):
        (folder / "lock").write_text("")
    (dead / "policy-00000009.safetensors").write_text("weights")
    os.utime(given_up, (time.time() - 3600,) * 2)
    with open(living / "lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        send(files, 1)
        assert sorted(shm.iterdir()) == sorted([living, making, files.folder])
    assert (files.folder / "lock").exists()


def test_two_trainers_of_one_machine_leave_each_other_alone(files, make_files):
    send(files, 1)
    other = make_files()
    send(other, 1)
    assert files.path(0).exists() and other.path(0).exists() and files.folder != other.folder


@pytest.mark.parametrize(("gpu", "bf16", "dtype"), [(1, 1, "bfloat16"), (1, 0, "float32"), (0, 1, "float32")])
def test_weights_are_handed_over_in_the_type_that_engines_on_a_gpu_compute_in(tmp_path, gpu, bf16, dtype):
    args = SimpleNamespace(engine="local", weight_sync=None, on_gpu=bool(gpu), bf16=bool(bf16))
    model = torch.nn.Linear(3, 2)
    accelerator = SimpleNamespace(unwrap_model=lambda model: model)
    hand_over = HandOver(SimpleNamespace(args=args, accelerator=accelerator, model=model))
    written = load_file(hand_over.write(model.named_parameters(), tmp_path, 1))
    assert {tensor.dtype for tensor in written.values()} == {getattr(torch, dtype)}
    assert hand_over.size_bytes() == 8 * getattr(torch, dtype).itemsize
