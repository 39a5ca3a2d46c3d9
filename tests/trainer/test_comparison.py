"""Comparisons: laid out seed by seed, done once, gone on with after an interruption, refused when they would mix."""

import json
import signal
import subprocess
import sys
import time

import psutil
import pytest

from divopd_gym.errors import ConfigError
from divopd_trainer import comparison
from divopd_trainer.cli import main
from divopd_trainer.comparison import Plan, run_all


@pytest.fixture
def fake_train(tmp_path, monkeypatch):
    """`divopd train` as a script that notes its options and does what the method's name says."""
    script = tmp_path / "train.py"
    script.write_text(
        "import json, signal, sys, time, pathlib\n"
        # Where the tests themselves were started deaf to it, as from a script's background.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "options = dict(zip(sys.argv[1::2], sys.argv[2::2]))\n"
        "run = pathlib.Path(options['--run_dir'])\n"
        "with open(run.parents[1] / 'calls.jsonl', 'a') as f: f.write(json.dumps(options) + chr(10))\n"
        "(run / 'metrics.jsonl').touch()\n"
        "method = options['--method']\n"
        "if method == 'fails': sys.exit('the cause')\n"
        "if method == 'hangs': time.sleep(60)\n"
        "if method.startswith('meets'):\n"
        "    end = time.time() + 30\n"
        "    while len(list(run.parents[1].glob('meets*/seed-*/metrics.jsonl'))) < 2:\n"
        "        assert time.time() < end, 'ran alone'\n"
        "        time.sleep(0.05)\n"
        "if method == 'stops' and '--resume_from_checkpoint' not in options:\n"
        "    (run / 'checkpoints' / 'checkpoint-1').mkdir(parents=True); sys.exit(130)\n"
    )

    def popen(command, **more):
        assert command[1:7] == [
            "-m",
            "divopd_trainer.guard",
            sys.executable,
            "-m",
            "divopd_trainer.cli",
            "train",
        ]
        return real([*command[:4], str(script), *command[7:]], **more)

    real = comparison.subprocess.Popen
    monkeypatch.setattr(comparison.subprocess, "Popen", popen)
    return lambda: [json.loads(line) for line in (tmp_path / "out" / "calls.jsonl").read_text().splitlines()]


def plan(tmp_path, methods, seeds=(0, 1), settings=("--updates", "4")):
    return Plan.of(tmp_path / "out", methods, seeds, settings)


def test_methods_alternate_within_a_seed_and_a_second_call_runs_nothing(tmp_path, fake_train):
    assert run_all(plan(tmp_path, ["a", "b"]), note=lambda _: None) == {}
    assert [(c["--method"], c["--seed"]) for c in fake_train()] == [
        ("a", "0"),
        ("b", "0"),
        ("a", "1"),
        ("b", "1"),
    ]
    assert all(c["--updates"] == "4" for c in fake_train())
    notes = []
    run_all(plan(tmp_path, ["a", "b", "c"]), note=notes.append)
    assert len(fake_train()) == 6 and "4 of 6 runs are done" in notes[0]


def test_a_failed_run_is_reported_with_its_cause_and_the_others_run(tmp_path, fake_train):
    failures = run_all(plan(tmp_path, ["fails", "b"], seeds=[0]), note=lambda _: None)
    assert list(failures.values()) == ["the cause"] and len(fake_train()) == 2


def test_an_interrupted_run_goes_on_from_its_checkpoint(tmp_path, fake_train):
    assert len(run_all(plan(tmp_path, ["stops"], seeds=[0]), note=lambda _: None)) == 1
    assert run_all(plan(tmp_path, ["stops"], seeds=[0]), note=lambda _: None) == {}
    assert fake_train()[1]["--resume_from_checkpoint"] == "true"


def test_a_run_without_a_checkpoint_is_set_aside_not_lost(tmp_path, fake_train):
    run_all(plan(tmp_path, ["fails"], seeds=[0]), note=lambda _: None)
    run_all(plan(tmp_path, ["fails"], seeds=[0]), note=lambda _: None)
    assert (tmp_path / "out" / "fails" / "seed-0.unfinished-1" / "metrics.jsonl").exists()


def test_a_run_that_takes_too_long_is_ended(tmp_path, fake_train):
    failures = run_all(plan(tmp_path, ["hangs"], seeds=[0]), note=lambda _: None, timeout_s=3.0)
    assert "longer than 3 s" in next(iter(failures.values()))


