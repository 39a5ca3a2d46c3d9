"""Whole policies over vLLM's own weight-transfer engine ``nccl`` and TRL's client, with TCP in place of NCCL."""

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from servers import MODELS, Server, model_of, reference, run_values
from transformers import AutoTokenizer

from divopd_trainer.chat import ChatCodec
from divopd_trainer.config_files import config_from_mapping
from divopd_trainer.engines.sync_probe import LIMIT, trained_probe, write_probe
from divopd_trainer.engines.weights import write_policy
from divopd_trainer.serve import server_commands

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    """The tiny student with a head of its own: vLLM keeps a tied one as it was on a CPU."""
    model = model_of(MODELS / "student")
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    folder = tmp_path_factory.mktemp("untied")
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(MODELS / "student").save_pretrained(folder)
    return folder


def trained_policy(student, folder, version):
    """A policy file with its probe, and the model that it is of."""
    model = model_of(student)
    generator = torch.Generator().manual_seed(version)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 0.1 * torch.randn(parameter.shape, generator=generator))
    path = write_policy(dict(model.named_parameters()), folder, version)
    codec = ChatCodec(AutoTokenizer.from_pretrained(student))
    write_probe(trained_probe(model, codec, 1000), path)
    return path, model


def assert_served_by(model, answer):
    """The response's log-probs are the model's own."""
    own = reference(model, np.array(answer["ids"]))[-len(answer["logprobs"]) :]
    np.testing.assert_allclose(answer["logprobs"], own, atol=LIMIT)


def test_policies_are_broadcast_and_a_restarted_server_gets_the_current_one(tmp_path, vllm_python, untied):
    config = config_from_mapping(run_values(tmp_path / "run", vllm_python, model=str(untied)))
    config.weight_sync = "nccl"
    command = next(one for one in server_commands(config) if one.role == "student")
    assert '{"backend": "nccl"}' in command.argv
    path = os.pathsep.join([str(HERE / "nccl_over_tcp"), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    there = {"PYTHONPATH": path, "VLLM_HOST_IP": "127.0.0.1"}
    server = Server(replace(command, env={**command.env, **there}), tmp_path)
    policies = [trained_policy(untied, tmp_path, version) for version in (1, 2)]
    arguments = [server.url, *(str(path) for path, _ in policies), "again"]
    sender = None
    try:
        server.start()
        server.wait()
        sender = subprocess.Popen(
            [vllm_python, str(HERE / "nccl_sender.py"), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **there, "VLLM_LOGGING_LEVEL": "ERROR"},
        )

        def answer():
            for line in sender.stdout:
                if line.startswith("{"):
                    return json.loads(line)
            raise AssertionError(f"the sender ended with {sender.wait(30)}")

        def go_on():
            sender.stdin.write("\n")
            sender.stdin.flush()

        first = answer()
        go_on()
        second = answer()
        server.kill()
        server.start()
        go_on()
        third = answer()
        go_on()
        assert sender.wait(60) == 0
    finally:
        if sender is not None:
            sender.kill()
            sender.wait()
            sender.stdin.close()
            sender.stdout.close()
        server.stop()
    assert_served_by(policies[0][1], first)
    assert_served_by(policies[1][1], second)
    assert_served_by(policies[1][1], third)
    assert first["logprobs"] != second["logprobs"]
    assert second["ids"] == third["ids"]
    assert third["restarts"] == 1
    assert len(third["gaps"]) == 3
    assert max(third["gaps"]) <= LIMIT
