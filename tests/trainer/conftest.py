"""Fixtures of several files."""

import pytest


@pytest.fixture
def serve(monkeypatch):
    """Start fake vLLM servers, which are tried again and looked at without long waits."""
    from fake_vllm import FakeVLLM

    from divopd_trainer.engines import replicas

    monkeypatch.setattr(replicas, "_BACKOFF_S", (0.001, 0.01))
    monkeypatch.setattr(replicas, "_LOOK_AGAIN_S", (0.01, 0.05))
    started = []

    def start(**options):
        started.append(FakeVLLM(**options))
        return started[-1]

    yield start
    for fake in started:
        if fake.alive:
            fake.stop()


@pytest.fixture(scope="module")
def student(tmp_path_factory):
    """Directory of a tiny student with its tokenizer."""
    from learner_fakes import save_student

    return save_student(tmp_path_factory.mktemp("student"))
