"""Launching: which commands, in which order, and that nothing survives however it ends."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from ports import free_port

from divopd_gym.errors import ConfigError
from divopd_trainer import serve
from divopd_trainer.commands.launch import main as launch_main
from divopd_trainer.commands.launch import split
from divopd_trainer.commands.serve import main as serve_main
from divopd_trainer.launch import Launcher, LaunchError, Part, _waves, plan_run
from divopd_trainer.serve import LaunchSettings, learner_gpus, server_commands

# Answers /health after a while; its own child would survive a careless launcher, as it has left the group.
SERVER = """
import http.server, subprocess, sys, time
subprocess.Popen(["sleep", "600"], start_new_session=True)
class H(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *a): pass
print("serving", flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), H).serve_forever()
"""
DEADLINE_S = 180


def python(code, *argv):
    return [sys.executable, "-c", code, *map(str, argv)]


def server(name="student-0", code=SERVER):
    port = free_port()
    return Part(name, python(code, port), url=f"http://127.0.0.1:{port}")


def trainer(code):
    return Part("trainer", python(code))


_older = set()


@pytest.fixture(autouse=True)
def older_children():
    """Fork servers and the like that earlier tests left to this process are no offspring of a launch."""
    _older.clear()
    _older.update(psutil.Process().children(recursive=True))


def offspring():
    return [p for p in psutil.Process().children(recursive=True) if p not in _older]


def until(condition):
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def none_left(processes):
    until(lambda: not any(p.is_running() and p.status() != "zombie" for p in processes))


def run_settings(**changes):
    values = {
        "engine": "vllm", "model": "student", "teacher": "teacher", "teachers": {}, "max_model_len": 512,
        "max_staleness": 2, "weight_sync": "file", "lora_rank": 0, "evaluates": False, "teacher_top_k": 8,
        "launch": {"device": "cpu"}, "bf16": True, "fp16": False,
    }  # fmt: skip
    return SimpleNamespace(**{**values, **changes})


def flag(command, name):
    return command.argv[command.argv.index(name) + 1]


# Which commands.


def test_every_server_listens_on_this_machine_alone_with_the_flags_that_training_needs():
    student, teacher = server_commands(run_settings())
    for command, length in ((student, 512), (teacher, 513)):
        assert flag(command, "--host") == "127.0.0.1"
        assert flag(command, "--max-model-len") == str(length)
        # Seeded prompts that are read in parts end the CPU engine.
        assert int(flag(command, "--max-num-batched-tokens")) >= length * int(flag(command, "--max-num-seqs"))
        assert command.env["OMP_NUM_THREADS"] == "1"
        assert "--trust-remote-code" not in command.argv
    assert flag(student, "--logprobs-mode") == "processed_logprobs"
    assert json.loads(flag(student, "--weight-transfer-config")) == {"backend": "file"}
    # Nobody changes a teacher, and one with adapters dies of batches of scores.
    assert "VLLM_SERVER_DEV_MODE" not in teacher.env
    assert "--enable-lora" not in teacher.argv


def test_adapter_slots_hold_every_version_in_use_and_ranks_are_those_that_servers_know():
    student, _ = server_commands(run_settings(weight_sync="lora", lora_rank=12, evaluates=True))
    assert flag(student, "--max-loras") == "5"
    assert flag(student, "--max-lora-rank") == "16"
    assert "--weight-transfer-config" not in student.argv


def test_servers_of_one_version_get_a_companion_for_evaluations():
    roles = [command.role for command in server_commands(run_settings(evaluates=True))]
    assert roles == ["student", "eval", "teacher"]


def test_ports_and_names_are_distinct_and_addresses_carry_the_teachers_label():
    settings = run_settings(
        teachers={"boil": "other"}, launch={"device": "cpu", "student_servers": 2, "port": 9000}
    )
    commands = server_commands(settings)
    assert [c.name for c in commands] == ["student-0", "student-1", "teacher-0", "teacher-boil-0"]
    assert [c.url.rpartition(":")[2] for c in commands] == ["9000", "9001", "9002", "9003"]
    assert commands[-1].address == "boil=http://127.0.0.1:9003"


def test_a_model_is_never_asked_for_more_tokens_than_it_was_made_for(tmp_path):
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 512}')
    teacher = server_commands(run_settings(teacher=str(tmp_path)))[-1]
    assert flag(teacher, "--max-model-len") == "512"


def test_gpus_are_shared_out_and_the_learner_keeps_its_own(monkeypatch):
    monkeypatch.setattr(serve, "visible_gpus", lambda: list(range(8)))
    settings = LaunchSettings(device="gpu", student_servers=2, tensor_parallel=2)
    commands = server_commands(run_settings(), settings)
    assert [c.env["CUDA_VISIBLE_DEVICES"] for c in commands] == ["0", "1", "2,3"]
    assert flag(commands[-1], "--tensor-parallel-size") == "2"
    assert learner_gpus(settings, commands) == [4, 5, 6, 7]
    assert "OMP_NUM_THREADS" not in commands[0].env
    monkeypatch.setattr(serve, "visible_gpus", lambda: [0])
    alone = server_commands(run_settings(), LaunchSettings(device="gpu"))
    shares = [float(flag(c, "--gpu-memory-utilization")) for c in alone]
    assert sum(shares) < 0.7
    assert learner_gpus(LaunchSettings(device="gpu"), alone) == [0]


def test_gpus_may_have_names_and_servers_on_a_gpu_compute_as_the_learner(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-0a1b, GPU-2c3d,GPU-4e5f")
    settings = LaunchSettings(device="gpu")
    student, teacher = server_commands(run_settings(), settings)
    assert student.env["CUDA_VISIBLE_DEVICES"] == "GPU-0a1b"
    assert learner_gpus(settings, [student, teacher]) == ["GPU-4e5f"]
    assert flag(student, "--dtype") == "bfloat16"
    assert "--dtype" not in teacher.argv
    assert int(flag(teacher, "--max-num-batched-tokens")) <= 8192
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert serve.visible_gpus() == []


def test_ranks_are_launched_whatever_the_users_own_accelerate_configuration_says(monkeypatch):
    monkeypatch.setattr(serve, "visible_gpus", lambda: list(range(4)))
    _, trainer = plan_run(run_settings(launch={"device": "gpu", "stop_timeout_s": 240}), [])
    words = " ".join(trainer.argv)
    assert "--multi_gpu --num_machines 1 --num_processes 2" in words
    assert "--gpu_ids all" in words
    assert "--main_process_port 0" in words
    assert trainer.env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "240"


def test_servers_that_share_a_gpu_start_one_after_another(tmp_path):
    parts = [server(f"student-{n}") for n in range(4)]
    for part, gpus in zip(parts, ("0", "1", "0,2", "1")):
        part.env = {"CUDA_VISIBLE_DEVICES": gpus}
    assert [[p.name[-1] for p in wave] for wave in _waves(parts)] == [["0", "1"], ["2", "3"]]
    assert [len(wave) for wave in _waves([server(f"student-{n}") for n in range(3)])] == [3]
    begun = []

    def show(shown):
        if len(begun) < sum(p.process is not None for p in shown[:4]):
            begun.append([p.state for p in shown[:4] if p.process is not None])

    assert Launcher(parts, trainer("print('trained')"), tmp_path, show=show).run() == 0
    assert begun[2][:2] == ["running", "running"]


def test_weights_are_broadcast_from_a_gpu_that_no_student_has(monkeypatch):
    settings = run_settings(weight_sync="nccl", launch={"device": "gpu"})
    monkeypatch.setattr(serve, "visible_gpus", lambda: [0, 1, 2])
    servers, trainer = plan_run(settings, [])
    assert '{"backend": "nccl"}' in servers[0].argv
    assert trainer.env["CUDA_VISIBLE_DEVICES"] == "2"
    monkeypatch.setattr(serve, "visible_gpus", lambda: [0])
    with pytest.raises(ConfigError, match="share GPU 0.*weight_sync to file"):
        plan_run(settings, [])
    with pytest.raises(ConfigError, match="there is no GPU"):
        plan_run(run_settings(weight_sync="nccl", launch={"device": "cpu"}), [])


@pytest.mark.parametrize(
    ("launch", "says"),
    [
        ({"studnet_servers": 2}, "student_servers"),
        ({"port": 0}, "launch.port"),
        ({"device": "tpu"}, "launch.device"),
        ({"host": "0.0.0.0"}, "VLLM_API_KEY"),
        ({"student_flags": ["--api-key", "hush"]}, "VLLM_API_KEY"),
    ],
)
def test_launch_settings_that_cannot_work_are_refused(monkeypatch, launch, says):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    with pytest.raises(ConfigError, match=says) as caught:
        LaunchSettings.of(run_settings(launch=launch))
    assert "hush" not in str(caught.value)


def test_a_key_is_in_no_command(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "hush")
    for command in server_commands(run_settings(launch={"device": "cpu", "host": "0.0.0.0"})):
        assert "hush" not in command.shell()


def test_an_engine_without_servers_is_refused():
    with pytest.raises(ConfigError, match="divopd train"):
        server_commands(run_settings(engine="local"))


def test_the_file_of_settings_comes_first():
    assert split(["a.yaml", "--dry-run", "--updates", "3"]) == (
        True,
        ["--config", "a.yaml", "--updates", "3"],
    )
    assert split(["--config=a.yaml"]) == (False, ["--config=a.yaml"])
    with pytest.raises(ConfigError, match="CONFIG"):
        split(["--updates", "3"])


def test_dry_run_prints_commands_that_train_with_these_servers(tmp_path, capsys):
    file = tmp_path / "run.yaml"
    file.write_text(
        "{engine: vllm, eval_every: 0, eval_at_start: false, eval_at_end: false, launch: {device: cpu}}"
    )
    assert launch_main([str(file), "--dry-run", "--updates", "3"]) == 0
    printed = capsys.readouterr().out
    assert "--student_urls http://127.0.0.1:8000 --teacher_urls http://127.0.0.1:8001" in printed
    assert "--updates 3" in printed
    assert serve_main(["teacher", str(file), "--dry-run"]) == 0
    assert "--port 8001" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="launch.student_servers"):
        serve_main(["student", str(file), "--index", "1", "--dry-run"])


# Order, failure, end.


def test_the_trainer_starts_when_servers_are_healthy_and_all_end_with_it(tmp_path):
    part = server()
    code = (
        f"import urllib.request as u; assert u.urlopen('{part.url}/health').status == 200; print('trained')"
    )
    seen = []
    launcher = Launcher([part], trainer(code), tmp_path, show=lambda parts: seen.extend(offspring()))
    assert launcher.run() == 0
    assert "trained" in (tmp_path / "trainer.log").read_text()
    assert "serving" in (tmp_path / "student-0.log").read_text()
    assert len({p.pid for p in seen}) >= 3
    none_left(seen)


def test_a_server_that_fails_ends_the_run_and_the_message_holds_the_end_of_its_log(tmp_path):
    broken = server("teacher-0", "import sys; print('no room left'); sys.exit(7)")
    with pytest.raises(LaunchError, match=r"teacher-0 ended with status 7(.|\n)*no room left"):
        Launcher([server(), broken], trainer("raise SystemExit"), tmp_path).run()
    assert offspring() == []


def test_a_server_that_dies_while_training_ends_the_run(tmp_path):
    part = server(code=SERVER.replace("serve_forever", "handle_request"))
    # One request for health is all it answers.
    with pytest.raises(LaunchError, match="student-0 ended with status 0"):
        Launcher([part], trainer("import time; time.sleep(600)"), tmp_path, stop_timeout_s=5).run()
    assert offspring() == []


def test_a_trainer_that_fails_ends_the_run(tmp_path):
    with pytest.raises(LaunchError, match="trainer ended with status 2"):
        Launcher([server()], trainer("raise SystemExit(2)"), tmp_path).run()
    assert offspring() == []


def test_servers_that_are_never_healthy_end_the_run(tmp_path):
    with pytest.raises(LaunchError, match="start_timeout_s"):
        Launcher(
            [server(code="import time; time.sleep(600)")], trainer(""), tmp_path, start_timeout_s=1.0
        ).run()
    assert offspring() == []


def test_a_taken_port_is_refused_before_anything_starts(tmp_path):
    part = server()
    with socket.create_server(("127.0.0.1", int(part.url.rpartition(":")[2]))):
        with pytest.raises(ConfigError, match="launch.port"):
            Launcher([part], trainer(""), tmp_path).run()
    assert offspring() == []


# The launcher in a process of its own, to be interrupted or killed.
DRIVER = """
import json, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in a script's background
from divopd_trainer.launch import Launcher, Part
servers, trainer, logs = json.loads(sys.argv[1])
sys.exit(Launcher([Part(*p) for p in servers], Part(*trainer), logs, stop_timeout_s=30).run())
"""
PATIENT = """
import signal, sys, time
def stop(*a):
    print("checkpoint written", flush=True); sys.exit(130)
