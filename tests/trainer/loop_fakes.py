"""An explorer's loop inside the test's own process, and somebody to talk to it."""

import asyncio
import contextlib

from fakes import ENV_ID

from divopd_trainer.explorer.config import ExplorerConfig
from divopd_trainer.explorer.messages import ExplorerState, GroupDone
from divopd_trainer.explorer.worker import Explorer


class FakeChannel:
    """Keeps what the explorer says, groups also as their episodes; `say` talks to it."""

    def __init__(self):
        self.said = []
        self.news = asyncio.Event()
        self.deliver = None

    def listen(self, loop, deliver):
        self.deliver = deliver

    def send(self, message):
        self.said += [message, *message.members] if isinstance(message, GroupDone) else [message]
        self.news.set()

    def say(self, message):
        self.deliver(message)

    def of(self, kind):
        return [m for m in self.said if isinstance(m, kind)]

    async def until(self, condition, timeout=20.0):
        async def wait():
            while not condition():
                self.news.clear()
                await self.news.wait()

        await asyncio.wait_for(wait(), timeout)


def config(**more):
    given = {
        "env_id": ENV_ID,
        "env_kwargs": {"tasks": 20},
        "workers": 3,
        "engine": "fakes:build",
        "pool": "fakes:make_pool",
        "prompt_style": "tiny",
        "max_turns": 8,
        "max_tokens": 20,
        "batch_rows": 8,
        "load": None,
        "max_concurrent": 3,
        "heartbeat_s": 0.05,
    }
    return ExplorerConfig.from_mapping({**given, **more})


async def _run(cfg, talk, state=None, policy=None):
    channel = FakeChannel()
    explorer = Explorer(cfg, state or ExplorerState(), channel, policy)
    running = asyncio.ensure_future(explorer.run())
    talking = asyncio.ensure_future(talk(channel, explorer))
    try:
        done, _ = await asyncio.wait({running, talking}, timeout=150, return_when=asyncio.FIRST_COMPLETED)
        for finished in done:
            finished.result()
        assert talking.done(), "the explorer ended before the test had its say"
    finally:
        for task in (talking, running):
            task.cancel()
        for task in (talking, running):
            with contextlib.suppress(BaseException):
                await task
    return channel, explorer


def run(cfg, talk, **more):
    return asyncio.run(_run(cfg, talk, **more))
