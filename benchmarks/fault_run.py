"""A real `divopd train` on fake servers, and what can be seen of it from outside: for `benchmarks/faults.py`."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import psutil
import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from divopd_trainer.costs import TROUBLES  # noqa: E402
from divopd_trainer.metrics_log import read_metrics  # noqa: E402
from divopd_trainer.records import read_batches, read_rollouts  # noqa: E402
from divopd_trainer.seeds import request_seed  # noqa: E402

DEADLINE_S = 120.0
COUNTERS = (
    "episodes_failed", "dead_rows", "env_restarts", "student_retries", "student_restarts", "teacher_retries",
    "teacher_restarts",
)  # fmt: skip
SEED = 0


class GaveUp(Exception):
    """What was waited for did not happen."""


def alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Server:
    """One server process on a port of its own."""

    def __init__(self, role, folder):
        self.role, self.log = role, folder / f"{role}.log"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.process = None

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def start(self):
        script = Path(__file__).with_name("fault_server.py")
        self.process = subprocess.Popen(
            [sys.executable, str(script), self.role, str(self.port), str(self.log)]
        )
        wait_for(self.healthy, f"the {self.role} server to answer")

    def healthy(self):
        try:
            return urllib.request.urlopen(self.url + "/health", timeout=2).status == 200
        except OSError:
            return False

    def faults(self, faults):
        body = json.dumps({"faults": faults}).encode()
        urllib.request.urlopen(urllib.request.Request(self.url + "/fake/faults", body), timeout=10).read()

    def kill(self):
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def answers(self):
        if not self.log.exists():
            return []
        return [json.loads(line) for line in self.log.read_text().splitlines() if line.endswith("}")]


def wait_for(condition, what, timeout_s=DEADLINE_S, every_s=0.1):
    """Seconds until the condition holds."""
    begun = time.monotonic()
    while not condition():
        if time.monotonic() - begun > timeout_s:
            raise GaveUp(f"waited {timeout_s:.0f} s for {what}")
        time.sleep(every_s)
    return time.monotonic() - begun


class FaultRun:
    """One run directory, the servers it asks, and the processes it had."""

    def __init__(self, folder, run_dir):
        self.folder, self.dir = folder, run_dir
        self.servers = {role: Server(role, folder) for role in ("student", "teacher")}
        self.process, self.out, self.seen, self.held = None, None, {}, set()
        self._mark = 0

    def settings(self, model):
        values = {
            "model": str(model), "teacher": str(model), "run_dir": str(self.dir), "engine": "fault_parts:build",
            "env_id": "fault_parts:divopd_test/Faults-v0", "env_kwargs": {"tasks": 20000}, "split": None,
            "prompt_style": "tiny", "max_turns": 5, "max_tokens": 6, "max_model_len": 512, "batch_rows": 8, "cap": 2,
            "updates": 100000, "max_concurrent": 4, "eval_every": 0, "eval_at_start": False, "eval_at_end": False,
            "save_every": 10, "use_cpu": True, "progress": "plain", "stop_grace_s": 5.0, "env_step_timeout_s": 3.0,
            "seed": SEED, "max_explorer_restarts": 5, "learning_rate": 1e-5,
        }  # fmt: skip
        (self.folder / "config.yaml").write_text(yaml.safe_dump(values))

    def start(self):
        """Start the run, or go on with it; seconds until the next update is done."""
        begun, more = time.monotonic(), []
        if (self.dir / "metrics.jsonl").exists():
            more = ["--resume_from_checkpoint", "true"]
        paths = [ROOT, ROOT / "benchmarks", ROOT / "tests" / "trainer"]
        env = os.environ | {f"FAULTS_{role.upper()}": server.url for role, server in self.servers.items()}
        env |= {"FAULTS_DIR": str(self.folder), "OMP_NUM_THREADS": "1"}
        env |= {"PYTHONPATH": os.pathsep.join(map(str, paths))}
        code = "import sys; from divopd_trainer.cli import main; sys.exit(main(sys.argv[1:]))"
        self.out = self.folder / f"{time.monotonic_ns()}.out"
        with open(self.out, "w") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code, "train", "--config", str(self.folder / "config.yaml"), *more],
                env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        self._mark = 0
        self.until(lambda: self.trains(bool(more)), "an update")
        self.held |= self.holds()
        return time.monotonic() - begun

    def trains(self, again):
        """Whether this process has done an update."""
        kinds = [line["kind"] for line in read_metrics(self.dir, ["train", "resume"])]
        return kinds[-1:] == ["train"] and (not again or "Going on from" in self.text())

    @property
    def update(self):
        lines = read_metrics(self.dir, ["train"])
        return lines[-1]["update"] if lines else 0

    def family(self):
        """Every process that it has had so far, by id."""
        if self.process is not None:
            try:
                for child in psutil.Process(self.process.pid).children(recursive=True):
                    self.seen[child.pid] = child
            except psutil.NoSuchProcess:
                pass
        return self.seen

    def explorer(self):
        for child in psutil.Process(self.process.pid).children():
            if "spawn_main" in " ".join(child.cmdline()) and child.children(recursive=True):
                return child
        raise GaveUp("the run has no explorer")

    def workers(self):
        """Ids of the environment workers that live."""
        found = [int(path.name.partition("-")[2]) for path in self.folder.glob("worker-*")]
        return sorted(pid for pid in found if alive(pid))

    def until(self, condition, what, timeout_s=DEADLINE_S):
        """Seconds until the condition holds, while the run lives."""

        def check():
            self.family()
            if condition():
                return True
            if self.process.poll() is not None:
                raise GaveUp(f"the run ended with {self.process.returncode}:\n{self.text()[-3000:]}")
            return False

        return wait_for(check, what, timeout_s)

    def ended(self, timeout_s=DEADLINE_S):
        """Seconds until the run's own process is gone."""

        def gone():
            self.family()
            return self.process.poll() is not None

        return wait_for(gone, "the run to end", timeout_s, 0.02)

    def survivors(self, pids=None, within_s=10.0):
        """Of all processes it had (or these ids), those that live on."""
        known = list(self.seen) if pids is None else list(pids)
        try:
            wait_for(lambda: not any(map(alive, known)), "the end of every process", within_s, 0.05)
        except GaveUp:
            return [pid for pid in known if alive(pid)]
        return []

    def text(self):
        return self.out.read_text()

    def said(self):
        """What it printed since the last call, updates left out.

        So are its sums of servers' troubles: they come at most every half minute, and may be of the fault before.
        """
        lines = self.text()[self._mark :].splitlines()
        self._mark = len(self.text())
        left_out = "|".join([r"\] update \d+/", *map(re.escape, TROUBLES.values())])
        return [line for line in lines if line.strip() and not re.search(left_out, line, re.IGNORECASE)]

    def counters(self):
        """The explorer's newest totals of what went wrong."""
        lines = read_metrics(self.dir, ["explorer"])
        return {name: lines[-1].get(name, 0) for name in COUNTERS} if lines else {}

    def wait_for_counters(self):
        """Until the explorer's counters were written once more."""
        seen = len(read_metrics(self.dir, ["explorer"]))
        self.until(lambda: len(read_metrics(self.dir, ["explorer"])) > seen, "the explorer's counters")

    def counted(self, before):
        """What was counted since, in words."""
        now = self.counters()
        rises = {
            name: int(now[name] - before.get(name, 0)) for name in now if now[name] > before.get(name, 0)
        }
        return [f"{name} +{rise}" for name, rise in rises.items()]

    def files_left(self):
        """Weights in memory that its learners held and that outlived them."""
        return [str(path) for path in self.held - self.holds() if path.exists()]

    def holds(self):
        """Folders of weights that the living learner has open."""
        if self.process.poll() is not None:
            return set()
        opened = [Path(file.path).parent for file in psutil.Process(self.process.pid).open_files()]
        return {path for path in opened if path.name.startswith("divopd-policies-")}

    # --- what is recorded --------------------------------------------------------------------------------------

    def rollouts(self):
        """Recorded rollouts by id."""
        notices = []
        found = list(read_rollouts(self.dir, notices.append)) if list(self.dir.glob("rollouts/*")) else []
        return {rollout.rollout_id: rollout for rollout in found}

    def trained(self):
        return [key for batch in read_batches(self.dir, lambda notice: None)[0] for key in batch.selected]

    def begun_after(self, when):
        """Whether a rollout is recorded whose first turn was written after this time."""
        # An episode that is played again asks with the seeds it asked with before.
        late = {answer["seed"] for answer in self.servers["student"].answers() if answer["t"] > when}
        return any(
            request_seed(SEED, r.task, r.attempt, r.turns[0].index) in late
            for r in self.rollouts().values()
            if r.turns
        )

    def dead_turns(self):
        """Recorded turns without the score that they should have."""
        # Without a score at all a turn was too old to be scored, which is pacing's affair.
        return sum(
            turn.trainable and not turn.valid and turn.why_not != "no_teacher_scores"
            for rollout in self.rollouts().values()
            for turn in rollout.turns
        )

    def lost_turns(self):
        """Times at which turns were written that are not recorded."""
        known = {
            request_seed(SEED, rollout.task, rollout.attempt, turn.index)
            for rollout in self.rollouts().values()
            for turn in rollout.turns
        }
        times: dict[int, list[float]] = {}
        for answer in self.servers["student"].answers():
            times.setdefault(answer["seed"], []).append(answer["t"])
        return [t for seed, when in times.items() for t in sorted(when)[: len(when) - (seed in known)]]

    def end(self):
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        for pid in self.seen:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        for server in self.servers.values():
            server.kill()
