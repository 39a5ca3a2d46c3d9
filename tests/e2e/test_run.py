"""The whole loop on a CPU with random tiny models: `divopd train` on generated houses, and what may happen to it."""

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
import yaml

from divopd_trainer.metrics_log import read_metrics
from divopd_trainer.records import read_batches, read_rollouts

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
DEADLINE_S = 400


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    from divopd_trainer.tiny import TinySpec, build_model, save_model, train_tokenizer

    folder = tmp_path_factory.mktemp("models")
    texts = [
        "you arrive at cabinet 1. on it, you see a mug 1. your task is to: put a mug in cabinet. go to desk 1"
    ]
    tokenizer = train_tokenizer(texts * 5, vocab_size=320)
    spec = TinySpec(layers=1, width=32, heads=2, mlp=48, positions=2048)
    for seed, name in enumerate(("student", "teacher")):
        save_model(build_model(spec, tokenizer, seed), tokenizer, folder / name)
    return folder


@pytest.fixture
def settings(tmp_path, models):
    values = {
        "model": str(models / "student"),
        "teacher": str(models / "teacher"),
        "run_dir": str(tmp_path / "run"),
        "env_kwargs": {"family": "tiny", "num_tasks": 400},
        "split": "generated",
        "eval_env_kwargs": {"family": "tiny", "subset": "valid", "num_tasks": 3},
        "eval_split": "generated",
        "prompt_style": "tiny",
        "max_turns": 4,
        "max_tokens": 6,
        "max_model_len": 2048,
        "batch_rows": 6,
        "cap": 2,
        "updates": 5,
        "learning_rate": 1e-3,
        "max_concurrent": 3,
        "eval_every": 0,
        "eval_at_start": False,
        "eval_at_end": False,
        "save_every": 2,
        "use_cpu": True,
        "progress": "plain",
        "stop_grace_s": 5.0,
    }

    def write(**changes):
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(values | changes))
        return path

    return write


class Run:
    """A `divopd train` in a process group of its own."""

    def __init__(self, path, *more):
        code = "import sys; from divopd_trainer.cli import main; sys.exit(main(sys.argv[1:]))"
        env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
        self.dir = Path(yaml.safe_load(path.read_text())["run_dir"])
        self.out = path.with_suffix(f".{time.monotonic_ns()}.out")
        with open(self.out, "w") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code, "train", "--config", str(path), *more],
                env=env,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.ps = psutil.Process(self.process.pid)
        self.seen = {}

    def family(self):
        """Every process it has had so far, so that none can hide by losing its parent."""
        try:
            for child in self.ps.children(recursive=True):
                self.seen[child.pid] = child
        except psutil.NoSuchProcess:
            pass
        return self.seen

    def explorer(self):
        """The child that has environment workers below it."""
        for child in self.ps.children():
            if "spawn_main" in " ".join(child.cmdline()) and child.children(recursive=True):
                return child
        return None

    def until(self, condition):
        """Wait for a condition while the run lives."""
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            self.family()
            if condition():
                return
            assert self.process.poll() is None, self.text()
            time.sleep(0.1)
        raise AssertionError(f"it did not happen within {DEADLINE_S} s:\n{self.text()}")

    def updates(self):
        return [line["update"] for line in read_metrics(self.dir, ["train"])]

    def wait(self):
        deadline = time.monotonic() + DEADLINE_S
        while self.process.poll() is None:
            assert time.monotonic() < deadline, self.text()
            self.family()
            time.sleep(0.1)
        return self.process.returncode

    def survivors(self, within_s=10.0):
        """Processes of the family that live on."""
        deadline = time.monotonic() + within_s
        while True:
            alive = [p for p in self.seen.values() if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
            if not alive or time.monotonic() > deadline:
                return [" ".join(p.cmdline()) for p in alive]
            time.sleep(0.1)

    def text(self):
        return self.out.read_text()[-8000:]

    def end(self):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@pytest.fixture
def start():
    runs = []

    def begin(path, *more):
        runs.append(Run(path, *more))
        return runs[-1]

    yield begin
    for run in runs:
        run.end()


def chosen(run_dir):
    return [key for batch in read_batches(run_dir)[0] for key in batch.selected]


def test_a_run_of_five_updates_leaves_everything_and_no_process(settings, start):
    run = start(settings(eval_at_start=True, eval_at_end=True))
    assert run.wait() == 0, run.text()
    assert run.updates() == [1, 2, 3, 4, 5]
    assert run.survivors() == []
    evaluations = read_metrics(run.dir, ["eval"])
    assert [(e["update"], e["policy_version"], e["episodes"]) for e in evaluations] == [(0, 0, 3), (5, 5, 3)]
    assert (run.dir / "final" / "model.safetensors").exists() and (run.dir / "config.yaml").exists()
    keys = chosen(run.dir)
    assert len(keys) == len(set(keys)) == 30
    for line in read_metrics(run.dir, ["train"]):
        assert max(map(int, line["staleness"])) <= 1
        # Before an update the learner recomputes what the engine said of the very same weights.
        if line["update"] == 1:
            assert line["logprob_drift"] < 1e-3


def test_a_killed_explorer_is_started_again_and_the_run_goes_on(settings, start):
    run = start(settings(updates=8))
    run.until(lambda: len(run.updates()) >= 2 and run.explorer() is not None)
    run.explorer().kill()
    assert run.wait() == 0, run.text()
    assert run.updates() == list(range(1, 9))
    assert "started again" in run.text()
    keys = chosen(run.dir)
    assert len(keys) == len(set(keys))
    assert run.survivors() == []


def test_ctrl_c_leaves_a_checkpoint_and_no_process_and_resume_finishes(settings, start):
    path = settings(updates=9, save_every=0)
    run = start(path)
    run.until(lambda: len(run.updates()) >= 2)
    os.killpg(run.process.pid, signal.SIGINT)
    assert run.wait() == 130, run.text()
    assert run.survivors() == []
    done = run.updates()[-1]
    assert done < 9 and (run.dir / "checkpoints" / f"checkpoint-{done}" / "manifest.json").exists()
    before = chosen(run.dir)

    refused = start(path)
    assert refused.wait() == 2 and "already holds a run" in " ".join(refused.text().split())

    again = start(path, "--resume_from_checkpoint", "true")
    assert again.wait() == 0, again.text()
    assert again.updates() == list(range(1, 10))
    keys = chosen(run.dir)
    assert keys[: len(before)] == before and len(keys) == len(set(keys)) == 54
    rollouts = list(read_rollouts(run.dir))
    ids = [r.rollout_id for r in rollouts]
    assert ids == sorted(set(ids))
    assert max(Counter(r.task for r in rollouts).values()) == 1
    versions = {(r.rollout_id, t.index): t.policy_version for r in rollouts for t in r.turns}
    for batch in read_batches(run.dir)[0]:
        assert all(1 <= batch.update - versions[key] <= 2 for key in batch.selected)
    assert again.survivors() == []
