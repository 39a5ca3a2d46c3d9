"""The learner on two ranks: data parallel or sharded, five updates come out as on one."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from ports import free_port
from safetensors.torch import load_file
from torch.distributed.fsdp import MixedPrecisionPolicy

from divopd_gym.errors import ConfigError
from divopd_trainer.checkpoint import whole
from divopd_trainer.metrics_log import read_metrics
from divopd_trainer.sharding import prepare_sharding

pytestmark = pytest.mark.timeout(400)
SCRIPT = Path(__file__).with_name("rank_run.py")
SHARDED = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
}


def ranks(student, folder, world, *, sharded=False, during=lambda processes: None, **changes):
    """Run so many ranks to their end; what each saved. `during` is called with their processes."""
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    processes = []
    for rank in range(world):
        env = os.environ | {
            "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(SCRIPT.parents[2]),
        }  # fmt: skip
        if world > 1:
            env |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        env |= SHARDED if sharded else {}
        command = [sys.executable, str(SCRIPT), student, str(folder), json.dumps(changes)]
        processes.append(
            subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    try:
        during(processes)
        outputs = [process.communicate(timeout=200)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * world, "\n".join(outputs)
    return [torch.load(folder / f"rank-{rank}.pt") for rank in range(world)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory, student):
    return ranks(student, tmp_path_factory.mktemp("alone"), 1)[0]


def equal(found, expected):
    """Weights after five updates, gradients of each, and policy files of each version."""
    for name, weight in expected["weights"].items():
        torch.testing.assert_close(found["weights"][name], weight, rtol=0.0, atol=1e-5)
    for mine, theirs in zip(found["gradients"], expected["gradients"], strict=True):
        assert float((mine - theirs).norm() / theirs.norm()) < 1e-5
    for mine, theirs in zip(found["policies"], expected["policies"], strict=True):
        assert mine.keys() == theirs.keys()
        for name, weight in theirs.items():
            torch.testing.assert_close(mine[name], weight, rtol=0.0, atol=1e-5)


@pytest.mark.e2e
@pytest.mark.parametrize("sharded", [False, True], ids=["data-parallel", "sharded"])
def test_five_updates_on_two_ranks_are_those_on_one(tmp_path, student, alone, sharded):
    first, second = ranks(student, tmp_path, 2, sharded=sharded)
    assert first["sharded"] is second["sharded"] is sharded
    equal(first, alone)
    equal({**second, "policies": first["policies"]}, alone)
    assert len(alone["policies"]) == 6 and second["policies"] == []
    lines = read_metrics(tmp_path / "run", ["train"])
    assert [line["rows"] for line in lines] == [8] * 5 and all(line["micro_batches"] > 1 for line in lines)
    checkpoint = tmp_path / "run" / "checkpoints" / "checkpoint-5"
    assert whole(checkpoint) is None
    for saved in (checkpoint, tmp_path / "final"):
        tensors = load_file(saved / "model.safetensors")
        for name, weight in alone["weights"].items():
            torch.testing.assert_close(tensors[name], weight, rtol=0.0, atol=1e-5)


@pytest.mark.e2e
def test_a_sharded_run_goes_on_from_its_checkpoint(tmp_path, student, alone):
    ranks(student, tmp_path, 2, sharded=True, stop_after=3, save_every=3)
    first, _ = ranks(student, tmp_path, 2, sharded=True, resume_from_checkpoint=True)
    assert [line["update"] for line in read_metrics(tmp_path / "run", ["train"])] == [1, 2, 3, 4, 5]
    for name, weight in alone["weights"].items():
        torch.testing.assert_close(first["weights"][name], weight, rtol=0.0, atol=1e-5)


@pytest.mark.e2e
def test_a_sharded_adapter_is_trained_and_handed_over_like_a_whole_one(tmp_path, student):
    expected = ranks(student, tmp_path / "one", 1, lora_rank=4)[0]
    found = ranks(student, tmp_path / "two", 2, sharded=True, lora_rank=4)[0]
    assert found["sharded"]
    equal(found, expected)


@pytest.mark.e2e
@pytest.mark.parametrize("sharded", [False, True], ids=["data-parallel", "sharded"])
def test_ctrl_c_on_every_rank_ends_after_the_update_with_a_checkpoint(tmp_path, student, sharded):
    def interrupt(processes):
        metrics, deadline = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 150
        while not (metrics.exists() and read_metrics(tmp_path / "run", ["train"])):
            assert time.monotonic() < deadline and all(p.poll() is None for p in processes)
            time.sleep(0.05)
        # A terminal reaches every rank, and the launcher passes its own signal on.
        for process in [*processes, processes[0]]:
            process.send_signal(signal.SIGINT)

    found = ranks(student, tmp_path, 2, sharded=sharded, during=interrupt, update_s=0.3, updates=60)
    assert [one["interrupted"] for one in found] == ["SIGINT", "SIGINT"]
    done = read_metrics(tmp_path / "run", ["train"])[-1]["update"]
    assert done < 60
    assert whole(tmp_path / "run" / "checkpoints" / f"checkpoint-{done}") is None
    assert not (tmp_path / "final").exists()


def accelerator(kind, plugin=None):
    return SimpleNamespace(distributed_type=kind, state=SimpleNamespace(fsdp_plugin=plugin))


def test_sharded_half_precision_adds_up_in_float32_and_leaves_the_loss_as_it_is():
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, mixed_precision_policy="bf16")
    assert plugin.mixed_precision_policy.output_dtype == torch.bfloat16
    assert prepare_sharding(accelerator(DistributedType.FSDP, plugin))
    assert plugin.mixed_precision_policy == MixedPrecisionPolicy(torch.bfloat16, torch.float32, None)
    assert "FULL_STATE_DICT" in str(plugin.state_dict_type)


def test_other_ways_of_sharding_are_refused_with_the_remedy():
    old = FullyShardedDataParallelPlugin(fsdp_version=1)
    with pytest.raises(ConfigError, match="FSDP version 1; expected version 2.*fsdp: true"):
        prepare_sharding(accelerator(DistributedType.FSDP, old))
    for kind in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        with pytest.raises(ConfigError, match=rf"{kind.value}; expected data parallelism"):
            prepare_sharding(accelerator(kind))
    for kind in (DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU):
        assert not prepare_sharding(accelerator(kind))