def test_two_jobs_run_at_once_and_a_third_waits(tmp_path, fake_train):
    notes = []
    assert run_all(plan(tmp_path, ["meets-1", "meets-2", "c"], seeds=[0]), note=notes.append, jobs=2) == {}
    assert [call["--method"] for call in fake_train()][2] == "c"
    started = [number for number, note in enumerate(notes) if note.startswith("[")]
    assert started[:2] == [0, 1] and notes[started[2] - 1].startswith("    meets-")


def test_ctrl_c_ends_all_jobs(tmp_path, fake_train, monkeypatch):
    sleep = time.sleep

    def interrupted(seconds):
        if len(list((tmp_path / "out").glob("hangs*/seed-0/metrics.jsonl"))) == 2:
            monkeypatch.setattr(comparison.time, "sleep", sleep)
            raise KeyboardInterrupt
        sleep(seconds)

    monkeypatch.setattr(comparison.time, "sleep", interrupted)
    methods = plan(tmp_path, ["hangs"], seeds=[0]).runs
    other = comparison.PlannedRun("hangs", 0, tmp_path / "out" / "hangs-2" / "seed-0")
    both = Plan(tmp_path / "out", ["--updates", "4"], [*methods, other])
    # As the command does: processes started from a script's background would ignore Ctrl-C like that script.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    known = set(psutil.Process().children(recursive=True))
    try:
        with pytest.raises(KeyboardInterrupt):
            run_all(both, note=lambda _: None, jobs=2)
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(fake_train()) == 2
    _, alive = psutil.wait_procs(set(psutil.Process().children(recursive=True)) - known, timeout=30)
    assert alive == []
    assert not any(run.done for run in both.runs)


def test_a_comparison_that_is_killed_takes_its_run_along(tmp_path):
    script = (
        "import subprocess, sys, time\n"
        "from pathlib import Path\n"
        "from divopd_trainer import comparison\n"
        "real = subprocess.Popen\n"
        "def popen(command, **more):\n"
        "    loop = 'import os, time; print(os.getpid(), flush=True); time.sleep(60)'\n"
        "    return real([*command[:4], '-c', loop], **more)\n"
        "comparison.subprocess.Popen = popen\n"
        "comparison.run_all(comparison.Plan.of(Path(sys.argv[1]), ['a'], [0], []))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.DEVNULL)
    log = tmp_path / "a" / "seed-0" / "train.log"
    end = time.monotonic() + 30
    while not (log.exists() and log.read_text().strip()) and time.monotonic() < end:
        time.sleep(0.1)
    pid = int(log.read_text())
    process.kill()
    process.wait(10)
    while psutil.pid_exists(pid) and time.monotonic() < end:
        time.sleep(0.1)
    assert not psutil.pid_exists(pid)


def test_other_settings_and_doubled_runs_are_refused(tmp_path, fake_train):
    run_all(plan(tmp_path, ["a"], seeds=[0]), note=lambda _: None)
    with pytest.raises(ConfigError, match="--updates 4.*--updates 5"):
        plan(tmp_path, ["a"], settings=("--updates", "5"))
    with pytest.raises(ConfigError, match="twice"):
        plan(tmp_path, ["a", "x/a.yaml"])


def test_the_command_refuses_what_cannot_work_before_the_first_run(tmp_path, capsys):
    config = tmp_path / "base.yaml"
    config.write_text("updates: 3\n")
    options = ["--config", str(config), "--out", str(tmp_path / "out"), "--dry_run"]
    assert main(["compare", *options, "--methods", "vanilla,mopd"]) == 2
    assert "several teachers" in capsys.readouterr().err
    assert main(["compare", *options, "--methods", "vanilla", "--seeds", "x"]) == 2
    assert main(["compare", *options, "--methods", "vanilla,turnopd", "--seeds", "2", "--cap", "3"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert len(out) == 4 and "--cap 3 --method turnopd --seed 1" in out[-1]


def test_methods_are_listed_and_shown(capsys):
    assert main(["methods"]) == 0 and "tcod-f2b" in capsys.readouterr().out
    assert main(["methods", "tcod-f2b"]) == 0
    assert "every: 4" in capsys.readouterr().out
    assert main(["methods", "tcod"]) == 2
    assert "tcod-" in capsys.readouterr().err
