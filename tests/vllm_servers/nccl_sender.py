"""The explorer's side of `test_nccl`, in the environment of vLLM, without which TRL's client sends nothing.

    nccl_sender.py URL POLICY...

Loads one policy after another, says after each what it was answered, and goes on when told to.
"""

import asyncio
import json
import sys

import nccl_over_tcp
import numpy as np

from divopd_trainer.engines.base import GenerateRequest
from divopd_trainer.engines.http import Server
from divopd_trainer.engines.vllm_nccl import NCCLSync
from divopd_trainer.engines.vllm_student import VLLMStudent

PROMPT = np.arange(20, 60, dtype=np.int32)


async def main(url, *policies):
    student = VLLMStudent(
        [Server(url)], max_model_len=1000, stop_ids=[2], sync=NCCLSync(120.0, "cpu"), request_timeout_s=400.0
    )
    try:
        for version, policy in enumerate(policies, 1):
            if policy != "again":
                await student.load_weights(policy, version)
            response = await student.generate(GenerateRequest(PROMPT, 12, seed=5))
            answer = {
                "ids": [*map(int, PROMPT), *map(int, response.token_ids)],
                "logprobs": [float(value) for value in response.logprobs],
                "gaps": student.sync.gaps,
                "restarts": student.counters["restarts"],
            }
            print(json.dumps(answer), flush=True)
            await asyncio.to_thread(sys.stdin.readline)
    finally:
        await student.aclose()


nccl_over_tcp.register()
asyncio.run(main(*sys.argv[1:]))
