"""No code of somebody else's runs, no key is written down, and nothing listens that need not."""

import ast
import json
import os
import pickle
import socket
import subprocess
import sys
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
import yaml
from learner_fakes import FakeExplorer, config, random_rollout, save_student
from run_fakes import fake_run

import divopd_gym
import divopd_trainer
from divopd_gym.errors import ConfigError
from divopd_trainer.config_files import config_from_mapping, load_config
from divopd_trainer.records import read_run
from divopd_trainer.startup import check_models
from divopd_trainer.trainer import DivOPDTrainer

PACKAGES = [Path(package.__file__).parent for package in (divopd_gym, divopd_trainer)]
# Pipes between a process and its own children, and objects that never leave a process.
PICKLES = {"divopd_gym/pool.py", "divopd_gym/pool_process.py", "divopd_gym/pool_worker.py"}
PICKLES |= {"divopd_gym/envs/alfworld/translate.py"}
# Expressions of the benchmark's own grammar files, without builtins.
EVALS = {"divopd_gym/envs/alfworld/grammar.py"}


def calls():
    """(file, call) of every call in the packages."""
    for folder in PACKAGES:
        for path in sorted(folder.rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.Call):
                    yield path.relative_to(folder.parent).as_posix(), node


def name_of(call):
    return ast.unparse(call.func)


def test_no_call_trusts_remote_code():
    for path, call in calls():
        for keyword in call.keywords:
            if keyword.arg == "trust_remote_code":
                assert ast.unparse(keyword.value) == "False", f"{path}:{call.lineno}"


def test_nothing_is_unpickled_but_what_a_process_and_its_children_tell_each_other():
    for path, call in calls():
        where = f"{path}:{call.lineno}"
        name = name_of(call)
        if name.split(".")[0] in ("pickle", "cloudpickle", "dill", "shelve", "marshal"):
            assert path in PICKLES, where
        if name in ("torch.load", "np.load", "numpy.load"):
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
            assert given.get("weights_only") == "True" or given.get("allow_pickle", "False") == "False", where
        if name.startswith("yaml.") and "load" in name:
            assert name in ("yaml.safe_load", "yaml.safe_load_all"), where
        if name in ("eval", "exec"):
            assert path in EVALS, where


def test_the_explorers_pipe_is_no_network_connection():
    ours, theirs = get_context("spawn").Pipe(duplex=True)
    with ours, theirs, socket.socket(fileno=os.dup(ours.fileno())) as end:
        assert end.family == socket.AF_UNIX


def test_a_model_that_brings_its_own_code_is_refused_and_its_code_does_not_run(tmp_path, monkeypatch):
    student = Path(save_student(tmp_path / "student"))
    mark = tmp_path / "ran"
    settings = json.loads((student / "config.json").read_text())
    settings |= {"model_type": "evil", "auto_map": {"AutoConfig": "evil.EvilConfig"}}
    (student / "config.json").write_text(json.dumps(settings))
    (student / "evil.py").write_text(
        f"open({str(mark)!r}, 'w')\nfrom transformers import Qwen3Config as EvilConfig\n"
    )
    monkeypatch.setattr("builtins.input", lambda prompt: "y")
    with pytest.raises(ConfigError, match="configuration of model"):
        check_models(config(tmp_path, str(student)))
    assert not mark.exists()


class Bomb:
    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return open, (self.mark, "w")


