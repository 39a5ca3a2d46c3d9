"""Real vLLM servers to test with, the settings of a small run, and what must be true of it."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import torch
from transformers import AutoModelForCausalLM

from divopd_trainer.engines.sync_probe import LIMIT
from divopd_trainer.launch import _healthy, _tail
from divopd_trainer.metrics_log import read_metrics
from divopd_trainer.records import read_rollouts

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / "examples" / "tiny" / "models"
START_S = 420


def free_ports(number):
    """First of some free ports that follow each other; test files that run at once look in ranges of their own."""
    begin = 8600 + 300 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
    for first in range(begin, begin + 300, number):
        try:
            for port in range(first, first + number):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first
    raise AssertionError("no free ports")


def run_values(run_dir, python, **changes):
    """Settings of 8 small updates on generated houses."""
    values = {
        "engine": "vllm",
        "model": str(MODELS / "student"),
        "teacher": str(MODELS / "teacher"),
        "run_dir": str(run_dir),
        "env_id": "divopd_gym/ALFWorld-v0",
        "env_kwargs": {"family": "tiny", "subset": "train", "num_tasks": 200},
        "split": "generated",
        "eval_env_kwargs": {"family": "tiny", "subset": "valid", "num_tasks": 4},
        "eval_split": "generated",
        "prompt_style": "tiny",
        "max_turns": 8,
        "max_tokens": 12,
        "max_model_len": 1000,
        "batch_rows": 8,
        "cap": 4,
        "load": 2.0,
        "max_concurrent": 4,
        "env_workers": 2,
        "updates": 8,
        "learning_rate": 1e-3,
        "eval_every": 0,
        "eval_at_start": False,
        "eval_at_end": False,
        "eval_temperature": 1.0,
        "save_every": 0,
        "sync_probes": -1,
        "use_cpu": True,
        "progress": "plain",
        "stop_grace_s": 5.0,
        "launch": {"python": python, "port": free_ports(4), "device": "cpu", "max_num_seqs": 16},
    }
    return values | changes


class Server:
    """One real server under a guard."""

    def __init__(self, command, folder):
        self.command, self.url = command, command.url
        self.log = folder / f"{command.name}.log"
        self.process = None

    def start(self):
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "divopd_trainer.guard", *self.command.argv],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.command.env},
                start_new_session=True,
            )

    def wait(self):
        deadline = time.monotonic() + START_S
        while not _healthy(self.url):
            assert self.process.poll() is None, _tail(self.log)
            assert time.monotonic() < deadline, _tail(self.log)
            time.sleep(0.5)

    def family(self):
        return psutil.Process(self.process.pid).children(recursive=True)

    def kill(self):
        """kill -9 of the process that answers."""
        family = self.family()
        os.kill(psutil.Process(self.process.pid).children()[0].pid, signal.SIGKILL)
        self.process.wait(60)
        psutil.wait_procs(family, 30)
        assert not any(p.is_running() for p in family)

    def stop(self):
        if self.process is None:
            return
        self.process.stdin.close()
        try:
            self.process.wait(40)
        except subprocess.TimeoutExpired:
            self.process.kill()


def check_run(run_dir):
    """Every update trained, with turns of several versions, and every sync was compared."""
    lines = read_metrics(run_dir, ["train"])
    assert [line["update"] for line in lines] == list(range(1, 9))
    assert all(np.isfinite(line["loss"]) for line in lines)
    # At generation and in the learner the same weights gave the same log-probs.
    assert lines[0]["logprob_drift"] < LIMIT
    gaps = [line["served_gap"] for line in read_metrics(run_dir, ["explorer"]) if "served_gap" in line]
    assert gaps
    assert max(gaps) <= LIMIT
    versions = {turn.policy_version for one in read_rollouts(run_dir) for turn in one.turns}
    assert len(versions) >= 3


def model_of(path):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@torch.no_grad()
def reference(model, ids):
    """float [T]: log-prob of each token after the first, given those before it; NaN for the first."""
    logits = model(input_ids=torch.tensor([list(map(int, ids))])).logits[0].float()
    chosen = torch.log_softmax(logits[:-1], -1).gather(1, torch.tensor(ids[1:].astype(np.int64))[:, None])
    return np.concatenate([[np.nan], chosen[:, 0].numpy()])
