"""Episodes in a pool, for tests."""

import asyncio
import os
import time
from pathlib import Path

FAKE = "pool_envs:fakes/Pool-v0"


def run(work):
    """Run a coroutine with a deadline, so that a hang fails the test."""
    return asyncio.run(asyncio.wait_for(work, 60))


async def until(condition, deadline_s=20):
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, "the condition did not come true"
        await asyncio.sleep(0.01)


def gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


async def episode(env, task, action="x"):
    heard = [(await env.reset(task, seed=1))[0]]
    over = False
    while not over:
        observation, reward, terminated, truncated, _ = await env.step(action)
        heard.append((observation, reward))
        over = terminated or truncated
    return heard
