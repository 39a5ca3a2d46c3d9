"""The explorer while weights are loaded: it writes no turn that no batch can have any more, and goes on afterwards."""

import asyncio

from fakes import ByteCodec, FakeStudent, FakeTeacher
from loop_fakes import config, run

from divopd_trainer.explorer.engines import Engines
from divopd_trainer.explorer.messages import PolicyLoaded, PoolStatus, Ready, RolloutDone, SetPolicy

LOAD_S = 0.5


class SlowLoad(FakeStudent):
    """Takes its time to load, and notes which version wrote while it did."""

    def __init__(self):
        super().__init__(delay_s=0.01)
        self.loading, self.written = False, []

    async def load_weights(self, source, version):
        self.loading = True
        await asyncio.sleep(LOAD_S)
        await super().load_weights(source, version)
        self.loading = False

    async def generate(self, request):
        self.written.append((self.loading, self.policy_version))
        return await super().generate(request)


def build(config):
    return Engines(SlowLoad(), ByteCodec(), FakeTeacher())


def test_no_turn_is_written_with_weights_that_no_batch_can_have_while_newer_ones_are_loaded():
    async def talk(channel, explorer):
        await channel.until(lambda: channel.of(Ready))
        channel.say(PoolStatus(0, 0, 8))
        await channel.until(lambda: channel.of(RolloutDone))
        # Batch 2 is composed, so turns of version 0 are of no use once version 1 is on its way.
        channel.say(SetPolicy(1, "v1", 1))
        channel.say(PoolStatus(2, 0, 0))
        await channel.until(lambda: channel.of(PolicyLoaded))
        seen = len(channel.of(RolloutDone))
        await channel.until(lambda: len(channel.of(RolloutDone)) > seen + 3)

    channel, explorer = run(config(engine="test_pacing_loop:build", load=None, max_staleness=2), talk)
    student = explorer.engines.student
    # One may have been asked for before the load began.
    assert sum(loading for loading, _ in student.written) == 0
    assert {version for _, version in student.written} == {0, 1}
    assert all(1 in {turn.policy_version for turn in m.rollout.turns} for m in channel.of(RolloutDone)[-3:])


def test_turns_that_a_batch_can_still_have_are_written_while_weights_are_loaded():
    async def talk(channel, explorer):
        await channel.until(lambda: channel.of(Ready))
        channel.say(SetPolicy(1, "v1", 1))
        channel.say(PoolStatus(1, 0, 8))
        await channel.until(lambda: channel.of(PolicyLoaded))

    _, explorer = run(config(engine="test_pacing_loop:build", load=None, max_staleness=2), talk)
    assert sum(loading for loading, _ in explorer.engines.student.written) > 0
