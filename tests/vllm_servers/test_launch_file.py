"""`divopd launch` with real servers and whole policies handed over as files."""

import os
import subprocess
import sys
import time

import psutil
import pytest
import yaml
from servers import ROOT, START_S, check_run, run_values

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


def launch(values, folder, **env):
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(values))
    return subprocess.Popen(
        [sys.executable, "-m", "divopd_trainer.cli", "launch", str(file)],
        cwd=ROOT,
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_launch_trains_eight_updates_with_weights_from_files_and_leaves_nothing(tmp_path, vllm_python):
    values = run_values(tmp_path / "run", vllm_python)
    process = launch(values, tmp_path, VLLM_API_KEY="hush-hush")
    family = {}
    try:
        while process.poll() is None:
            for child in psutil.Process(process.pid).children(recursive=True):
                family[child.pid] = child
            try:
                process.wait(1.0)
            except subprocess.TimeoutExpired:
                continue
    finally:
        if process.poll() is None:
            process.kill()
    said = process.stdout.read()
    run_dir = tmp_path / "run"
    logs = {path.name: path.read_text(errors="replace") for path in (run_dir / "logs").iterdir()}
    assert process.returncode == 0, said + logs.get("trainer.log", "")[-3000:]
    check_run(run_dir)
    assert set(logs) == {"student-0.log", "teacher-0.log", "trainer.log"}
    assert len(family) >= 6
    psutil.wait_procs(family.values(), 30)
    assert not [p for p in family.values() if p.is_running()]
    # The servers asked for the key; nothing that was written holds it.
    for path in run_dir.rglob("*"):
        assert path.is_dir() or b"hush-hush" not in path.read_bytes()
    assert "hush-hush" not in said


def test_no_real_server_survives_a_killed_launcher(tmp_path, vllm_python):
    process = launch(run_values(tmp_path / "run", vllm_python), tmp_path)
    log = tmp_path / "run" / "logs" / "student-0.log"
    deadline = time.monotonic() + START_S
    # Once its engine, which is a process of its own, has begun.
    while not (log.exists() and "EngineCore" in log.read_text(errors="replace")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.2)
    family = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait(30)
    process.stdout.close()
    psutil.wait_procs(family, 40)
    assert len(family) >= 5
    assert not [p for p in family if p.is_running()]
