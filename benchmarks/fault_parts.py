"""The environment and the engines of the run that `benchmarks/faults.py` breaks."""

import contextlib
import os
import signal
from pathlib import Path

import gymnasium
from fakes import ByteCodec, CounterEnv

from divopd_trainer.explorer.engines import Engines

LENGTH, END = 4000, 256
REQUEST_TIMEOUT_S = 30.0


class FaultEnv(CounterEnv):
    """Counts; leaves its process id in FAULTS_DIR, and hangs once for a file named "hang" there."""

    def reset(self, *, seed=None, options=None):
        (Path(os.environ["FAULTS_DIR"]) / f"worker-{os.getpid()}").touch()
        return super().reset(seed=seed, options=options)

    def step(self, action):
        with contextlib.suppress(FileNotFoundError):
            (Path(os.environ["FAULTS_DIR"]) / "hang").unlink()
            signal.pause()
        return super().step(action)


gymnasium.register("divopd_test/Faults-v0", FaultEnv, disable_env_checker=True, order_enforce=False)


def build(config):
    """The engine factory: student and teacher at the addresses in the environment."""
    from fake_vllm import FakeSync

    from divopd_trainer.engines.http import Server
    from divopd_trainer.engines.vllm_student import VLLMStudent
    from divopd_trainer.engines.vllm_teacher import VLLMTeacher

    class VersionSync(FakeSync):
        """The served weights are those of the version's number."""

        async def push(self, server, source, version, load):
            return await super().push(server, version, version, load)

    def server(role):
        return [Server(os.environ[f"FAULTS_{role}"])]

    times = {"request_timeout_s": REQUEST_TIMEOUT_S, "max_model_len": LENGTH}
    student = VLLMStudent(
        server("STUDENT"),
        stop_ids=(END,),
        sync=VersionSync(),
        policy_version=config.policy_version,
        **times,
    )
    return Engines(student, ByteCodec(), VLLMTeacher(server("TEACHER"), **times))