def test_a_run_directory_from_somebody_else_runs_no_code_when_it_is_reported_or_replayed(tmp_path):
    run, mark = tmp_path / "run", tmp_path / "ran"
    fake_run(run, updates=4)
    (run / "evil.py").write_text(f"open({str(mark)!r}, 'w')\n")
    settings = yaml.safe_load((run / "config.yaml").read_text())
    settings |= {
        "plugins": ["evil", str(run / "evil.py")],
        "engine": "evil:build",
        "composer": "evil:Composer",
    }
    settings |= {"weighting": "evil:W", "env_id": "evil:Env-v0", "method": str(run / "evil.yaml")}
    (run / "config.yaml").write_text(yaml.safe_dump(settings))
    checkpoint = run / "checkpoints" / "checkpoint-4"
    checkpoint.mkdir(parents=True)
    for name in (
        "optimizer.pt",
        "scheduler.pt",
        "rng_state.pth",
        "training_args.bin",
        "../../teacher_eval.json",
    ):
        (checkpoint / name).write_bytes(pickle.dumps(Bomb(str(mark))))
    script = (
        "import sys\n"
        "def watch(event, args):\n"
        "    if event in ('pickle.find_class', 'os.system', 'subprocess.Popen'):\n"
        "        print('UNSAFE', event, args, flush=True)\n"
        "from divopd_trainer.cli import main\n"
        "import divopd_trainer.report, divopd_trainer.replay\n"
        "sys.addaudithook(watch)\n"
        f"print('codes', main(['report', {str(run)!r}]), main(['replay', {str(run)!r}]))\n"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(PACKAGES[0].parent), str(run)])}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=run, env=env, timeout=300
    )
    assert "codes 0 0" in done.stdout, done.stdout + done.stderr
    assert "UNSAFE" not in done.stdout and not mark.exists()


def test_settings_that_would_build_python_objects_are_left_out_of_a_report_and_refused_by_a_run(tmp_path):
    run, mark = tmp_path / "run", tmp_path / "ran"
    fake_run(run, updates=2)
    (run / "config.yaml").write_text(f"seed: !!python/object/apply:builtins.open ['{mark}', 'w']\n")
    found = read_run(run)
    assert found.config == {} and "config.yaml cannot be read" in found.notices[0]
    with pytest.raises(ConfigError, match="not valid YAML"):
        load_config(run / "config.yaml")
    assert not mark.exists()


def test_keys_reach_neither_the_run_directory_nor_the_output_and_checkpoints_are_read_as_data(
    tmp_path, monkeypatch, capfd
):
    secrets = {
        "HF_TOKEN": "hf_4711secret",
        "VLLM_API_KEY": "key-4711secret",
        "WANDB_API_KEY": "wb-4711secret",
    }
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    student = save_student(tmp_path / "student")
    values = {"updates": 2, "save_every": 1, "hub_token": "hub-4711secret", "progress": "plain"}

    def train(**more):
        trainer = DivOPDTrainer(
            config(tmp_path, student, **values, **more),
            explorer=lambda s, p: FakeExplorer(random_rollout, state=s),
        )
        trainer.train()
        trainer.save_model(str(trainer.run_dir.final_model))

    train()
    load, asked = torch.load, []

    def watched(*args, **kwargs):
        asked.append(kwargs.get("weights_only"))
        return load(*args, **kwargs)

    monkeypatch.setattr(torch, "load", watched)
    values["updates"] = 3
    train(resume_from_checkpoint=True)
    assert asked and set(asked) == {True}

    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert len(files) > 10
    for path in files:
        assert b"4711secret" not in path.read_bytes(), path
    out = capfd.readouterr()
    assert "4711secret" not in out.out + out.err


def test_addresses_with_a_password_are_refused_without_repeating_it():
    values = {"model": "m", "engine": "vllm", "student_urls": ["http://me:hush4711@host:8000"]}
    with pytest.raises(ConfigError, match="VLLM_API_KEY") as refused:
        config_from_mapping(values)
    assert "hush4711" not in str(refused.value)


def test_servers_listen_on_this_machine_alone_unless_told_otherwise():
    import inspect

    from divopd_gym.envs.webshop import serve
    from divopd_trainer.serve import LaunchSettings

    assert LaunchSettings().host == "127.0.0.1"
    hosts = [
        parameter.default
        for _, function in inspect.getmembers(serve, inspect.isfunction)
        if function.__module__ == serve.__name__
        for name, parameter in inspect.signature(function).parameters.items()
        if name == "host" and parameter.default is not parameter.empty
    ]
    assert hosts and set(hosts) == {"127.0.0.1"}
