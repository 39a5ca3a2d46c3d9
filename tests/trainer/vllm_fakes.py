"""Engines on fake vLLM servers: helpers of the test_vllm_* files."""

import asyncio

import numpy as np

from divopd_trainer.engines.base import GenerateRequest
from divopd_trainer.engines.http import Server
from divopd_trainer.engines.vllm_student import VLLMStudent
from divopd_trainer.engines.vllm_teacher import VLLMTeacher


def student_of(*fakes, **options):
    values = {"max_model_len": 128, "stop_ids": (1,), "request_timeout_s": 20.0, **options}
    return VLLMStudent([Server(fake.url) for fake in fakes], **values)


def teacher_of(*fakes, **options):
    values = {"max_model_len": 128, "request_timeout_s": 20.0, **options}
    return VLLMTeacher([Server(fake.url) for fake in fakes], **values)


def play(engine, work):
    """Run a coroutine function on an engine and close it."""

    async def main():
        try:
            return await asyncio.wait_for(work(engine), 60)
        finally:
            await engine.aclose()

    return asyncio.run(main())


def asked(prompt=(5, 6, 7), max_tokens=8, **more):
    return GenerateRequest(np.array(prompt), max_tokens, **more)


async def all_up(engine):
    await engine.replicas.start()
    while any(replica.state != "up" for replica in engine.replicas.members):
        await asyncio.sleep(0.01)
