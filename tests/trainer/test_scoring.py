"""The teacher reads what the composer can still use: first come, first served, nothing lost, no room leaked."""

import asyncio

import numpy as np
import pytest

from divopd_trainer.explorer.scoring import ScoringGate
from divopd_trainer.turns import Rollout, Segment, make_turn


def rollout(number, turns=2, version=0):
    segment = Segment(number, 0, [1])
    made = []
    for index in range(turns):
        start, end = segment.append([2, 3])
        made.append(
            make_turn(
                rollout_id=number, index=index, segment=segment, start=start, end=end,
                student_logprobs=np.zeros(2), policy_version=version,
            )
        )  # fmt: skip
    return Rollout(number, turns=made)


class Learner:
    """What the gate is told: turns delivered, and the oldest version that may train."""

    def __init__(self, pool=4):
        self.delivered, self.oldest, self.wanted = 0, 0, 0
        self.gate = ScoringGate(
            pool,
            lambda: self.delivered,
            lambda r: all(t.policy_version < self.oldest for t in r.turns),
            lambda: self.wanted,
        )
        self.entered, self.refused = [], []
        self.jobs = {}

    async def bring(self, *rollouts):
        for mine in rollouts:
            self.jobs[mine.rollout_id] = asyncio.ensure_future(self._enter(mine))
            await asyncio.sleep(0)

    async def _enter(self, mine):
        (self.entered if await self.gate.enter(mine) else self.refused).append(mine.rollout_id)

    async def end(self):
        for job in self.jobs.values():
            job.cancel()
        await asyncio.gather(*self.jobs.values(), return_exceptions=True)


def play(script, **more):
    async def main():
        learner = Learner(**more)
        try:
            await asyncio.wait_for(script(learner), 10)
        finally:
            await learner.end()

    asyncio.run(main())


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


def test_without_a_pool_everything_goes_through_at_once():
    async def script(learner):
        await learner.bring(*map(rollout, range(6)))
        await settle()
        assert learner.entered == list(range(6)) and learner.gate.waiting == 0

    play(script, pool=None)


def test_no_more_than_the_pool_holds_is_scored_and_the_rest_follows_in_order_as_room_comes():
    everyone = [rollout(number) for number in range(5)]

    async def script(learner):
        await learner.bring(*everyone)
        await settle()
        assert learner.entered == [0, 1] and learner.gate.scoring == 4 and learner.gate.waiting == 3
        for mine in everyone[:2]:
            learner.gate.leave(mine)
        learner.delivered = 4
        learner.gate.pump()
        await settle()
        assert learner.entered == [0, 1]
        learner.delivered = 3  # one turn trained
        learner.gate.pump()
        await settle()
        assert learner.entered == [0, 1, 2]
        learner.gate.leave(everyone[2])
        learner.delivered = 0
        learner.gate.pump()
        await settle()
        assert learner.entered == [0, 1, 2, 3, 4]

    play(script)


def test_what_went_stale_while_it_waited_is_never_scored_and_told_so():
    everyone = [rollout(0, version=1), rollout(1, turns=4, version=1), rollout(2, version=2)]

    async def script(learner):
        learner.delivered = 4
        await learner.bring(*everyone)
        await settle()
        assert learner.entered == []
        learner.oldest = 2
        learner.gate.pump()
        await settle()
        assert learner.refused == [0, 1] and learner.entered == [] and learner.gate.waiting == 1
        learner.delivered = 0
        learner.gate.pump()
        await settle()
        assert learner.entered == [2]

    play(script)


def test_turns_added_while_it_was_scored_do_not_leak_room():
    mine = rollout(0)

    async def script(learner):
        await learner.bring(mine)
        mine.turns.append(mine.turns[-1])
        learner.gate.leave(mine)
        assert learner.gate.scoring == 0

    play(script)


def test_leaving_twice_gives_room_back_once():
    mine, other = rollout(0, turns=1), rollout(1, turns=1)

    async def script(learner):
        await learner.bring(mine, other)
        learner.gate.leave(mine)
        learner.gate.leave(mine)
        assert learner.gate.scoring == 1

    play(script)


@pytest.mark.parametrize("let_through", [False, True])
def test_who_is_called_off_while_waiting_or_just_let_through_leaves_no_trace(let_through):
    first, second, third = rollout(0, turns=4), rollout(1), rollout(2)

    async def script(learner):
        await learner.bring(first, second, third)
        await settle()
        if let_through:
            learner.gate.leave(first)
            learner.gate.pump()  # the second's answer is there, and it has not run since
        learner.jobs[1].cancel()
        await settle()
        if not let_through:
            learner.gate.leave(first)
            learner.gate.pump()
            await settle()
        assert learner.entered == [0, 2]
        learner.gate.leave(third)
        assert learner.gate.scoring == 0 and learner.gate.waiting == 0

    play(script)


def test_what_the_learner_waits_for_is_let_through_whatever_the_pool_holds():
    """The last explorer of a fleet that has tasks left fills the whole batch, with a share of the pool."""

    async def script(learner):
        learner.delivered, learner.wanted = 5, 8
        await learner.bring(rollout(0), rollout(1), rollout(2))
        assert learner.entered == [0, 1]
        learner.wanted = 0
        learner.gate.pump()
        assert learner.gate.waiting == 1

    play(script, pool=4)