signal.signal(signal.SIGINT, stop)
print("training", flush=True)
while True:
    time.sleep(0.1)  # a signal just before a long sleep would be heard at its end
"""


def launched(tmp_path, code=PATIENT):
    part = server()
    plan = [[["student-0", part.argv, {}, part.url]], ["trainer", python(code)], str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen([*python(DRIVER), json.dumps(plan)], env=env)
    log = tmp_path / "trainer.log"
    until(lambda: log.exists() and "training" in log.read_text())
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) >= 5  # two guards, two parts, one child that left
    return process, family


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_lets_the_trainer_finish_and_leaves_nothing(tmp_path, number):
    process, family = launched(tmp_path)
    process.send_signal(number)
    assert process.wait(DEADLINE_S) == 130
    assert "checkpoint written" in (tmp_path / "trainer.log").read_text()
    none_left(family)


def test_nothing_survives_a_killed_launcher(tmp_path):
    process, family = launched(tmp_path, PATIENT.replace("SIGINT", "SIGTERM"))
    process.kill()
    process.wait(DEADLINE_S)
    none_left(family)


def test_a_killed_guard_takes_its_part_along_and_ends_the_run(tmp_path):
    process, family = launched(tmp_path)
    parts = [p for p in family if p.name() != "sleep"]
    next(p for p in parts if p.ppid() == process.pid).kill()
    assert process.wait(DEADLINE_S) != 0
    none_left(parts)
    for left in set(family) - set(parts):
        # What left its group has nobody who knows it any more.
        with contextlib.suppress(psutil.NoSuchProcess):
            left.kill()
