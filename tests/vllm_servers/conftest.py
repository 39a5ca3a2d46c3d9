"""Real vLLM servers on a CPU, one thread each and at most two at a time; `make test-vllm` names their interpreter."""

import os

import pytest
import torch
from servers import Server, run_values

from divopd_trainer.config_files import config_from_mapping
from divopd_trainer.serve import server_commands

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def vllm_python():
    """Interpreter of the environment that has vLLM."""
    python = os.environ.get("DIVOPD_VLLM_PYTHON")
    if not python:
        pytest.skip("DIVOPD_VLLM_PYTHON names no interpreter with vLLM; run `make test-vllm`")
    return python


@pytest.fixture(scope="module")
def adapter_run(tmp_path_factory, vllm_python):
    """Settings of a run that trains adapters, with its student's and its teacher's server running."""
    folder = tmp_path_factory.mktemp("servers")
    values = run_values(folder / "run", vllm_python, lora_rank=8, learning_rate=3e-3, eval_at_end=True)
    config = config_from_mapping(values)
    student, teacher = (Server(command, folder) for command in server_commands(config))
    values |= {"student_urls": [student.url], "teacher_urls": [teacher.url]}
    try:
        for server in (student, teacher):
            server.start()
        for server in (student, teacher):
            server.wait()
        yield values, student, teacher
    finally:
        for server in (student, teacher):
            server.stop()
